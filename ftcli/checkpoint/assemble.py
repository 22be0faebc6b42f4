"""Assemble the weights of a checkpoint, or of an adapter merged into its base, one at a time on one process.

The model is built as for training. Its own weights stay memory-mapped files, of which only untrained weights are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ftcli.config.recipe import Recipe
from ftcli.models.frozen_weights import check_frozen, frozen_digest
from ftcli.runtime.errors import InputError
from ftcli.runtime.patches import declare

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ftcli.checkpoint.reader import CheckpointReader
    from ftcli.tasks.protocol import Task


WRAPPERS = ("base_layer", "modules_to_save", "token_adapter", "default")  # modules that peft adds to names of weights
MERGING = declare(
    __name__,
    "adapter-merging",
    library="peft",
    versions=">=0.19,<0.22",
    purpose="Merges the adapter of one layer into its weight, outside of the layer",
    without="`ftcli export --merge` is refused.",
    alternative="`merge_and_unload`, which needs the whole model in memory, in the dtype of the result.",
    apis=(
        "peft.tuners.lora.layer:LoraLayer.lora_variant",
        "peft.tuners.lora.layer:Linear.get_delta_weight",
        "peft.tuners.lora.variants:DoraLinearVariant.merge_safe",
        "peft.tuners.trainable_tokens.layer:TrainableTokensLayer.trainable_tokens_delta",
    ),
    required=True,
)
CHUNK_ELEMENTS = 2**24  # elements that are read from a checkpoint and converted at once


def build_model(recipe: Recipe, task: Task, facts: dict[str, Any]) -> Any:
    """Build the model that a run trains, in evaluation mode, with the recipe's weights in the dtype of their files.

    Args:
        recipe: The recipe of the run.
        task: Its task.
        facts: The task's results from the rows, as stored in state.json.

    Returns:
        The model with its adapter, not prepared, on the host.
    """
    from ftcli.models.adapters import add_adapter

    model, heads = task.load_model(facts, dtype="auto")
    adapter = recipe.adapter.model_copy(update={"path": None})  # its initial values are not needed
    recipe = recipe.model_copy(update={"adapter": adapter})
    model = add_adapter(model, recipe, keep=heads, task_type=task.peft_type)
    task.finish_model(model)
    return model.eval()


def build_matching_model(recipe: Recipe, task: Task, state: dict[str, Any]) -> Any:
    """Build the model of a checkpoint with `build_model`, and check that the checkpoint fits it.

    Args:
        recipe: The recipe that the checkpoint stores.
        task: Its task.
        state: The checkpoint's state.json.

    Returns:
        The model, still without the weights of the checkpoint.

    Raises:
        InputError: The frozen weights are not those of the run, the model lacks a weight of the checkpoint, or it has
            the weight in another shape.
    """
    check_frozen(state, recipe, frozen_digest(recipe))
    model = build_model(recipe, task, state["data"]["facts"])
    _check_names(model, state)
    return model


def _check_names(model: Any, state: dict[str, Any]) -> None:
    """Raise `InputError` unless a model has each weight of a checkpoint in the same shape."""
    shapes = {name: list(value.shape) for name, value in _parameters_and_buffers(model).items()}
    for name, shape in state["parameters"].items():
        if shapes.get(name) != shape:
            raise InputError(
                f"{name} has the shape {shape} in the checkpoint, "
                f"and {shapes.get(name, 'does not exist')} in the recipe's model",
                hint="restore the model with which the run was started",
            )


def full_weights(
    model: Any, stored: CheckpointReader, state: dict[str, Any], dtype: torch.dtype
) -> tuple[dict[str, Tensor], Iterator[tuple[str, Tensor]]]:
    """Return the weights and persistent buffers of a fully trained model, one at a time.

    Values that are not in the checkpoint were not trained and come from the model.

    Args:
        model: The model that `build_model` returned.
        stored: The checkpoint.
        state: The checkpoint's state.json.
        dtype: The dtype of floating-point values in the result.

    Returns:
        Meta tensors by name, for shapes and dtypes, and an iterator over (name, value) in the same order.
    """
    tensors = _parameters_and_buffers(model)

    def values() -> Iterator[tuple[str, Tensor]]:
        for name, own in tensors.items():
            kind = "weight" if name in state["parameters"] else "buffer" if name in state["buffers"] else None
            yield name, _cast(own, dtype) if kind is None else _read(stored, kind, name, own, _dtype(own, dtype))

    return {name: _meta_like(value, dtype) for name, value in tensors.items()}, values()


def merged_weights(model: Any, dtype: torch.dtype) -> tuple[dict[str, Tensor], Iterator[tuple[str, Tensor]]]:
    """Return the weights of a peft model's base with its adapter merged, one at a time.

    Args:
        model: The peft model with its trained values.
        dtype: The dtype of floating-point values in the result.

    Returns:
        Meta tensors by name in the base model, for shapes and dtypes, and an iterator over (name, value).

    Raises:
        InputError: A weight with an adapter is used in two places.
    """
    MERGING.require()
    base = model.get_base_model()
    _check_ties(base)
    shapes: dict[str, Tensor] = {}
    sources: dict[str, tuple[Any, Tensor]] = {}
    for name, value in _parameters_and_buffers(base).items():
        modules = name.split(".")
        if any(m in ("original_module", "trainable_tokens_delta") or m.startswith("lora_") for m in modules):
            continue
        layer = base.get_submodule(name.rpartition(".base_layer.")[0]) if "base_layer" in modules else None
        plain = ".".join(module for module in modules if module not in WRAPPERS)
        sources[plain] = (layer if modules[-1] == "weight" else None, value)
        shapes[plain] = _meta_like(value, dtype)

    def values() -> Iterator[tuple[str, Tensor]]:
        for name, (layer, value) in sources.items():
            if layer is None:
                yield name, _cast(value, dtype)
            else:
                yield name, _merge_layer(layer, value.float()).to(dtype)

    return shapes, values()


def _merge_layer(layer: Any, value: Tensor) -> Tensor:
    """Return the weight of a layer with its adapter merged, float32; the formula is peft's."""
    import torch

    if hasattr(layer, "trainable_tokens_delta"):
        rows = torch.tensor(layer.token_indices["default"])
        return value.index_copy(0, rows, layer.trainable_tokens_delta["default"].detach().float())
    variant = layer.lora_variant.get("default")  # DoRA
    if variant is not None:
        merged: Tensor = variant.merge_safe(layer, "default", value)
        return merged.detach()
    delta: Tensor = layer.get_delta_weight("default").float()
    return value + delta


def adapter_weights(model: Any, stored: CheckpointReader) -> dict[str, Tensor]:
    """Return the trained weights of an adapter run from a checkpoint, by name in the model."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {name: _read(stored, "weight", name, parameter, parameter.dtype) for name, parameter in trained.items()}


def set_parameters(model: Any, values: Mapping[str, Tensor]) -> None:
    """Copy values into the parameters of a model, by name."""
    import torch

    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in values.items():
            parameters[name].copy_(value)


def load_trained_weights(model: Any, stored: CheckpointReader, state: dict[str, Any], *, is_adapter: bool) -> None:
    """Copy the weights and persistent buffers of a checkpoint into a model, one weight at a time.

    Args:
        model: The model that `build_matching_model` returned, in float32.
        stored: The checkpoint.
        state: The checkpoint's state.json.
        is_adapter: Whether only the weights of an adapter were trained.
    """
    import torch

    if is_adapter:
        set_parameters(model, adapter_weights(model, stored))
    else:
        for name, value in full_weights(model, stored, state, torch.float32)[1]:
            if name in state["parameters"]:
                set_parameters(model, {name: value})
    load_buffers(model, stored, state["buffers"])


def load_buffers(model: Any, stored: CheckpointReader, names: list[str]) -> dict[str, Tensor]:
    """Copy persistent buffers of a checkpoint into a model.

    Args:
        model: The model.
        stored: The checkpoint.
        names: Names of the buffers.

    Returns:
        The buffers by name.
    """
    tensors = _parameters_and_buffers(model)
    buffers = {name: tensors[name] for name in names}
    for name, value in buffers.items():
        value.copy_(_read(stored, "buffer", name, value, value.dtype))
    return buffers


def _parameters_and_buffers(model: Any) -> dict[str, Tensor]:
    """Return every parameter, a tied one under its first name, and every persistent buffer of a model."""
    persistent = model.state_dict()
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return parameters | {name: buffer for name, buffer in model.named_buffers() if name in persistent}


def _read(stored: CheckpointReader, kind: str, name: str, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a stored tensor with the shape of `like`, converted to `dtype` in chunks."""
    import torch

    flat = torch.empty(like.numel(), dtype=dtype)
    for start in range(0, like.numel(), CHUNK_ELEMENTS):
        length = min(CHUNK_ELEMENTS, like.numel() - start)
        flat[start : start + length] = stored.read(kind, name, start, length)
    return flat.view(like.shape)


def _dtype(value: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return `dtype` for floating-point values, else the dtype of the value."""
    return dtype if value.is_floating_point() else value.dtype


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a converted copy, which does not reference the memory-mapped file."""
    return value.to(_dtype(value, dtype), copy=True)


def _meta_like(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor without values that has the shape of `value` and its dtype after conversion."""
    import torch

    return torch.empty(value.shape, dtype=_dtype(value, dtype), device="meta")


def _check_ties(base: Any) -> None:
    """Raise `InputError` if a weight with LoRA is tied to another one, because merging would change both."""
    names: dict[int, list[str]] = {}
    for name, parameter in base.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for tied in names.values():
        if len(tied) > 1 and any(".base_layer." in f".{name}" and ".token_adapter." not in name for name in tied):
            raise InputError(
                f"--merge: {tied[0]} has a LoRA adapter and is the same weight as {tied[1]}",
                hint="export the adapter without --merge",
            )
