"""Write the tokens that end a trained answer into generation_config.json, so that other programs stop there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ftcli.config.recipe import Recipe
from ftcli.config.recipe_model import Model
from ftcli.config.task_registry import find_task
from ftcli.models.adapter_folder import base_of
from ftcli.models.structure import base_model_of
from ftcli.runtime.torn_files import read_object
from ftcli.tasks.build import build_task

FILE = "generation_config.json"
BASE_LACKS_IT = " The base model's file may lack it: load that of this folder with `GenerationConfig.from_pretrained`."


def write_answer_ends(task: Any, model: Any, folder: Path) -> None:
    """Add the trained end tokens to generation_config.json. The end tokens of the base model stay, after them.

    Args:
        task: The task of the run. One without `answer_ends` changes nothing.
        model: The model, with or without an adapter, not prepared.
        folder: Folder of the weights. An adapter's folder gets the base model's file with the tokens.
    """
    base, path = base_model_of(model), folder / FILE
    ends = trained_answer_ends(task)
    if not ends or getattr(base, "generation_config", None) is None:
        return
    _add(ends, path, base.generation_config)


def complete_answer_ends(recipe: Recipe, final: Path, folder: Path) -> None:
    """Add the trained end tokens to an export of `final/` that an earlier version of ftcli wrote without them.

    Args:
        recipe: The recipe of the run. The user trusts the code that it names.
        final: The final weights of the run, with the tokenizer.
        folder: The export.
    """
    if not hasattr(find_task(recipe.task).Task, "answer_ends"):
        return
    from transformers import GenerationConfig

    section = Model(name=str(final), trust_remote_code=recipe.model.trust_remote_code)
    ends = trained_answer_ends(build_task(recipe.model_copy(update={"model": section})))
    written = (read_object(folder / FILE) or {}).get("eos_token_id")
    if not ends or (isinstance(written, list) and set(ends) <= set(written)):
        return
    name, revision = base_of(final) or (str(final), None)
    try:
        base = GenerationConfig.from_pretrained(name, revision=revision or "main")
    except OSError:  # the base has no such file
        base = GenerationConfig()
    _add(ends, folder / FILE, base)


def _add(ends: list[int], path: Path, base: Any) -> None:
    """Put end tokens before those that are in a generation_config.json, or in the settings of the base."""
    settings = json.loads(path.read_text(encoding="utf-8") if path.exists() else base.to_json_string())
    before = settings.get("eos_token_id")
    known = before if isinstance(before, list) else [] if before is None else [before]
    settings["eos_token_id"] = list(dict.fromkeys([*ends, *known]))
    settings.pop("_from_model_config", None)  # transformers replaces settings that come from config.json alone
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def trained_answer_ends(task: Any) -> list[int]:
    """Return the ids of the tokens that end a trained answer; empty for a task without answers."""
    return [int(token) for token in task.answer_ends()] if hasattr(task, "answer_ends") else []


def describe_answer_ends(task: Any, *, is_adapter: bool) -> str:
    """Return a sentence for the model card; "" for a task without answers.

    Args:
        task: The task of the run.
        is_adapter: Whether the card is that of an adapter.
    """
    ends = trained_answer_ends(task)
    if not ends:
        return ""
    names = " or ".join(f"`{token}`" for token in task.tokenizer.convert_ids_to_tokens(ends))
    return f"Answers end with {names}: `{FILE}` has it in `eos_token_id`.{BASE_LACKS_IT * is_adapter}"
