"""The real command line meets a loss that is not a number, a device that is full, and a rank that hangs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ftcli.__main__ import main
from ftcli.checkpoint_folder import checkpoints_of, describe, read_state
from ftcli.errors import InputError
from ftcli.recipe_file import load_recipe
from ftcli.run_folder import RunFolder
from ftcli.sampling import epoch_order, held_out

from ..multiprocess.cells import write_inputs

RECIPE: dict[str, Any] = {
    "task": "./troubled.py",
    "model": {"name": "tied", "dropout": 0.0},
    "data": {"train": "chats.jsonl", "eval_rows": 5, "max_length": 128},
    "batch": {"global_size": 6, "micro_size": 3},
    "train": {"max_steps": 8},
    "optimizer": {"learning_rate": 5e-3},
    "schedule": {"name": "cosine", "warmup_steps": 2},
    "checkpoint": {"every_steps": 2},
    "log": {"every_steps": 50},
}
TROUBLED_TASK = """
import os, time
import torch
from ftcli import heartbeat
from ftcli.tasks import sft

Options = sft.Options
heartbeat.WRITE_SECONDS, heartbeat.LEAST_SECONDS = 0.2, 2.0

class Task(sft.Task):
    calls = 0

    def collate(self, rows):
        bad = {int(i) for i in os.environ.get("BAD_IDS", "").split()}
        poison = float("nan") if any(row["id"] in bad for row in rows) else 1.0
        return super().collate(rows) | {"poison": torch.tensor(poison)}

    def loss(self, model, batch):
        self.calls += 1
        if str(self.calls) == os.environ.get("FULL_AT"):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\\nMore words.")
        if os.environ.get("HANG_AT") == f"{os.environ.get('RANK', '0')}:{self.calls}":
            time.sleep(6)
        rest = {name: value for name, value in batch.items() if name != "poison"}
        return super().loss(model, rest) * batch["poison"]

    def eval_step(self, model, batch):
        return super().eval_step(model, {name: value for name, value in batch.items() if name != "poison"})
"""
Ftcli = Callable[..., tuple[int, str]]


def ids_of(step: int) -> list[int]:
    """Return the sample ids of a step of the first epoch, in global order."""
    return [int(index) for index in epoch_order(42 - 5, 0, 0)[(step - 1) * 6 : step * 6]]


def names_of(ids: list[int]) -> str:
    """Return what messages call training rows: their file, and their number among all its rows."""
    return ", ".join(f"chats.jsonl:{held_out(42, 5, 0)[0][number] + 1}" for number in sorted(ids))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    (folder / "troubled.py").write_text(TROUBLED_TASK)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    return folder


@pytest.fixture
def train(inputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ftcli:
    """Return a function that trains in this process and gives (exit code, all it said)."""
    monkeypatch.chdir(inputs)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(output: Path, *arguments: object, **trouble: str) -> tuple[int, str]:
        capsys.readouterr()
        with monkeypatch.context() as patched, pytest.raises(SystemExit) as end:
            for name, value in trouble.items():
                patched.setenv(name, value)
            main(["train", "recipe.yaml", "--output", str(output), *map(str, arguments)])
        said = capsys.readouterr()
        return int(end.value.code or 0), said.out + said.err

    return run


def train_on_two(inputs: Path, output: Path, *arguments: str, **trouble: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "ftcli", "train", "recipe.yaml", "--profile", "ddp", "--cpu"]
    command += ["--num-processes", "2", "--output", str(output), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=inputs, env=os.environ | trouble)
    return done.returncode, done.stderr


def policy(name: str, **more: int) -> list[str]:
    values = {"faults.non_finite": name} | {f"faults.{key}": value for key, value in more.items()}
    return [f"--set={key}={value}" for key, value in values.items()]


def saved_steps(run: Path) -> list[int]:
    return [read_state(folder)["step"] for folder in checkpoints_of(run)]


def losses(run: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in RunFolder(run).training_rows()}


def test_a_step_that_is_not_finite_stops_the_run_though_it_is_not_logged(train: Ftcli, tmp_path: Path) -> None:
    ids = ids_of(4)
    code, said = train(tmp_path / "run", BAD_IDS=str(ids[0]))
    assert code == 1 and "Traceback" not in said
    told = f"step 4: loss nan, gradient norm nan; not finite on rank 0, rows {names_of(ids[:3])}."
    assert told in said.splitlines()[-1] and said.count("loss nan") == 1
    assert saved_steps(tmp_path / "run") == [2] and not (tmp_path / "run" / "final").exists()
    status = RunFolder(tmp_path / "run").status()
    assert (status["state"], status["exit_code"]) == ("failed", 1) and told in status["error"]


def test_under_fp16_a_loss_that_is_not_finite_stops_the_run_too(train: Ftcli, tmp_path: Path) -> None:
    code, said = train(tmp_path / "run", "--set=precision=fp16", BAD_IDS=str(ids_of(4)[0]))
    assert code == 1 and "step 4: loss nan" in said
    assert saved_steps(tmp_path / "run") == [2]


def test_the_last_step_is_looked_at_before_the_weights_are_written(train: Ftcli, tmp_path: Path) -> None:
    arguments = ("--set=train.max_steps=3", "--set=checkpoint.every_steps=null")
    code, said = train(tmp_path / "run", *arguments, BAD_IDS=str(ids_of(3)[-1]))
    assert code == 1 and "step 3: loss nan" in said
    assert not checkpoints_of(tmp_path / "run") and not (tmp_path / "run" / "final").exists()


def test_a_stopped_run_goes_on_under_another_policy_from_its_last_good_step(train: Ftcli, tmp_path: Path) -> None:
    bad = str(ids_of(4)[0])
    assert train(tmp_path / "run", BAD_IDS=bad)[0] == 1
    code, said = train(
        tmp_path / "run", "--resume", "auto", *policy("rollback"), "--set=log.every_steps=1", BAD_IDS=bad
    )
    assert code == 0, said
    assert "goes on after step 2 from" in said and "without 6 rows" in said
    assert list(losses(tmp_path / "run")) == [3, 4, 5, 6, 7, 8]


def test_going_back_leaves_one_curve_and_sets_the_other_aside(train: Ftcli, tmp_path: Path) -> None:
    every = "--set=log.every_steps=1"
    assert train(tmp_path / "good", every)[0] == 0
    code, said = train(tmp_path / "run", every, *policy("rollback"), BAD_IDS=str(ids_of(4)[-1]))
    assert code == 0, said
    good, found = losses(tmp_path / "good"), losses(tmp_path / "run")
    assert list(found) == list(good) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [found[step] for step in (1, 2, 3)] == [good[step] for step in (1, 2, 3)]
    assert found[4] == 0 and all(abs(found[step] - good[step]) > 1e-6 for step in (5, 6))
    assert '{"step": 3,' in (tmp_path / "run" / "metrics.abandoned.jsonl").read_text()
    newest = checkpoints_of(tmp_path / "run")[-1]
    assert read_state(newest)["optimizer_updates"] == 7
    assert "not finite       step 4 (rollback)" in describe(newest)


def test_going_back_waits_for_the_checkpoint_that_a_slow_disk_still_writes(
    train: Ftcli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, seconds = os.fsync, iter([1.5])  # of its first file: steps 3 and 4 are done long before

    def slow_for_once(file: int) -> None:
        if threading.current_thread().name.startswith("ftcli-saving"):
            time.sleep(next(seconds, 0))
        fsync(file)

    monkeypatch.setattr(os, "fsync", slow_for_once)
    code, said = train(tmp_path / "run", *policy("rollback"), "--set=train.max_steps=4", BAD_IDS=str(ids_of(3)[0]))
    assert code == 0, said
    assert "goes on after step 2 from" in said and next(seconds, None) is None


def test_going_back_needs_a_checkpoint(train: Ftcli, tmp_path: Path) -> None:
    code, said = train(tmp_path / "run", *policy("rollback"), BAD_IDS=str(ids_of(1)[0]))
    assert code == 1 and "no checkpoint is there to go back to" in said


@pytest.mark.parametrize("name", ["skip", "rollback"])
def test_too_many_bad_steps_in_a_row_end_the_run(name: str, train: Ftcli, tmp_path: Path) -> None:
    bad = " ".join(str(ids_of(step)[0]) for step in (3, 4, 5))
    code, said = train(tmp_path / "run", *policy(name, max_in_a_row=2), BAD_IDS=bad)
    assert code == 1 and "step 5: loss nan" in said and "faults.max_in_a_row is 2, and this is number 3" in said
    assert max(saved_steps(tmp_path / "run")) == 4
    code, said = train(tmp_path / "more", *policy(name, max_in_a_row=3), BAD_IDS=bad)
    assert code == 0, said


def test_bad_steps_are_counted_over_resumes(train: Ftcli, tmp_path: Path) -> None:
    bad = {"BAD_IDS": f"{ids_of(2)[0]} {ids_of(5)[0]}"}
    few = policy("skip", max_in_all=1)
    code, said = train(tmp_path / "run", *few, **bad)
    assert code == 1 and "step 5: loss nan" in said and "faults.max_in_all is 1, and this is number 2" in said
    assert read_state(checkpoints_of(tmp_path / "run")[-1])["not_finite"][0]["step"] == 2
    code, said = train(tmp_path / "run", "--resume", "auto", *few, **bad)
    assert code == 1 and "this is number 2" in said
    code, said = train(tmp_path / "run", "--resume", "auto", *policy("skip", max_in_all=3), **bad)
    assert code == 0, said


def test_a_policy_that_cannot_work_is_refused_with_the_recipe(inputs: Path) -> None:
    path = inputs / "recipe.yaml"
    with pytest.raises(InputError, match="set checkpoint.every_steps"):
        load_recipe(path, ["faults.non_finite=rollback", "checkpoint.every_steps=null"])
    with pytest.raises(InputError, match="batch_norm: train; use rollback"):
        load_recipe(path, ["faults.non_finite=skip", "model.batch_norm=train"])


def test_a_full_device_is_told_with_the_micro_sizes_that_fit(train: Ftcli, tmp_path: Path) -> None:
    code, said = train(tmp_path / "run", "--set=batch.micro_size=6", FULL_AT="2")
    assert code == 2 and "Traceback" not in said
    assert "rank 0 ran out of memory in forward (step 1) with 6 rows in each forward pass" in said
    assert "CUDA out of memory. Tried to allocate 20.00 MiB." in said and "More words" not in said
    assert "set batch.micro_size to 1 or 2 or 3: batch.global_size 6 and the curve stay" in said
    assert "gradient_checkpointing" in said and "--profile fsdp or zero3" in said
    assert RunFolder(tmp_path / "run").status()["exit_code"] == 2


def test_two_ranks_name_the_bad_one(inputs: Path, tmp_path: Path) -> None:
    ids = ids_of(4)
    code, said = train_on_two(inputs, tmp_path / "bad", BAD_IDS=str(ids[-1]))
    assert code == 1 and "loop.py" not in said, said  # no stack of ours; the launcher's own stands there
    assert f"not finite on rank 1, rows {names_of(ids[3:])}." in said.splitlines()[-1]
    assert saved_steps(tmp_path / "bad") == [2]


@pytest.mark.slow
def test_two_ranks_name_one_whose_device_is_full(inputs: Path, tmp_path: Path) -> None:
    code, said = train_on_two(inputs, tmp_path / "full", FULL_AT="3")
    assert (
        code == 2
        and said.count("ran out of memory") == 1
        and "loop.py" not in said
        and "set batch.micro_size to 1:" in said
    ), said


@pytest.mark.slow
def test_two_ranks_name_one_that_hangs(inputs: Path, tmp_path: Path) -> None:
    code, said = train_on_two(inputs, tmp_path / "hung", HANG_AT="1:6")
    assert code == 0, said
    lines = [line for line in said.splitlines() if "usually" in line]
    assert len(lines) == 1 and "ftcli: step 5 has taken 2 s, usually 0." in lines[0], said
    assert "the slowest, rank 1 is in forward (step 5) for" in lines[0]
    assert not (tmp_path / "hung" / "heartbeats").exists()
