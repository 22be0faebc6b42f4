"""Moments in 8 bits: near AdamW's curve, one format of checkpoints, the same bits where they were written.

bitsandbytes has these kernels for the CPU too, so all but speed is seen without a GPU; recipes are refused there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ftcli.checkpoint.folder import read_state
from ftcli.checkpoint.reader import CheckpointReader
from ftcli.runtime.checkpoint_names import checkpoint_path
from ftcli.testing import run_on_cpu

from ....support.cells import SAVED_AT, cell, resume_cell, save_and_resume, save_cell

pytest.importorskip("bitsandbytes", reason="needs the extra `quantization`")
NAMES = ["sft-tied"]  # its embeddings have 8288 elements, its other tensors fewer than 4096
PACKED: dict[str, Any] = {
    "train": {"max_steps": 8},
    "optimizer": {"name": "adamw_8bit", "learning_rate": 5e-3, "weight_decay": 0.1},
}
PLAIN = PACKED | {"optimizer": PACKED["optimizer"] | {"name": "adamw"}}


def test_adamw_8bit_follows_adamw_and_resumes_bit_exactly(inputs: Path, tmp_path: Path) -> None:
    saved = save_cell(cell(inputs, NAMES[0], **PACKED), tmp_path)
    plain = save_cell(cell(inputs, NAMES[0], **PLAIN), tmp_path / "plain")
    losses, expected = ([row[0] for row in run["rows"]] for run in (saved, plain))
    assert losses == pytest.approx(expected, rel=2e-2) and losses != expected
    checkpoint = checkpoint_path(tmp_path, SAVED_AT)
    resumed = resume_cell(cell(inputs, NAMES[0], **PACKED), checkpoint)
    assert resumed["rows"] == saved["rows"][SAVED_AT:]
    assert all(np.array_equal(resumed["after"][name], value) for name, value in saved["after"].items())
    with CheckpointReader(checkpoint, list(read_state(checkpoint)["files"])) as stored:
        moment = stored.read("exp_avg_sq", "model.embed_tokens.weight", 0, 259 * 32)
    assert moment.dtype == torch.float32 and (moment >= 0).all() and moment.any()


@pytest.mark.slow
def test_adamw_8bit_resume_on_shards_from_whole_moments_gives_the_same_curve(inputs: Path, tmp_path: Path) -> None:
    save_cell(cell(inputs, NAMES[0], **PACKED), tmp_path / "whole" / NAMES[0])
    arguments = (inputs, NAMES, PACKED, tmp_path / "cut", [tmp_path / "whole", tmp_path / "cut"])
    saved, resumed = run_on_cpu(save_and_resume, *arguments, processes=2, profile="fsdp")[0]
    assert resumed["cut"][NAMES[0]]["rows"] == saved[NAMES[0]]["rows"][SAVED_AT:]
    actual, expected = ([row[0] for row in resumed[name][NAMES[0]]["rows"]] for name in ("whole", "cut"))
    assert actual == pytest.approx(expected, rel=2e-2)
