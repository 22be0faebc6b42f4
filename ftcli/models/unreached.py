"""Find the parts of a model that rows of text do not reach, such as the vision tower of a vision-language model.

These parts get no gradient. They are frozen before the first step, and have no adapter. Otherwise DDP would wait for
their gradients, and a run in which a trained weight has none is stopped. Imports no library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftcli.config.task_registry import is_custom_task, task_class
from ftcli.models.structure import base_model_of
from ftcli.runtime.errors import InputError
from ftcli.tasks.protocol import properties_of

if TYPE_CHECKING:
    from torch import nn

    from ftcli.config.recipe import Recipe


HEADS = ("score", "classifier")  # names of heads beside the text model in transformers


def unreached_parts(model: Any, recipe: Recipe) -> list[str]:
    """Return the names of the modules, and of parameters beside them, that the rows of a recipe do not reach.

    The text model is found by its configuration. What stands beside it, except embeddings and heads, works on other
    inputs. A user's own task may have such inputs, so nothing is returned for it.

    Args:
        model: The model, with or without an adapter.
        recipe: The recipe of the run.

    Returns:
        Names in the model without adapter; empty for a model without a text model of its own.
    """
    inner: Any = base_model_of(model)
    config: Any = getattr(inner, "config", None)
    if is_custom_task(recipe.task) or not hasattr(config, "get_text_config"):
        return []
    text = config.get_text_config()
    if text is config or not properties_of(task_class(recipe.task)).reads_text:
        return []
    found = next((name for name, m in inner.named_modules() if name and getattr(m, "config", None) is text), None)
    if found is None:
        return []
    owner, _, _ = found.rpartition(".")
    parent = inner.get_submodule(owner) if owner else inner
    used = {id(module) for module in _ends(inner)}
    beside = [
        name
        for name, module in parent.named_children()
        if f"{owner}.{name}".lstrip(".") != found and name not in HEADS
        if any(True for _ in module.parameters()) and not used & {id(part) for part in module.modules()}
    ]
    beside += [name for name, _ in parent.named_parameters(recurse=False)]
    return [f"{owner}.{name}".lstrip(".") for name in beside]


def freeze_unreached(model: nn.Module, recipe: Recipe) -> None:
    """Freeze what the rows of a recipe do not reach.

    Args:
        model: The model, not prepared.
        recipe: The recipe of the run.

    Raises:
        InputError: `adapter.modules_to_save` names such a module.
    """
    parts = tuple(f"{name}." for name in unreached_parts(model, recipe))
    for name, parameter in base_model_of(model).named_parameters():
        if parts and f"{name}.".startswith(parts):
            if recipe.adapter.type != "none" and parameter.requires_grad:
                raise InputError(
                    f"adapter.modules_to_save: {name} would be trained, but no row of {recipe.task} reaches it",
                    hint="remove the name: rows of text do not use this part of the model",
                )
            parameter.requires_grad_(False)


def describe_unreached(model: Any, recipe: Recipe) -> list[str]:
    """Return a log line about the parts of a model that are not trained because rows are text.

    Args:
        model: The model of a run, with or without an adapter.
        recipe: The recipe of the run.
    """
    parts = unreached_parts(model, recipe)
    return [f"not trained, because the rows of {recipe.task} are text: {', '.join(parts)}"] if parts else []


def _ends(model: Any) -> list[Any]:
    """Return the embeddings and the head of a model, as far as it has them."""
    ends = []
    for method in ("get_input_embeddings", "get_output_embeddings"):
        try:
            ends.append(getattr(model, method)())
        except (NotImplementedError, AttributeError):
            continue
    return [end for end in ends if end is not None]
