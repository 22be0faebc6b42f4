"""Find the base model inside an adapter, and the repeated layers of a model.

Code that reads a configuration, searches for layers or replaces a forward uses the base model, with or without an
adapter. The module never imports torch or peft.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftcli.runtime.patches import declare

if TYPE_CHECKING:
    import torch
    from torch import nn


LAYERS = declare(
    __name__,
    "layers-of-a-model",
    library="transformers",
    versions=">=5.17,<5.25",
    purpose="Finds the layers that a model repeats, by the names of their classes",
    without="Layers are then not compiled, and ZeRO-3 gathers the modules inside a layer one by one.",
    alternative="None: Accelerate reads the same attribute.",
    apis=("transformers:PreTrainedModel._no_split_modules",),
    measurement="279.1 ms and 33.3 GiB a step under ZeRO-3, without it 326.1 ms and 33.7 GiB (again: 284.9 and 344.0 "
    "ms): 1B, 4 x 4,096 tokens, layers not compiled, two H200s. Without it, layers are not compiled either "
    "([compiled-layers](#compiled-layers)).",
)


def base_model_of(model: Any) -> Any:
    """Return the model inside peft's wrapper, with the adapter's layers; a model without adapter is returned itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def is_of_transformers(model: Any) -> bool:
    """Return whether the base of a model is a class of transformers, and no network of the user."""
    return type(base_model_of(model)).__module__.startswith("transformers.")


def helper_prefixes(model: nn.Module) -> tuple[str, ...]:
    """Return the beginnings of names in frozen helper networks; `tasks/protocol.py` says which modules these are."""
    return tuple(f"{name}." for name, module in model.named_modules() if getattr(module, "is_helper", False))


def layers_of(model: Any) -> list[Any]:
    """Return the repeated layers of a transformers model; empty if the model does not name their classes."""
    if not LAYERS.is_usable():
        return []
    inner = base_model_of(model)
    classes = set(getattr(inner, "_no_split_modules", None) or ())
    return [layer for name, layer in inner.named_modules() if type(layer).__name__ in classes and name[-1:].isdigit()]


def embeddings_and_head(model: Any) -> list[Any]:
    """Return the modules of the input embeddings and of the head of a language model; empty for other models."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return [] if head is None else [model.get_input_embeddings(), head]


def saved_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that a checkpoint contains, by name: persistent ones, except those of frozen helper networks.

    Args:
        model: A model.
    """
    persistent, helpers = model.state_dict(), helper_prefixes(model)
    buffers = model.named_buffers()
    return {name: one for name, one in buffers if name in persistent and not name.startswith(helpers)}


def full_shape(parameter: nn.Parameter) -> torch.Size:
    """Return the shape of the whole parameter, even if this process has only a shard of it or nothing."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 shards parameters when it loads them
    return shape
