"""Rows of metrics that are written during the next step: the same rows, none lost, none for a step that is undone."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ftcli.runtime.errors import RunError

from ...support.cells import cell

STEPS = 6
EXACT = ("step", "loss", "grad_norm", "learning_rate", "items", "samples", "epoch")


def numbers(path: Path) -> list[int]:
    return [row["step"] for row in rows(path)]


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def record(
    recipe: Any,
    folder: Path,
    *,
    late: bool,
    fail_after: int | None = None,
    spoil_after: int | None = None,
) -> list[list[int]]:
    """Train with a reporter, and return the numbers of the rows that are on the disk after each step."""
    from ftcli.loop import steps
    from ftcli.runtime.run_folder import RunFolder
    from ftcli.training.reporter import Reporter
    from ftcli.training.setup import prepare

    run = prepare(recipe, cpu=True)
    folder.mkdir()
    run.folder = RunFolder(folder)
    seen = []
    with Reporter(run, quiet=True, late=late) as report:
        for step in steps(run):
            report.step(step)
            seen.append(numbers(folder / "metrics.jsonl"))
            if step.number == fail_after:
                raise ArithmeticError("in the body of the loop")
            if step.number == spoil_after:
                with torch.no_grad():
                    next(iter(run.model.parameters())).fill_(float("nan"))
    return seen


def recipe_of(inputs: Path, **changes: Any) -> Any:
    return cell(inputs, "sft-tied", train={"max_steps": STEPS}, evaluate={"every_steps": 3}, **changes)


def test_late_rows_are_written_in_the_next_step_but_at_once_before_an_evaluation(inputs: Path, tmp_path: Path) -> None:
    seen = record(recipe_of(inputs), tmp_path / "run", late=True)
    assert seen == [[], [1], [1, 2, 3], [1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6]]


def test_late_rows_have_the_values_of_rows_that_are_written_at_once(inputs: Path, tmp_path: Path) -> None:
    seen = record(recipe_of(inputs), tmp_path / "at-once", late=False)
    assert seen == [list(range(1, number + 1)) for number in range(1, STEPS + 1)]
    record(recipe_of(inputs), tmp_path / "late", late=True)
    late, at_once = (rows(tmp_path / name / "metrics.jsonl") for name in ("late", "at-once"))
    assert [[row[name] for name in EXACT] for row in late] == [[row[name] for name in EXACT] for row in at_once]


@pytest.mark.parametrize("late", [False, True])
def test_speeds_and_seconds_leave_out_pauses_and_the_time_of_writing(
    inputs: Path, tmp_path: Path, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step takes a second. Rows of two steps; an evaluation lies within the second, a checkpoint in the third."""
    from ftcli.loop import steps
    from ftcli.runtime.run_folder import RunFolder
    from ftcli.training.batches import moment
    from ftcli.training.reporter import Reporter
    from ftcli.training.setup import prepare

    clock = [100.0]
    monkeypatch.setattr(moment, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    recipe = recipe_of(inputs, log={"every_steps": 2})
    run = prepare(recipe, cpu=True)
    (tmp_path / "run").mkdir()
    run.folder = RunFolder(tmp_path / "run")
    with Reporter(run, quiet=True, late=late) as report:
        for step in steps(run):
            report.step(step)
            clock[0] += 1
            if step.number == 3:
                clock[0] += 50
                report.evaluation(step.number, {"loss": 1.0}, 50.0)
            if step.number == 5:
                clock[0] += 70
                report.saved(step.number, None, 70.0)
    written = [row for row in rows(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    size = recipe.batch.global_size
    assert [(row["step"], row["rows_per_second"], row["seconds"]) for row in written] == [
        (2, 2 * size, 1.0),  # the first step ends before the first second
        (4, size, 3.0),
        (6, size, 5.0),
    ]


class SlowRows:
    """A moment later on a clock whenever rows are asked for."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock

    def __call__(self, run: Any) -> Any:
        from ftcli.training.batches.window import windows

        loaded = windows(run)
        while True:
            self.clock[0] += 3
            window = next(loaded, None)
            if window is None:
                return
            window.wait = SimpleNamespace(seconds=lambda: 3.0)
            yield window


def test_the_wait_for_rows_lies_in_the_row_of_the_step_that_trains_on_them(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ftcli import loop
    from ftcli.runtime.run_folder import RunFolder
    from ftcli.training.batches import moment
    from ftcli.training.reporter import Reporter
    from ftcli.training.setup import prepare

    clock = [100.0]
    monkeypatch.setattr(moment, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(loop, "windows", SlowRows(clock))
    run = prepare(recipe_of(inputs), cpu=True)
    (tmp_path / "run").mkdir()
    run.folder = RunFolder(tmp_path / "run")
    with Reporter(run, quiet=True) as report:
        for step in loop.steps(run):
            clock[0] += 1
            report.step(step)
    written = [row for row in rows(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    assert [row["data_wait_share"] for row in written] == [1.0] + [0.75] * (STEPS - 1)
    assert [row["rows_per_second"] for row in written][1:] == [run.recipe.batch.global_size / 4] * (STEPS - 1)


def test_late_rows_of_a_loop_that_fails_are_written_at_its_end(inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(ArithmeticError):
        record(recipe_of(inputs), tmp_path / "run", late=True, fail_after=2)
    assert numbers(tmp_path / "run" / "metrics.jsonl") == [1, 2]


def test_late_rows_leave_out_a_step_that_ends_the_run(inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="step 5: loss nan"):
        record(recipe_of(inputs), tmp_path / "run", late=True, spoil_after=4)
    assert numbers(tmp_path / "run" / "metrics.jsonl") == [1, 2, 3, 4]


def test_time_left_after_a_rollback_is_that_of_the_steps_since_then(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ftcli.training.reporter import Reporter
    from ftcli.training.setup import prepare

    run = prepare(recipe_of(inputs), cpu=True)
    with Reporter(run) as report:
        report.terminal = False
        common = {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 1.0, "tokens_per_second": 1, "data_wait_share": 0.0}
        report._show(common | {"step": 4, "seconds": 20.0}, last=True)
        run.first_step = 2  # as `roll_back` does
        report._show(common | {"step": 3, "seconds": 23.0}, last=True)
    shown = [line.rpartition("  ")[2] for line in capsys.readouterr().err.splitlines() if "s left" in line]
    assert shown == [f"{5 * (STEPS - 4)} s left", f"{3 * (STEPS - 3)} s left"]
