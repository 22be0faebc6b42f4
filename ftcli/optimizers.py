"""The optimizer of a recipe over the parameters that are trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from .recipe import Optimizer as OptimizerSection


def build_optimizer(model: nn.Module, section: OptimizerSection) -> Optimizer:
    """Return AdamW over the trainable parameters, fused where they are on a GPU.

    Weight decay (decoupled: Loshchilov & Hutter 2019) applies to matrices only; biases and norms, which have fewer
    than two dimensions, are not decayed.
    """
    import torch

    from .hardware import full_shape

    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if len(full_shape(p)) >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in trained if len(full_shape(p)) < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=section.learning_rate,
        betas=(section.betas[0], section.betas[1]),
        eps=section.eps,
        fused=all(p.is_cuda for p in trained),
    )
