"""Find the file and row number of a sample id, for messages.

Prepared rows have columns with their source and row number. The sample ids of a stream contain file and row. A row that
was split, or that occurs several times in an epoch, has one name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.data.image_folders import image_files
from ftcli.data.paths import local_path
from ftcli.data.streaming.lanes import DOCUMENTS_PER_ROW, ROWS_PER_FILE

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe
    from ftcli.config.recipe_data import Source
    from ftcli.data.cache import PreparedRows
    from ftcli.data.streaming.lanes import Corpus


NameRows = Callable[[Iterable[int]], list[str]]  # sample ids -> names, each once, in the order of the ids


def row_names(recipe: Recipe, rows: PreparedRows, loader: Any) -> NameRows:
    """Return a function that names the training rows of a run.

    Args:
        recipe: The recipe of the run.
        rows: Its prepared rows.
        loader: The loader of the training rows.

    Returns:
        A function from sample ids to names such as `rows.jsonl:12`, each once, in the order of the ids.
    """
    return _of_stream(loader.order.lanes[0].corpus) if rows.streamed else _of_prepared(recipe.data.train_sources, rows)


def _of_prepared(sources: list[Source], rows: PreparedRows) -> NameRows:
    """Return the function that names prepared rows."""

    @cache  # each folder is listed once, when its first row is named
    def images(number: int) -> list[Path]:
        return _images(sources[number])

    def names(ids: Iterable[int]) -> list[str]:
        numbers = sorted(ids)
        columns = rows.train.select_columns(["source", "row"]).select(numbers)[:]
        rows_of = zip(columns["source"], columns["row"], strict=True)
        return _unique(str(images(s)[row]) if images(s) else f"{sources[s].path}:{row + 1}" for s, row in rows_of)

    return names


def _of_stream(corpus: Corpus) -> NameRows:
    """Return the function that gives the file and line of rows of a stream."""

    def names(ids: Iterable[int]) -> list[str]:
        places = (divmod(number // DOCUMENTS_PER_ROW, ROWS_PER_FILE) for number in sorted(ids))
        return _unique(f"{corpus.name(file)}:{row + 1}" for file, row in places)

    return names


def _images(source: Source) -> list[Path]:
    """Return the images of a source in the order of its rows; an empty list for other sources."""
    path = local_path(source.path)
    return [image for image, _ in image_files(path)] if path is not None and path.is_dir() else []


def _unique(names: Iterable[str]) -> list[str]:
    """Return names without repetitions."""
    return list(dict.fromkeys(names))
