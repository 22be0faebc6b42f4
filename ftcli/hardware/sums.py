"""Sums of gradients that come in 16 bits: inside of one machine they are sent so, and added up in float32.

Half the bytes, and the same sum but for the order of its float32 additions. Between machines of eight ranks the bytes
would not be half but up to four times as many: each rank sends to every other, where NCCL's ring crosses from one
machine to the next but once.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor


def in_one_machine(ranks: int) -> bool:
    """Say whether so many neighbouring ranks are always in one machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) % ranks == 0


def add_up(parts: Tensor, group: dist.ProcessGroup, *, mean: bool, out: Tensor | None = None) -> Tensor:
    """Return the float32 sum `[N]`, or the mean, over ranks of what each has for this one; a collective.

    Row r of `parts [ranks, N]` is what rank r adds up.
    """
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    add = torch.mean if mean else torch.sum
    return add(received, dim=0, dtype=torch.float32, out=out)
