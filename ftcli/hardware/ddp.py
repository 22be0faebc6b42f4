"""One process, or whole copies of the model on several: DistributedDataParallel."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from ..planning import Plan
    from ..recipe import Recipe


def options(recipe: Recipe) -> dict[str, Any]:
    """Return what the Accelerator is made with: autocast to the recipe's precision."""
    from accelerate.utils import DistributedDataParallelKwargs

    return {
        "mixed_precision": "no" if recipe.precision == "fp32" else recipe.precision,
        # Buffers are equal on every rank already (frozen statistics) or must not be copied from rank 0 (trained ones).
        "kwargs_handlers": [DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False)],
    }


def configure(accelerator: Accelerator, recipe: Recipe, plan: Plan) -> None:
    """Nothing to settle after the Accelerator exists."""


def fit(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Return the model on the device."""
    return model.to(accelerator.device)


def reads_once() -> bool:
    """Say no: every rank needs the whole model, and ranks of one machine share the pages of its file."""
    return False


def handing_out(accelerator: Accelerator, model: nn.Module, optimizer: Optimizer) -> AbstractContextManager[None]:
    """Return a block in which nothing is handed out."""
    return nullcontext()


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside the copy that averages gradients."""
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model


def clip(accelerator: Accelerator, model: nn.Module, max_norm: float | None) -> Tensor:
    """Clip in place; return the norm before clipping."""
    limit = float("inf") if max_norm is None else max_norm
    norm: Tensor = accelerator.clip_grad_norm_(model.parameters(), limit)
    return norm


def full_parameter(parameter: nn.Parameter) -> Tensor:
    """Return the parameter: it is whole everywhere."""
    return parameter.data


def settle(model: nn.Module) -> None:
    """Nothing to do before parameters are read."""
