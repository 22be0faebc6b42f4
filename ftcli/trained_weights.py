"""The weights of a checkpoint, or of an adapter and its base merged, one at a time and on one process.

The model they belong to is built as for training, but its weights stay mapped files that nobody reads: only those
that were not trained are, when their turn comes. Knows nothing of shards or of where a run stands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .errors import InputError
from .recipe import Recipe

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .checkpoint import Stored
    from .tasks.protocol import Task

WRAPPERS = ("base_layer", "modules_to_save", "token_adapter", "default")  # in peft's names of a base model's weights
STRETCH = 2**24  # elements that are read from a checkpoint at a time


def build_model(recipe: Recipe, task: Task, facts: dict[str, Any]) -> Any:
    """Return the model that a run trains, before `prepare`, with the recipe's weights in the dtype of their files."""
    from .adapters import add_adapter

    model, heads = task.load_model(facts, dtype="auto")
    anew = recipe.adapter.model_copy(update={"path": None})  # the values it began with are not needed
    recipe = recipe.model_copy(update={"adapter": anew})
    model = add_adapter(model, recipe, keep=heads, task_type=task.peft_type)
    task.finish_model(model)
    return model.eval()


def check_names(model: Any, state: dict[str, Any]) -> None:
    """Raise `InputError` when a checkpoint holds weights that the model has not, or in another shape."""
    shapes = {name: list(value.shape) for name, value in _live(model).items()}
    for name, shape in state["parameters"].items():
        if shapes.get(name) != shape:
            raise InputError(
                f"the checkpoint has {name} {shape}, and the recipe's model has it as {shapes.get(name, 'nothing')}",
                hint="has the model that the recipe names changed since?",
            )


def whole_model(
    model: Any, stored: Stored, state: dict[str, Any], dtype: torch.dtype
) -> tuple[dict[str, Tensor], Iterator[tuple[str, Tensor]]]:
    """Return (name -> meta tensor, an iterator over (name, value)) of a full model's weights and persistent buffers.

    Floating-point values become `dtype`. What the checkpoint does not hold was not trained, and is the model's own.
    """
    live = _live(model)

    def values() -> Iterator[tuple[str, Tensor]]:
        for name, own in live.items():
            kind = "weight" if name in state["parameters"] else "buffer" if name in state["buffers"] else None
            yield name, _cast(own, dtype) if kind is None else _read(stored, kind, name, own, _dtype(own, dtype))

    return {name: _meta(value, dtype) for name, value in live.items()}, values()


def merged_model(model: Any, dtype: torch.dtype) -> tuple[dict[str, Tensor], Iterator[tuple[str, Tensor]]]:
    """Return what `whole_model` does of a peft model whose LoRA weights are added to those they stand beside.

    Names are those of the base model. Raises `InputError` where a weight that is adapted stands elsewhere, too.
    """
    base = model.get_base_model()
    _check_ties(base)
    wanted: dict[str, Tensor] = {}
    sources: dict[str, tuple[Any, Tensor]] = {}
    for name, value in _live(base).items():
        parts = name.split(".")
        if any(part in ("original_module", "trainable_tokens_delta") or part.startswith("lora_") for part in parts):
            continue
        layer = base.get_submodule(name.rpartition(".base_layer.")[0]) if "base_layer" in parts else None
        plain = ".".join(part for part in parts if part not in WRAPPERS)
        sources[plain] = (layer if parts[-1] == "weight" else None, value)
        wanted[plain] = _meta(value, dtype)

    def values() -> Iterator[tuple[str, Tensor]]:
        for name, (layer, value) in sources.items():
            if layer is None:
                yield name, _cast(value, dtype)
            else:
                yield name, _merged(layer, value.float()).to(dtype)

    return wanted, values()


def _merged(layer: Any, value: Tensor) -> Tensor:
    """Return the weight of a layer with what was trained beside it, as peft merges it: float32."""
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


def adapter_values(model: Any, stored: Stored) -> dict[str, Tensor]:
    """Return the trained weights of an adapter run by the name that the model has for them; a small part of it."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {name: _read(stored, "weight", name, parameter, parameter.dtype) for name, parameter in trained.items()}


def put(model: Any, values: Mapping[str, Tensor]) -> None:
    """Give a model's parameters of these names their values."""
    import torch

    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in values.items():
            parameters[name].copy_(value)


def put_buffers(model: Any, stored: Stored, names: list[str]) -> dict[str, Tensor]:
    """Give a model the persistent buffers that a checkpoint holds; return them by name."""
    live = _live(model)
    found = {name: live[name] for name in names}
    for name, value in found.items():
        value.copy_(_read(stored, "buffer", name, value, value.dtype))
    return found


def _live(model: Any) -> dict[str, Tensor]:
    """Return every parameter, a tied one under its first name, and every persistent buffer of a model."""
    persistent = model.state_dict()
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return found | {name: buffer for name, buffer in model.named_buffers() if name in persistent}


def _read(stored: Stored, kind: str, name: str, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a stored tensor of another's shape, converted to `dtype` a stretch at a time."""
    import torch

    found = torch.empty(like.numel(), dtype=dtype)
    for start in range(0, like.numel(), STRETCH):
        length = min(STRETCH, like.numel() - start)
        found[start : start + length] = stored.read(kind, name, start, length)
    return found.view(like.shape)


def _dtype(value: Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if value.is_floating_point() else value.dtype


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy, so that the file behind a mapped weight can be let go."""
    return value.to(_dtype(value, dtype), copy=True)


def _meta(value: Tensor, dtype: torch.dtype) -> Tensor:
    import torch

    return torch.empty(value.shape, dtype=_dtype(value, dtype), device="meta")


def _check_ties(base: Any) -> None:
    """Raise when LoRA stands beside a weight that the model uses twice: added there, it would act in both places."""
    names: dict[int, list[str]] = {}
    for name, parameter in base.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for tied in names.values():
        if len(tied) > 1 and any(".base_layer." in f".{name}" and ".token_adapter." not in name for name in tied):
            raise InputError(
                f"--merge: LoRA is beside {tied[0]}, which is the same weight as {tied[1]}",
                hint="export the adapter without --merge",
            )
