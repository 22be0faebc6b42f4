"""Tests for what tells that a run continued after its final weights."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ftcli.runtime.checkpoint_names import PROBE
from ftcli.runtime.run_folder import RunFolder


@pytest.mark.parametrize(
    ("step", "final_step", "is_newer_by_time", "is_found"),
    [
        (8, 4, False, True),  # a copy that wrote checkpoints first, or the clock went back
        (4, 4, False, False),
        (4, 4, True, False),  # a copy that wrote final/ first
        (2, 4, True, True),  # resumed from an earlier step, and stopped before the old end
        (2, 4, False, False),
        (8, None, True, True),  # without a probe the times decide
        (8, None, False, False),
    ],
)
def test_checkpoint_after_final_follows_the_steps_and_then_the_times(
    tmp_path: Path, step: int, final_step: int | None, is_newer_by_time: bool, is_found: bool
) -> None:
    checkpoint = tmp_path / "checkpoints" / f"step-{step:06d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMPLETE").touch()
    (tmp_path / "final").mkdir()
    os.utime(tmp_path / "final", (2, 2))
    os.utime(checkpoint / "COMPLETE", (3, 3) if is_newer_by_time else (1, 1))
    if final_step is not None:
        save_file({"logits": torch.zeros(1)}, tmp_path / PROBE, metadata={"step": str(final_step)})
    assert RunFolder(tmp_path).checkpoint_after_final() == (checkpoint if is_found else None)
