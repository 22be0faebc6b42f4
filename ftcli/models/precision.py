"""Define the dtypes of weights and computation for each precision of the recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe


AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}

COMPUTE = {"fp32": torch.float32, "bf16_pure": torch.bfloat16, **AUTOCAST}


def trained_dtype(recipe: Recipe) -> torch.dtype:
    """Return the dtype of trained weights, of the sums of their gradients, and of their moments."""
    return torch.bfloat16 if recipe.precision == "bf16_pure" else torch.float32


def frozen_dtype(recipe: Recipe) -> torch.dtype:
    """Return the dtype of frozen weights: that of `model.dtype`, or for auto that of the computation."""
    if recipe.model.dtype == "auto":
        return COMPUTE[recipe.precision]
    dtype: torch.dtype = getattr(torch, recipe.model.dtype)
    return dtype


def load_dtype(recipe: Recipe) -> torch.dtype:
    """Return the dtype in which weights are loaded: that of frozen weights for an adapter, else of trained weights."""
    return trained_dtype(recipe) if recipe.adapter.type == "none" else frozen_dtype(recipe)
