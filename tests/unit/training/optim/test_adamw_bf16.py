"""AdamW on bfloat16 weights: no update is lost, and nothing depends on how tensors are cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ftcli.training.optim.adamw_bf16 import AdamWBf16, join, split, update
from ftcli.training.optim.adamw_per_parameter import PerParameterAdamW

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
    update(*whole, *numbers)
    for part in (slice(0, 3), slice(3, 10)):
        update(*(tensor[part] for tensor in cut), *numbers)
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))


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
