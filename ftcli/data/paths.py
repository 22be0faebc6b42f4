"""Resolve the paths of data files and model folders in a recipe."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ftcli.data.assets.catalogue import asset_path
from ftcli.runtime.errors import InputError, nearest
from ftcli.runtime.reader_errors import user_path
from ftcli.runtime.redaction import redact

if TYPE_CHECKING:
    from ftcli.config.recipe_data import Source


FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".txt": "text"}
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")  # NAME or OWNER/NAME
MODEL_KEY = "model.name"  # the key of the recipe that names the model
RELATIVE = "a relative path starts at the current folder"


def local_path(name: str) -> Path | None:
    """Return the local path of a name: an asset, a file or a folder; None for a name on the hub.

    Args:
        name: A name or path from a recipe.

    Raises:
        InputError: No file can have this path, or there is no such asset.
    """
    if name.startswith("asset:"):
        return asset_path(name)
    path = user_path(name)
    is_no_hub_name = "://" not in name and HUB_NAME.fullmatch(name) is None
    looks_local = path.suffix in FORMATS or name.startswith((".", "/", "~")) or is_no_hub_name or path.exists()
    return path if looks_local else None


def model_folder(name: str, key: str = MODEL_KEY) -> Path | None:
    """Return the local folder of a model; None for a name on the hub.

    Args:
        name: Name of the model in a recipe.
        key: The key of the recipe that has the name, for messages.

    Raises:
        InputError: The folder does not exist or contains no model.
    """
    path = local_path(name)
    if path is None:
        return None
    if not path.exists():
        raise InputError(f"{key}: no model folder at {path.absolute()}", hint=similar_names(path) or RELATIVE)
    if not (path / "config.json").is_file() and not (path / "adapter_config.json").is_file():
        hint = f"it is a run, and its weights are {path / 'final'}" if (path / "final").is_dir() else ""
        raise InputError(f"{key}: {path.absolute()} is not a model folder (it has no config.json)", hint=hint)
    return path


def labels_of(sources: Sequence[Source]) -> list[str]:
    """Return the name of each source in reports: its label, else its file name, else its path if names are equal.

    Args:
        sources: The sources of one split.

    Raises:
        InputError: Two sources have the same name.
    """
    stems = [
        Path(source.path).stem if local_path(source.path) and "*" not in source.path else redact(source.path)
        for source in sources
    ]
    labels = [
        source.label or (stem if stems.count(stem) == 1 else redact(source.path))
        for source, stem in zip(sources, stems, strict=True)
    ]
    if double := [label for label in labels if labels.count(label) > 1]:
        raise InputError(f"two sources of data have the name {double[0]!r}", hint="give each a different `label`")
    return labels


def similar_names(path: Path) -> str:
    """Return a hint with a similar name in the folder of a missing path; an empty string if there is none."""
    return nearest(path.name, os.listdir(path.parent)) if path.parent.is_dir() else ""
