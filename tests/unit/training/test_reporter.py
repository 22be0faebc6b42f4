"""Rows of metrics that are written during the next step: the same rows, none lost, none for a step that is undone."""

from __future__ import annotations

import json
import time
from pathlib import Path
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
    nap: float = 0.0,
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
            time.sleep(nap)
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
def test_no_row_has_a_higher_speed_than_its_step(inputs: Path, tmp_path: Path, late: bool) -> None:
    """A late row is written together with the next one if an evaluation follows that."""
    recipe, nap = recipe_of(inputs), 0.05
    record(recipe, tmp_path / "run", late=late, nap=nap)
    written = [row for row in rows(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    assert len(written) == STEPS
    assert all(row["rows_per_second"] <= recipe.batch.global_size / nap for row in written)
    assert written[-1]["seconds"] >= STEPS * nap


def test_late_rows_of_a_loop_that_fails_are_written_at_its_end(inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(ArithmeticError):
        record(recipe_of(inputs), tmp_path / "run", late=True, fail_after=2)
    assert numbers(tmp_path / "run" / "metrics.jsonl") == [1, 2]


def test_late_rows_leave_out_a_step_that_ends_the_run(inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="step 5: loss nan"):
        record(recipe_of(inputs), tmp_path / "run", late=True, spoil_after=4)
    assert numbers(tmp_path / "run" / "metrics.jsonl") == [1, 2, 3, 4]
