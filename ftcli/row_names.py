"""What messages call a training row that is known by its sample id: its file and its number there.

The ids of prepared rows are looked up among them, those of a stream say file and row themselves. A row that became
several, or that occurs several times in an epoch, has one name. No device and no rank is known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .rows import image_files, local_path
from .streaming import PIECES, ROWS

if TYPE_CHECKING:
    from .cache import PreparedRows
    from .recipe import Recipe, Source
    from .stream_loader import StreamLoader

NameRows = Callable[[Iterable[int]], list[str]]  # sample ids -> names, each once, in the order of the ids


def row_names(recipe: Recipe, rows: PreparedRows, loader: Any) -> NameRows:
    """Return what names the training rows of a run; `loader` is theirs."""
    return _of_stream(loader) if rows.streamed else _of_prepared(recipe.data.train_sources, rows)


def _of_prepared(sources: list[Source], rows: PreparedRows) -> NameRows:
    @cache  # a folder is listed when its first row is named, and not again
    def images(number: int) -> list[Path]:
        return _images(sources[number])

    def names(ids: Iterable[int]) -> list[str]:
        numbers = sorted(ids)
        found = rows.train.select_columns(["source", "row"]).select(numbers)[:]
        rows_of = zip(found["source"], found["row"], strict=True)
        return _once(str(images(s)[row]) if images(s) else f"{sources[s].path}:{row + 1}" for s, row in rows_of)

    return names


def _of_stream(stream: StreamLoader) -> NameRows:
    def names(ids: Iterable[int]) -> list[str]:
        corpus = stream.order.lanes[0].corpus
        places = (divmod(number // PIECES, ROWS) for number in sorted(ids))
        return _once(f"{corpus.name(file)}:{row + 1}" for file, row in places)

    return names


def _images(source: Source) -> list[Path]:
    """Return the images of a source that is a folder of them; their numbers are those of its rows."""
    path = local_path(source.path)
    return [image for image, _ in image_files(path)] if path is not None and path.is_dir() else []


def _once(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
