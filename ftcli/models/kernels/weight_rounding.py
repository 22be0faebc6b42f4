"""Round weights to bfloat16 in compiled layers as in others.

torch.compile leaves out a cast to bfloat16 if the next operation of the same kernel computes in float32, as scaling
to 8 bits and the sum with a bias do. FSDP gathers weights in bfloat16, so the curve would depend on the profile. An
operation of its own is not part of such a kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("ftcli::rounded_weight", mutates_args=())
def _rounded(weight: Tensor) -> Tensor:
    return weight.to(torch.bfloat16)


@_rounded.register_fake
def _(weight: Tensor) -> Tensor:
    return torch.empty_like(weight, dtype=torch.bfloat16)


def _keep_dtype(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    """Store the dtype of the gradient."""
    ctx.dtype = inputs[0].dtype


def _gradient(ctx: Any, upstream: Tensor) -> Tensor:
    """Return the gradient of the weight: that of the rounded weight, cast back."""
    return upstream.to(ctx.dtype)


_rounded.register_autograd(_gradient, setup_context=_keep_dtype)


def round_to_bfloat16(weight: Tensor) -> Tensor:
    """Return a weight or bias in bfloat16; one that is in bfloat16 is returned itself.

    Args:
        weight: The weight, of any shape and floating dtype.
    """
    return weight if weight.dtype == torch.bfloat16 else _rounded(weight)
