"""What the backward pass has of the forward pass: all of it kept, or computed again from a part, or kept on the host.

None of it moves a number: what is computed again has the random numbers of the first time. Which of it a run needs is
said by memory.py's estimate, or by the recipe. Knows no task and no backend; transformers' layers do the rest.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from .base_model import base_model_of
from .errors import InputError
from .memory import Shape, Sizes, choose
from .packing import lengths_of
from .profiles import profile_of_process

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .cache import PreparedRows
    from .hardware import Hardware
    from .planning import Plan
    from .recipe import Recipe

# What `selective` keeps: products of matrices, and attention. All else of a layer is cheap to compute again.
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm"}
ATTENTION = ("attention", "attn", "flash")  # in the names of kernels: torch's, its varlen's, flash-attn's
LEAST_MOVED = 2**16  # bytes: less is not worth a copy to the host


def fit_activations(
    model: nn.Module, recipe: Recipe, plan: Plan, hardware: Hardware, rows: PreparedRows, *, compiled: bool
) -> tuple[str, str]:
    """Let a model that is not prepared yet keep what the recipe says, or what fits.

    `compiled`: its layers will be, unless something is computed again selectively. Returns (what is computed again, the
    line that says so). A collective: all ranks take the same way, that of the smallest device.
    """
    shares = profile_of_process(os.environ).shares(plan.processes)
    sizes, tokens = _sizes(model), _longest(recipe, rows)
    capacities, trained, frozen = zip(
        *hardware.ranks.collect((_capacity(hardware), sizes.trained, sizes.frozen_bytes)), strict=True
    )
    sizes = Sizes(max(trained), max(frozen), sizes.shape)  # ties and dtypes may not be made on every rank yet
    able, capacity = can_recompute(model), min((size for size in capacities if size is not None), default=None)
    mode, told = choose(recipe, sizes, shares, plan, tokens=tokens, capacity=capacity, able=able, compiled=compiled)
    recompute(model, mode)
    if recipe.model.activation_offloading:
        offload(model)
        told += "; activations wait on the host"
    return mode, told


def _sizes(model: nn.Module) -> Sizes:
    config: Any = getattr(model, "config", None)
    shape = Shape.of(config.to_dict()) if hasattr(config, "to_dict") else None
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return Sizes(trained, sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad), shape)


def _longest(recipe: Recipe, rows: PreparedRows) -> int:
    """Return the tokens of the longest row that the model will see."""
    if rows.bins is not None or rows.streamed or "input_ids" not in rows.train.column_names:
        return recipe.data.max_length
    return int(lengths_of(rows.train).max())


def _capacity(hardware: Hardware) -> int | None:
    """Return the memory of this process's GPU in bytes; None on the host, which others share."""
    device = hardware.accelerator.device
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def can_recompute(model: nn.Module) -> bool:
    """Say whether the layers of a model can be computed again, each from its input."""
    return bool(getattr(model, "supports_gradient_checkpointing", False))


def recompute(model: nn.Module, mode: str) -> None:
    """Let every layer of a transformers model compute again in its backward pass what `mode` does not keep.

    none: all is kept. selective: products of matrices and attention are kept. full: only the input of each layer.
    Raises `InputError` for a model whose layers cannot.
    """
    if mode == "none":
        return
    if not can_recompute(model):
        told = f"model.gradient_checkpointing: {type(model).__name__} does not support it"
        raise InputError(told, hint="set it to none")
    how: dict[str, Any] = {"use_reentrant": False}  # the other kind drops gradients of frozen inputs, and of keywords
    if mode == "selective":
        how["context_fn"] = partial(create_selective_checkpoint_contexts, keeps_products)
    named: Any = model  # transformers 5.23 has the second name beside the first
    (getattr(named, "activation_checkpointing_enable", None) or named.gradient_checkpointing_enable)(how)


def keeps_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return whether the result of an operation is kept; a policy of `create_selective_checkpoint_contexts`.

    Attention that draws dropout is computed again: left out, it would not draw, and every mask behind it would be
    another one than in the forward pass.
    """
    name = operation.name().rpartition("::")[2].partition(".")[0]
    is_kept = name in PRODUCTS
    if not is_kept and any(word in name for word in ATTENTION):
        schema = getattr(operation, "_schema", None)
        names = [] if schema is None else [argument.name for argument in schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        is_kept = not any(value for key, value in given.items() if "dropout" in key)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def offload(model: nn.Module) -> None:
    """Let what the forward pass keeps wait in pinned host memory until the backward pass needs it.

    As torch.autograd.graph.save_on_cpu, but weights stay where they are, and no copy makes the host wait: copies run in
    the order of the device's own work. What a recomputed layer keeps while it is recomputed stays on the device.
    """
    inner = base_model_of(model)
    forward = inner.forward

    def offloading(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(_to_host, _from_host):
            return forward(*args, **kwargs)

    inner.forward = offloading


def _to_host(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
    """Return a tensor as it is, or (its device, its copy on the host)."""
    is_weight = isinstance(tensor, torch.nn.Parameter) or (tensor.is_leaf and tensor.requires_grad)
    is_view_of_weight = tensor._base is not None and isinstance(tensor._base, torch.nn.Parameter)
    if is_weight or is_view_of_weight or tensor.numel() * tensor.element_size() < LEAST_MOVED:
        return tensor
    kept = torch.empty_like(tensor, device="cpu", pin_memory=torch.cuda.is_available())
    return tensor.device, kept.copy_(tensor, non_blocking=True)


def _from_host(kept: Tensor | tuple[torch.device, Tensor]) -> Tensor:
    return kept if isinstance(kept, torch.Tensor) else kept[1].to(kept[0], non_blocking=True)
