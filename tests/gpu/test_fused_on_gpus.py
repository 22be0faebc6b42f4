"""On a GPU: the head's one kernel and its float32 sums beside their plain forms, and how many kernels a step has.

A minute on one GPU, most of it compiling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from ftcli.models.kernels import linear_cross_entropy as room
from ftcli.models.kernels import linear_regularizers
from ftcli.models.kernels.linear_cross_entropy import linear_nll
from ftcli.training.optim import adamw_bf16
from ftcli.training.optim.adamw_bf16 import AdamWBf16

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
N, H, V = 1000, 64, 1600
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of the largest value


@pytest.fixture(autouse=True)
def pieces_of_300_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(room, "MAX_LOGITS_PER_CHUNK", 300 * V)
    monkeypatch.setattr(room, "MIN_LOGITS_TO_COMPILE", 0)
    yield
    torch.cuda.set_sync_debug_mode("default")


def head(weight_dtype: torch.dtype, autocast: torch.dtype | None) -> Callable[[], list[Tensor]]:
    """Return what gives the likelihoods and both gradients of one head, the same at every call."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=draw).cuda().to(weight_dtype).requires_grad_()
    weight = torch.randn(V, H, generator=draw).cuda().to(weight_dtype).requires_grad_()
    targets = torch.randint(0, V, (N,), generator=draw)
    targets[[3, 700]] = -100
    targets = targets.cuda()

    def once() -> list[Tensor]:
        with torch.autocast("cuda", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            nll = linear_nll(hidden, weight, None, targets)
        return [nll.detach(), *torch.autograd.grad(nll.sum() * 0.5, [hidden, weight])]

    return once


@pytest.mark.parametrize(
    ("weight_dtype", "autocast"),
    [
        (torch.float32, None),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, None),
    ],
)
def test_fused_head_equals_its_plain_form_without_synchronising(
    weight_dtype: torch.dtype, autocast: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = head(weight_dtype, autocast)
    once()
    assert room._nll.problem is None
    torch.cuda.set_sync_debug_mode("error")  # compiled by now
    actual = once()
    torch.cuda.set_sync_debug_mode("default")
    monkeypatch.setattr(room, "MIN_LOGITS_TO_COMPILE", N * V + 1)
    monkeypatch.setattr(room, "can_accumulate_in_float32", lambda kind, dtype: False)
    expected = once()
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-5, atol=1e-5)
    assert actual[0][3] == actual[0][700] == 0
    for a, b in zip(actual[1:], expected[1:], strict=True):
        assert a.dtype == b.dtype == weight_dtype
        assert (a - b).abs().max() <= CLOSE[autocast or weight_dtype] * b.abs().max()


def test_fused_likelihoods_without_gradients_are_one_kernel() -> None:
    logits = torch.randn(20, 2**17, device="cuda").bfloat16()  # few and long rows, which a compiler likes to split
    targets = torch.arange(20, device="cuda")
    with torch.no_grad():
        actual = room._nll(logits.clone(), targets, None)
        torch.testing.assert_close(actual, room.plain_nll(logits, targets, None), rtol=1e-5, atol=1e-5)
        assert kernels(lambda: room._nll(logits, targets, None)).total() == 1
    assert room._nll.problem is None


@pytest.mark.parametrize("vocabulary", [96, 1600, 50257])  # below and above one block; 50257 has no 16-byte loads
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nll_kernel_equals_plain_nll(dtype: torch.dtype, vocabulary: int) -> None:
    draw = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(7, vocabulary, generator=draw) * 8).to(dtype)
    targets = torch.randint(60, vocabulary, (7,), generator=draw).cuda()
    logits[2, :50] = -float("inf")
    logits, targets[3] = logits.cuda(), -100
    for factors in (torch.rand(7, generator=draw).cuda(), torch.tensor(0.5, device="cuda").expand(7), None):
        ours, plain = logits.clone(), logits.clone()
        nll = room._nll(ours, targets, factors)
        torch.testing.assert_close(nll, room.plain_nll(plain, targets, factors), rtol=1e-6, atol=2e-6)
        torch.testing.assert_close(ours, plain)
        assert nll[3] == 0 and torch.equal(ours, logits) is (factors is None)
    assert room._nll.problem is None


def test_nll_kernel_with_an_unusual_target_or_logit_gives_nan_for_its_row_only() -> None:
    logits = torch.zeros(6, 96, device="cuda")
    targets = torch.tensor([-1, 96, 3, 4, 5, -100], device="cuda")
    logits[2, 9], logits[3, 9] = float("nan"), float("inf")
    nll = room._nll(logits, targets, None)
    assert room._nll.problem is None
    assert nll.isnan().tolist() == [True, True, True, True, False, False]


def test_nll_kernel_reaches_rows_behind_two_to_the_31_logits() -> None:
    rows, vocabulary = 2**31 // 128256 + 3, 128256
    logits = torch.zeros(rows, vocabulary, device="cuda", dtype=torch.bfloat16)
    logits[-1, 7] = 5.0
    last, targets = logits[-1:].clone(), torch.full((rows,), 7, device="cuda")
    factors = torch.ones(rows, device="cuda")
    nll = room._nll(logits, targets, factors)
    torch.testing.assert_close(nll[-1:], room.plain_nll(last, targets[-1:], factors[-1:]), rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(logits[-1:], last)
    assert room._nll.problem is None


def test_fused_head_sums_products_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    assert room.can_accumulate_in_float32("cuda", torch.bfloat16), f"torch {torch.__version__}"
    draw = torch.Generator().manual_seed(0)
    pairs = [[torch.randn(size, generator=draw).bfloat16().cuda() for size in ((300, 80), (300, 48))] for _ in range(8)]
    exact = sum(left.double().T @ right.double() for left, right in pairs)

    def error() -> float:
        total: Any = None
        for left, right in pairs:
            total = room.add_product(total, left.T, right, is_one=False)
        assert total.dtype == torch.float32
        return float((total - exact).norm() / exact.norm())  # type: ignore[operator, union-attr]

    summed = error()
    monkeypatch.setattr(room, "can_accumulate_in_float32", lambda kind, dtype: False)
    assert summed < 1e-5 < error()


def kernels(function: Callable[[], Any]) -> Counter[str]:
    """Return name -> number of the kernels that a second call runs on the device, copies and fillings apart."""
    function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        function()
        torch.cuda.synchronize()
    on_device = [event for event in profiled.events() or [] if event.device_type == torch.autograd.DeviceType.CUDA]
    names = [event.name for event in on_device if not event.is_user_annotation]
    return Counter(name for name in names if not name.startswith(("Memcpy", "Memset")))


def test_fused_head_piece_is_one_kernel_beside_its_products() -> None:
    once = head(torch.bfloat16, None)
    of_head = {name: count for name, count in kernels(once).items() if name == "_kernel"}
    assert sum(of_head.values()) == 4, kernels(once)  # pieces of 256 rows, whole tiles of at most 300, and one of 232


def test_adamw_bf16_is_one_fast_kernel_per_weight() -> None:
    torch._dynamo.reset()  # the kernel of another test may be made for smaller weights
    sizes = ((8192, 8192), (8192, 2048), (2048,), (33,))
    weights = [torch.nn.Parameter(torch.zeros(size, device="cuda", dtype=torch.bfloat16)) for size in sizes]
    optimizer = AdamWBf16([{"params": weights}], lr=1e-3)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    assert kernels(optimizer.step).total() == len(sizes)
    assert adamw_bf16._step.problem is None
    moved = sum(weight.numel() for weight in weights) * 22  # bytes: 12 are read and 10 written
    one, other = (torch.zeros(2**29, dtype=torch.uint8, device="cuda") for _ in range(2))
    stepped, copied = milliseconds(optimizer.step), milliseconds(lambda: one.copy_(other))
    speed, most = moved / stepped, 2 * one.numel() / copied
    assert speed > 0.5 * most, f"{speed / 1e9:.2f} TB/s, where a copy has {most / 1e9:.2f}"


def milliseconds(function: Callable[[], Any]) -> float:
    """Return the shortest of several calls, on the device."""
    times = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return min(times)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_fused_regularizers_equal_their_plain_form_without_synchronising(
    autocast: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_regularizers, "MIN_LOGITS_TO_COMPILE", 0)
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=draw).cuda().requires_grad_()
    weight = torch.randn(V, H, generator=draw).cuda().requires_grad_()
    targets = torch.randint(0, V, (N,), generator=draw)
    targets[[3, 700]] = -100
    targets, upstream = targets.cuda(), torch.randn(N, 3, generator=draw).cuda()

    def once() -> list[Tensor]:
        with torch.autocast("cuda", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            values = linear_regularizers.linear_regularized(hidden, weight, None, targets)
        return [values.detach(), *torch.autograd.grad(values, [hidden, weight], upstream)]

    once()
    assert linear_regularizers._losses.problem is None
    torch.cuda.set_sync_debug_mode("error")  # compiled by now
    actual = once()
    torch.cuda.set_sync_debug_mode("default")
    monkeypatch.setattr(linear_regularizers, "MIN_LOGITS_TO_COMPILE", N * V + 1)
    for a, b in zip(actual, once(), strict=True):
        assert (a - b).abs().max() <= CLOSE[autocast or torch.float32] * b.abs().max()
