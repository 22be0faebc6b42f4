"""One dtype policy on every backend: float32 master weights, gradients summed in float32, losses summed in float32.

Under bf16 only the forward and backward pass compute in bfloat16; frozen weights keep the dtype they are loaded in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn

    from ..recipe import Recipe


def frozen_dtype(recipe: Recipe) -> torch.dtype:
    """Return the dtype that frozen weights are held in."""
    if recipe.model.dtype == "auto":
        return torch.bfloat16 if recipe.precision == "bf16" else torch.float32
    found: torch.dtype = getattr(torch, recipe.model.dtype)
    return found


def load_dtype(recipe: Recipe) -> torch.dtype:
    """Return the dtype that weights are loaded in: float32 where they are trained."""
    return torch.float32 if recipe.adapter.type == "none" else frozen_dtype(recipe)


def check(model: nn.Module, recipe: Recipe) -> str:
    """Return the policy as one line; raises `RuntimeError` naming the first trained weight that is not float32."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise RuntimeError(f"trained weight {name} is {parameter.dtype} after prepare, not float32")
    compute = {"fp32": "float32", "bf16": "bfloat16"}[recipe.precision]
    frozen = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters() if not p.requires_grad})
    held = f", frozen weights {'/'.join(frozen)}" if frozen else ""
    return f"weights float32, compute {compute}, gradients float32, loss float32{held}"
