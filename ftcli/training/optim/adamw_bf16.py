"""AdamW for bfloat16 weights that loses no update. For each weight it stores the 16 bits that rounding removes.

    float32 weight  =  bfloat16 weight (upper 16 bits, rounded)  +  remainder (int16, lower 16 bits)

With plain AdamW a bfloat16 weight does not change if the update is below half a unit in the last place (2^-9 of the
weight). A second moment in bfloat16 does not decay at beta2 0.999. There are two alternatives. Stochastic rounding
needs random numbers that do not depend on how tensors are sharded. Kahan compensation in bfloat16 needs the same memory
and stalls at 2^-17. The lower half of a float32 is exact and depends only on its own element, so every backend computes
the same bits.

Memory: 2 weight + 2 gradient + 2 remainder + 2 first moment + 4 second moment = 12 bytes per element (float32: 16).
Tensors may be whole, shards or flat partitions. This module is independent of the backend.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ftcli.hardware.gradient_clipping import ClipsGradients
from ftcli.hardware.moments_8bit import local_shard
from ftcli.models.kernels.fused import Fused
from ftcli.training.optim.adamw_per_parameter import PerParameterAdamW

# State tensors by their names in checkpoints, with their dtypes.
KINDS = {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.float32, "remainder": torch.int16}
ROW_LENGTH = (
    16  # elements; a tensor is viewed in rows of this length, so that its kernel can read several elements at once
)


class AdamWBf16(ClipsGradients, PerParameterAdamW):
    """AdamW (Loshchilov & Hutter 2019) on bfloat16 weights, with the results of float32 weights.

    Parameter groups and options are those of torch's AdamW. Gradients are bfloat16, arithmetic is float32.
    """

    kinds = KINDS

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step every weight that has a gradient."""
        if self.clip_factor is not None:  # the norm may be on a device whose weights are updated on the host
            device = next(weight.device for group in self.param_groups for weight in group["params"])
            self.clip_factor = self.clip_factor.to(device, torch.bfloat16)
        super().step(closure)
        self.clip_factor = None

    def step_weight(self, group: dict[str, Any], weight: Tensor, state: dict[str, Any]) -> None:
        """Step one weight in place, on a GPU with one compiled kernel."""
        numbers = _numbers(
            float(state["step"]), float(group["lr"]), tuple(group["betas"]), group["weight_decay"], group["eps"]
        )
        tensors: list[Any] = [weight, weight.grad, *(state[kind] for kind in KINDS)]
        _step(*(_in_rows(local_shard(tensor)) for tensor in tensors), self.clip_factor, *numbers)


def _in_rows(tensor: Tensor) -> Tensor:
    """Return a view `[n, ROW_LENGTH]` of a tensor's elements, or `[n]` if their number is not a multiple."""
    return tensor.view(-1) if tensor.numel() % ROW_LENGTH else tensor.view(-1, ROW_LENGTH)


@lru_cache(maxsize=8)  # equal for all weights of a group
def _numbers(
    count: float, rate: float, betas: tuple[float, float], weight_decay: float, eps: float
) -> tuple[Tensor, ...]:
    """Return the scalar arguments of `update` as float32 tensors, for update number `count`, from 1."""
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
    factor: Tensor | None,
    keep: Tensor,
    rate: Tensor,
    new1: Tensor,
    beta2: Tensor,
    new2: Tensor,
    scale2: Tensor,
    eps: Tensor,
) -> None:
    """Step one weight in place. All tensors have the same shape; the scalars are on the host, so no kernel waits.

    Args:
        weight: bfloat16, updated.
        gradient: bfloat16.
        exp_avg: First moment, bfloat16, updated.
        exp_avg_sq: Second moment, float32, updated.
        remainder: Lower 16 bits of the weight, int16, updated.
        factor: Factor of the gradient, a bfloat16 scalar tensor on its device; None for 1. The product is rounded to
            bfloat16, as if the gradient had been multiplied in place.
        keep: Factor of weight decay, `1 - learning rate * decay`.
        rate: Learning rate with the correction of the first moment's bias.
        new1: `1 - beta1`.
        beta2: Decay of the second moment.
        new2: `1 - beta2`.
        scale2: Correction of the second moment's bias.
        eps: Added to the denominator.
    """
    whole = join(weight, remainder)
    gradient = gradient.float() if factor is None else nearest_bfloat16(gradient.float() * factor.float())
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
    """Return the float32 values of bfloat16 weights and their int16 remainders."""
    return ((weight.view(torch.int16).to(torch.int32) << 16) + remainder.to(torch.int32)).view(torch.float32)


def split(whole: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest bfloat16 values and the int16 remainders of float32 values. Ties round away from zero."""
    bits = whole.view(torch.int32)
    upper = (bits + 2**15) >> 16
    return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)


def nearest_bfloat16(values: Tensor) -> Tensor:
    """Return float32 values rounded to bfloat16, as float32; ties to even. Compilers leave out casts there and back."""
    bits = values.view(torch.int32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32)
    return torch.where(values.isnan(), values, rounded)  # the sum may turn NaN into zero


_step = Fused(update)  # one kernel for weights of any length, instead of eight passes over memory
