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

from ftcli import adamw_bf16
from ftcli import linear_nll as room
from ftcli.adamw_bf16 import AdamWBf16
from ftcli.linear_nll import linear_nll

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
N, H, V = 1000, 64, 1600
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of the largest value


@pytest.fixture(autouse=True)
def pieces_of_300_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(room, "PIECE", 300 * V)
    monkeypatch.setattr(room, "WORTH", 0)
    yield
    torch.cuda.set_sync_debug_mode("default")


def head(held: torch.dtype, autocast: torch.dtype | None) -> Callable[[], list[Tensor]]:
    """Return what gives the likelihoods and both gradients of one head, the same at every call."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=draw).cuda().to(held).requires_grad_()
    weight = torch.randn(V, H, generator=draw).cuda().to(held).requires_grad_()
    targets = torch.randint(0, V, (N,), generator=draw)
    targets[[3, 700]] = -100
    targets = targets.cuda()

    def once() -> list[Tensor]:
        with torch.autocast("cuda", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            nll = linear_nll(hidden, weight, None, targets)
        return [nll.detach(), *torch.autograd.grad(nll.sum() * 0.5, [hidden, weight])]

    return once


@pytest.mark.parametrize(
    ("held", "autocast"),
    [
        (torch.float32, None),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, None),
    ],
)
def test_the_kernel_of_the_head_gives_the_numbers_of_its_plain_form_and_waits_for_nothing(
    held: torch.dtype, autocast: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = head(held, autocast)
    once()
    assert room._nll.problem is None
    torch.cuda.set_sync_debug_mode("error")  # compiled by now
    found = once()
    torch.cuda.set_sync_debug_mode("default")
    monkeypatch.setattr(room, "WORTH", N * V + 1)
    monkeypatch.setattr(room, "adds_in_float32", lambda kind, dtype: False)
    wanted = once()
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-5)
    assert found[0][3] == found[0][700] == 0
    for a, b in zip(found[1:], wanted[1:], strict=True):
        assert a.dtype == b.dtype == held
        assert (a - b).abs().max() <= CLOSE[autocast or held] * b.abs().max()


def test_likelihoods_without_gradients_are_one_kernel_too() -> None:
    logits = torch.randn(20, 2**17, device="cuda").bfloat16()  # few and long rows, which a compiler likes to split
    targets = torch.arange(20, device="cuda")
    with torch.no_grad():
        found = room._nll(logits.clone(), targets, None)
        torch.testing.assert_close(found, room.plain_nll(logits, targets, None), rtol=1e-5, atol=1e-5)
        assert kernels(lambda: room._nll(logits, targets, None)).total() == 1
    assert room._nll.problem is None


def test_sums_of_products_are_float32_and_nearer_to_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    assert room.adds_in_float32("cuda", torch.bfloat16), f"torch {torch.__version__}"
    draw = torch.Generator().manual_seed(0)
    pairs = [[torch.randn(size, generator=draw).bfloat16().cuda() for size in ((300, 80), (300, 48))] for _ in range(8)]
    exact = sum(left.double().T @ right.double() for left, right in pairs)

    def error() -> float:
        total: Any = None
        for left, right in pairs:
            total = room._plus_product(total, left.T, right, is_one=False)
        assert total.dtype == torch.float32
        return float((total - exact).norm() / exact.norm())  # type: ignore[operator, union-attr]

    summed = error()
    monkeypatch.setattr(room, "adds_in_float32", lambda kind, dtype: False)
    assert summed < 1e-5 < error()


def kernels(function: Callable[[], Any]) -> Counter[str]:
    """Return name -> number of the kernels that a second call runs on the device, copies and fillings apart."""
    function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        function()
        torch.cuda.synchronize()
    on_device = [event for event in found.events() or [] if event.device_type == torch.autograd.DeviceType.CUDA]
    names = [event.name for event in on_device if not event.is_user_annotation]
    return Counter(name for name in names if not name.startswith(("Memcpy", "Memset")))


def test_a_piece_of_the_head_is_one_kernel_beside_its_products() -> None:
    once = head(torch.bfloat16, None)
    by_compiler = {name: count for name, count in kernels(once).items() if name.startswith("triton")}
    assert sum(by_compiler.values()) == 4, by_compiler  # pieces of 256 rows, whole tiles of at most 300, and one of 232


def test_adamw_in_bfloat16_is_one_kernel_a_weight_that_reads_and_writes_at_speed() -> None:
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
    found = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end))
    return min(found)
