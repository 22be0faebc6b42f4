"""The accuracy of `ftcli plan`: memory and step time beside the measured lines of benchmarks/speed.jsonl."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

import plan_errors  # noqa: E402
from plan_errors import Compared, compare, newest_lines, table  # noqa: E402


@pytest.fixture(scope="module")
def compared() -> list[Compared]:
    return [compare(number, line) for number, line in newest_lines()]


def test_plan_is_within_15_percent_of_memory_and_time_for_80_percent_of_the_lines(compared: list[Compared]) -> None:
    assert len(compared) >= 32
    assert sum(one.is_near for one in compared) >= 0.8 * len(compared)


@pytest.mark.parametrize("part", [0, 1], ids=["memory", "time"])
def test_plan_has_a_median_error_below_10_percent(part: int, compared: list[Compared]) -> None:
    assert statistics.median(abs(one.errors[part]) for one in compared) < 0.1


def test_newest_lines_have_one_line_per_cell_and_label(compared: list[Compared]) -> None:
    keys = [(str(one.line["cell"]), one.line["label"]) for one in compared]
    assert len(set(keys)) == len(keys)
    assert not any(one.line["traced"] or one.line["peer"] != "ftcli" for one in compared)


def test_page_of_errors_has_the_current_table(compared: list[Compared]) -> None:
    page = (ROOT / "docs" / "explanation" / "plan-accuracy.md").read_text()
    assert "\n".join(table(compared)) in page, (
        "python benchmarks/plan_errors.py --page docs/explanation/plan-accuracy.md"
    )


def test_changed_constant_is_restored(compared: list[Compared]) -> None:
    constant = plan_errors.CONSTANTS[0]
    before = plan_errors.step_time.NOT_HIDDEN
    with plan_errors.changed(constant, 0.0):
        assert plan_errors.step_time.NOT_HIDDEN == 0.0
    assert before == plan_errors.step_time.NOT_HIDDEN


def test_newest_lines_leave_out_pairs_and_short_rows(compared: list[Compared]) -> None:
    assert "preference" not in {one.line["task"] for one in compared}
    assert not any(one.line["cell"].get("median") for one in compared)
