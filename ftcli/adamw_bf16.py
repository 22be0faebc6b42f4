"""AdamW for weights in bfloat16 that loses no update: beside each weight it keeps the 16 bits that rounding took.

    float32 weight  =  bfloat16 weight (upper 16 bits, rounded)  +  remainder (int16, lower 16 bits)

Plain AdamW on bfloat16 stands still where an update is below half a unit of the last place (2^-9 of the weight), and a
second moment in bfloat16 cannot decay at beta2 0.999. Stochastic rounding would need random numbers that do not depend
on how tensors are cut; a compensation in bfloat16 (Kahan) has 16 bits again and stalls at 2^-17. The lower half of a
float32 costs as much, is exact, and depends on nothing but its own element, so every backend gives the same bits.
Memory: 2 weight + 2 gradient + 2 remainder + 2 first moment + 4 second moment = 12 bytes an element (float32: 16).
Knows no backend; tensors may be whole, shards or flat partitions.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .adamw_by_weight import AdamWByWeight, here
from .fused import Fused

# What is kept of each element, as checkpoints name it: dtype, or that of the weight.
KINDS = {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.float32, "remainder": torch.int16}
WIDTH = 16  # elements of a row, where a tensor can be cut into such: then its kernel may read several at once


class AdamWBf16(AdamWByWeight):
    """AdamW (Loshchilov & Hutter 2019) on bfloat16 weights, with the numbers of float32 weights.

    Takes the groups and options of torch's own; gradients are bfloat16, arithmetic is float32.
    """

    kinds = KINDS

    def step_weight(self, group: dict[str, Any], weight: Tensor, state: dict[str, Any]) -> None:
        """Step one weight in place: on a GPU by one compiled kernel."""
        numbers = _numbers(
            float(state["step"]), float(group["lr"]), tuple(group["betas"]), group["weight_decay"], group["eps"]
        )
        held: list[Any] = [weight, weight.grad, *(state[kind] for kind in KINDS)]
        _step(*(_in_rows(here(tensor)) for tensor in held), *numbers)


def _in_rows(tensor: Tensor) -> Tensor:
    """Return a view `[n, WIDTH]` of a tensor's elements in their order; `[n]` where their number is no multiple."""
    return tensor.view(-1) if tensor.numel() % WIDTH else tensor.view(-1, WIDTH)


@lru_cache(maxsize=8)  # all weights of a group are stepped with the same
def _numbers(
    count: float, rate: float, betas: tuple[float, float], weight_decay: float, eps: float
) -> tuple[Tensor, ...]:
    """Return what `update` is given beside tensors, for the update number `count`, the first being 1."""
    beta1, beta2 = betas
    numbers = (
        1 - rate * weight_decay,
        rate / (1 - beta1**count),
        1 - beta1,
        beta2,
        1 - beta2,
        (1 - beta2**count) ** -0.5,
        eps,
    )
    return tuple(torch.tensor(number, dtype=torch.float32) for number in numbers)


def update(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    remainder: Tensor,
    keep: Tensor,
    rate: Tensor,
    new1: Tensor,
    beta2: Tensor,
    new2: Tensor,
    scale2: Tensor,
    eps: Tensor,
) -> None:
    """Step one weight in place; all have one shape. The numbers are scalars on the host: no kernel waits for them."""
    whole = join(weight, remainder)
    gradient = gradient.float()
    first = exp_avg.float()
    first = first + (gradient - first) * new1
    second = exp_avg_sq * beta2 + gradient * gradient * new2
    whole = whole * keep - rate * first / (second.sqrt() * scale2 + eps)
    upper, lower = split(whole)
    weight.copy_(upper)
    remainder.copy_(lower)
    exp_avg.copy_(first)
    exp_avg_sq.copy_(second)


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 values whose upper halves, rounded, are `weight` and whose rest is `remainder`."""
    return ((weight.view(torch.int16).to(torch.int32) << 16) + remainder.to(torch.int32)).view(torch.float32)


def split(whole: Tensor) -> tuple[Tensor, Tensor]:
    """Return (bfloat16 values nearest to `whole`, what they lack as int16); halves are rounded away from zero."""
    bits = whole.view(torch.int32)
    upper = (bits + 2**15) >> 16
    return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)


_step = Fused(update)  # seven passes over memory are saved, and one kernel serves weights of any length
