"""The model inside an adapter, what peft calls the base model, with the adapter's layers in it; and those layers.

Whoever reads a configuration, looks for layers or replaces a forward wants that one, whether there is an adapter or
not. Knows of peft one method's name, and of models nothing. Light: never imports torch or peft.
"""

from __future__ import annotations

from typing import Any


def base_model_of(model: Any) -> Any:
    """Return the model that peft wrapped for an adapter, the very object that it calls; any other model as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def layers_of(model: Any) -> list[Any]:
    """Return the layers that a transformers model repeats, by its own account; nothing: it does not say."""
    inner = base_model_of(model)
    kinds = set(getattr(inner, "_no_split_modules", None) or ())
    return [layer for name, layer in inner.named_modules() if type(layer).__name__ in kinds and name[-1:].isdigit()]
