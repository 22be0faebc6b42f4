"""KTO and APO-zero of single answers against the paper in float64, the baseline, and the balance of both kinds."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftcli.tasks.shared.unpaired_losses import (
    BALANCED,
    apo_zero_unpaired,
    balance_ratio,
    balancing_weights,
    kto,
    kto_baseline,
)

from ....support.trl_trainer import trl_attributes

RATIOS = [1.4, -0.3, -2.2, 0.8]
LABELS = [True, False, True, False]


def paper_kto(ratio: float, is_desirable: bool, beta: float, baseline: float, weights: tuple[float, float]) -> float:
    """Return lambda_y - v(x, y) of the paper: the value is a fraction of exponentials."""
    gain = math.exp(beta * ratio) / (math.exp(beta * ratio) + math.exp(beta * baseline))
    return weights[0] - weights[0] * gain if is_desirable else weights[1] - weights[1] * (1 - gain)


@pytest.mark.parametrize("baseline", [0.0, 0.6])
def test_kto_equals_the_paper_in_value_and_gradient(baseline: float) -> None:
    ratios = torch.tensor(RATIOS, dtype=torch.float64, requires_grad=True)
    options: dict[str, Any] = {"beta": 0.4, "desirable_weight": 1.2, "undesirable_weight": 0.9}
    z0 = torch.tensor(baseline, dtype=torch.float64, requires_grad=True)
    actual = kto(ratios, torch.tensor(LABELS), baseline=z0, **options)
    actual.sum().backward()

    def paper(ratio: float, label: bool) -> float:
        return paper_kto(ratio, label, 0.4, baseline, (1.2, 0.9))

    assert actual.tolist() == pytest.approx([paper(*row) for row in zip(RATIOS, LABELS, strict=True)], rel=1e-12)
    slopes = [(paper(r + 1e-6, label) - paper(r - 1e-6, label)) / 2e-6 for r, label in zip(RATIOS, LABELS, strict=True)]
    assert ratios.grad is not None and ratios.grad.tolist() == pytest.approx(slopes, rel=1e-7)
    assert z0.grad is None


def test_apo_zero_unpaired_adds_up_to_apo_zero_of_pairs() -> None:
    from ftcli.tasks.shared.preference_losses import PairLogps, apo_zero

    ratios, tokens = torch.tensor(RATIOS, dtype=torch.float64), torch.ones(2)
    zeros = torch.zeros(2, dtype=torch.float64)
    single = apo_zero_unpaired(ratios, torch.tensor(LABELS), beta=0.3)
    pairs = apo_zero(PairLogps(ratios[::2], ratios[1::2], tokens, tokens, zeros, zeros), beta=0.3)
    torch.testing.assert_close(single.reshape(2, 2).sum(1), pairs, rtol=1e-12, atol=0)


def test_kto_of_extreme_ratios_is_finite_and_float32() -> None:
    ratios = torch.tensor([9e3, -9e3, 9e3, -9e3], dtype=torch.bfloat16, requires_grad=True)
    actual = kto(ratios, torch.tensor([True, True, False, False]), beta=5.0, baseline=torch.tensor(2.0))
    actual.sum().backward()
    assert actual.dtype == torch.float32 and actual.tolist() == [0.0, 1.0, 1.0, 0.0]
    assert ratios.grad is not None and ratios.grad.isfinite().all()


def test_kto_baseline_is_the_mean_of_the_step_and_never_negative() -> None:
    assert kto_baseline(torch.tensor(6.0, requires_grad=True), 4).item() == 1.5
    assert kto_baseline(torch.tensor(-6.0), 4).item() == 0.0
    assert not kto_baseline(torch.tensor(6.0, requires_grad=True), 4).requires_grad


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_balancing_weights_bring_the_kinds_into_the_range_of_the_paper(desirable: int, undesirable: int) -> None:
    weights = balancing_weights(desirable, undesirable)
    assert min(weights) >= 1.0
    ratio = balance_ratio(desirable, undesirable, *weights)
    assert BALANCED[0] * (1 - 1e-12) <= ratio <= BALANCED[1] * (1 + 1e-12)


def test_balancing_weights_of_one_kind_are_refused() -> None:
    assert balance_ratio(3, 0, 1.0, 1.0) == math.inf
    with pytest.raises(ValueError, match="one kind only"):
        balancing_weights(3, 0)


@pytest.mark.parametrize("name", ["kto", "apo_zero_unpaired"])
def test_loss_equals_that_of_trl_on_one_batch(name: str, trl: Any) -> None:
    from trl.trainer.kto_trainer import KTOTrainer

    labels, tokens = torch.tensor(LABELS), 5
    generator = torch.Generator().manual_seed(2)
    values = -2 * torch.rand(4, tokens, generator=generator, dtype=torch.float64)
    reference, mismatched = (-5 + 2 * torch.rand(4, generator=generator, dtype=torch.float64) for _ in range(2))
    mismatched_reference = mismatched - torch.tensor([0.5, -0.2, 0.9, 0.1], dtype=torch.float64)
    theirs, ours = (values.clone().requires_grad_() for _ in range(2))
    zeros = torch.zeros(4, tokens, dtype=torch.float64)
    outputs = SimpleNamespace(log_probs=theirs, entropy=zeros, mean_logits=zeros)
    trainer = SimpleNamespace(
        **trl_attributes(),
        loss_type=name,
        calculate_KL=name == "kto",
        beta=0.4,
        desirable_weight=1.2,
        undesirable_weight=0.9,
        _compute_kl_logps=lambda *_: mismatched,
    )
    inputs = {
        "input_ids": torch.ones(4, tokens + 1, dtype=torch.int64),
        "attention_mask": torch.ones(4, tokens + 1, dtype=torch.int64),
        "completion_mask": torch.tensor([[0] + [1] * tokens] * 4),
        "label": labels,
        "ref_logps": reference,
        "ref_KL_logps": mismatched_reference,
    }
    their_loss = KTOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    their_loss.backward()

    options: dict[str, Any] = {"beta": 0.4, "desirable_weight": 1.2, "undesirable_weight": 0.9}
    if name == "kto":
        options["baseline"] = kto_baseline((mismatched - mismatched_reference).sum(), rows=4)
    function = {"kto": kto, "apo_zero_unpaired": apo_zero_unpaired}[name]
    our_loss = function(ours.sum(1) - reference, labels, **options).mean()
    our_loss.backward()
    torch.testing.assert_close(our_loss, their_loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=0)
