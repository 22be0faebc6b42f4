"""A resumed run continues the run of its tracker, and what was abandoned is cut off or marked."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import accelerate.tracking
import pytest
import torch
from accelerate import PartialState
from accelerate.utils import LoggerType

import ftcli
from ftcli.config.load import dump_recipe
from ftcli.loop import train
from ftcli.runtime.errors import InputError
from ftcli.runtime.run_folder import RunFolder
from ftcli.testing import run_on_cpu
from ftcli.training.checkpointing import save_checkpoint
from ftcli.training.trackers import _names_for_mlflow

from ..support.cells import cell


class StandInRun:
    """A run of Weights & Biases: its arguments and rows. Like the real one it drops rows of an earlier step."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments, self.id = arguments, arguments.get("id", "of-the-first-launch")
        self.rows: list[dict[str, Any]] = []
        self.config: dict[str, Any] = {}
        self.axis, self.has_finished = "", False

    def define_metric(self, name: str, step_metric: str) -> None:
        assert name == "*"
        self.axis = step_metric

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        assert not self.has_finished, "the real one raises an error then"
        self.rows.append({"passed": step} | values)

    def finish(self) -> None:
        self.has_finished = True


class Config(dict[str, Any]):
    def update(self, values: dict[str, Any], *, allow_val_change: bool) -> None:  # type: ignore[override]
        assert allow_val_change
        super().update(values)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a module that stands in for wandb; `runs` are those that were started."""
    module: Any = ModuleType("wandb")
    module.__spec__ = ModuleSpec("wandb", None)
    module.runs = []

    def init(**arguments: Any) -> StandInRun:
        module.runs.append(StandInRun(**arguments))
        module.runs[-1].config = Config()
        return module.runs[-1]

    module.init, module.config = init, Config()
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr(accelerate.tracking, "_available_trackers", [LoggerType.WANDB])
    return module


def test_evaluations_before_and_after_a_loop_of_your_own_are_sent(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = stand_in(monkeypatch)
    recipe = cell(inputs, "sft-tied", train={"max_steps": 2}, log={"trackers": ["wandb"]})
    run = ftcli.prepare(recipe, cpu=True, output=tmp_path / "run")
    ftcli.evaluate(run)
    for _ in ftcli.steps(run):
        pass
    ftcli.evaluate(run)
    (only,) = module.runs
    assert [(row["step"], "eval/loss" in row) for row in only.rows] == [(0, True), (1, False), (2, False), (2, True)]
    assert not only.has_finished
    del run
    assert only.has_finished, "it ends with the run that it belongs to"


def test_resumed_run_continues_its_run_in_wandb_and_marks_what_was_abandoned(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = stand_in(monkeypatch)
    runs = module.runs
    recipe, folder = cell(inputs, "sft-tied", train={"max_steps": 4}, log={"trackers": ["wandb"]}), tmp_path / "run"
    run = ftcli.prepare(recipe, cpu=True, output=folder)
    for step in ftcli.steps(run):
        if step.number == 2:
            checkpoint = save_checkpoint(run, 2)
        if step.number == 3:
            break
    monkeypatch.setenv("WANDB_PROJECT", "another")  # the id of a run belongs to its project
    capsys.readouterr()
    again = ftcli.prepare(recipe, cpu=True, output=folder, resume=checkpoint)
    losses = [step.loss for step in ftcli.steps(again)]
    assert "this run continues in its project ftcli, and WANDB_PROJECT is now another" in capsys.readouterr().err
    first, second = runs
    assert "id" not in first.arguments and first.arguments["name"] == "run" and first.axis == "step"
    assert [(row["step"], row["passed"], row["attempt"]) for row in first.rows] == [(n, n, 1) for n in (1, 2, 3)]
    assert (second.arguments["id"], second.arguments["resume"]) == (first.id, "allow")
    assert first.arguments["project"] == second.arguments["project"] == "ftcli"
    rows = [(row["step"], row["passed"], row["attempt"], row["loss"]) for row in second.rows]
    assert rows == [(3, None, 2, losses[0]), (4, None, 2, losses[1])]  # with a step, wandb would drop the first one
    assert module.config["attempt_2_after_step"] == 2
    assert json.loads((folder / "trackers.json").read_text())["wandb"] == first.id


@pytest.mark.parametrize("place", ["log", "define_metric", "finish"])
def test_tracker_that_fails_ends_no_run(
    place: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = stand_in(monkeypatch)
    original = getattr(StandInRun, place)

    def fail_later(self: StandInRun, *values: Any, **more: Any) -> None:
        if place == "log" and len(self.rows) < 2:
            return original(self, *values, **more)
        raise ConnectionError("no route to\nhttps://user:secret@host")

    monkeypatch.setattr(StandInRun, place, fail_later)
    recipe = cell(inputs, "sft-tied", train={"max_steps": 4}, log={"trackers": ["wandb"]})
    train(ftcli.prepare(recipe, cpu=True, output=tmp_path / "run"))
    folder, err = RunFolder(tmp_path / "run"), capsys.readouterr().err
    (line,) = [line for line in err.splitlines() if "ConnectionError: no route to" in line]
    assert line.startswith("ftcli: warning: wandb ") and "secret" not in line
    assert folder.status()["state"] == "done" and folder.final.is_dir()
    assert len(folder.training_rows()) == 4
    (only,) = module.runs
    assert len(only.rows) == {"log": 2, "define_metric": 0, "finish": 5}[place]


def test_run_after_one_whose_tracker_has_failed_gets_its_own(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = stand_in(monkeypatch)
    original = StandInRun.log

    def fail_once(self: StandInRun, values: dict[str, Any], step: int | None = None) -> None:
        if len(module.runs) == 1 and self.rows:
            raise ConnectionError("no route")
        original(self, values, step)

    monkeypatch.setattr(StandInRun, "log", fail_once)
    recipe = cell(inputs, "sft-tied", train={"max_steps": 3}, log={"trackers": ["wandb"]})
    run = ftcli.prepare(recipe, cpu=True, output=tmp_path / "one")
    for _ in ftcli.steps(run):
        pass
    assert not module.runs[0].has_finished, "that may take minutes"
    run.record.reporter.trackers._continue_after(1)  # type: ignore[union-attr]  # as a roll-back does
    assert json.loads((tmp_path / "one" / "trackers.json").read_text())["wandb"] == "of-the-first-launch"
    for _ in ftcli.steps(ftcli.prepare(recipe, cpu=True, output=tmp_path / "two")):
        pass
    first, second = module.runs
    assert first.has_finished and [row["step"] for row in second.rows] == [1, 2, 3]


def test_tracker_that_cannot_be_started_is_refused_before_the_first_step(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = stand_in(monkeypatch)

    def init(**arguments: Any) -> StandInRun:
        raise ConnectionError("no route")

    module.init = init
    recipe = cell(inputs, "sft-tied", log={"trackers": ["wandb"]})
    with pytest.raises(InputError, match="log.trackers: wandb cannot be started: ConnectionError: no route"):
        train(ftcli.prepare(recipe, cpu=True, output=tmp_path / "run"))
    assert RunFolder(tmp_path / "run").training_rows() == []


def test_names_of_metrics_are_accepted_by_mlflow_and_stay_different() -> None:
    names = ["loss", "eval/f1/C++", "eval/f1/C--", "eval/f1/C#?", "eval/f1/\u00e9t\u00e9 (2)", "a//b", "../a/b", "/"]
    assert _names_for_mlflow(names) == [
        "loss",
        "eval/f1/C__",
        "eval/f1/C--",
        "eval/f1/C___",
        "eval/f1/\u00e9t\u00e9 _2_",
        "a/b",
        "a/b_",
        "_",
    ]


def evaluated_after_the_loop(inputs: Path, folder: Path) -> float:
    """Train with a tracker, and evaluate after its end."""
    recipe = cell(inputs, "sft-tied", train={"max_steps": 2}, log={"trackers": ["tensorboard"]})
    run = ftcli.prepare(recipe, cpu=True, output=folder)
    PartialState().fork_launched = False  # as under `accelerate launch`, where Accelerate may end the process group
    for _ in ftcli.steps(run):
        pass
    loss = ftcli.evaluate(run)["loss"]
    run.record.reporter.trackers.end()  # type: ignore[union-attr]
    assert torch.distributed.is_initialized(), "the process group belongs to the run, not to its trackers"
    return loss


def test_processes_can_evaluate_after_a_loop_with_trackers(inputs: Path, tmp_path: Path) -> None:
    first, second = run_on_cpu(evaluated_after_the_loop, inputs, tmp_path / "run", profile="ddp")
    assert first == second


def test_a_second_run_starts_its_own_run_of_a_tracker(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `reinit`, `wandb.init` returns the run that is active; mlflow raises an error."""
    module = stand_in(monkeypatch)
    real = module.init

    def init(**arguments: Any) -> Any:
        active = [run for run in module.runs if not run.has_finished]
        return active[-1] if active else real(**arguments)

    module.init = init
    kept = []
    for seed in (1, 2):
        recipe = cell(inputs, "sft-tied", seed=seed, train={"max_steps": 2}, log={"trackers": ["wandb"]})
        kept.append(run := ftcli.prepare(recipe, cpu=True, output=tmp_path / f"run-{seed}"))
        for _ in ftcli.steps(run):
            pass
    assert [[row["step"] for row in run.rows] for run in module.runs] == [[1, 2], [1, 2]]


WANDB = """import atexit, sys
class Run:
    id, is_torn_down = "x", False
    config = {}
    def define_metric(self, name, step_metric): pass
    def log(self, values, step=None): pass
    def finish(self):
        print("torn down" if Run.is_torn_down else "finished", flush=True)
class Config(dict):
    def update(self, values, allow_val_change=False): pass
config = Config()
def init(**arguments):
    atexit.register(lambda: setattr(Run, "is_torn_down", True))
    return Run()
"""


def test_trackers_end_before_their_library_at_the_end_of_the_process(inputs: Path, tmp_path: Path) -> None:
    recipe = cell(inputs, "sft-tied", train={"max_steps": 2}, log={"trackers": ["wandb"]})
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    (tmp_path / "wandb.py").write_text(WANDB)
    lines = [
        "import accelerate.tracking, accelerate.utils, ftcli",
        "accelerate.tracking._available_trackers.append(accelerate.utils.LoggerType.WANDB)",
        "run = ftcli.prepare('recipe.yaml', cpu=True, output='run')",
        "for step in ftcli.steps(run): pass",
    ]
    (tmp_path / "script.py").write_text("\n".join(lines))
    ended = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ended.stdout.split("\n")[0] == "finished", ended.stdout + ended.stderr
