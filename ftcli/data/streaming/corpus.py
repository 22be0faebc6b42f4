"""List and open the sources of data.streaming: local files, files behind an address, and data sets on the hub.

Files are never loaded or downloaded as a whole. lanes.py defines the order of the rows. `datasets` is imported inside
functions, so that `ftcli check` stays light.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.data.hub_streams import open_hub, source_commit
from ftcli.data.sources import first_columns, rename_columns, require_columns, require_file
from ftcli.data.streaming.lanes import BadRow, Corpus, assign_files, bad_rows_error, open_corpus
from ftcli.data.streaming.line_reader import COMPRESSED, read_lines, require_size, suffix_of
from ftcli.data.streaming.remote_files import file_system, is_address, is_folder, is_pattern
from ftcli.data.streaming.source_files import format_of, list_files, local_files, require_one_format
from ftcli.data.text_files import READERS, EmptyLine
from ftcli.runtime.errors import InputError, RowError, RunError
from ftcli.runtime.reader_errors import first_line

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

    from ftcli.config.recipe import Recipe
    from ftcli.config.recipe_data import Source

FIRST_ROWS = 256  # rows of a stream for its format and its preview
USUAL_FILES = 8  # number of files that suits the usual numbers of processes


def check_corpus(source: Source, columns: Mapping[str, str], *, most_bad: int = 0, key: str = "data") -> None:
    """Check a streamed source by its first rows. For an address, check only that its protocol is installed.

    Args:
        source: The source.
        columns: Name the task expects -> name in the source.
        most_bad: First rows that may be unreadable or lack columns.
        key: The recipe's key of the source, for messages.

    Raises:
        InputError: A file is missing, empty or unreadable, or a column is missing.
    """
    files = local_files(source)
    if files is not None:
        first = _first_filled(files)
        require_file(Path(first), key)
        if (names := columns_of_stream(source, most_bad=most_bad)) is not None:
            require_columns(names, columns.values(), first)
        elif suffix_of(first) in READERS:
            raise InputError(f"{key}: {source.path} has no rows", hint="give a file with at least one row")
    elif is_address(source.path):
        if not is_pattern(source.path) and not is_folder(source.path):
            require_one_format([source.path], source.path)
        file_system(source.path)


def corpus_digest(source: Source) -> Any:
    """Return an identifier of a stream for the cache key: names and sizes of its files, or the commit on the hub."""
    content = list_files(source) or source_commit(source)
    return ["stream", source.path, source.name, source.split, source.revision, content]


def stream_content(source: Source) -> Any:
    """Return an identifier of a stream for the data fingerprint. It does not depend on the location of the files.

    Names of files are relative to their common folder, without the query of an address. For a data set on the hub the
    identifier is its commit, with configuration and split.
    """
    listed = list_files(source)
    if listed is None:
        return [source.name, source.split, source_commit(source)]
    names, sizes = listed
    files = [file.partition("?")[0] if is_address(file) else file for file in names]
    start = len(os.path.commonprefix([os.path.dirname(file) + "/" for file in files]).rpartition("/")[0])
    return [[file[start:].lstrip("/") for file in files], sizes]


def columns_of_stream(source: Source, *, most_bad: int = 0) -> list[str] | None:
    """Return the column names of a stream's first rows.

    Args:
        source: Files, addresses or a name on the hub.
        most_bad: Rows that may be unusable. One row more than that is read.

    Returns:
        The names; None if there are no rows, or if reading them needs a library.

    Raises:
        InputError: More than `most_bad` rows are unreadable.
    """
    files = local_files(source)
    if files is None:
        return None
    first = _first_filled(files)
    if suffix_of(first) not in READERS:
        plain = source.model_copy(update={"path": first})
        return None if Path(first).suffix in COMPRESSED else first_columns(plain, most_bad=most_bad)
    lines = Corpus((1,) * len(files), Files(files, [None] * len(files), None), tuple(files))
    rows = _usable(Corpus(lines.sizes, Renamed(lines, {}), lines.names), most_bad)
    return list(dict.fromkeys(name for row in islice(rows, 1 + min(most_bad, FIRST_ROWS)) for name in row)) or None


def _usable(corpus: Corpus, most_bad: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of all files in their order; raise `InputError` for more than `most_bad` unreadable rows."""
    bad = 0
    for file in range(len(corpus.sizes)):
        for number, row in enumerate(corpus.read(file, 0)):
            if not isinstance(row, RowError):
                yield row
            elif not isinstance(row, EmptyLine) and (bad := bad + 1) > most_bad:
                raise bad_rows_error(corpus, [BadRow(file, number, str(row))], bad, most_bad)


def _first_filled(files: list[str]) -> str:
    """Return the first file that is not empty; the first file if all are."""
    return next((file for file in files if os.path.exists(file) and os.path.getsize(file)), files[0])


def open_source(source: Source, columns: Mapping[str, str]) -> Corpus:
    """Open a source as a corpus with the column names of the task. Files of unknown size count as equally large.

    Args:
        source: The source.
        columns: Name the task expects -> name in the source.

    Raises:
        InputError: The source does not exist or cannot be listed.
    """
    listed = list_files(source)
    if listed is None:
        corpus = open_hub(source)
    else:
        files, sizes = listed
        weights = tuple(1 if None in sizes else size or 0 for size in sizes)
        shards = None if all(suffix_of(file) in READERS for file in files) else open_corpus(_open_files(files))
        corpus = Corpus(weights, Files(files, sizes, shards), tuple(files))
        if shards is not None and len(shards.sizes) != len(files):  # `datasets` divided the files into other shards
            corpus = shards
    return Corpus(corpus.sizes, Renamed(corpus, dict(columns)), corpus.names)


def first_rows(source: Source, columns: Mapping[str, str], *, most_bad: int = 0) -> Dataset:
    """Return the first rows of a source. They are used for the format of the rows and for previews.

    Args:
        source: The source.
        columns: Name the task expects -> name in the source.
        most_bad: Number of rows that may be unreadable.

    Raises:
        InputError: The source has no rows, lacks a column, or has more unreadable rows.
    """
    rows = list(islice(_usable(open_source(source, columns), most_bad), FIRST_ROWS))
    if not rows:
        raise InputError(f"{source.path} has no rows")
    names = list(dict.fromkeys(name for row in rows for name in row))
    require_columns(names, columns, source.path)
    return _as_dataset(rows, names)


def _as_dataset(rows: list[dict[str, Any]], names: list[str]) -> Dataset:
    """Return rows as a dataset. Columns with values that JSON cannot represent, such as dates, get types of Arrow."""
    from datasets import Dataset, concatenate_datasets

    from ftcli.data.arrow_tables import build_dataset

    plain = [name for name in names if _is_json([row.get(name) for row in rows])]
    typed = [name for name in names if name not in plain]
    parts = [
        build([{name: row.get(name) for name in columns} for row in rows])
        for build, columns in ((build_dataset, plain), (Dataset.from_list, typed))
        if columns
    ]
    return concatenate_datasets(parts, axis=1) if len(parts) > 1 else parts[0]


def _is_json(values: list[Any]) -> bool:
    """Return whether JSON can represent all values."""
    try:
        json.dumps(values)
    except TypeError:
        return False
    return True


@dataclass(frozen=True)
class Files:
    """Reads files by their number: text files row by row, others through `datasets`."""

    names: list[str]
    sizes: list[int | None]
    shards: Corpus | None  # None for text files

    def __call__(self, file: int, skip: int) -> Iterator[dict[str, Any] | RowError]:
        """Yield the rows of a file from row `skip` on; raise `RunError` if the size of the file has changed."""
        name, size = self.names[file], self.sizes[file]
        if self.shards is None:
            yield from read_lines(name, skip, size=size)
            return
        if not is_address(name):
            require_size(name, size, os.path.getsize(name))
        yield from self.shards.read(file, skip)


@dataclass(frozen=True)
class Renamed:
    """Reads a corpus with renamed columns. Errors name the file and row."""

    corpus: Corpus
    columns: dict[str, str]  # name the task expects -> name in the file

    def __call__(self, file: int, skip: int) -> Iterator[dict[str, Any] | RowError]:
        """Yield the rows of a file from row `skip` on."""
        done = skip
        try:
            for row in self.corpus.read(file, skip):
                yield row if isinstance(row, RowError) else rename_columns(row, self.columns)
                done += 1
        except (InputError, RunError):
            raise
        except Exception as error:  # `datasets`, pyarrow and each file system have their own exceptions
            cause = error.__cause__ or error
            message = f"{self.corpus.name(file)} cannot be read after row {done}: {first_line(cause)}"
            raise InputError(message) if isinstance(cause, ValueError) else RunError(message) from error


def describe_stream(recipe: Recipe, processes: int) -> tuple[dict[str, str], list[str]]:
    """Describe a stream for `ftcli check`: its number of lanes, and the lanes that each process reads.

    Args:
        recipe: A recipe with data.streaming.
        processes: Number of processes of the run.

    Returns:
        (facts of the report, warnings).
    """
    from ftcli.data.streaming.lanes import lanes_of

    (source,) = recipe.data.train_sources
    files = local_files(source)
    if files is None:
        return {"stream": f"{source.path}: its files are listed when rows are read, not by `ftcli check`"}, []
    lanes = assign_files([os.path.getsize(file) for file in files], recipe.batch.global_size)
    count = len(files)
    summary = f"{count} file{'s' * (count > 1)} in {len(lanes)} lane{'s' * (len(lanes) > 1)}"
    of_each = len(lanes_of(0, processes, len(lanes)))
    facts = {"stream": summary if processes == 1 else f"{summary}; each process reads and tokenizes {of_each} of them"}
    if processes == 1 or of_each == 1 < len(lanes):
        return facts, []
    whole = "every process reads and tokenizes all of it"
    if count == 1:
        return facts, [f"data.streaming: 1 file: {whole}; split it into {max(USUAL_FILES, processes)} or more files"]
    if len(lanes) < min(count, recipe.batch.global_size) and len(lanes) == 1:
        return facts, [
            f"data.streaming: {count} files of unequal size (or a batch.global_size {recipe.batch.global_size} that "
            f"they do not divide) make one lane: {whole}; split it into files of equal size"
        ]
    if of_each == len(lanes):
        hint = f"use a multiple of {processes} files of equal size to divide the reading"
        return facts, [f"data.streaming: {len(lanes)} lanes over {processes} processes: {whole}; {hint}"]
    return facts, []


def _open_files(files: list[str]) -> IterableDataset:
    """Open files as a streamed data set of `datasets`."""
    from datasets import load_dataset

    kind = format_of(files[0])
    assert kind is not None  # `require_one_format` has checked it
    absolute = [file if is_address(file) else os.path.abspath(file) for file in files]
    return load_dataset(kind, data_files=absolute, split="train", streaming=True)
