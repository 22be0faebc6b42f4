"""Signals and time limits at every stage of a run: it ends with 75, and --resume auto makes it the run never stopped.

The task signals its own run at a chosen call of a chosen function, so that nothing depends on timing; below our
launcher it signals the parent, as a batch system does, and waits until the ranks may know.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftcli.__main__ import main
from ftcli.checkpoint.folder import find_damage, read_state
from ftcli.runtime.checkpoint_names import checkpoints_of
from ftcli.runtime.run_folder import RunFolder
from ftcli.testing import run_on_cpu

from ..support.recipes import recipe_values
from ..support.run_folders import stable_metrics
from ..support.runner import MakeInputs, RunCli, run_forked

ROOT = Path(__file__).resolve().parents[2]
RECIPE = recipe_values(
    "./signalled.py",  # one process: 2 micro-batches a step, 3 of an evaluation
    data={"train": "chats.jsonl", "eval_rows": 9, "max_length": 128},
    schedule={"name": "cosine", "warmup_steps": 2},
    evaluate={"every_steps": 2, "at_start": True},
)
TASK = """
import atexit, os, signal, time
from pathlib import Path
import psutil
from ftcli.tasks import sft

Options = sft.Options
RANK = os.environ.get("RANK", "0")

class Task(sft.Task):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.calls = {}

    def called(self, name):
        self.calls[name] = self.calls.get(name, 0) + 1
        if "CALLS" in os.environ:
            with open(f"{os.environ['CALLS']}-{RANK}", "a") as file: file.write(f"{name}\\n")
        if RANK == os.environ.get("ON_RANK", "0") and f"{name} {self.calls[name]}" == os.environ.get("SIGNAL_AT"):
            if "AT_THE_END" in os.environ:
                atexit.register(os.kill, os.getpid(), signal.Signals[os.environ["AT_THE_END"]])
            for number in os.environ["SIGNALS"].split(): signal_run(signal.Signals[number])

    def load_model(self, *arguments, **options):
        self.called("load_model")
        time.sleep(float(os.environ.get("LOADS_FOR", "0")))
        return super().load_model(*arguments, **options)

    def encode(self, *arguments):
        self.called("encode")
        return super().encode(*arguments)

    def loss(self, *arguments):
        self.called("loss")
        return super().loss(*arguments)

    def eval_step(self, *arguments):
        self.called("eval_step")
        return super().eval_step(*arguments)

    def save_processor(self, *arguments):
        self.called("save_processor")
        return super().save_processor(*arguments)

def signal_run(number):
    if "FTCLI_PARENT" not in os.environ:
        os.kill(os.getpid(), number)
        return
    os.kill(int(os.environ["FTCLI_PARENT"]), number)
    for process in psutil.process_iter() if "WHOLE_TREE" in os.environ else ():
        try:
            if process.environ().get("FTCLI_LAUNCHED") == os.environ["FTCLI_LAUNCHED"]: process.send_signal(number)
        except psutil.Error:
            continue
    if "STOP_FILE" in os.environ:
        while not Path(os.environ["STOP_FILE"]).exists(): time.sleep(0.05)
        time.sleep(0.6)  # the file is looked at twice a second
"""
Train = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    return make_inputs({"signalled.py": TASK, "recipe.yaml": RECIPE})


def environment(**more: str) -> dict[str, str]:
    marks = ("FTCLI_LAUNCHED", "FTCLI_PROFILE", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    inherited = {name: value for name, value in os.environ.items() if name not in marks}
    return inherited | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"} | more


def shell(inputs: Path, *command: object, **more: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m COMMAND`, as a shell would."""
    line = [sys.executable, "-m", *map(str, command)]
    return subprocess.run(line, cwd=inputs, env=environment(**more), capture_output=True, text=True)


def on_two(profile: str, output: Path) -> tuple[object, ...]:
    line = ("ftcli", "train", "recipe.yaml", "--profile", profile, "--cpu", "--num-processes", 2)
    return (*line, "--output", output, "--resume", "auto")


@pytest.fixture
def train(inputs: Path, monkeypatch: pytest.MonkeyPatch, run_cli: RunCli) -> Train:
    """Return a function that trains in this process with `--resume auto` and gives (exit code, all output)."""
    monkeypatch.chdir(inputs)

    def run(output: Path, *arguments: object, **trouble: str) -> tuple[int, str]:
        ended = run_cli("train", "recipe.yaml", "--output", output, "--resume", "auto", *arguments, **trouble)
        return ended.code, ended.text

    return run


@pytest.fixture(scope="module")
def never_stopped(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "run"
    ended = run_forked(inputs, "train", "recipe.yaml", "--output", run)
    assert ended.code == 0, ended.err
    return run


def assert_same_run(actual: Path, expected: Path) -> None:
    assert stable_metrics(actual) == stable_metrics(expected)
    weights = "final/model.safetensors"
    assert (actual / weights).read_bytes() == (expected / weights).read_bytes()
    assert RunFolder(actual).status()["state"] == "done"


def assert_stopped(run: Path, step: int) -> None:
    status = RunFolder(run).status()
    assert (status["state"], status["step"], status["exit_code"]) == ("stopped", step, 75)
    saved = checkpoints_of(run)
    assert [read_state(folder)["step"] for folder in saved][-1:] == ([step] if step else [])
    assert all(find_damage(folder) == "" for folder in saved)
    assert not (run / "stop").exists()


@pytest.mark.parametrize(
    "number", ["SIGTERM", *(pytest.param(n, marks=pytest.mark.slow) for n in ("SIGINT", "SIGUSR1"))]
)
def test_signal_in_a_step_stops_after_it_and_the_resume_gives_the_same_run(
    number: str, train: Train, never_stopped: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    code, output = train(run, SIGNAL_AT="loss 5", SIGNALS=number)
    assert code == 75 and f"stopped on request after step 3 of 4 ({number})" in output
    assert_stopped(run, 3)
    assert [row["step"] for row in stable_metrics(run)] == [0, 1, 2, 2, 3]
    assert train(run)[0] == 0
    assert_same_run(run, never_stopped)


@pytest.mark.parametrize(
    "stage", ["load_model 1", *(pytest.param(s, marks=pytest.mark.slow) for s in ("encode 3", "eval_step 2"))]
)
def test_signal_before_the_first_step_leaves_no_checkpoint_and_the_next_launch_restarts(
    stage: str, train: Train, never_stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    monkeypatch.setenv("FTCLI_CACHE", str(tmp_path / "cache"))  # rows are encoded anew
    code, output = train(run, SIGNAL_AT=stage, SIGNALS="SIGTERM")
    assert code == 75 and "stopped on request before" in output
    assert_stopped(run, 0)
    assert stable_metrics(run) == [] and not (run / "errors").exists()
    code, output = train(run)
    assert code == 0, output
    assert_same_run(run, never_stopped)


@pytest.mark.slow
def test_run_stopped_before_its_first_step_does_not_block_its_folder(
    inputs: Path, train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", SIGNAL_AT="load_model 1", SIGNALS="SIGTERM")[0] == 75
    with pytest.raises(SystemExit) as end:
        main(["train", "recipe.yaml", "--output", str(tmp_path / "run"), "--set", "train.max_steps=2"])
    assert not end.value.code


@pytest.mark.parametrize(
    ("call", "step"), [(5, 2), pytest.param(8, 4, marks=pytest.mark.slow)]
)  # 3 calls at the start, 3 after step 2, 3 after the last
def test_signal_in_an_evaluation_drops_it_and_the_resume_repeats_it(
    call: int, step: int, train: Train, never_stopped: Path, tmp_path: Path
) -> None:
    run, calls = tmp_path / "run", tmp_path / "calls"
    code, _ = train(run, SIGNAL_AT=f"eval_step {call}", SIGNALS="SIGUSR1", CALLS=str(calls))
    assert code == 75
    assert_stopped(run, step)
    assert [row["step"] for row in stable_metrics(run) if "loss" not in row] == [0, 2][: step // 2]
    assert not (run / "final").exists()
    assert Path(f"{calls}-0").read_text().count("eval_step") == call + 1  # the batch after it was agreed on
    code, output = train(run)
    assert code == 0, output
    assert_same_run(run, never_stopped)


@pytest.mark.slow
def test_keep_best_after_an_interrupted_evaluation_uses_the_repeated_one(train: Train, tmp_path: Path) -> None:
    run, best = tmp_path / "run", ("--set", "checkpoint.keep_best.metric=loss", "--set", "checkpoint.keep=1")
    keep = (*best, "--set", "checkpoint.keep_best.direction=max", "--set", "checkpoint.every_steps=1")
    assert train(run, *keep, SIGNAL_AT="eval_step 5", SIGNALS="SIGTERM")[0] == 75
    assert_stopped(run, 2)
    assert read_state(checkpoints_of(run)[-1])["metrics"] == {}
    code, output = train(run, *keep)
    assert code == 0, output
    assert [read_state(folder)["step"] for folder in checkpoints_of(run)] == [2, 4]  # the loss after step 2 is larger
    assert all(find_damage(folder) == "" for folder in checkpoints_of(run))
    (row,) = [row for row in stable_metrics(run) if row["step"] == 2 and "loss" not in row]
    assert {f"eval/{name}": value for name, value in read_state(checkpoints_of(run)[0])["metrics"].items()} == {
        name: value for name, value in row.items() if name != "step"
    }


def test_signal_during_a_save_leaves_an_intact_checkpoint(
    train: Train, never_stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ftcli.training import checkpointing

    run, publish = tmp_path / "run", checkpointing.publish

    def interrupted(*arguments: Any) -> None:
        if not checkpoints_of(run):
            signal.raise_signal(signal.SIGTERM)
        publish(*arguments)

    monkeypatch.setattr(checkpointing, "publish", interrupted)
    code, output = train(run, "--set", "checkpoint.every_steps=1")
    assert code == 75, output
    assert_stopped(run, 2)  # the request was heard after the message of step 1 had left
    assert len(checkpoints_of(run)) == 2
    assert train(run, "--set", "checkpoint.every_steps=1")[0] == 0
    assert_same_run(run, never_stopped)


def test_signal_during_the_final_weights_lets_the_run_finish(train: Train, never_stopped: Path, tmp_path: Path) -> None:
    # The first call is a trial before step 1.
    code, output = train(tmp_path / "run", SIGNAL_AT="save_processor 2", SIGNALS="SIGTERM")
    assert code == 0, output
    assert_same_run(tmp_path / "run", never_stopped)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [("SIGTERM", -15), *(pytest.param(n, c, marks=pytest.mark.slow) for n, c in (("SIGUSR1", -10), ("SIGINT", 130)))],
)
def test_second_signal_ends_the_process_at_once(number: str, code: int, inputs: Path, tmp_path: Path) -> None:
    line = ("train", "recipe.yaml", "--output", tmp_path / "run")
    first = "SIGUSR1" if number == "SIGTERM" else "SIGTERM"
    ended = run_forked(inputs, *line, SIGNAL_AT="loss 5", SIGNALS=f"{first} {number}")
    assert ended.code == code, ended.err
    assert f"{first}: stopping after the current step; a second signal ends the run at once" in ended.err
    status = RunFolder(tmp_path / "run").status()
    assert (status["state"], status["exit_code"]) == ("failed", 128 + signal.Signals[number])
    assert status["error"] == f"ended by a second signal ({number})"
    assert checkpoints_of(tmp_path / "run") == []


@pytest.mark.parametrize(("again", "code"), [("SIGTERM", 75), pytest.param("SIGUSR1", -10, marks=pytest.mark.slow)])
def test_signal_that_repeats_while_the_command_ends_does_not_change_its_exit_code(
    again: str, code: int, inputs: Path, tmp_path: Path
) -> None:
    line = ("ftcli", "train", "recipe.yaml", "--output", tmp_path / "run")
    trouble = {"SIGNAL_AT": "load_model 1", "SIGNALS": "SIGTERM", "AT_THE_END": again, "SLURM_STEP_ID": "0"}
    ended = shell(inputs, *line, **trouble)
    assert ended.returncode == code, ended.stderr
    assert_stopped(tmp_path / "run", 0)


REQUEUE = 'n=0; until "$@"; do [ $? -eq 75 ] || exit 1; n=$((n+1)); [ $n -lt 9 ] || exit 2; done; echo launches $n'


def requeue(inputs: Path, *command: object, **more: str) -> str:
    """Launch as a batch system does that requeues, by a shell; return how often it stopped."""
    line = ["sh", "-c", REQUEUE, "sh", sys.executable, "-m", *map(str, command)]
    result = subprocess.run(line, cwd=inputs, env=environment(**more), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.splitlines()[-1]


@pytest.mark.slow
def test_requeue_after_each_step_by_max_minutes_gives_the_same_run(
    inputs: Path, never_stopped: Path, tmp_path: Path
) -> None:
    line = ("train", "recipe.yaml", "--output", tmp_path / "run", "--resume", "auto")
    codes = []
    while codes[-1:] != [0] and len(codes) < 9:
        codes.append(run_forked(inputs, *line, "--set", "train.max_minutes=0.0001").code)
    assert codes == [75, 75, 75, 75, 0]  # the last evaluation is cut
    assert_same_run(tmp_path / "run", never_stopped)


@pytest.mark.slow
@pytest.mark.parametrize("number", ["SIGTERM", "SIGUSR1"])
def test_signal_to_every_process_of_a_job_stops_two_ranks_at_one_step(
    number: str, inputs: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    trouble = {"SIGNALS": number, "STOP_FILE": str(run / "stop"), "WHOLE_TREE": "1"}
    result = shell(inputs, *on_two("ddp", run), SIGNAL_AT="loss 3", **trouble)
    assert result.returncode == 75, result.stderr
    assert f"stopped on request after step 3 of 4 ({number})" in result.stderr
    assert_stopped(run, 3)
    assert not _processes_of(run)


@pytest.mark.slow
def test_signal_while_ranks_load_ends_them_at_once(inputs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = shell(inputs, *on_two("ddp", run), SIGNAL_AT="load_model 1", SIGNALS="SIGTERM", LOADS_FOR="150")
    assert result.returncode == 75, result.stderr
    assert "stopped on request before the first step, nothing to save (SIGTERM)" in result.stderr
    assert_stopped(run, 0)
    assert not _processes_of(run)


def resumed_is_never_stopped(inputs: Path, tmp_path: Path, profile: str, *stops: dict[str, str]) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    run_on_cpu(train_here, inputs, whole, [], profile=profile)
    for trouble in stops:
        result = shell(inputs, *on_two(profile, run), STOP_FILE=str(run / "stop"), **trouble)
        assert result.returncode == 75, result.stderr
        assert find_damage(checkpoints_of(run)[-1]) == ""
    run_on_cpu(train_here, inputs, run, [], profile=profile)
    assert_same_run(run, whole)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("profile", "first", "last"), [("ddp", 0, 3), ("fsdp", 1, 2), ("zero3", 1, 2)])
def test_two_ranks_stopped_by_each_signal_go_on_bit_for_bit(
    profile: str, first: int, last: int, inputs: Path, tmp_path: Path
) -> None:
    calls = tmp_path / "calls"
    stops: list[dict[str, str]] = [
        {"SIGNAL_AT": "loss 1", "SIGNALS": "SIGINT"},
        # A first launch also evaluates before step 1, in two calls per rank. This one stops after step 2.
        {"SIGNAL_AT": f"eval_step {1 if first == 0 else 3}", "SIGNALS": "SIGTERM", "CALLS": str(calls)},
        {"SIGNAL_AT": "loss 1", "SIGNALS": "SIGUSR1", "WHOLE_TREE": "1"},
    ]
    # Every launch imports for itself: all signals under one profile, and one under each other.
    resumed_is_never_stopped(inputs, tmp_path, profile, *stops[first:last])
    seen = [Path(f"{calls}-{rank}").read_text() for rank in (0, 1)]
    # Both left after the same batch. Only the main rank tries to write, before step 1.
    assert seen[0].replace("save_processor\n", "") == seen[1]
    assert seen[0].count("eval_step") == (2 if first == 0 else 4)


def train_here(inputs: Path, output: Path, overrides: list[str]) -> None:
    """Train on this rank of several with `--resume auto`, as a process of a bare launch does."""
    from ftcli.launch import launcher

    os.chdir(inputs)
    launcher.train("recipe.yaml", output=output, overrides=overrides, cpu=True, resume="auto")


@pytest.mark.slow
def test_requeue_of_two_ranks_by_max_minutes_gives_the_same_run(inputs: Path, tmp_path: Path) -> None:
    two = "train.max_steps=2"
    run_on_cpu(train_here, inputs, tmp_path / "whole", [two], profile="fsdp")
    line = (*on_two("fsdp", tmp_path / "run"), "--set", two, "--set", "train.max_minutes=0.0001")
    assert requeue(inputs, *line) == "launches 2"
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("first", ["SIGINT", "SIGUSR1"])
def test_second_signal_ends_launched_ranks(first: str, inputs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", *map(str, on_two("ddp", run))],
        cwd=inputs,
        env=environment(SIGNAL_AT="loss 3", SIGNALS=first, STOP_FILE=str(run / "never")),
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (run / "stop").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate()
    assert process.returncode == 143 and error.endswith("ended by a second signal (SIGTERM)\n"), error
    assert RunFolder(run).status()["exit_code"] == 143
    assert not _processes_of(run)


def bare(run: Path) -> tuple[object, ...]:
    line = ("accelerate.commands.launch", "--config_file", ROOT / "accelerate_configs" / "ddp.yaml")
    return (*line, "--num_processes", 2, "--main_process_port", 0, "-m", *on_bare(run))


def on_bare(run: Path) -> tuple[object, ...]:
    return ("ftcli", "train", "recipe.yaml", "--output", run, "--resume", "auto")


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "step"), [("loss 2", 2), ("load_model 1", 0)])
def test_bare_launch_signal_to_one_rank_stops_both_and_writes_exit_code_75(
    stage: str, step: int, inputs: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    result = shell(inputs, *bare(run), SIGNAL_AT=stage, SIGNALS="SIGUSR1", ON_RANK="1")
    assert result.returncode == 0, result.stderr  # the launcher knows of no stopped runs
    assert_stopped(run, step)
    assert json.loads((run / "status.json").read_text())["exit_code"] == 75


def _processes_of(run: Path) -> list[list[str]]:
    """Return the command lines of processes that still work for a run folder."""
    import psutil

    return [p.info["cmdline"] for p in psutil.process_iter(["cmdline"]) if str(run) in (p.info["cmdline"] or [])]
