"""A disk with little space, seen by the commands."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from ..support.recipes import recipe_values
from ..support.runner import MakeInputs, RunCli

RECIPE = recipe_values(
    model={"name": "untied", "dropout": 0.0},
    data={"train": "chats.jsonl", "max_length": 128},
    train={"max_steps": 3},
    schedule={"name": "constant"},
    checkpoint={"every_steps": 1, "keep": None},
)


@pytest.fixture
def ftcli(make_inputs: MakeInputs, monkeypatch: pytest.MonkeyPatch, run_cli: RunCli) -> RunCli:
    """Return `run_cli` in the folder of inputs, with a finished run of three steps."""
    monkeypatch.chdir(make_inputs({"r.yaml": RECIPE}))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, _, err = run_cli("train", "r.yaml", "--output", "run")
    assert code == 0, err
    return run_cli


def test_resumed_run_counts_the_checkpoints_that_stay_until_the_next_one(
    ftcli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = sorted(Path("run/checkpoints").iterdir())
    assert len(stored) == 3
    size = sum(path.stat().st_size for path in stored[0].iterdir())

    def resume(free: int, *changes: str) -> tuple[int, str]:
        with monkeypatch.context() as patched:
            patched.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
            sets = [word for change in changes for word in ("--set", change)]
            code, _, err = ftcli("train", "r.yaml", "--output", "run", "--resume", "auto", *sets)
        return code, err

    shutil.rmtree("run/final")
    code, err = resume(0)  # only the final weights are written
    assert code == 0 and Path("run/final/model.safetensors").exists(), err
    one = ("checkpoint.every_steps=null", "train.max_steps=4")
    code, err = resume(size // 2, *one)  # the three stored ones stay until it is complete
    assert code == 2 and "4 checkpoints of" in err and "do not fit into run/checkpoints" in err, err
    code, err = resume(size, *one)
    assert code == 0, err
    code, err = resume(size, "train.max_steps=6")
    assert code == 2 and "6 checkpoints of" in err, err
    Path("run/checkpoints/step-000009.tmp").mkdir()
    Path("run/checkpoints/step-000009.tmp/part").write_bytes(bytes(2 * size))  # is removed first
    code, err = resume(size // 2, "train.max_steps=5", "checkpoint.every_steps=null")
    assert code == 0, err


def test_export_onto_a_full_disk_names_the_folder_and_leaves_nothing(
    ftcli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    code, _, err = ftcli("export", "run", "exported")
    assert code == 1 and "exported could not be written: No space left on device. Free some space" in err
    assert not [path for path in Path().iterdir() if "exported" in path.name]


def test_evaluate_says_that_the_run_continued_after_its_final_weights(ftcli: RunCli) -> None:
    sets = ("--set", "data.eval=chats.jsonl", "--set", "train.max_steps=5", "--resume-anyway")
    shutil.copytree("run/final", "old")
    shutil.copy("run/probe.safetensors", "old.safetensors")
    code, _, err = ftcli("train", "r.yaml", "--output", "run", "--resume", "auto", *sets)
    assert code == 0, err
    code, _, err = ftcli("evaluate", "run")
    assert code == 0 and "continued" not in err
    shutil.rmtree("run/final")
    shutil.copytree("old", "run/final")
    shutil.copy("old.safetensors", "run/probe.safetensors")
    code, _, err = ftcli("evaluate", "run")
    note = "the run continued after the final weights, which are evaluated: run/checkpoints/step-000005 is newer"
    assert code == 0 and note in err
