"""Assemble the weights of a checkpoint, or of an adapter merged into its base, one at a time on one process.

The model is built as for training. Its own weights stay memory-mapped files, of which only untrained weights are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ftcli.config.recipe import Recipe
from ftcli.models.trained_on import check_trained_on, differences
from ftcli.runtime.errors import InputError
from ftcli.runtime.log import log_line
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
    purpose="Merges the adapter of one module at a time, with peft's `merge` on a float32 copy of its weights",
    without="`ftcli export --merge` is refused.",
    alternative="`merge_and_unload`, which needs the whole model in memory, in the dtype of the result.",
    apis=(
        "peft.tuners.tuners_utils:BaseTunerLayer.get_base_layer",
        "peft.tuners.tuners_utils:BaseTunerLayer.merged_adapters",
        "peft.tuners.lora.layer:ParamWrapper.merge",
        "peft.tuners.trainable_tokens.layer:TrainableTokensLayer.merge",
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
        InputError: The recipe's model is not the one of the run, the model lacks a weight of the checkpoint, or it has
            the weight in another shape.
    """
    base = state.get("frozen"), recipe.model.name, recipe.model.revision
    parts = ("weights", "config", "processor", "vocabulary")  # the tokenizer is not in the checkpoint
    check_trained_on(*base, hint="restore the old model", parts=parts)
    for each in differences(*base, parts=("template",)):
        log_line(f"warning: {each}")
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
    model: Any, stored: CheckpointReader, state: dict[str, Any], dtype: torch.dtype, part: str = ""
) -> tuple[dict[str, Tensor], Iterator[tuple[str, Tensor]]]:
    """Return the weights and persistent buffers of a fully trained model, one at a time.

    Values that are not in the checkpoint were not trained and come from the model.

    Args:
        model: The model that `build_model` returned.
        stored: The checkpoint.
        state: The checkpoint's state.json.
        dtype: The dtype of floating-point values in the result.
        part: Name of a submodule, whose weights alone are returned, by their names in it; default: the whole model.

    Returns:
        Meta tensors by name, for shapes and dtypes, and an iterator over (name, value) in the same order.
    """
    tensors = _parameters_and_buffers(model.get_submodule(part) if part else model)
    prefix = f"{part}." if part else ""

    def values() -> Iterator[tuple[str, Tensor]]:
        for short, own in tensors.items():
            name = f"{prefix}{short}"
            kind = "weight" if name in state["parameters"] else "buffer" if name in state["buffers"] else None
            yield short, _cast(own, dtype) if kind is None else _read(stored, kind, name, own, _dtype(own, dtype))

    return {name: _meta_like(value, dtype) for name, value in tensors.items()}, values()


def merged_weights(model: Any, dtype: torch.dtype) -> tuple[dict[str, Tensor], Iterator[tuple[str, Tensor]]]:
    """Return the weights of a peft model's base with its adapter merged, one module at a time.

    A weight that is tied in the base and no longer in the adapted model is returned under both names.

    Args:
        model: The peft model with its trained values.
        dtype: The dtype of floating-point values in the result.

    Returns:
        Meta tensors by name in the base model, for shapes and dtypes, and an iterator over (name, value).

    Raises:
        InputError: The base has quantised weights.
    """
    MERGING.require()
    if getattr(model.get_base_model(), "is_quantized", False):
        raise InputError(
            "--merge: the files of the base model have quantised weights, to which an adapter cannot be added",
            hint="export the adapter without --merge",
        )
    sources = _distinct(_sources(model.get_base_model()))

    def values() -> Iterator[tuple[str, Tensor]]:
        merged: dict[str, Tensor] = {}  # of the module that was merged last
        owner = None
        for name, (layer, own, value) in sources.items():
            if layer is None:
                yield name, _cast(value, dtype)
                continue
            merged = merged if layer is owner else _merge_module(layer)
            owner = layer
            yield name, _cast(merged[own], dtype)

    return {name: _meta_like(value, dtype) for name, (_, _, value) in sources.items()}, values()


# Outermost adapter of the module that has a weight, or None; name of the weight in that module; its value in the base.
Source = tuple[Any, str, "Tensor"]


def _sources(base: Any) -> dict[str, Source]:
    """Return where each weight and persistent buffer of a peft model's base comes from, by name without peft's parts.

    A tied weight is there under each of its names.
    """
    sources: dict[str, Source] = {}
    for name, value in _parameters_and_buffers(base, tied=True).items():
        modules = name.split(".")
        if any(m in ("original_module", "trainable_tokens_delta") or m.startswith("lora_") for m in modules):
            continue
        inner, _, own = name.rpartition(".")
        outer = inner
        while outer.endswith(".base_layer"):  # adapters of several weights of a module are nested
            outer = outer.removesuffix(".base_layer")
        is_adapted = outer != inner and own in dict(base.get_submodule(inner).named_parameters(recurse=False))
        layer = base.get_submodule(outer) if is_adapted else None
        sources[".".join(module for module in modules if module not in WRAPPERS)] = (layer, own, value)
    return sources


def _distinct(sources: dict[str, Source]) -> dict[str, Source]:
    """Return the sources without further names of the same weight, unless its adapters give it other values there."""
    import torch

    kept: dict[str, Source] = {}
    first: dict[tuple[int, ...], str] = {}
    for name, (layer, own, value) in sources.items():
        key = (value.data_ptr(), *value.shape)
        earlier = first.setdefault(key, name) if value.numel() else name
        if earlier != name:
            layer_before, own_before, _ = sources[earlier]
            if layer is None and layer_before is None:
                continue
            before, now = (
                value.float() if each is None else _merge_module(each)[part]
                for each, part in ((layer_before, own_before), (layer, own))
            )
            if torch.equal(before, now):
                continue
        kept[name] = (layer, own, value)
    return kept


def _merge_module(layer: Any) -> dict[str, Tensor]:
    """Return the weights of a module with all of its adapters merged by peft, float32; the module does not change.

    Args:
        layer: The outermost adapter of the module. Each adapter of one weight is around the next one.

    Returns:
        Values by name in the module.
    """
    import torch

    module = layer.get_base_layer()
    parameters = dict(module.named_parameters(recurse=False))
    before = {name: parameter.data for name, parameter in parameters.items()}
    adapters = []
    while hasattr(layer, "base_layer"):
        adapters.append(layer)
        layer = layer.base_layer
    try:
        for parameter in parameters.values():
            parameter.data = _cast(parameter.data, torch.float32)
        for adapter in adapters:
            adapter.merge()
        return {name: parameter.data for name, parameter in parameters.items()}
    finally:
        for name, value in before.items():
            parameters[name].data = value
        for adapter in adapters:
            adapter.merged_adapters.clear()


def adapter_weights(model: Any, stored: CheckpointReader) -> dict[str, Tensor]:
    """Read the trained weights of an adapter run from a checkpoint.

    Args:
        model: The model with its adapter. The trained parameters of it require gradients.
        stored: The checkpoint.

    Returns:
        The weights by parameter name, in the dtype of the parameters.
    """
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
        parameters = dict(model.named_parameters())  # read here, so that `full_weights` is compared with it
        for name in state["parameters"]:
            set_parameters(model, {name: _read(stored, "weight", name, parameters[name], torch.float32)})
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


def _parameters_and_buffers(model: Any, *, tied: bool = False) -> dict[str, Tensor]:
    """Return every parameter, a tied one under its first name or all names, and every persistent buffer of a model."""
    persistent = model.state_dict()
    named = model.named_parameters(remove_duplicate=not tied)
    parameters = {name: parameter.detach() for name, parameter in named}
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
