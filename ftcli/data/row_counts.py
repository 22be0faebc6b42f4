"""Count the rows of a recipe's files without encoding them, to report too few rows before any process starts.

Counting stops as soon as there are enough rows. The number is unknown if only a library or the network could count.
Never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from ftcli.config.plan import derive_steps
from ftcli.data.image_folders import walk_images
from ftcli.data.paths import local_path
from ftcli.data.sources import FIRST_CHARACTERS
from ftcli.data.text_files import EmptyLine, json_objects, parse_rows
from ftcli.runtime.errors import InputError, RowError

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe
    from ftcli.config.recipe_data import Data, Source


def check_row_counts(recipe: Recipe, *, may_split: bool) -> None:
    """Check that a recipe has enough training rows. Unusable rows and rows that are too long are not known yet.

    Args:
        recipe: A valid recipe.
        may_split: Whether the task may split a row into several.

    Raises:
        InputError: There are too few rows for one step.
    """
    data = recipe.data
    needed = data.eval_rows + recipe.batch.global_size
    counts = [] if data.streaming else [count_rows(source, needed) for source in data.train_sources]
    known = [count for count in counts if count]  # a source without rows is reported when it is read
    if not counts or len(known) < len(counts) or sum(known) >= needed:
        return
    left = sum(known) - data.eval_rows
    if data.eval_rows and left <= 0:
        raise no_training_rows_error(data, [source.path for source in data.train_sources])
    if not may_split and all(source.weight <= 1 for source in data.train_sources):
        derive_steps(recipe.train, left, recipe.batch.global_size, drop_last=data.drop_last)


def no_training_rows_error(data: Data, paths: Iterable[str]) -> InputError:
    """Return the error for a `data.eval_rows` that leaves no training rows.

    Args:
        data: The section `data` of the recipe.
        paths: Paths of the training sources.
    """
    message = f"data.eval_rows {data.eval_rows} leaves no rows of {', '.join(paths)} to train on"
    return InputError(message, hint="lower data.eval_rows, or set data.eval to evaluation rows")


def count_rows(source: Source, most: int) -> int | None:
    """Count the rows of a source.

    Args:
        source: The source.
        most: Number of rows at which counting stops.

    Returns:
        The number of rows, at most `most`; None if counting needs a library or the network.
    """
    path = local_path(source.path)
    if path is None:
        return None
    most = min(most, source.max_rows or most)
    if path.is_dir():
        return sum(1 for _ in islice(walk_images(path), most))
    if path.suffix == ".parquet":
        rows = _parquet_rows(path)
        return None if rows is None else min(rows, most)
    if path.suffix == ".json":
        try:
            return _listed_objects(path, most)
        except UnicodeDecodeError:  # reading the rows reports it
            return None
    with path.open("rb") as file:
        filled = (row for row in parse_rows(file, path.suffix) if not isinstance(row, EmptyLine))
        first = list(islice(filled, most))
    return None if any(isinstance(row, RowError) for row in first) else len(first)  # reading the rows reports errors


def _listed_objects(path: Path, most: int) -> int | None:
    """Return the number of objects in the list of a JSON file; None if it is not a list, or too long to read."""
    with path.open(encoding="utf-8-sig") as file:
        text = file.read(FIRST_CHARACTERS)
    count = sum(1 for _ in islice(json_objects(text.lstrip().removeprefix("[")), most))
    is_complete = text.lstrip().startswith("[") and len(text) < FIRST_CHARACTERS
    return count if is_complete or count == most else None


def _parquet_rows(path: Path) -> int | None:
    """Return the number of rows of a parquet file; None if it is unreadable."""
    from pyarrow import ArrowException, parquet

    try:
        rows: int = parquet.read_metadata(path).num_rows
    except (ArrowException, OSError):  # reported when rows are read
        return None
    return rows
