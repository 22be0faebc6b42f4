"""Reduce-scatter of 16-bit gradients inside one machine: sent in 16 bits, summed in float32.

This halves the bytes. The sums differ from a float32 reduce-scatter only in the order of additions. Between machines of
eight ranks it would send up to four times the bytes, because each rank sends to every other rank. NCCL's ring crosses
from one machine to the next once.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ftcli.models.kernels.fused import Fused
from ftcli.runtime.process import local_world_size

WIDTH = 16  # elements that a kernel loads together


def in_one_machine(ranks: int) -> bool:
    """Return whether every group of `ranks` neighbouring ranks is inside one machine."""
    return local_world_size() % ranks == 0


def reduce_scatter_in_float32(
    rows: Tensor, group: dist.ProcessGroup, *, mean: bool, out: Tensor | None = None
) -> Tensor:
    """Return this rank's shard of the sum or the mean over ranks. A collective.

    Args:
        rows: `[ranks, N]`, 16 bits. Row r is sent to rank r.
        group: The ranks.
        mean: Whether to return the mean instead of the sum.
        out: `[N]`, float32; receives the result.

    Returns:
        `[N]`, float32.
    """
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows, group=group)
    if out is None:
        out = rows.new_empty(rows.shape[1], dtype=torch.float32)
    width = WIDTH if len(out) % WIDTH == 0 else 1
    (_mean if mean else _sum)(out.view(-1, width), *received.view(len(rows), -1, width))
    return out


def sum_of_rows(out: Tensor, *rows: Tensor) -> Tensor:
    """Write the sum of tensors to `out`, which has more bits, and return it."""
    out.copy_(rows[0])
    for row in rows[1:]:
        out.add_(row)
    return out


def mean_of_rows(out: Tensor, *rows: Tensor) -> Tensor:
    """Write the mean of tensors to `out`, which has more bits, and return it."""
    return sum_of_rows(out, *rows).div_(len(rows))


_sum, _mean = Fused(sum_of_rows), Fused(mean_of_rows)  # PyTorch's sums over so few rows take three times as long
