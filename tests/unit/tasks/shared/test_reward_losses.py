"""Losses of reward models against their papers in float64, and the pairs of a ranking."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftcli.tasks.shared.reward_losses import bradley_terry, centring, ranked_pairs, ranking, regression

from ....support.trl_trainer import trl_attributes

CHOSEN, REJECTED, MARGIN = [1.2, -0.4, 3.0], [0.3, 0.9, 3.0], [0.0, 0.5, 1.0]


def doubles(values: object, **options: bool) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, **options)


def test_bradley_terry_with_a_margin_equals_the_odds_of_the_paper() -> None:
    chosen, rejected = doubles(CHOSEN, requires_grad=True), doubles(REJECTED, requires_grad=True)
    actual = bradley_terry(chosen, rejected, doubles(MARGIN))
    actual.sum().backward()
    strengths = [(math.exp(c), math.exp(r + m)) for c, r, m in zip(CHOSEN, REJECTED, MARGIN, strict=True)]
    assert actual.tolist() == pytest.approx([-math.log(c / (c + r)) for c, r in strengths], rel=1e-12)
    assert chosen.grad is not None and rejected.grad is not None
    assert chosen.grad.tolist() == pytest.approx([-r / (c + r) for c, r in strengths], rel=1e-12)
    assert torch.equal(chosen.grad, -rejected.grad)


def test_bradley_terry_without_a_margin_of_far_scores_is_finite() -> None:
    actual = bradley_terry(torch.tensor([3e4, -3e4], dtype=torch.bfloat16), torch.zeros(2))
    assert actual.dtype == torch.float32 and actual.tolist() == pytest.approx([0.0, 3e4], rel=1e-2)


def test_centring_is_least_where_both_scores_add_up_to_zero() -> None:
    chosen, rejected = doubles([2.0, 1.0], requires_grad=True), doubles([-2.0, 0.5])
    actual = centring(chosen, rejected)
    actual.sum().backward()
    assert actual.tolist() == [0.0, 2.25]
    assert chosen.grad is not None and chosen.grad.tolist() == [0.0, 3.0]


@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=6), max_size=4))
def test_ranked_pairs_are_all_pairs_of_a_prompt_with_different_ranks(ranks: list[list[int]]) -> None:
    actual = ranked_pairs(ranks)
    expected, first = [], 0
    for of_prompt in ranks:
        numbered = list(enumerate(of_prompt, start=first))
        pairs = [(a, b) for (a, x), (b, y) in itertools.permutations(numbered, 2) if x < y]
        expected += [(a, b, 1 / len(pairs)) for a, b in pairs]
        first += len(of_prompt)
    triples = zip(actual.better.tolist(), actual.worse.tolist(), actual.weights.tolist(), strict=True)
    assert [(a, b) for a, b, _ in triples] == [(a, b) for a, b, _ in expected]
    assert actual.weights.tolist() == pytest.approx([weight for *_, weight in expected])


def test_ranking_equals_the_mean_over_pairs_of_each_prompt() -> None:
    scores = doubles([0.5, -1.0, 2.0, 1.0, 0.0], requires_grad=True)
    better, worse, weights = map(torch.from_numpy, ranked_pairs([[2, 3, 1], [1, 2]]))
    actual = ranking(scores, better, worse, weights.double())
    s = scores.tolist()
    first = [(2, 0), (2, 1), (0, 1)]
    expected = sum(math.log(1 + math.exp(s[w] - s[b])) for b, w in first) / 3 + math.log(1 + math.exp(s[4] - s[3]))
    assert actual.sum().item() == pytest.approx(expected, rel=1e-6)


def test_regression_leaves_unknown_attributes_out_of_value_and_gradient() -> None:
    scores = doubles([[1.0, 2.0], [0.0, -1.0]], requires_grad=True)
    actual = regression(scores, doubles([[0.5, math.nan], [math.nan, 1.0]]))
    actual.sum().backward()
    assert actual.tolist() == [[0.25, 0.0], [0.0, 4.0]]
    assert scores.grad is not None and scores.grad.tolist() == [[1.0, 0.0], [0.0, -4.0]]


@pytest.mark.parametrize("margin", [None, MARGIN])
def test_loss_of_a_reward_model_equals_that_of_trl(margin: list[float] | None, trl: Any) -> None:
    from trl.trainer.reward_trainer import RewardTrainer

    chosen, rejected = doubles(CHOSEN, requires_grad=True), doubles(REJECTED, requires_grad=True)
    logits = torch.cat([chosen, rejected])[:, None]
    trainer = SimpleNamespace(**trl_attributes(), args=SimpleNamespace(center_rewards_coefficient=0.01))
    inputs = {"attention_mask": torch.ones(6, 2)} | ({} if margin is None else {"margin": doubles(margin)})
    theirs = RewardTrainer.compute_loss(trainer, lambda **_: SimpleNamespace(logits=logits), inputs)
    (expected,) = torch.autograd.grad(theirs, [chosen])
    parts = bradley_terry(chosen, rejected, None if margin is None else doubles(margin))
    ours = parts.mean() + 0.01 * centring(chosen, rejected).mean()
    (actual,) = torch.autograd.grad(ours, [chosen])
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
