"""Learning rates worked by hand."""

from __future__ import annotations

import math

import pytest

from ftcli.config.recipe_training import Schedule
from ftcli.training.optim.schedule import learning_rate

PLAN = {"peak": 1.0, "steps": 10, "warmup_steps": 2}


def rates(name: str, **more: float) -> list[float]:
    return [learning_rate(step, name=name, **PLAN, **more) for step in range(10)]  # type: ignore[arg-type]


def test_warm_up_is_linear_and_reaches_the_peak() -> None:
    assert rates("constant") == [0.5, 1.0] + [1.0] * 8


def test_linear_falls_in_equal_steps() -> None:
    assert rates("linear") == pytest.approx([0.5, 1.0, 1.0, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8])


def test_cosine_is_half_way_down_in_the_middle() -> None:
    assert rates("cosine")[6] == pytest.approx(0.5)
    assert rates("cosine")[9] == pytest.approx(0.5 * (1 + math.cos(math.pi * 7 / 8)))


def test_learning_rate_has_a_minimum() -> None:
    assert learning_rate(10, name="linear", min_ratio=0.1, **PLAN) == pytest.approx(0.1)  # type: ignore[arg-type]
    assert learning_rate(10, name="cosine", min_ratio=0.1, **PLAN) == pytest.approx(0.1)  # type: ignore[arg-type]


def test_learning_rate_of_a_run_that_is_all_warm_up_is_finite() -> None:
    assert learning_rate(3, peak=2.0, name="linear", steps=4, warmup_steps=4) == 2.0


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_learning_rate_at_the_last_step_is_just_above_the_minimum(name: str) -> None:
    last, after = (learning_rate(step, name=name, min_ratio=0.1, **PLAN) for step in (9, 10))  # type: ignore[arg-type]
    assert after == pytest.approx(0.1) and 0.1 < last < 0.22
    documented = {field: info.description or "" for field, info in Schedule.model_fields.items()}
    assert "one step after the last" in documented["name"]
    assert "the last step is just above it" in documented["min_ratio"]
