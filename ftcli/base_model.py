"""The model inside an adapter: what peft calls the base model, with the adapter's layers in it.

Whoever reads a configuration, looks for layers or replaces a forward wants that one, whether there is an adapter or
not. Knows of peft one method's name, and of models nothing. Light: never imports torch or peft.
"""

from __future__ import annotations

from typing import Any


def base_model_of(model: Any) -> Any:
    """Return the model that peft wrapped for an adapter, the very object that it calls; any other model as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
