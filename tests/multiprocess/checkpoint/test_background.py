"""A background save writes byte for byte the files of a blocking save."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ftcli.checkpoint.folder import find_damage, read_state
from ftcli.runtime.checkpoint_names import checkpoint_path, checkpoints_of
from ftcli.testing import run_on_cpu

from ...support.cells import SAVED_AT, cell, resume_cell, weights
from ...support.patching import patching

CASES = [
    ("single", 1, "fp16"),
    ("ddp", 2, "fp32"),
    ("fsdp", 2, "bf16"),
    ("zero2", 2, "fp32"),
    ("zero3", 2, "fp16"),
    ("fsdp", 3, "bf16_pure"),
    ("fsdp_offload", 2, "fp32"),
    ("zero3_offload", 2, "fp32"),
    ("hsdp", 4, "fp32"),
]


@patching
def save_both_ways(patch: pytest.MonkeyPatch, folder: Path, output: Path, precision: str) -> dict[str, Any]:
    """Save one step twice, blocking and in the background, on disks that block while more steps are trained.

    Files are small, so that most of them are written after those steps.
    """
    from ftcli.checkpoint import tensor_files
    from ftcli.loop import steps
    from ftcli.runtime.run_folder import RunFolder
    from ftcli.training.checkpointing import save_checkpoint
    from ftcli.training.setup import prepare

    recipe = cell(folder, "sft-tied", train={"max_steps": 10}, precision=precision)
    run = prepare(recipe, cpu=True, output=output / "waited")
    if run.hardware.loss_scale is not None:
        run.hardware.loss_scale.growth_interval = 1  # another scale after each step
    patch.setattr(tensor_files, "FILE_BYTES", 5_000)
    gate, fsync, rows, was_early = threading.Event(), os.fsync, [], True
    for step in steps(run):
        rows.append((step.loss, step.grad_norm, step.samples))
        if step.number == SAVED_AT:
            save_checkpoint(run, SAVED_AT)
            run.folder = RunFolder(output / "beside")
            patch.setattr(os, "fsync", lambda file: (gate.wait(60), fsync(file)))
            save_checkpoint(run, SAVED_AT, background=True)
        if step.number == SAVED_AT + 2 + run.hardware.ranks.rank:  # the disks of ranks do not end together
            was_early = bool(checkpoints_of(output / "beside"))
            gate.set()
            time.sleep(0.5)  # this rank's thread has its message out before its main thread sends the next
    run.saving.wait()
    patch.setattr(os, "fsync", fsync)
    after = weights(run)
    scaled = None if run.hardware.loss_scale is None else run.hardware.loss_scale.scale
    resumed = None if scaled else resume_cell(recipe, checkpoint_path(output / "beside", SAVED_AT))
    return {"rows": rows, "after": after, "was_early": was_early, "scale": scaled, "resumed": resumed}


@pytest.mark.parametrize(
    ("profile", "processes", "precision"),
    [pytest.param(*case, marks=() if case[0] == "ddp" else pytest.mark.slow) for case in CASES],
)
def test_background_save_equals_a_blocking_save(
    profile: str, processes: int, precision: str, inputs: Path, tmp_path: Path
) -> None:
    ranks = run_on_cpu(save_both_ways, inputs, tmp_path, precision, processes=processes, profile=profile)
    waited, beside = (checkpoint_path(tmp_path / name, SAVED_AT) for name in ("waited", "beside"))
    assert find_damage(waited) == find_damage(beside) == ""
    state = read_state(waited)
    writers = sorted({int(name.split("-")[1]) for name in state["files"]})
    assert writers == list(range(2 if profile == "hsdp" else processes))  # of copies of shards the first is saved
    assert not any(ranks[rank]["was_early"] for rank in writers)
    assert read_state(beside) == state and len(state["files"]) >= 5 * len(writers)
    for name in state["files"]:
        assert (beside / name).read_bytes() == (waited / name).read_bytes()
    if precision == "fp16":
        assert state["loss_scale"]["scale"] != ranks[0]["scale"]  # five doublings and halvings later
    else:
        resumed = ranks[0]["resumed"]
        assert resumed["rows"] == ranks[0]["rows"][SAVED_AT:]
        assert all(np.array_equal(resumed["after"][name], value) for name, value in ranks[0]["after"].items())
