"""Refuse a base model whose files have quantised weights, beside which ftcli does not train. Imports no library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftcli.data.paths import model_folder
from ftcli.models.frozen_weights import model_settings
from ftcli.runtime.errors import InputError, Problem

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe


# transformers may convert these to 16 bits while it loads them. All other methods keep packed weights.
MAY_BE_CONVERTED = ("mxfp4", "fp8", "compressed-tensors")
HINT = "name the model with its plain weights; model.quantization: {load_in_4bit: true} then holds them in 4 bits"


def quantised_problems(recipe: Recipe) -> list[Problem]:
    """Return a problem if the configuration of a local model says that its files have packed weights.

    Args:
        recipe: The recipe of the run.
    """
    try:
        folder = model_folder(recipe.model.name)
        settings = {} if folder is None else model_settings(folder).get("quantization_config")
    except (InputError, ValueError, AttributeError):  # no folder, or no JSON object: the checks of its files say so
        return []
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if not method or method in MAY_BE_CONVERTED or (method == "bitsandbytes" and recipe.model.quantization):
        return []
    return [_problem(recipe.model.name, str(method))]


def check_loaded(model: Any, recipe: Recipe) -> None:
    """Check that a loaded model has no packed weights, except floats that hold those of `model.quantization`.

    Args:
        model: The model, as transformers has loaded it for training.
        recipe: The recipe of the run.

    Raises:
        InputError: The weights are packed.
    """
    if not getattr(model, "is_quantized", False):
        return
    if recipe.model.quantization is None or any(not weight.is_floating_point() for weight in model.parameters()):
        method = getattr(getattr(model.config, "quantization_config", None), "quant_method", "unknown")
        raise InputError([_problem(recipe.model.name, str(getattr(method, "value", method)))])


def _problem(name: str, method: str) -> Problem:
    """Return the problem of a model with packed weights."""
    what = f"model.name: the files of {name} have quantised weights ({method}), on which ftcli does not train"
    return Problem(what, hint=HINT)
