"""Find and load frozen helper models, which a task's loss uses beside the model that is trained.

A task lists the keys of task_options that name such models in `helper_options` (tasks/protocol.py). Their names are
those of model.name: a folder, an asset or a name on the hub. The module imports torch and transformers inside functions
only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ftcli.config.task_registry import task_class
from ftcli.data.paths import model_folder
from ftcli.models.frozen_weights import folder_digest
from ftcli.runtime.errors import InputError, Problem
from ftcli.tasks.protocol import properties_of

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe
    from ftcli.config.recipe_model import Model


RANDOM = "random"  # name of a helper with random weights, which has no files


def helper_names(recipe: Recipe) -> dict[str, str]:
    """Return the names of a recipe's helper models by key, such as {"task_options.recogniser": "./recogniser"}.

    Models with random weights are left out. The result is empty for a custom task that is not imported yet.

    Args:
        recipe: The recipe.
    """
    task = task_class(recipe.task)
    if task is None:
        return {}
    named = {key: recipe.task_options.get(key, _default(task, key)) for key in properties_of(task).helper_options}
    return {f"task_options.{key}": name for key, name in named.items() if isinstance(name, str) and name != RANDOM}


def helper_folder(name: str, key: str) -> Path | None:
    """Return the folder of a helper model, perhaps in the cache of the hub; None if it is not on this machine.

    Args:
        name: Name of the model.
        key: The key that names it, for messages.

    Raises:
        InputError: A local folder does not exist or contains no model.
    """
    folder = model_folder(name, key)
    if folder is not None:
        return folder
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # not a valid name on the hub
        return None
    return Path(config).parent if isinstance(config, str) else None


def helper_digests(recipe: Recipe, known: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """Return a digest of each helper model of a recipe whose files are on this machine, by its key.

    Args:
        recipe: The recipe.
        known: Digests that need not be computed again.
    """
    names = helper_names(recipe)
    folders = {key: helper_folder(name, key) for key, name in names.items() if key not in known}
    return {**known, **{key: folder_digest(folder) for key, folder in folders.items() if folder is not None}}


def check_helpers(state: Mapping[str, Any], recipe: Recipe, now: Mapping[str, str]) -> None:
    """Check that the helper models of a recipe are those with which a checkpoint was trained.

    Args:
        state: The checkpoint's state.json.
        recipe: The recipe whose helpers are used now.
        now: Their digests, the result of `helper_digests`.

    Raises:
        InputError: A digest differs. Keys that one of the two lacks are not compared.
    """
    names = helper_names(recipe)
    problems = [
        Problem(
            f"the frozen weights of {key}: {names[key]} are not those with which the model was trained: "
            f"digest {before} then, {now[key]} now",
            hint="restore the old model, or use --resume-anyway to train with the new one",
        )
        for key, before in state.get("helpers", {}).items()
        if key in now and now[key] != before
    ]
    if problems:
        raise InputError(problems)


def load_helper(auto_class: str, recipe: Recipe, key: str, name: str, *, dtype: Any, has_values: bool = True) -> Any:
    """Load a helper model with transformers.

    Args:
        auto_class: Name of transformers' class.
        recipe: The recipe of the run.
        key: The key that names the model, for messages.
        name: Name of the model.
        dtype: Dtype of its weights.
        has_values: Whether to read the weights; without, the model is built from its configuration.

    Raises:
        InputError: The model is not found or damaged, or lacks weights.
    """
    import transformers

    from ftcli.models.hub import load_from_hub

    auto = getattr(transformers, auto_class)
    if not has_values:
        return auto.from_config(configuration(recipe, key, name), dtype=dtype, trust_remote_code=False)
    model, info = load_from_hub(auto, _section(recipe, name), key=key, dtype=dtype, output_loading_info=True)
    if missing := sorted(info["missing_keys"]):
        raise InputError(
            f"{key}: {name} lacks {len(missing)} weights, the first is {missing[0]}",
            hint="name a model whose files have all weights: a frozen network is not trained",
        )
    return model


def configuration(recipe: Recipe, key: str, name: str) -> Any:
    """Return the configuration of a helper model; arguments and errors are `load_helper`'s."""
    from transformers import AutoConfig

    from ftcli.models.hub import load_from_hub

    return load_from_hub(AutoConfig, _section(recipe, name), key=key)


def _section(recipe: Recipe, name: str) -> Model:
    """Return a section `model` of the recipe for a helper model. The code of a helper is never run."""
    changes = {"name": name, "revision": None, "attn_implementation": None, "trust_remote_code": False}
    return recipe.model.model_copy(update=changes)


def _default(task: Any, key: str) -> Any:
    """Return the default of a key of task_options."""
    import sys

    options = getattr(sys.modules.get(task.__module__), "Options", None)
    return options.model_fields[key].default if options is not None and key in options.model_fields else None
