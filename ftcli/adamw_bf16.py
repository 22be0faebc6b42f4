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

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from .adamw_by_weight import AdamWByWeight, here

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

# What is kept of each element, as checkpoints name it: dtype, or that of the weight.
KINDS = {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.float32, "remainder": torch.int16}


class AdamWBf16(AdamWByWeight):
    """AdamW (Loshchilov & Hutter 2019) on bfloat16 weights, with the numbers of float32 weights.

    Takes the groups and options of torch's own; gradients are bfloat16, arithmetic is float32.
    """

    kinds = KINDS

    def step_weight(self, group: dict[str, Any], weight: Tensor, state: dict[str, Any]) -> None:
        """Step one weight in place: on a GPU by one compiled kernel."""
        (beta1, beta2), count, rate = group["betas"], float(state["step"]), float(group["lr"])
        numbers = (
            1 - rate * group["weight_decay"],
            rate / (1 - beta1**count),
            1 - beta1,
            beta2,
            1 - beta2,
            (1 - beta2**count) ** -0.5,
            group["eps"],
        )
        held: list[Any] = [weight, weight.grad, *(state[kind] for kind in KINDS)]
        tensors = [here(tensor).view(-1) for tensor in held]
        fused = _compiled() if weight.is_cuda else update
        fused(*tensors, *(torch.tensor(number, dtype=torch.float32) for number in numbers))


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
    """Step one flat weight in place; the numbers are scalars on the host, made of learning rate, betas and count."""
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


@cache
def _compiled() -> Callable[..., None]:
    """Return `update` as one kernel: seven passes over memory are saved. Made once, for tensors of any length."""
    return torch.compile(update, fullgraph=True, dynamic=True)
