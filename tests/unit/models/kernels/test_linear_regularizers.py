"""Label smoothing and z-loss under a linear head: values and gradients against float64 and by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ftcli.models.kernels import linear_cross_entropy
from ftcli.models.kernels.linear_regularizers import linear_regularized, regularized_rows

from ....support.heads import H, N, V, head_inputs
from ....support.watching import Alive, Watch

AFTER: dict[str, Callable[[Tensor], Tensor] | None] = {
    "plain": None,
    "capped": lambda logits: torch.tanh(logits / 2.0) * 2.0,
}
MOST = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}  # of the largest value


@pytest.fixture(autouse=True)
def five_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_cross_entropy, "MAX_LOGITS_PER_CHUNK", 5 * V)


def transcribed(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the three values as their papers write them, from probabilities in float64."""
    p = torch.softmax(logits, dim=-1)
    known = targets != -100
    of_target = p[torch.arange(len(targets)), targets.clamp(min=0)]
    z = torch.exp(logits).sum(dim=-1)
    values = [-torch.log(of_target), -torch.log(p).sum(dim=-1) / logits.shape[-1], torch.log(z) ** 2]
    return torch.stack(values, dim=-1) * known[:, None]


@pytest.mark.parametrize("dtype", MOST)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", AFTER)
def test_linear_regularized_values_and_all_gradients_equal_float64(dtype: torch.dtype, bias: bool, shape: str) -> None:
    given, targets = head_inputs(dtype, bias=bias)
    upstream = torch.randn(N, 3, generator=torch.Generator().manual_seed(1))
    actual = linear_regularized(*given, targets, AFTER[shape])  # type: ignore[arg-type]
    gradients = torch.autograd.grad(actual, [x for x in given if x is not None], upstream)
    exact = [None if x is None else x.detach().double().requires_grad_() for x in given]
    logits, after = F.linear(*exact), AFTER[shape]  # type: ignore[arg-type]
    reference = transcribed(logits if after is None else after(logits), targets)
    expected = torch.autograd.grad(reference, [x for x in exact if x is not None], upstream.double())
    assert actual.dtype == torch.float32 and actual[3].abs().sum() == actual[11].abs().sum() == 0
    for column in range(3):
        assert (actual[:, column] - reference[:, column]).abs().max() <= MOST[dtype] * reference[:, column].abs().max()
    for a, b in zip(gradients, expected, strict=True):
        assert a.dtype == dtype
        assert (a.double() - b).abs().max() <= MOST[dtype] * b.abs().max()


def test_label_smoothing_of_both_columns_is_that_of_torch() -> None:
    logits = torch.randn(N, V, dtype=torch.float64, requires_grad=True)
    targets = head_inputs(torch.float32)[1]
    values = regularized_rows(logits, targets)
    smoothed = 0.9 * values[:, 0] + 0.1 * values[:, 1]
    expected = F.cross_entropy(logits, targets, reduction="none", label_smoothing=0.1)
    torch.testing.assert_close(smoothed, expected)
    for a, b in zip(*(torch.autograd.grad(x.sum(), logits) for x in (smoothed, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_regularized_rows_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)]])  # Z = 4, p = 1/4 and 3/4
    ((nll, uniform, square),) = regularized_rows(logits, torch.tensor([1])).tolist()
    assert nll == pytest.approx(math.log(4 / 3))
    assert uniform == pytest.approx((math.log(4) + math.log(4 / 3)) / 2)
    assert square == pytest.approx(math.log(4) ** 2)


def test_linear_regularized_makes_no_tensor_of_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, vocabulary = 400, 300
    hidden, weight = torch.randn(rows, H, requires_grad=True), torch.randn(vocabulary, H, requires_grad=True)
    monkeypatch.setattr(linear_cross_entropy, "MAX_LOGITS_PER_CHUNK", 50 * vocabulary)
    with Watch() as watch:
        linear_regularized(hidden, weight, None, torch.zeros(rows, dtype=torch.long)).sum().backward()
    assert max(watch.sizes) == 50 * vocabulary


@pytest.mark.parametrize("shape", AFTER)
def test_linear_regularized_frees_the_logits_of_a_chunk_before_the_next_chunk(shape: str) -> None:
    hidden, weight = torch.randn(20, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    with Alive((5, V)) as alive:
        linear_regularized(hidden, weight, None, torch.zeros(20, dtype=torch.long), AFTER[shape]).sum().backward()
    assert alive.before_products == [0] * 8


def test_linear_regularized_without_rows_gives_zero_gradients() -> None:
    given: list[Any] = head_inputs(torch.float32)[0]
    total = linear_regularized(given[0][:0], *given[1:], torch.zeros(0, dtype=torch.long)).sum()
    gradients = torch.autograd.grad(total, given)
    assert total == 0 and not any(gradient.any() for gradient in gradients)
