"""Read the row counts of a recipe whose rows are in the cache of this machine, without opening the rows.

`ftcli check` and `ftcli plan` use them. cache.py writes them. The module imports neither numpy nor torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.data.cache_key import ftcli_digest, rows_folder, task_code
from ftcli.data.fingerprints import file_digest
from ftcli.data.image_folders import folder_digest
from ftcli.data.paths import local_path, model_folder
from ftcli.runtime.resources import cache_root
from ftcli.runtime.torn_files import read_object

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe


READER = 1  # increased when the same file is read as different rows
FORMAT = 5  # increased when the layout or the content of prepared rows changes
STREAM = ("streaming", "shuffle_buffer")  # keys of data that are not in the cache key: streams have another digest
ARRANGEMENT = ("packing", "padding_free", "group_by_length")  # keys of data that change no prepared row
TOKENIZER_FILES = (".json", ".jinja", ".txt", ".model", ".py")  # endings of files of tokenizers and chat templates


def cached_row_counts(recipe: Recipe) -> dict[str, int] | None:
    """Return the row counts of a recipe whose rows are in the cache of this machine. Does not import torch.

    Args:
        recipe: The recipe.

    Returns:
        {"train": rows, "eval": rows}, with "documents" and "tokens" for packed training rows, and without "train" for
        a stream. None if the rows were not prepared on this machine, or if files that they name have changed since.
    """
    record = _record(recipe)
    return None if record is None else record["rows"]


def cached_lengths(recipe: Recipe) -> list[int]:
    """Return the tokens of some training rows that stand for all of them, before packing. Does not import torch.

    Args:
        recipe: The recipe.

    Returns:
        Ascending numbers. Empty if the rows were not prepared on this machine, or have no tokens.
    """
    return (_record(recipe) or {}).get("lengths", [])


def _record(recipe: Recipe) -> dict[str, Any] | None:
    """Return the stored record of a recipe's rows; None if it is missing or files that the rows name have changed."""
    record = read_object(counts_file(recipe))  # None also for a file that a power cut left empty
    if record is None:
        return None
    if "folder" in record:  # the rows name files: the counts are of the files at that time
        folder = rows_folder(record["key"], names_files=True)
        if folder is None or folder.name != record["folder"]:
            return None
    return record


def data_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings of a recipe that affect prepared rows."""
    settings = recipe.data.model_dump(exclude={"workers", *ARRANGEMENT, *STREAM})
    return settings | {"task": recipe.task, "options": recipe.task_options, "seed": recipe.seed}


def counts_file(recipe: Recipe) -> Path:
    """Return the file of row counts for `check`. Its name depends on facts that are known without reading the data."""
    seen: list[Any] = [
        FORMAT,
        READER,
        data_settings(recipe),
        recipe.data.packing,
        recipe.data.streaming,
        recipe.model.name,
        recipe.model.revision,
        ftcli_digest(),
        task_code(recipe.task),
        [file_digest(Path(value)) for value in recipe.task_options.values() if _is_file(value)],  # a chat template
    ]
    for source in recipe.data.train_sources + recipe.data.eval_sources:
        path = local_path(source.path)
        if path is not None and path.is_file():
            seen.append((str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns))
        elif path is not None and path.is_dir() and not recipe.data.streaming:
            seen.append(folder_digest(path))
    if (folder := model_folder(recipe.model.name)) is not None:
        small = (path for path in sorted(folder.iterdir()) if path.suffix in TOKENIZER_FILES)
        seen += [str(folder.absolute()), *((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in small)]
    name = hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()[:32]
    return cache_root() / "rows" / "counts" / f"{name}.json"


def _is_file(value: Any) -> bool:
    """Return whether a value of task_options is the path of a file."""
    return isinstance(value, str) and "\0" not in value and os.path.isfile(value)
