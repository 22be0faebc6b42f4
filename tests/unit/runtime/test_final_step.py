"""Tests for what tells that a run continued after its final weights."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ftcli.runtime.final_step import checkpoint_after_final
from ftcli.runtime.run_folder import PROBE, RunFolder


@pytest.mark.parametrize(("step", "has_probe", "is_found"), [(8, True, True), (4, True, False), (8, False, False)])
def test_checkpoint_after_final_of_a_copy_follows_the_steps(
    tmp_path: Path, step: int, has_probe: bool, is_found: bool
) -> None:
    checkpoint = tmp_path / "checkpoints" / f"step-{step:06d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMPLETE").touch()
    os.utime(checkpoint / "COMPLETE", (1, 1))  # a copy writes checkpoints before final/, or the clock went back
    (tmp_path / "final").mkdir()
    if has_probe:
        save_file({"logits": torch.zeros(1)}, tmp_path / PROBE, metadata={"step": "4"})
    assert checkpoint_after_final(RunFolder(tmp_path)) == (checkpoint if is_found else None)
