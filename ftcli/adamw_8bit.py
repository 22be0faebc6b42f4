"""AdamW whose moments are held in 8 bits, in blocks of 256 with a scale each: bitsandbytes' kernels, on GPUs.

Dettmers et al. 2022 (arXiv:2110.02861). Weights and gradients stay float32. Blocks follow the tensors of a process, so
they differ from profile to profile; a checkpoint therefore holds both moments in float32 under AdamW's own names, and
every profile, and plain AdamW, goes on from it. Unpacked and packed again they are the same bits.
Tensors of fewer than 4096 elements keep float32 moments. Knows no backend.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from .adamw_by_weight import AdamWByWeight, here

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 256
LEAST = 4096  # elements; smaller tensors are few, and sensitive: norms, biases
SIGNED = {"exp_avg": True, "exp_avg_sq": False}  # which map of 256 values a moment is written with
KINDS = dict.fromkeys(SIGNED, torch.uint8)


class AdamW8bit(AdamWByWeight):
    """AdamW over groups that say by `kinds` whether their moments have 8 bits (`KINDS`); else they have 32."""

    kinds = dict.fromkeys(SIGNED, torch.float32)

    def step_weight(self, group: dict[str, Any], weight: Tensor, state: dict[str, Any]) -> None:
        """Step one weight in place by bitsandbytes' kernel for its kind of moments."""
        import bitsandbytes  # noqa: F401 - its operations come with it

        (beta1, beta2), count, rate = group["betas"], int(state["step"]), float(group["lr"])
        gradient, value = here(weight.grad).contiguous(), here(weight)  # type: ignore[arg-type]
        first, second = (here(state[kind]) for kind in SIGNED)
        eps, decay = group["eps"], group["weight_decay"]
        kernels = torch.ops.bitsandbytes
        if first.dtype == torch.uint8:
            maps = [code(signed, value.device) for signed in SIGNED.values()]
            scales = [absmax(state, kind) for kind in SIGNED]
            more = (beta1, beta2, 0.0, 0.0, eps, count, rate, *maps, *scales, decay, 1.0, False)
            kernels.optimizer_update_8bit_blockwise("adam", gradient, value, first, second, *more)
            for scale in scales:
                _shorten(scale)
            return
        more = (0.0, 0.0, beta1, beta2, 0.0, 0.0, eps, decay, count, rate, 1.0, False)
        kernels.optimizer_update_32bit("adam", gradient, value, first, second, None, *more)


def absmax(state: dict[str, Any], kind: str) -> Tensor:
    """Return the scale of every block of a moment, made on first use."""
    name, values = f"{kind}_absmax", here(state[kind])
    if name not in state:
        state[name] = torch.zeros(-(-values.numel() // BLOCK), device=values.device)
    scales: Tensor = state[name]
    return scales


def unpack(state: dict[str, Any], kind: str) -> Tensor:
    """Return a moment in float32, a copy of the shape that this process holds."""
    import bitsandbytes  # noqa: F401

    packed, signed = here(state[kind]), SIGNED[kind]
    if not packed.numel():  # a shard that this rank has no part of; the kernel takes no such thing
        return torch.empty_like(packed, dtype=torch.float32)
    scales, values = absmax(state, kind), code(signed, packed.device)
    found: Tensor = torch.ops.bitsandbytes.dequantize_blockwise(packed, scales, values, BLOCK, torch.float32)
    return found


def pack(state: dict[str, Any], kind: str, moment: Tensor) -> None:
    """Put float32 values into a moment; those of `unpack` become the bytes and the scales that they were.

    The largest of a block was written as 1, or as the least value of the map, which is not -1.
    """
    values, packed = code(SIGNED[kind], moment.device), here(state[kind])
    flat = moment.reshape(-1)
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    highest, lowest = blocks.amax(1), blocks.amin(1)
    scales = torch.where(-lowest > highest, lowest / values[0], highest) if SIGNED[kind] else highest
    _shorten(scales)
    absmax(state, kind).copy_(scales)
    units = blocks / scales.where(scales > 0, 1.0)[:, None]
    nearest = torch.bucketize(units, (values[1:] + values[:-1]) / 2)
    packed.copy_(nearest.view(-1)[: flat.numel()].view(packed.shape))


def _shorten(scales: Tensor) -> None:
    """Round float32 scales to 12 bits, in place: they can then be found again from values that were scaled by them.

    That is 1e-4 of a moment, where 8 bits are 1e-2.
    """
    scales.view(torch.int32).add_(2**11).bitwise_and_(-(2**12))


@cache
def code(signed: bool, device: torch.device) -> Tensor:
    """Return the 256 values that a byte may mean, in units of its block's scale."""
    from bitsandbytes.functional import create_dynamic_map

    found: Tensor = create_dynamic_map(signed=signed).to(device)
    return found
