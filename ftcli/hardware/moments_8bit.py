"""Optimizer moments in 8 bits, with one scale per block. This module reads and writes them as float32."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor


BLOCK = 256  # elements that share a scale

SIGNED = {"exp_avg": True, "exp_avg_sq": False}  # whether the map of 256 values of a moment is signed


def absmax(state: dict[str, Any], kind: str) -> Tensor:
    """Return the scales of a moment `[blocks]`, float32. The first call creates them in the state."""
    name, values = f"{kind}_absmax", local_shard(state[kind])
    if name not in state:
        state[name] = torch.zeros(-(-values.numel() // BLOCK), device=values.device)
    scales: Tensor = state[name]
    return scales


def unpack(state: dict[str, Any], kind: str) -> Tensor:
    """Return a float32 copy of a moment, or of its shard on this process."""
    import bitsandbytes  # noqa: F401

    packed, signed = local_shard(state[kind]), SIGNED[kind]
    if not packed.numel():  # an empty shard, which the kernel does not accept
        return torch.empty_like(packed, dtype=torch.float32)
    scales, values = absmax(state, kind), byte_values(signed, packed.device)
    moment: Tensor = torch.ops.bitsandbytes.dequantize_blockwise(packed, scales, values, BLOCK, torch.float32)
    return moment


def pack(state: dict[str, Any], kind: str, moment: Tensor) -> None:
    """Write float32 values into a moment. Values of `unpack` give back the same bytes and scales.

    The element with the largest magnitude in a block is stored as 1, or as the lowest value of the map, which is not
    -1.

    Args:
        state: The optimizer's state of one parameter.
        kind: Name of the moment.
        moment: Float32 values with the shape of `unpack`.
    """
    values, packed = byte_values(SIGNED[kind], moment.device), local_shard(state[kind])
    flat = moment.reshape(-1)
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    highest, lowest = blocks.amax(1), blocks.amin(1)
    scales = torch.where(-lowest > highest, lowest / values[0], highest) if SIGNED[kind] else highest
    round_scales(scales)
    absmax(state, kind).copy_(scales)
    units = blocks / scales.where(scales > 0, 1.0)[:, None]
    nearest = torch.bucketize(units, (values[1:] + values[:-1]) / 2)
    packed.copy_(nearest.view(-1)[: flat.numel()].view(packed.shape))


def round_scales(scales: Tensor) -> None:
    """Round float32 scales in place to 12 bits, so that `pack` can recover them from scaled values.

    The relative error is 1e-4; that of 8-bit moments is 1e-2.
    """
    scales.view(torch.int32).add_(2**11).bitwise_and_(-(2**12))


@cache
def byte_values(signed: bool, device: torch.device) -> Tensor:
    """Return the values of the 256 byte codes `[256]`, in units of the scale of a block."""
    from bitsandbytes.functional import create_dynamic_map

    values: Tensor = create_dynamic_map(signed=signed).to(device)
    return values


def local_shard(tensor: Tensor) -> Tensor:
    """Return the shard of a tensor on this process; the tensor itself if it is not sharded."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local
