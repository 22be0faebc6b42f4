"""Build the optimizer of a recipe."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from ftcli.config.recipe import Recipe

# Ends of names of parameters: down_proj_bias of GPT-OSS, attention_biases of LeViT, relative_position_bias_table of
# Swin, relative_attention_bias.weight of T5.
BIAS = re.compile(r"bias(es)?(_table|\.weight)?$")
NORM = re.compile(r"([Nn]orm|GRN)$")  # of classes: LlamaRMSNorm, ConvNextV2GRN


def build_optimizer(model: nn.Module, recipe: Recipe, *, fused: bool) -> Optimizer:
    """Build the optimizer over the trainable parameters of a model.

    The class depends on the recipe: `AdamWBf16` for precision bf16_pure, `AdamW8bit` for optimizer adamw_8bit,
    `CountingSGD` for sgd, else torch's AdamW. Weight decay applies to matrices and kernels of convolutions only
    (AdamW: decoupled, Loshchilov & Hutter 2019; SGD: a part of the gradient). Biases and norms are not decayed
    (`is_decayed`). Each group has `lr_factor`, by which the schedule's learning rate is multiplied.
    It is 1, or adapter.loraplus_lr_ratio for LoRA's B matrices (LoRA+: Hayou et al. 2024).

    Args:
        model: The model, not yet prepared.
        recipe: The recipe.
        fused: Whether a GPU will step the parameters. Then one kernel steps many weights. Their present device does
            not show this, because weights that will be sharded are still on the host.

    Raises:
        InputError: The installed bitsandbytes does not fit `AdamW8bit`.
    """
    import torch

    from ftcli.models.structure import full_shape
    from ftcli.training.optim.adamw_8bit import KERNELS, KINDS, LEAST, AdamW8bit

    section = recipe.optimizer
    groups: dict[tuple[float, float, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decay, factor = _settings(model, name, parameter, recipe)
            is_packed = section.name == "adamw_8bit" and full_shape(parameter).numel() >= LEAST
            group = {"params": [], "weight_decay": decay, "lr": section.learning_rate * factor, "lr_factor": factor}
            group |= {"kinds": KINDS} if is_packed else {}
            groups.setdefault((decay, factor, is_packed), group)["params"].append(parameter)
    if section.name == "sgd":
        from ftcli.training.optim.sgd import CountingSGD

        how = {"lr": section.learning_rate, "momentum": section.momentum, "nesterov": section.nesterov}
        return CountingSGD(list(groups.values()), **how)
    options: dict[str, Any] = {
        "lr": section.learning_rate,
        "betas": (section.betas[0], section.betas[1]),
        "eps": section.eps,
    }
    if recipe.precision == "bf16_pure":
        from ftcli.training.optim.adamw_bf16 import AdamWBf16

        return AdamWBf16(list(groups.values()), **options)
    if section.name == "adamw_8bit":
        KERNELS.require()
        return AdamW8bit(list(groups.values()), **options)
    return torch.optim.AdamW(list(groups.values()), fused=fused, **options)


def is_decayed(name: str, module: nn.Module, shape: Sequence[int]) -> bool:
    """Return whether weight decay applies to a parameter: not to biases and norms.

    Most of them have fewer than two dimensions. Some have more: biases of experts (GPT-OSS), biases by attention head
    (XLNet) and by distance (Swin, LeViT, T5), norms by attention head (Cohere), global response norms (ConvNeXt V2).

    Args:
        name: Name of the parameter.
        module: The module that has the parameter.
        shape: Its whole shape.
    """
    return len(shape) >= 2 and not BIAS.search(name) and not NORM.search(type(module).__name__)


def _settings(model: nn.Module, name: str, parameter: nn.Parameter, recipe: Recipe) -> tuple[float, float]:
    """Return (weight decay, factor of the learning rate) of one parameter."""
    from ftcli.models.structure import full_shape

    ratio = recipe.adapter.loraplus_lr_ratio
    module = model.get_submodule(name.rpartition(".")[0])
    decay = recipe.optimizer.weight_decay if is_decayed(name, module, full_shape(parameter)) else 0.0
    is_b = ".lora_B." in name or ".lora_embedding_B." in name
    return decay, ratio if ratio is not None and is_b else 1.0
