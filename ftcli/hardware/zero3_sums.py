"""How ZeRO-3 averages gradients over ranks: those that come in 16 bits are sent so, inside of one machine (sums.py).

By itself DeepSpeed copies each into a float32 bucket, lays that out by rank, divides it and sends twice the bytes: 73
of 951 ms of an 8B shape on two H200s, and 131 ms of sums beside what computes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .sums import add_up, in_one_machine

AVERAGE = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"  # DeepSpeed 0.19's, which has no other word for it
Average = Callable[[list[Any], torch.dtype], list[Tensor]]


def send_as_they_come(zero: Any, processes: int) -> bool:
    """Let an optimizer of DeepSpeed send gradients of 16 bits as they are; say whether it does.

    Not where its buckets make them float32, which `contiguous_gradients` says, nor where it sends them in fewer bits.
    """
    plain = getattr(zero, AVERAGE, None)
    if plain is None or zero.contiguous_gradients or zero.all2all_process_group or not in_one_machine(processes):
        return False
    setattr(zero, AVERAGE, partial(_average, plain))
    return True


def sends_as_they_come(zero: Any) -> bool:
    """Say whether `send_as_they_come` did."""
    return AVERAGE in vars(zero)


def _average(plain: Average, weights: list[Any], dtype: torch.dtype) -> list[Tensor]:
    """Return this rank's piece of the mean gradient of each weight, flat and float32; `plain` takes what comes so."""
    wide, thin = [[w for w in weights if (w.grad.dtype == torch.float32) == is_wide] for is_wide in (True, False)]
    found = dict(zip(wide, plain(wide, dtype) if wide else (), strict=True))
    if thin:
        found |= zip(thin, _mean([w.grad for w in thin], thin[0].ds_process_group), strict=True)
    return [found[weight] for weight in weights]


def _mean(gradients: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Return this rank's piece of the mean over ranks of each: all pieces are as long, until the elements are over."""
    ranks, rank = group.size(), dist.get_rank(group)
    lengths = [-(-gradient.numel() // ranks) for gradient in gradients]
    rows = [
        torch.nn.functional.pad(gradient.reshape(-1), (0, ranks * length - gradient.numel())).view(ranks, length)
        if gradient.numel() % ranks
        else gradient.reshape(ranks, length)
        for gradient, length in zip(gradients, lengths, strict=True)
    ]
    parts = rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)
    means = add_up(parts, group, mean=True).split(lengths)
    return [
        mean[: max(0, min(length, gradient.numel() - rank * length))]
        for mean, length, gradient in zip(means, lengths, gradients, strict=True)
    ]
