"""Inputs of a small linear head, for the tests of its losses."""

from __future__ import annotations

import torch
from torch import Tensor

N, H, V = 23, 16, 67  # rows, features, vocabulary


def head_inputs(dtype: torch.dtype, *, bias: bool = True) -> tuple[list[Tensor | None], Tensor]:
    """Return hidden, weight and bias that ask for gradients, and targets of which some are masked."""
    draw = torch.Generator().manual_seed(0)
    sizes = [(N, H), (V, H), (V,)]
    inputs: list[Tensor | None] = [torch.randn(size, generator=draw).to(dtype).requires_grad_() for size in sizes]
    targets = torch.randint(0, V, (N,), generator=draw)
    targets[[3, 11]] = -100
    return [*inputs[:2], inputs[2] if bias else None], targets
