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
import yaml

from ftcli.__main__ import main
from ftcli.checkpoint_folder import checkpoints_of, damage, read_state
from ftcli.run_folder import RunFolder

from ..multiprocess.cells import write_inputs

ROOT = Path(__file__).resolve().parents[2]
RECIPE: dict[str, Any] = {
    "task": "./signalled.py",
    "model": {"name": "tied", "dropout": 0.0},
    "data": {"train": "chats.jsonl", "eval_rows": 9, "max_length": 128},
    "batch": {"global_size": 6, "micro_size": 3},  # one process: 2 micro-batches a step, 3 of an evaluation
    "train": {"max_steps": 4},
    "optimizer": {"learning_rate": 5e-3},
    "schedule": {"name": "cosine", "warmup_steps": 2},
    "evaluate": {"every_steps": 2, "at_start": True},
}
TASK = """
import os, signal, time
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
NEVER_IN_A_CHECKPOINT = ("seconds", "tokens_per_second", "rows_per_second", "data_wait_share", "peak_memory_gb")
Train = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    (folder / "signalled.py").write_text(TASK)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    return folder


def environment(**more: str) -> dict[str, str]:
    marks = ("FTCLI_LAUNCHED", "FTCLI_PROFILE", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    kept = {name: value for name, value in os.environ.items() if name not in marks}
    return kept | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"} | more


def shell(inputs: Path, *command: object, **more: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m COMMAND`, as a shell would."""
    line = [sys.executable, "-m", *map(str, command)]
    return subprocess.run(line, cwd=inputs, env=environment(**more), capture_output=True, text=True, timeout=200)


def on_two(profile: str, output: Path) -> tuple[object, ...]:
    line = ("ftcli", "train", "recipe.yaml", "--profile", profile, "--cpu", "--num-processes", 2)
    return (*line, "--output", output, "--resume", "auto")


@pytest.fixture
def train(inputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Train:
    """Return a function that trains in this process with `--resume auto` and gives (exit code, all it said)."""
    monkeypatch.chdir(inputs)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(output: Path, *arguments: object, **trouble: str) -> tuple[int, str]:
        capsys.readouterr()
        with monkeypatch.context() as patched, pytest.raises(SystemExit) as end:
            for name, value in trouble.items():
                patched.setenv(name, value)
            main(["train", "recipe.yaml", "--output", str(output), "--resume", "auto", *map(str, arguments)])
        said = capsys.readouterr()
        return int(end.value.code or 0), said.out + said.err

    return run


@pytest.fixture(scope="module")
def never_stopped(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "run"
    result = shell(inputs, "ftcli", "train", "recipe.yaml", "--output", run)
    assert result.returncode == 0, result.stderr
    return run


def told(run: Path) -> list[dict[str, Any]]:
    """Return a run's metrics but for what depends on the clock or the machine."""
    return [{k: v for k, v in row.items() if k not in NEVER_IN_A_CHECKPOINT} for row in RunFolder(run).metrics()]


def assert_same_run(found: Path, wanted: Path) -> None:
    assert told(found) == told(wanted)
    weights = "final/model.safetensors"
    assert (found / weights).read_bytes() == (wanted / weights).read_bytes()
    assert RunFolder(found).status()["state"] == "done"


def assert_stopped(run: Path, step: int) -> None:
    status = RunFolder(run).status()
    assert (status["state"], status["step"], status["exit_code"]) == ("stopped", step, 75)
    saved = checkpoints_of(run)
    assert [read_state(folder)["step"] for folder in saved][-1:] == ([step] if step else [])
    assert all(damage(folder) == "" for folder in saved)
    assert not (run / "stop").exists()


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_ends_the_run_after_its_step_and_resuming_makes_it_whole(
    number: str, train: Train, never_stopped: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    code, said = train(run, SIGNAL_AT="loss 5", SIGNALS=number)
    assert code == 75 and f"stopped as asked after step 3 of 4 ({number})" in said
    assert_stopped(run, 3)
    assert [row["step"] for row in told(run)] == [0, 1, 2, 2, 3]
    assert train(run)[0] == 0
    assert_same_run(run, never_stopped)


@pytest.mark.parametrize("stage", ["encode 3", "load_model 1", "eval_step 2"])
def test_a_signal_before_the_first_step_leaves_no_checkpoint_and_the_next_launch_begins_anew(
    stage: str, train: Train, never_stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    monkeypatch.setenv("FTCLI_CACHE", str(tmp_path / "cache"))  # rows are encoded anew
    code, said = train(run, SIGNAL_AT=stage, SIGNALS="SIGTERM")
    assert code == 75 and "stopped as asked before" in said
    assert_stopped(run, 0)
    assert told(run) == [] and not (run / "errors").exists()
    code, said = train(run)
    assert code == 0, said
    assert_same_run(run, never_stopped)


def test_a_run_that_was_stopped_before_its_first_step_blocks_no_other(
    inputs: Path, train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", SIGNAL_AT="load_model 1", SIGNALS="SIGTERM")[0] == 75
    with pytest.raises(SystemExit) as end:
        main(["train", "recipe.yaml", "--output", str(tmp_path / "run"), "--set", "train.max_steps=2"])
    assert not end.value.code


@pytest.mark.parametrize(("call", "step"), [(5, 2), (8, 4)])  # 3 calls at the start, 3 after step 2, 3 after the last
def test_an_evaluation_is_cut_short_unrecorded_and_made_up_for(
    call: int, step: int, train: Train, never_stopped: Path, tmp_path: Path
) -> None:
    run, calls = tmp_path / "run", tmp_path / "calls"
    code, _ = train(run, SIGNAL_AT=f"eval_step {call}", SIGNALS="SIGUSR1", CALLS=str(calls))
    assert code == 75
    assert_stopped(run, step)
    assert [row["step"] for row in told(run) if "loss" not in row] == [0, 2][: step // 2]
    assert not (run / "final").exists()
    assert Path(f"{calls}-0").read_text().count("eval_step") == call + 1  # the batch after it was agreed on
    code, said = train(run)
    assert code == 0, said
    assert_same_run(run, never_stopped)


def test_the_checkpoint_of_an_evaluation_that_was_cut_short_becomes_the_best_when_it_is_made_up_for(
    train: Train, tmp_path: Path
) -> None:
    run, best = tmp_path / "run", ("--set", "checkpoint.keep_best.metric=loss", "--set", "checkpoint.keep=1")
    keep = (*best, "--set", "checkpoint.keep_best.direction=max", "--set", "checkpoint.every_steps=1")
    assert train(run, *keep, SIGNAL_AT="eval_step 5", SIGNALS="SIGTERM")[0] == 75
    assert_stopped(run, 2)
    assert read_state(checkpoints_of(run)[-1])["metrics"] == {}
    code, said = train(run, *keep)
    assert code == 0, said
    assert [read_state(folder)["step"] for folder in checkpoints_of(run)] == [2, 4]  # the loss after step 2 is larger
    assert all(damage(folder) == "" for folder in checkpoints_of(run))
    (row,) = [row for row in told(run) if row["step"] == 2 and "loss" not in row]
    assert {f"eval/{name}": value for name, value in read_state(checkpoints_of(run)[0])["metrics"].items()} == {
        name: value for name, value in row.items() if name != "step"
    }


def test_a_signal_while_saving_leaves_a_whole_checkpoint(
    train: Train, never_stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ftcli import checkpoint

    run, publish = tmp_path / "run", checkpoint.publish

    def interrupted(*arguments: Any) -> None:
        if not checkpoints_of(run):
            signal.raise_signal(signal.SIGTERM)
        publish(*arguments)

    monkeypatch.setattr(checkpoint, "publish", interrupted)
    code, said = train(run, "--set", "checkpoint.every_steps=1")
    assert code == 75, said
    assert_stopped(run, 2)  # the request was heard after the message of step 1 had left
    assert len(checkpoints_of(run)) == 2
    assert train(run, "--set", "checkpoint.every_steps=1")[0] == 0
    assert_same_run(run, never_stopped)


def test_a_signal_while_the_final_weights_are_written_lets_the_run_finish(
    train: Train, never_stopped: Path, tmp_path: Path
) -> None:
    code, said = train(tmp_path / "run", SIGNAL_AT="save_processor 1", SIGNALS="SIGTERM")
    assert code == 0, said
    assert_same_run(tmp_path / "run", never_stopped)


@pytest.mark.parametrize(
    ("number", "code"),
    [("SIGTERM", -15), *(pytest.param(n, c, marks=pytest.mark.slow) for n, c in (("SIGUSR1", -10), ("SIGINT", 130)))],
)
def test_a_second_signal_ends_the_run_at_once_as_any_process(
    number: str, code: int, inputs: Path, tmp_path: Path
) -> None:
    line = ("ftcli", "train", "recipe.yaml", "--output", tmp_path / "run")
    first = "SIGUSR1" if number == "SIGTERM" else "SIGTERM"
    result = shell(inputs, *line, SIGNAL_AT="loss 5", SIGNALS=f"{first} {number}")
    assert result.returncode == code, result.stderr
    assert f"{first}: stopping after the current step; a second signal ends it at once" in result.stderr
    status = RunFolder(tmp_path / "run").status()
    assert (status["state"], status["exit_code"]) == ("failed", 128 + signal.Signals[number])
    assert status["error"] == f"ended by a second signal ({number})"
    assert checkpoints_of(tmp_path / "run") == []


REQUEUE = 'n=0; until "$@"; do [ $? -eq 75 ] || exit 1; n=$((n+1)); [ $n -lt 9 ] || exit 2; done; echo launches $n'


def requeue(inputs: Path, *command: object, **more: str) -> str:
    """Launch as a batch system does that requeues, by a shell; return how often it stopped."""
    line = ["sh", "-c", REQUEUE, "sh", sys.executable, "-m", *map(str, command)]
    result = subprocess.run(line, cwd=inputs, env=environment(**more), capture_output=True, text=True, timeout=290)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.splitlines()[-1]


def test_requeued_after_each_step_by_a_time_limit_the_run_is_the_one_never_stopped(
    inputs: Path, never_stopped: Path, tmp_path: Path
) -> None:
    line = ("ftcli", "train", "recipe.yaml", "--output", tmp_path / "run", "--resume", "auto")
    assert requeue(inputs, *line, "--set", "train.max_minutes=0.0001") == "launches 4"  # the last evaluation is cut
    assert_same_run(tmp_path / "run", never_stopped)


@pytest.mark.parametrize("number", ["SIGTERM", pytest.param("SIGUSR1", marks=pytest.mark.slow)])
def test_a_signal_to_every_process_of_a_job_stops_two_ranks_at_one_step(
    number: str, inputs: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    trouble = {"SIGNALS": number, "STOP_FILE": str(run / "stop"), "WHOLE_TREE": "1"}
    result = shell(inputs, *on_two("ddp", run), SIGNAL_AT="loss 3", **trouble)
    assert result.returncode == 75, result.stderr
    assert f"stopped as asked after step 3 of 4 ({number})" in result.stderr
    assert_stopped(run, 3)
    assert not _processes_of(run)


def test_a_signal_while_ranks_load_ends_them_at_once(inputs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = shell(inputs, *on_two("ddp", run), SIGNAL_AT="load_model 1", SIGNALS="SIGTERM", LOADS_FOR="150")
    assert result.returncode == 75, result.stderr
    assert "stopped as asked before the first step, nothing to save (SIGTERM)" in result.stderr
    assert_stopped(run, 0)
    assert not _processes_of(run)


def resumed_is_never_stopped(inputs: Path, tmp_path: Path, profile: str, *stops: dict[str, str]) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert shell(inputs, *on_two(profile, whole)).returncode == 0
    for trouble in stops:
        result = shell(inputs, *on_two(profile, run), STOP_FILE=str(run / "stop"), **trouble)
        assert result.returncode == 75, result.stderr
        assert damage(checkpoints_of(run)[-1]) == ""
    result = shell(inputs, *on_two(profile, run))
    assert result.returncode == 0, result.stderr
    assert_same_run(run, whole)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("profile", "signals"), [("ddp", 3), ("fsdp", 2), ("zero3", 2)])
def test_two_ranks_stopped_by_each_signal_go_on_bit_for_bit(
    profile: str, signals: int, inputs: Path, tmp_path: Path
) -> None:
    calls = tmp_path / "calls"
    stops: list[dict[str, str]] = [
        {"SIGNAL_AT": "loss 1", "SIGNALS": "SIGINT"},
        {"SIGNAL_AT": "eval_step 1", "SIGNALS": "SIGTERM", "CALLS": str(calls)},  # after step 2
        {"SIGNAL_AT": "loss 1", "SIGNALS": "SIGUSR1", "WHOLE_TREE": "1"},
    ]
    resumed_is_never_stopped(inputs, tmp_path, profile, *stops[:signals])  # the parent hears of no profile
    seen = [Path(f"{calls}-{rank}").read_text() for rank in (0, 1)]
    assert seen[0] == seen[1] and seen[0].count("eval_step") == 2  # both left after the same batch


@pytest.mark.slow
def test_two_ranks_requeued_by_a_time_limit_finish(inputs: Path, tmp_path: Path) -> None:
    two = ("--set", "train.max_steps=2")
    assert shell(inputs, *on_two("fsdp", tmp_path / "whole"), *two).returncode == 0
    line = (*on_two("fsdp", tmp_path / "run"), *two, "--set", "train.max_minutes=0.0001")
    assert requeue(inputs, *line) == "launches 2"
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("first", ["SIGINT", "SIGUSR1"])
def test_a_second_signal_ends_launched_ranks(first: str, inputs: Path, tmp_path: Path) -> None:
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
    _, error = process.communicate(timeout=60)
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
def test_under_a_bare_launch_a_signal_to_one_rank_stops_both_and_status_json_says_so(
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
