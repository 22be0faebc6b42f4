"""AdamW on bfloat16 weights: no update is lost, and nothing depends on how tensors are cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ftcli.hardware.gradient_clipping import clip_factor, clip_grads_with_norm, get_total_norm
from ftcli.training.optim.adamw_bf16 import KINDS, AdamWBf16, join, nearest_bfloat16, split, update
from ftcli.training.optim.adamw_per_parameter import PerParameterAdamW

from ....support.cells import cell

STEPS = 200


def test_split_and_join_of_a_float32_weight_are_bit_exact() -> None:
    values = torch.randn(4000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 4000)
    values = torch.cat([values, torch.tensor([0.0, -0.0, 1.0, 1.00390625, -1.00390625, 3e38])])
    upper, lower = split(values)
    assert torch.equal(join(upper, lower).view(torch.int32), values.view(torch.int32))
    half = (upper.float() - values).abs() <= (values.abs() * 2**-8)
    assert half.all()


def walk(start: Tensor, kind: str, rate: float) -> Tensor:
    """Return how far a weight gets, `[64, 64]` float32."""
    weight = torch.nn.Parameter(start.clone() if kind == "float32" else start.bfloat16())
    make = AdamWBf16 if kind == "ours" else torch.optim.AdamW
    optimizer = make([{"params": [weight]}], lr=rate, weight_decay=0.1)
    draw = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        gradient = torch.randn(64, 64, generator=draw) + 0.3
        weight.grad = (gradient * (1 if step < STEPS / 2 else 0.2)).to(weight.dtype)
        optimizer.step()
    end = weight.detach()
    return (join(end, optimizer.state[weight]["remainder"]) if kind == "ours" else end.float()) - start


@pytest.mark.parametrize("rate", [1e-6, 1e-5, 1e-3])
def test_adamw_bf16_follows_float32_where_plain_bfloat16_loses_updates(rate: float) -> None:
    start = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    expected, plain, ours = (walk(start, kind, rate) for kind in ("float32", "plain", "ours"))
    assert (ours - expected).norm() < 5e-3 * expected.norm()
    assert (plain - expected).norm() > 0.9 * expected.norm()
    if rate == 1e-6:
        assert not plain.any()


def test_cutting_a_weight_changes_no_bit() -> None:
    draw = torch.Generator().manual_seed(0)
    whole = [torch.randn(10, generator=draw).bfloat16() for _ in range(3)]
    whole += [torch.rand(10, generator=draw), torch.randint(-99, 99, (10,), generator=draw).to(torch.int16)]
    cut = [tensor.clone() for tensor in whole]
    numbers = [torch.tensor(value) for value in (0.999, 1e-3, 0.1, 0.999, 0.001, 31.6, 1e-8)]
    update(*whole, None, *numbers)
    for part in (slice(0, 3), slice(3, 10)):
        update(*(tensor[part] for tensor in cut), None, *numbers)
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))


def test_nearest_bfloat16_equals_torchs_cast() -> None:
    values = torch.randn(4000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-45, 38, 4000)
    ties = torch.tensor([1.00390625, 1.01171875, -1.00390625, 3.4e38, float("inf"), 0.0, -0.0])
    values = torch.cat([values, ties, -ties])
    assert torch.equal(nearest_bfloat16(values), values.bfloat16().float())
    every_nan = torch.tensor([0x7FFFFFFF, 0x7FC00000, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    assert nearest_bfloat16(every_nan).isnan().all()


@pytest.mark.parametrize("factor", [0.37, 1.0])
def test_clipping_inside_of_the_step_gives_the_bits_of_clipping_before_it(factor: float) -> None:
    starts = [torch.randn(*size, generator=torch.Generator().manual_seed(0)).bfloat16() for size in ((8, 16), (33,))]
    optimizers = []
    for _ in range(2):
        weights = [torch.nn.Parameter(start.clone()) for start in starts]
        optimizers.append(AdamWBf16([{"params": weights}], lr=1e-3, weight_decay=0.1))
    draw = torch.Generator().manual_seed(1)
    for step in range(4):  # the last one is not clipped, so a factor must not stay
        inside, before = (optimizer.param_groups[0]["params"] for optimizer in optimizers)
        for here, there in zip(inside, before, strict=True):
            here.grad = torch.randn(here.shape, generator=draw).bfloat16()
            there.grad = here.grad.clone()
        norm = get_total_norm([weight.grad for weight in before], torch.device("cpu"))
        if step < 3:
            optimizers[0].clip_factor = clip_factor(norm, factor * float(norm))
            clip_grads_with_norm([weight.grad for weight in before], norm, factor * float(norm))
        for optimizer in optimizers:
            optimizer.step()
    for here, there in zip(inside, before, strict=True):
        assert torch.equal(here, there)
        assert all(torch.equal(optimizers[0].state[here][kind], optimizers[1].state[there][kind]) for kind in KINDS)


class Walk(PerParameterAdamW):
    """Notes which weights are walked over, and with what state."""

    kinds = {"exp_avg": torch.float32}
    seen: list[tuple[int, int, torch.dtype]]

    def step_weight(self, group: dict[str, Any], weight: Tensor, state: dict[str, Any]) -> None:
        self.seen.append((weight.numel(), int(state["step"]), state["exp_avg"].dtype))


def test_adamw_bf16_skips_weights_without_gradient_and_counts_empty_shards() -> None:
    weights = [torch.nn.Parameter(torch.zeros(size)) for size in (2, 0, 3, 4)]
    walk = Walk([{"params": weights[:2]}, {"params": weights[2:], "kinds": {"exp_avg": torch.float16}}])
    walk.seen = []
    for _ in range(2):
        for weight in weights[:3]:
            weight.grad = torch.ones_like(weight)
        walk.step()
    first = [(2, 1, torch.float32), (3, 1, torch.float16)]
    assert walk.seen == first + [(size, 2, dtype) for size, _, dtype in first]
    assert int(walk.state[weights[1]]["step"]) == 2 and weights[3] not in walk.state


@pytest.mark.parametrize("precision", ["bf16_pure", "bf16"])
def test_gradients_are_clipped_once_in_place_or_by_the_step(precision: str, inputs: Path) -> None:
    from ftcli.training.setup import prepare

    run = prepare(
        cell(inputs, "sft-tied", precision=precision, optimizer={"learning_rate": 1e-3, "max_grad_norm": 0.01}),
        cpu=True,
    )
    weights = run.hardware.trained(run.model)
    run.hardware.backward(run.loss_of(run.any_batch()))
    before = [weight.grad.clone() for weight in weights]
    norm = run.hardware.clip_grad_norm(weights, run.recipe.optimizer.max_grad_norm)
    in_place = not all(torch.equal(weight.grad, own) for weight, own in zip(weights, before, strict=True))
    assert in_place is (precision == "bf16") and norm > 0.02
    if in_place:
        assert float(get_total_norm([weight.grad for weight in weights], torch.device("cpu"))) == pytest.approx(0.01)
    else:
        optimizer = run.hardware.clipping
        assert float(optimizer.clip_factor) == pytest.approx(0.01 / float(norm), rel=1e-4)
        run.hardware.step(run.optimizer)
        assert optimizer.clip_factor is None and weights[0].grad is None
        moments = [optimizer.state[weight]["exp_avg"].float() for weight in weights]  # 0.1 of the clipped gradients
        assert float(torch.linalg.vector_norm(torch.cat([m.flatten() for m in moments]))) == pytest.approx(
            1e-3, rel=1e-2
        )
        run.hardware.clip_grad_norm(weights, None)
        assert optimizer.clip_factor is None
