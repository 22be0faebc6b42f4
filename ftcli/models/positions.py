"""Positions of a model: how many it has, and which its classifier reads. Imports torch inside functions only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.config.task_registry import is_custom_task
from ftcli.data.packing import longest_documents
from ftcli.data.paths import model_folder
from ftcli.models.architectures import POSITION_MODULES, POSITION_TABLES, architecture_of
from ftcli.runtime.errors import InputError
from ftcli.runtime.reader_errors import reading

if TYPE_CHECKING:
    from torch import nn

    from ftcli.config.recipe import Recipe
    from ftcli.data.cache import PreparedRows


def check_positions(recipe: Recipe) -> None:
    """Compare data.max_length with the positions of a local model. The default of data.max_length is not checked.

    Raises:
        InputError: `data.max_length` is set to more than the model has positions.
    """
    problem = position_problem(recipe, model_folder(recipe.model.name))
    if problem and recipe.data.max_length != type(recipe.data).model_fields["max_length"].default:
        raise InputError(problem, hint="lower data.max_length to this number, because a longer row would end the run")


def position_problem(recipe: Recipe, folder: Path | None) -> str:
    """Return why data.max_length is too long for a local model with learned positions; "" if it is not.

    Args:
        recipe: The recipe.
        folder: Folder of the model; None for a model on the hub, which is not checked.
    """
    config, path = _local_config(recipe, folder)
    with reading(path):
        learned = architecture_of(config.get("model_type")).learned_positions
        positions = int(config[learned.key]) if learned is not None and config.get(learned.key) else None
        if positions is not None and learned is not None and learned.begins_behind_padding:
            positions -= int(config.get("pad_token_id", 1)) + 1
    if positions is None or recipe.data.max_length <= positions:
        return ""
    return f"data.max_length is {recipe.data.max_length}, but {recipe.model.name} has only {positions} positions"


def position_note(recipe: Recipe, folder: Path | None) -> str:
    """Return a note if data.max_length is more than a local model was made for; "" if it is not.

    A longer row ends the run only where positions are learned. Rotary embeddings have no last position.

    Args:
        recipe: The recipe.
        folder: Folder of the model; None for a model on the hub, which is not checked.
    """
    if problem := position_problem(recipe, folder):
        return f"{problem}; a longer row would end the run"
    config, path = _local_config(recipe, folder)
    with reading(path):
        is_learned = architecture_of(config.get("model_type")).learned_positions is not None
        rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
        is_scaled = rotary.get("rope_type", rotary.get("type", "default")) != "default"
        positions = int(config.get("max_position_embeddings") or 0)
    if is_learned or is_scaled or not 0 < positions < recipe.data.max_length:
        return ""
    limit = f"max_position_embeddings of {recipe.model.name} is {positions}"
    return f"data.max_length is {recipe.data.max_length}, but {limit}: it was not made for longer rows"


def _local_config(recipe: Recipe, folder: Path | None) -> tuple[dict[str, Any], Path]:
    """Return (config.json of a shipped task's model, its path); an empty configuration if there is none."""
    path = (folder or Path()) / "config.json"
    if folder is None or is_custom_task(recipe.task) or not path.is_file():
        return {}, path
    with reading(path):
        return dict(json.loads(path.read_bytes())), path


def check_lengths(model: nn.Module, recipe: Recipe, rows: PreparedRows) -> None:
    """Compare the longest prepared row with the positions of the model. On a GPU a longer row would abort the process.

    Args:
        model: The model.
        recipe: The recipe of the run.
        rows: The prepared rows.

    Raises:
        InputError: A row has more tokens than the model has positions.
    """
    positions = learned_positions(model)
    if positions is None or recipe.data.max_length <= positions or "input_ids" not in rows.train.column_names:
        return
    longest = max(int(longest_documents(split).max()) for split in (rows.train, rows.eval) if split is not None)
    if longest > positions:
        raise InputError(
            f"the longest row has {longest} tokens, and {recipe.model.name} has {positions} positions",
            hint=f"set data.max_length to {positions} at most",
        )


def needs_left_padding(config: Any) -> bool:
    """Return whether a classifier with this configuration reads the last position, so that padding has to be first."""
    reads_last = architecture_of(getattr(config, "model_type", None)).reads_last_position
    return reads_last and getattr(config, "summary_type", None) == "last"


def learned_positions(model: nn.Module) -> int | None:
    """Return the number of positions in the tables of a model, learned or computed; None without such a table."""
    from torch import nn

    counts = [len(table) for name, table in model.named_buffers() if POSITION_TABLES.search(name) and table.dim() > 1]
    config: Any = getattr(model, "config", None)
    if getattr(config, "model_type", None) == "mpt":  # its distances are computed in each forward pass
        counts.append(config.max_seq_len)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and POSITION_MODULES.search(name):
            # The first position of OPT is `offset`; that of RoBERTa follows the position of the padding token.
            first = getattr(module, "offset", 0) if module.padding_idx is None else module.padding_idx + 1
            counts.append(module.num_embeddings - first)
    return min(counts, default=None)
