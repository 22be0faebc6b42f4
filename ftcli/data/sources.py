"""Read the rows of local files, image folders, assets, and data sets on the hub.

This module and hub_data.py read text files without changing values; `datasets` reads parquet files. Errors contain the
file and, if possible, the row number. `datasets` is imported inside functions, so that `ftcli check` stays light.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO

from ftcli.data.cache_key import file_state
from ftcli.data.hub_data import read_hub
from ftcli.data.hub_files import find_hub_files
from ftcli.data.image_folders import check_image_folder, image_files
from ftcli.data.paths import FORMATS, RELATIVE, local_path, similar_names
from ftcli.data.streaming.line_reader import text_rows
from ftcli.data.streaming.remote_files import is_address
from ftcli.data.text_files import TABLES, json_objects, read_header
from ftcli.runtime.errors import InputError
from ftcli.runtime.reader_errors import reading, reason

if TYPE_CHECKING:
    from datasets import Dataset

    from ftcli.config.recipe_data import Source


FIRST_CHARACTERS = 2**20  # characters or bytes of a JSON file that are read to find its first rows


def first_columns(source: Source, *, most_bad: int = 0, key: str = "data") -> list[str] | None:
    """Return the column names of a source's first rows, as the file has them.

    Args:
        source: File, folder, asset or name on the hub.
        most_bad: Rows that may be unusable. One row more than that is read.
        key: The recipe's key of the source, for messages.

    Returns:
        The names; None if reading them needs a library.

    Raises:
        InputError: A line of a .jsonl file is not a JSON object, or the file has no rows.
    """
    path = local_path(source.path)
    if path is not None and path.suffix == ".parquet" and path.is_file():
        return parquet_columns(path)
    if path is None or path.suffix not in (".jsonl", ".json", ".csv", ".tsv", ".txt"):
        return None
    if path.suffix == ".txt":
        return ["text"]
    with path.open("rb") as file:
        if path.suffix in TABLES:
            names_in_file, has_rows = read_header(file, path.suffix)
            if not has_rows:
                raise InputError(f"{key}: {path} has no rows", hint="give a file with at least one row")
            return names_in_file
        rows = text_rows(path) if path.suffix == ".jsonl" else _objects_of(file)
        names = list(dict.fromkeys(name for row in islice(rows, 1 + most_bad) for name in row))
    if not names and path.suffix == ".jsonl" and next(text_rows(path), None) is None:
        raise InputError(f"{key}: {path} is empty", hint="give a file with at least one row")
    return names or None


def _objects_of(file: BinaryIO) -> Iterator[dict[str, Any]]:
    """Return the first objects of a JSON file."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()  # the last character may be incomplete
    try:
        text = decoder.decode(file.read(FIRST_CHARACTERS))
    except UnicodeDecodeError:  # reading all rows reports the line
        return iter(())
    return json_objects(text.lstrip().removeprefix("["))


def check_source(source: Source, columns: dict[str, str], *, most_bad: int = 0, key: str = "data") -> None:
    """Check a source by its first rows.

    Args:
        source: The source. A name on the hub is not checked.
        columns: Name the task expects -> name in the source.
        most_bad: Number of first rows that may be unusable.
        key: The recipe's key of the source, for messages.

    Raises:
        InputError: The source is missing or empty, has no known format, or lacks a column. An address is refused:
            `check_corpus` looks at the files of a stream.
    """
    if is_address(source.path):
        hint = "set data.streaming to true for training rows, or download the file"
        message = f"{key}: {source.path} is an address, but only a stream reads addresses (data.streaming)"
        raise InputError(message, hint=hint)
    path = local_path(source.path)
    if path is None:
        return
    require_file(path, key)
    if path.is_dir():
        check_image_folder(path, key)
    elif path.suffix not in FORMATS:
        known = ", ".join(FORMATS)
        raise InputError(f"{key}: {path} has no known data format", hint=f"known: {known}, or a folder of images")
    elif (names := first_columns(source, most_bad=most_bad, key=key)) is not None:
        require_columns(names, columns.values(), str(path))


def require_file(path: Path, key: str) -> None:
    """Raise `InputError` if there is no file or folder at a path, or if the file is empty.

    Args:
        path: The path.
        key: The recipe's key of the source, for messages.
    """
    if not path.exists():
        raise InputError(f"{key}: no data at {path.absolute()}", hint=similar_names(path) or RELATIVE)
    if path.is_file() and path.stat().st_size == 0:
        raise InputError(f"{key}: {path} is empty", hint="give a file with at least one row")


def require_columns(present: Sequence[str], required: Any, where: str) -> None:
    """Check that a source has all required columns.

    Args:
        present: Columns of the source.
        required: Names of the required columns.
        where: Name of the source in messages.

    Raises:
        InputError: A required column is missing. The hint contains the columns of the source.
    """
    missing = [name for name in required if name not in present]
    if missing:
        raise InputError(
            f"no column {', '.join(repr(name) for name in missing)}",
            where=where,
            hint=f"the columns are {', '.join(present)}; name the right ones in data.columns, or in `columns` of this "
            "source",
        )


def rename_columns(row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Rename the columns of a row. A column that had one of the new names before is removed.

    Args:
        row: Row of the source.
        columns: Name the task expects -> name in the source.

    Returns:
        The renamed row.
    """
    renamed = set(columns.values())
    other = {name: value for name, value in row.items() if name not in renamed and name not in columns}
    return other | {expected: row[name] for expected, name in columns.items() if name in row}


def read_rows(
    source: Source,
    columns: dict[str, str],
    text: Collection[str] = (),
    complete: Callable[[dict[str, str], list[str]], dict[str, str]] | None = None,
    *,
    key: str = "data",
) -> Dataset:
    """Return every row of a source, with columns renamed to what the task expects.

    Args:
        source: File, folder, asset or name on the hub.
        columns: Name the task expects -> name in the source.
        text: Columns, by the names the task expects, whose fields in a table stay text even if they look like numbers.
        complete: Returns `columns` with further names, for (columns, columns of the source).
        key: The recipe's key of the source, for messages.

    Returns:
        The rows.

    Raises:
        InputError: The data is unreadable or empty, or lacks a column.
    """
    from ftcli.data.arrow_tables import first_invalid_row

    check_source(source, {}, key=key)
    path = local_path(source.path)
    text_names = [columns.get(name, name) for name in text]
    rows = read_hub(source, text_names) if path is None else _read_local(path, text_names)
    if len(rows) == 0:
        raise InputError(f"{key}: {source.path} has no rows")
    if (path is None or path.suffix == ".parquet") and (number := first_invalid_row(rows)) is not None:
        message = f"{key}: row {number} of {source.path} has text that is not UTF-8"
        raise InputError(message, hint="repair or remove the row; with data.streaming, data.max_bad_rows leaves it out")
    columns = columns if complete is None else complete(columns, rows.column_names)
    require_columns(rows.column_names, columns.values(), source.path)
    renamed = set(columns.values())
    rows = rows.remove_columns([n for n in columns if n in rows.column_names and n not in renamed and columns[n] != n])
    names: dict[str, str] = {}  # name in the source -> its first name here
    for expected, name in columns.items():
        names[name] = name if columns.get(name) == name else names.get(name, expected)
    rows = rows.rename_columns({name: first for name, first in names.items() if name != first})
    for expected, name in columns.items():
        if expected != (first := names[name]):  # a column with several names
            rows = rows.add_column(expected, rows.data.column(first), feature=rows.features[first])
    return rows


def is_table(source: Source) -> bool:
    """Return whether the rows of a source come from tables such as .csv files, whose fields have no type."""
    if PurePosixPath(source.path).suffix.lower() in TABLES:
        return True
    if local_path(source.path) is not None or "://" in source.path:
        return False
    files = find_hub_files(source)
    return files is not None and not files.why_not and files.is_table


def _read_local(path: Path, text: Collection[str]) -> Dataset:
    """Return the rows of a local file or folder of images."""
    from datasets import Dataset, load_dataset

    from ftcli.data.arrow_tables import build_dataset, infer_numbers

    if path.is_dir():
        files = image_files(path)
        return Dataset.from_dict({"image": [str(file) for file, _ in files], "label": [label for _, label in files]})
    if path.suffix != ".parquet":
        rows = build_dataset(text_rows(path))
        if len(rows) == 0:
            raise InputError(f"{path} has no rows", hint="give a file with at least one row")
        return infer_numbers(rows, text) if path.suffix in TABLES else rows
    # `datasets` finds rows in its own cache by path and modification time, which a program can set to that of the file
    # before. It cannot set the change time, which is in the name.
    name = hashlib.blake2b(repr(file_state(path)).encode(), digest_size=8).hexdigest()
    try:
        return load_dataset("parquet", name, data_files=str(path.absolute()), split="train")
    except MemoryError:
        raise
    except Exception as error:  # parquet readers raise exceptions of many types
        if "corresponds to no data" in str(error):
            raise InputError(f"{path} has no rows", hint="give a file with at least one row") from None
        cause = error.__cause__ or error
        raise InputError(f"cannot read {path}: {reason(cause)}", hint="do all rows have the same types?") from cause


def parquet_columns(path: Path) -> list[str]:
    """Return the names of the columns of a parquet file; raise `InputError` if it is none or has no rows."""
    from pyarrow import parquet

    with reading(path, "is it a complete parquet file?"):
        metadata = parquet.read_metadata(path)
        names = list(metadata.schema.to_arrow_schema().names)
    if metadata.num_rows == 0:
        raise InputError(f"{path} has no rows", hint="give a file with at least one row")
    return names
