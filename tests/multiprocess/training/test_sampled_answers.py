"""Prompts answered while training: the same answers on every profile, and an unchanged curve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ftcli.testing import run_on_cpu

from ...support.cells import cell

PROMPTS = ["alpha beta", "gamma " * 9, [{"role": "system", "content": "be brief"}, {"role": "user", "content": "eps"}]]
LEARNT = {"optimizer": {"learning_rate": 5e-2}, "train": {"max_steps": 4}}  # enough to leave one letter for another


def curves(folder: Path, cases: list[tuple[str, int, float]]) -> dict[str, Any]:
    """Train each case (cell, number of prompts, temperature) with prompts answered at every second step.

    Returns the curve, the answers at each evaluation, and the curve of the same run without prompts.
    """
    from ftcli.loop import steps
    from ftcli.training.evaluation import sample_prompts
    from ftcli.training.setup import prepare

    results: dict[str, Any] = {}
    for name, count, temperature in cases:
        generation = {"prompts": PROMPTS[:count], "max_new_tokens": 8, "temperature": temperature}
        run = prepare(cell(folder, name, evaluate={"generate": generation}, **LEARNT), cpu=True)
        curve, answers = [], []
        for step in steps(run):
            curve.append((step.loss, step.grad_norm))
            if step.number % 2 == 0:
                answers.append([(a.text, a.tokens, a.ended) for a in sample_prompts(run)])
        key = f"{name} {count} {temperature}"
        results[key] = {"curve": curve, "answers": answers}
        plain = prepare(cell(folder, name, **LEARNT), cpu=True)
        results[key]["silent"] = [(step.loss, step.grad_norm) for step in steps(plain)]
    return results


CASES = [("sft-untied", 3, 0.0), ("sft-tied", 1, 0.9)]  # an odd number of prompts, and fewer than ranks
MORE = [("sft-lora", 3, 0.0)]


@pytest.fixture(scope="module")
def alone(inputs: Path) -> dict[str, Any]:
    return run_on_cpu(curves, inputs, CASES + MORE, processes=1, profile="single")[0]


def test_sampled_answers_change_in_training(alone: dict[str, Any]) -> None:
    answers = alone["sft-untied 3 0.0"]["answers"]
    assert len(answers) == 2 and all(len(row) == 3 for row in answers)
    assert answers[0] != answers[-1]
    assert len({text for row in answers for text, _, _ in row}) > 3


def test_sampling_on_one_process_does_not_change_the_curve(alone: dict[str, Any]) -> None:
    for case in alone.values():
        assert case["curve"] == case["silent"]


def assert_equal(alone: dict[str, Any], actual: list[dict[str, Any]]) -> None:
    for rank in actual:
        for name, got in rank.items():
            assert got["answers"] == alone[name]["answers"], name
            assert got["curve"] == got["silent"], name
            for (a, _), (b, _) in zip(got["curve"], alone[name]["curve"], strict=True):
                assert a == pytest.approx(b, rel=1e-5)


@pytest.mark.slow
def test_sampling_on_fsdp_gives_the_same_answers_and_does_not_change_the_curve(
    inputs: Path, alone: dict[str, Any]
) -> None:
    assert_equal(alone, run_on_cpu(curves, inputs, CASES[:1], profile="fsdp"))


@pytest.mark.slow
@pytest.mark.parametrize(("profile", "processes"), [("ddp", 2), ("zero2", 2), ("zero3", 2), ("fsdp", 3)])
def test_sampling_on_every_profile_gives_the_same_answers_and_does_not_change_the_curve(
    profile: str, processes: int, inputs: Path, alone: dict[str, Any]
) -> None:
    assert_equal(alone, run_on_cpu(curves, inputs, CASES + MORE, profile=profile, processes=processes))
