"""Likelihoods of a linear head in chunks: values and gradients against float64, and memory without whole logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ftcli.models.kernels import linear_cross_entropy as room
from ftcli.models.kernels.linear_cross_entropy import linear_nll

from ....support.heads import H, N, V, head_inputs
from ....support.watching import Alive, Watch

AFTER: dict[str, Callable[[Tensor], Tensor] | None] = {
    "plain": None,
    "capped": lambda logits: torch.tanh(logits / 2.0) * 2.0,
    "scaled": lambda logits: logits / 3.0,
}
MOST = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}  # of the largest value


@pytest.fixture(autouse=True)
def five_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MAX_LOGITS_PER_CHUNK", 5 * V)


def in_float64(given: list[Tensor | None], targets: Tensor, after: Any, upstream: Tensor) -> list[Tensor]:
    """Return the likelihoods, and the gradient of each input, from whole logits in float64."""
    exact = [None if x is None else x.detach().double().requires_grad_() for x in given]
    logits = F.linear(*exact)  # type: ignore[arg-type]
    nll = F.cross_entropy(logits if after is None else after(logits), targets, reduction="none")
    return [nll, *torch.autograd.grad(nll, [x for x in exact if x is not None], upstream.double())]


def assert_close(actual: Any, expected: list[Tensor], most: float) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert (a.double() - b).abs().max() <= most * b.abs().max()


@pytest.mark.parametrize("dtype", MOST)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", AFTER)
@pytest.mark.parametrize("weighed", [True, False])
def test_linear_nll_values_and_all_gradients_equal_float64(
    dtype: torch.dtype, bias: bool, shape: str, weighed: bool
) -> None:
    given, targets = head_inputs(dtype, bias=bias)
    upstream = torch.randn(N, generator=torch.Generator().manual_seed(1)) if weighed else torch.tensor(3.0).expand(N)
    nll = linear_nll(*given, targets, AFTER[shape])  # type: ignore[arg-type]
    differentiated = [x for x in given if x is not None]
    gradients = torch.autograd.grad(nll, differentiated, upstream)
    assert nll.dtype == torch.float32
    assert [gradient.dtype for gradient in gradients] == [dtype] * len(differentiated)
    assert nll[3] == nll[11] == 0
    assert_close([nll, *gradients], in_float64(given, targets, AFTER[shape], upstream), MOST[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_multiplies_in_its_dtype_and_returns_gradients_in_float32(dtype: torch.dtype) -> None:
    given, targets = head_inputs(torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        nll = linear_nll(*given, targets)  # type: ignore[arg-type]
        whole = F.cross_entropy(F.linear(*given).float(), targets, reduction="none")  # type: ignore[arg-type]
    gradients = torch.autograd.grad(nll.sum(), given)
    assert all(gradient.dtype == torch.float32 for gradient in gradients)
    assert torch.allclose(nll, whole, atol=1e-6)
    assert (nll - in_float64(given, targets, None, torch.ones(N))[0]).abs().max() > 1e-4, "not in float32"
    assert_close([nll, *gradients], in_float64(given, targets, None, torch.ones(N)), MOST[dtype])


def test_linear_nll_with_a_loss_scale_reaches_the_gradients_of_float16_before_they_are_rounded() -> None:
    hidden, weight = torch.zeros(1, 2, requires_grad=True), torch.eye(2).repeat(2000, 1) * 2
    with torch.autocast("cpu", dtype=torch.float16):  # 4000 tokens of 1/4000 each; times 2^-13 it is below float16
        nll = linear_nll(hidden, weight, None, torch.tensor([0]), lambda logits: logits * 2.0**-13)
    (scaled,) = torch.autograd.grad(nll.sum() * 2.0**13, hidden)
    assert torch.allclose(scaled, torch.tensor([[-1.0, 1.0]]), atol=1e-2)


@pytest.mark.parametrize("weighed", [True, False])
@pytest.mark.parametrize("shape", AFTER)
def test_linear_nll_makes_no_tensor_of_all_logits(weighed: bool, shape: str) -> None:
    rows, vocabulary = 400, 300
    hidden, weight = torch.randn(rows, H, requires_grad=True), torch.randn(vocabulary, H, requires_grad=True)
    room.MAX_LOGITS_PER_CHUNK = 50 * vocabulary
    with Watch() as watch:
        nll = linear_nll(hidden, weight, None, torch.zeros(rows, dtype=torch.long), AFTER[shape])
        (nll * torch.randn(rows) if weighed else nll).sum().backward()
    assert max(watch.sizes) == room.MAX_LOGITS_PER_CHUNK
    with Watch() as whole:
        F.cross_entropy(hidden @ weight.T, torch.zeros(rows, dtype=torch.long)).backward()
    assert max(whole.sizes) == rows * vocabulary


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("shape", AFTER)
def test_linear_nll_frees_the_logits_of_a_chunk_before_the_next_chunk(trained: bool, shape: str) -> None:
    hidden, weight = torch.randn(20, H, requires_grad=trained), torch.randn(V, H)
    with Alive((5, V)) as alive:
        linear_nll(hidden, weight, None, torch.zeros(20, dtype=torch.long), AFTER[shape])
    assert alive.before_products == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("trained", "weighed", "products"),
    [
        (("hidden", "weight"), False, 3),
        (("hidden", "weight"), True, 6),  # made anew for what the forward pass could not know
        (("hidden",), False, 2),
        (("hidden",), True, 2),  # a row's gradient is only multiplied by its factor
        (("weight",), False, 2),
        ((), False, 1),
    ],
)
def test_linear_nll_makes_no_unneeded_matrix_product(trained: tuple[str, ...], weighed: bool, products: int) -> None:
    given, targets = head_inputs(torch.float32, bias=False)
    hidden = given[0].detach().requires_grad_("hidden" in trained)  # type: ignore[union-attr]
    weight = given[1].detach().requires_grad_("weight" in trained)  # type: ignore[union-attr]
    with Watch() as watch:
        nll = linear_nll(hidden, weight, None, targets)
        if trained:
            (nll * torch.arange(N) if weighed else nll).sum().backward()
    chunks = -(-N // 5)
    assert watch.products == products * chunks
    assert [hidden.grad is not None, weight.grad is not None] == ["hidden" in trained, "weight" in trained]
    with Watch() as watch, torch.no_grad():
        linear_nll(hidden, weight, None, targets)
    assert watch.products == chunks


def test_linear_nll_second_backward_equals_the_first() -> None:
    given, targets = head_inputs(torch.float32)
    total = linear_nll(*given, targets).sum() * 3  # type: ignore[arg-type]
    first = [gradient.clone() for gradient in torch.autograd.grad(total, given, retain_graph=True)]
    assert_close(torch.autograd.grad(total, given), [gradient.double() for gradient in first], 1e-6)


def test_linear_nll_without_rows_gives_zero_and_zero_gradients() -> None:
    given, _ = head_inputs(torch.float32)
    total = linear_nll(given[0][:0], *given[1:], torch.zeros(0, dtype=torch.long)).sum()  # type: ignore
    total.backward()
    assert total == 0
    assert all(x is not None and not x.grad.any() for x in given)


def test_linear_nll_with_a_target_outside_the_vocabulary_raises() -> None:
    given, targets = head_inputs(torch.float32)
    targets[0] = V
    with pytest.raises((IndexError, RuntimeError)):
        linear_nll(*given, targets)  # type: ignore[arg-type]
