"""A Triton kernel for the likelihoods of a chunk of logits and their gradient. It reads the logits twice.

torch.compile makes one kernel of the same formula too, but its kernel takes 1.4 times as long, because it keeps a
maximum and a sum for each thread (docs/explanation/our-own-code.md). This module can be imported only where Triton is
installed, as with PyTorch for GPUs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192  # logits that a program holds at once
WARPS = 16
LOWEST = tl.constexpr(-3.4e38)  # finite, because the difference of two infinities is NaN


def nll_and_gradient(logits: Tensor, targets: Tensor, factors: Tensor | None) -> Tensor:
    """Return the negative log-likelihoods of a chunk. With factors, overwrite the logits with their gradient.

    A target outside the vocabulary gives NaN.

    Args:
        logits: `[n, V]`, contiguous, on a GPU.
        targets: `[n]` int64; -100 gives 0.
        factors: `[n]` float32, what each loss is multiplied by in the gradient; None: compute no gradient.

    Returns:
        `[n]` float32.
    """
    rows, vocabulary = logits.shape
    nll = torch.empty(rows, dtype=torch.float32, device=logits.device)
    factors = None if factors is None else factors.contiguous()  # an expanded scalar has no stride
    if rows:
        _kernel[(rows,)](
            logits, targets.contiguous(), factors, nll, vocabulary, BLOCK, factors is not None, num_warps=WARPS
        )
    return nll


@triton.jit
def _kernel(
    logits: tl.tensor,
    targets: tl.tensor,
    factors: tl.tensor,
    nll: tl.tensor,
    vocabulary: tl.tensor,
    block: tl.constexpr,
    trains: tl.constexpr,
) -> None:
    """Compute one row."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    target = tl.load(targets + row)
    is_inside = (target >= 0) & (target < vocabulary)
    logit = tl.load(logits + target, mask=is_inside, other=float("nan")).to(tl.float32)
    highest = LOWEST
    total = 0.0
    for start in range(0, vocabulary, block):
        at = start + tl.arange(0, block)
        # The second loop reads these logits again, so they should stay in the cache.
        part = tl.load(logits + at, mask=at < vocabulary, other=-float("inf"), eviction_policy="evict_last")
        part = part.to(tl.float32)
        higher = tl.maximum(highest, tl.max(part, 0))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(part - higher), 0)
        highest = higher
    log_sum = tl.log(total) + highest
    tl.store(nll + row, tl.where(target == -100, 0.0, log_sum - logit))
    if trains:
        factor = tl.where(target == -100, 0.0, tl.load(factors + row))
        index = target.to(tl.int32)
        for start in range(0, vocabulary, block):
            at = start + tl.arange(0, block)
            part = tl.load(logits + at, mask=at < vocabulary, other=0.0, eviction_policy="evict_first")
            gradient = (tl.exp(part.to(tl.float32) - log_sum) - (at == index).to(tl.float32)) * factor
            tl.store(logits + at, gradient, mask=at < vocabulary)
