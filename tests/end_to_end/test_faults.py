"""The real command line with a loss that is not a number, a device without memory, and a rank that hangs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ftcli.checkpoint.folder import read_state
from ftcli.config.load import load_recipe
from ftcli.data.sampler import epoch_order, hold_out_rows
from ftcli.reports.show import describe
from ftcli.runtime.checkpoint_names import checkpoints_of
from ftcli.runtime.errors import InputError
from ftcli.runtime.run_folder import RunFolder

from ..support.recipes import recipe_values
from ..support.runner import MakeInputs, RunCli

RECIPE = recipe_values(
    "./troubled.py",
    train={"max_steps": 8},
    schedule={"name": "cosine", "warmup_steps": 2},
    checkpoint={"every_steps": 2},
    log={"every_steps": 50},
)
TROUBLED_TASK = """
import os, time
from pathlib import Path
import torch
from ftcli.runtime import heartbeat
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
            events = Path(os.environ["EVENTS"])
            while not events.exists() or '"step": 5, "event": "stall"' not in events.read_text(): time.sleep(0.1)
        rest = {name: value for name, value in batch.items() if name != "poison"}
        return super().loss(model, rest) * batch["poison"]

    def eval_step(self, model, batch):
        if kind := os.environ.get("EVALUATIONS_FAIL"):
            raise {"value": ValueError, "memory": torch.OutOfMemoryError}[kind]("this evaluation fails")
        return super().eval_step(model, {name: value for name, value in batch.items() if name != "poison"})

    def metrics(self, rows):
        mean = rows["loss"].astype("float32").mean()
        return super().metrics(rows) | {"mean": None if os.environ.get("NO_METRIC") else mean}
"""
Ftcli = Callable[..., tuple[int, str]]


def ids_of(step: int) -> list[int]:
    """Return the sample ids of a step of the first epoch, in global order."""
    return [int(index) for index in epoch_order(42 - 5, 0, 0)[(step - 1) * 6 : step * 6]]


def names_of(ids: list[int]) -> str:
    """Return the names of training rows in messages: file and row number."""
    return ", ".join(f"chats.jsonl:{hold_out_rows(42, 5, 0)[0][number] + 1}" for number in sorted(ids))


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    return make_inputs({"troubled.py": TROUBLED_TASK, "recipe.yaml": RECIPE})


@pytest.fixture
def train(inputs: Path, monkeypatch: pytest.MonkeyPatch, run_cli: RunCli) -> Ftcli:
    """Return a function that trains in this process and gives (exit code, all output)."""
    monkeypatch.chdir(inputs)

    def run(output: Path, *arguments: object, **trouble: str) -> tuple[int, str]:
        ended = run_cli("train", "recipe.yaml", "--output", output, *arguments, **trouble)
        return ended.code, ended.text

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


def test_train_with_a_nonfinite_step_between_log_lines_stops(train: Ftcli, tmp_path: Path) -> None:
    ids = ids_of(4)
    code, output = train(tmp_path / "run", BAD_IDS=str(ids[0]))
    assert code == 1 and "Traceback" not in output
    message = f"step 4: loss nan, gradient norm nan; not finite on rank 0, rows {names_of(ids[:3])}."
    assert message in output.splitlines()[-1] and output.count("loss nan") == 1
    assert saved_steps(tmp_path / "run") == [2] and not (tmp_path / "run" / "final").exists()
    status = RunFolder(tmp_path / "run").status()
    assert (status["state"], status["exit_code"]) == ("failed", 1) and message in status["error"]


def test_train_in_fp16_with_a_nonfinite_loss_stops(train: Ftcli, tmp_path: Path) -> None:
    code, output = train(tmp_path / "run", "--set=precision=fp16", BAD_IDS=str(ids_of(4)[0]))
    assert code == 1 and "step 4: loss nan" in output
    assert saved_steps(tmp_path / "run") == [2]


def test_train_with_a_nonfinite_last_step_writes_no_final_weights(train: Ftcli, tmp_path: Path) -> None:
    arguments = ("--set=train.max_steps=3", "--set=checkpoint.every_steps=null")
    code, output = train(tmp_path / "run", *arguments, BAD_IDS=str(ids_of(3)[-1]))
    assert code == 1 and "step 3: loss nan" in output
    assert not checkpoints_of(tmp_path / "run") and not (tmp_path / "run" / "final").exists()


def test_train_whose_evaluation_fails_saves_its_steps_first(train: Ftcli, tmp_path: Path) -> None:
    at_the_end = ("--set=checkpoint.every_steps=null", "--set=log.every_steps=1")
    assert train(tmp_path / "good", *at_the_end)[0] == 0
    code, output = train(tmp_path / "run", *at_the_end, EVALUATIONS_FAIL="value")
    assert code == 1 and "ValueError: this evaluation fails" in output
    line = f"step 8: the evaluation failed; the steps before it are saved in {tmp_path / 'run' / 'checkpoints'}"
    assert line in output and saved_steps(tmp_path / "run") == [8]
    assert not read_state(checkpoints_of(tmp_path / "run")[0])["metrics"]
    code, output = train(tmp_path / "run", "--resume", "auto", *at_the_end)
    assert code == 0, output
    assert RunFolder(tmp_path / "run").metrics()[-1] == RunFolder(tmp_path / "good").metrics()[-1]
    assert (tmp_path / "run" / "final").exists()


def test_train_with_a_metric_of_numpy_records_a_float(train: Ftcli, tmp_path: Path) -> None:
    code, output = train(tmp_path / "run")
    assert code == 0, output
    assert RunFolder(tmp_path / "run").metrics()[-1]["eval/mean"] > 0


def test_train_with_a_metric_that_is_no_number_saves_its_steps_and_names_it(train: Ftcli, tmp_path: Path) -> None:
    code, output = train(tmp_path / "run", "--set=checkpoint.every_steps=null", NO_METRIC="1")
    assert code == 2 and "the task's `metrics` returned None for mean, not a number" in output, output
    assert saved_steps(tmp_path / "run") == [8]


def test_train_whose_evaluation_needs_too_much_memory_names_the_evaluation(train: Ftcli, tmp_path: Path) -> None:
    code, output = train(tmp_path / "run", "--set=checkpoint.every_steps=null", EVALUATIONS_FAIL="memory")
    assert code == 2 and "rank 0 ran out of memory in evaluating (step" in output, output
    assert saved_steps(tmp_path / "run") == [8]


def test_train_whose_evaluation_fails_before_the_first_step_saves_nothing(train: Ftcli, tmp_path: Path) -> None:
    code, output = train(tmp_path / "run", "--set=evaluate.at_start=true", EVALUATIONS_FAIL="value")
    assert code == 1 and "evaluation failed; the steps" not in output and not saved_steps(tmp_path / "run")


def test_resume_with_policy_rollback_starts_from_the_last_good_step(train: Ftcli, tmp_path: Path) -> None:
    bad = str(ids_of(4)[0])
    assert train(tmp_path / "run", BAD_IDS=bad)[0] == 1
    code, output = train(
        tmp_path / "run", "--resume", "auto", *policy("rollback"), "--set=log.every_steps=1", BAD_IDS=bad
    )
    assert code == 0, output
    assert "resumed after step 2 from" in output and "6 rows of non-finite steps are excluded" in output
    assert list(losses(tmp_path / "run")) == [3, 4, 5, 6, 7, 8]


def test_rollback_leaves_one_curve_in_the_metrics(train: Ftcli, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    every = "--set=log.every_steps=1"
    assert train(tmp_path / "good", every)[0] == 0
    tracked = "--set=log.trackers=[tensorboard]"
    code, output = train(tmp_path / "run", every, tracked, *policy("rollback"), BAD_IDS=str(ids_of(4)[-1]))
    assert code == 0, output
    for file in (tmp_path / "run" / "ftcli").glob("events.*"):  # its number counts the files of this process
        name, _, number = file.name.rpartition(".")
        file.rename(file.with_name(f"{name}.{number:0>6}"))  # of two files of one second, .10 would be read before .9
    events = EventAccumulator(str(tmp_path / "run" / "ftcli"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6, 7, 8]
    good, curve = losses(tmp_path / "good"), losses(tmp_path / "run")
    assert list(curve) == list(good) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [curve[step] for step in (1, 2, 3)] == [good[step] for step in (1, 2, 3)]
    assert curve[4] == 0 and all(abs(curve[step] - good[step]) > 1e-6 for step in (5, 6))
    assert '{"step": 3,' in (tmp_path / "run" / "metrics.abandoned.jsonl").read_text()
    newest = checkpoints_of(tmp_path / "run")[-1]
    assert read_state(newest)["optimizer_updates"] == 7
    assert "not finite       step 4 (rollback)" in describe(newest)


def test_rollback_waits_for_a_background_save(train: Ftcli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, seconds = os.fsync, iter([1.5])  # of its first file: steps 3 and 4 are done long before

    def slow_for_once(file: int) -> None:
        if threading.current_thread().name.startswith("ftcli-saving"):
            time.sleep(next(seconds, 0))
        fsync(file)

    monkeypatch.setattr(os, "fsync", slow_for_once)
    code, output = train(tmp_path / "run", *policy("rollback"), "--set=train.max_steps=4", BAD_IDS=str(ids_of(3)[0]))
    assert code == 0, output
    assert "resumed after step 2 from" in output and next(seconds, None) is None


def test_rollback_without_a_checkpoint_ends_the_run(train: Ftcli, tmp_path: Path) -> None:
    code, output = train(tmp_path / "run", *policy("rollback"), BAD_IDS=str(ids_of(1)[0]))
    assert code == 1 and "there is no checkpoint to return to" in output


@pytest.mark.parametrize("name", ["skip", "rollback"])
def test_policy_with_too_many_bad_steps_in_a_row_ends_the_run(name: str, train: Ftcli, tmp_path: Path) -> None:
    bad = " ".join(str(ids_of(step)[0]) for step in (3, 4, 5))
    code, output = train(tmp_path / "run", *policy(name, max_in_a_row=2), BAD_IDS=bad)
    assert code == 1 and "step 5: loss nan" in output and "faults.max_in_a_row is 2, and this is number 3" in output
    assert max(saved_steps(tmp_path / "run")) == 4
    code, output = train(tmp_path / "more", *policy(name, max_in_a_row=3), BAD_IDS=bad)
    assert code == 0, output


def test_policy_counts_bad_steps_over_resumes(train: Ftcli, tmp_path: Path) -> None:
    bad = {"BAD_IDS": f"{ids_of(2)[0]} {ids_of(5)[0]}"}
    few = policy("skip", max_in_all=1)
    code, output = train(tmp_path / "run", *few, **bad)
    assert code == 1 and "step 5: loss nan" in output and "faults.max_in_all is 1, and this is number 2" in output
    assert read_state(checkpoints_of(tmp_path / "run")[-1])["not_finite"][0]["step"] == 2
    code, output = train(tmp_path / "run", "--resume", "auto", *few, **bad)
    assert code == 1 and "this is number 2" in output
    code, output = train(tmp_path / "run", "--resume", "auto", *policy("skip", max_in_all=3), **bad)
    assert code == 0, output


def test_load_recipe_with_an_impossible_fault_policy_is_refused(inputs: Path) -> None:
    path = inputs / "recipe.yaml"
    with pytest.raises(InputError, match="set checkpoint.every_steps"):
        load_recipe(path, ["faults.non_finite=rollback", "checkpoint.every_steps=null"])
    with pytest.raises(InputError, match="batch_norm: train; use rollback"):
        load_recipe(path, ["faults.non_finite=skip", "model.batch_norm=train"])


def test_train_out_of_memory_error_lists_micro_sizes_that_fit(train: Ftcli, tmp_path: Path) -> None:
    code, output = train(tmp_path / "run", "--set=batch.micro_size=6", FULL_AT="2")
    assert code == 2 and "Traceback" not in output
    assert "rank 0 ran out of memory in forward (step 1) with 6 rows in each forward pass" in output
    assert "CUDA out of memory. Tried to allocate 20.00 MiB." in output and "More words" not in output
    assert "set batch.micro_size to 1 or 2 or 3: batch.global_size 6 and the curve stay" in output
    assert "gradient_checkpointing" in output and "--profile fsdp or zero3" in output
    assert RunFolder(tmp_path / "run").status()["exit_code"] == 2


@pytest.mark.slow
def test_train_on_two_ranks_with_a_nonfinite_loss_names_the_rank(inputs: Path, tmp_path: Path) -> None:
    ids = ids_of(4)
    code, output = train_on_two(inputs, tmp_path / "bad", BAD_IDS=str(ids[-1]))
    assert code == 1 and "loop.py" not in output, output  # no stack of ours; the launcher's own stands there
    assert f"not finite on rank 1, rows {names_of(ids[3:])}." in output.splitlines()[-1]
    assert saved_steps(tmp_path / "bad") == [2]


@pytest.mark.slow
def test_train_on_two_ranks_out_of_memory_names_the_rank(inputs: Path, tmp_path: Path) -> None:
    code, output = train_on_two(inputs, tmp_path / "full", FULL_AT="3")
    assert (
        code == 2
        and output.count("ran out of memory") == 1
        and "loop.py" not in output
        and "set batch.micro_size to 1:" in output
    ), output


@pytest.mark.slow
def test_train_on_two_ranks_with_a_hanging_rank_names_it(inputs: Path, tmp_path: Path) -> None:
    code, output = train_on_two(
        inputs, tmp_path / "hung", HANG_AT="1:6", EVENTS=str(tmp_path / "hung" / "events.jsonl")
    )
    assert code == 0, output
    lines = [line for line in output.splitlines() if "ftcli: step 5 has taken" in line]
    assert len(lines) == 1 and ", usually " in lines[0], output
    assert "the slowest, rank 1, has been in forward (step 5) for" in lines[0]
    assert not (tmp_path / "hung" / "heartbeats").exists()
