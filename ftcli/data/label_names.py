"""Convert values of a label column to names, and compare names of labels.

A column may hold the names themselves, or indices into the list of names of a `ClassLabel` feature. The module imports
pyarrow and datasets only where it converts columns.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from ftcli.runtime.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset


INTEGER = re.compile(r"0|-?[1-9][0-9]{0,400}")
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,99})(?:\.[0-9]{1,99})?(?:[eE][-+]?[0-9]{1,2})?")  # no code such as 007
RENAME = "write both with the same names in the same order, or as text"


def name_of(value: Any, *, keep: Iterable[str] = ()) -> str | None:
    """Return the class name of a value in a label column; None for a missing label.

    Args:
        value: Text, number or bytes.
        keep: Blank texts that are names. All other blank texts mean a missing label.
    """
    if value is None or isinstance(value, str):
        return value if value is None or value.strip() or value in keep else None
    if isinstance(value, bytes):
        return name_of(value.decode("utf-8", "backslashreplace"), keep=keep)
    if isinstance(value, float | Decimal):
        if math.isnan(value):
            return None
        return str(int(value)) if math.isfinite(value) and value == int(value) else str(value)
    return str(value)


def number_name(text: str) -> str | None:
    """Return the name of a number that is written as text, for instance "1" for "1.0"; None if it is not a number."""
    return name_of(Decimal(text)) if NUMBER.fullmatch(text) else None


def similar_names(names: Iterable[str]) -> list[list[str]]:
    """Return groups of names that differ only in case, in white space or in how a number is written, each sorted.

    Args:
        names: The names.
    """
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        letters = unicodedata.normalize("NFKC", name).casefold()
        visible = "".join(letter for letter in letters if not letter.isspace() and unicodedata.category(letter) != "Cf")
        groups.setdefault(number_name(visible) or visible, []).append(name)
    return [sorted(group) for group in groups.values() if len(group) > 1]


def joined_groups(groups: Sequence[Sequence[str]], most: int = 5) -> str:
    """Return groups of names as text for a message: "'a' and 'A'; 'b' and ' b'"."""
    shown = "; ".join(" and ".join(map(repr, group)) for group in groups[:most])
    return shown + (f"; and {len(groups) - most:,} more" if len(groups) > most else "")


def same_labels(one: Any, other: Any) -> bool:
    """Return whether two lists have the same labels in the same order. "1" and "1.0" are the same label."""
    if not all(isinstance(labels, list) and all(isinstance(name, str) for name in labels) for labels in (one, other)):
        return bool(one == other)
    first, second = ([number_name(name) or name for name in labels] for labels in (one, other))
    return first == second


def replace_column(rows: Dataset, name: str, values: pa.ChunkedArray) -> Dataset:
    """Return rows with new values in one column. The order of the columns stays.

    Args:
        rows: The rows.
        name: The column to replace.
        values: The new values, one per row.
    """
    import pyarrow as pa
    from datasets import Dataset, concatenate_datasets
    from datasets.table import InMemoryTable

    order = rows.column_names
    column = Dataset(InMemoryTable(pa.table({name: values})))
    rest = rows.remove_columns([name])
    return concatenate_datasets([rest, column], axis=1).select_columns(order) if rest.column_names else column


def name_values(column: pa.ChunkedArray, names: Sequence[str], path: str) -> pa.ChunkedArray:
    """Return the names of class indices; null for null and for -1, which means no class.

    Args:
        column: Class indices, integers.
        names: Name of each class.
        path: The source, for messages.

    Raises:
        InputError: An index has no name.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    bounds = pc.min_max(column).as_py()
    for index in (bounds["min"], bounds["max"]):
        if index is not None and not -1 <= index < len(names):
            message = f"{path} has the class index {index}, and its ClassLabel feature has {len(names)} names"
            raise InputError(message, hint="write the file again, with classes that its feature declares")
    table = pa.array([*names, None], pa.string())
    indices = pc.fill_null(column, -1).to_numpy().astype(np.int64)
    return pa.chunked_array([table.take(pa.array(np.where(indices < 0, len(names), indices)))])


def decode_class_names(rows: Dataset, columns: Collection[str], path: str) -> Dataset:
    """Return rows with names in place of class indices.

    Args:
        rows: The rows.
        columns: Columns to convert, if they have a `ClassLabel` feature.
        path: The source, for messages.
    """
    for name, names in class_names(rows.features).items():
        if name in columns:
            values = rows.select_columns([name]).with_format("arrow")[:][name]
            rows = replace_column(rows, name, name_values(values, names, path))
    return rows


def class_names(features: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the names of every column that has a `ClassLabel` feature."""
    from datasets import ClassLabel

    return {name: list(feature.names) for name, feature in features.items() if isinstance(feature, ClassLabel)}


def check_class_names(sources: Sequence[tuple[str, Dataset]], columns: Collection[str]) -> None:
    """Raise `InputError` if a column has different class names in two sources."""
    for column in columns:
        first: tuple[str, list[list[str]]] | None = None
        for where, rows in sources:
            names = _names_in(rows.features.get(column))
            first = first or ((where, names) if names else None)
            if first is not None and names and names != first[1]:
                raise InputError(
                    f"column '{column}' has the class names {_join_names(first[1])} in {first[0]}, "
                    f"and {_join_names(names)} in {where}",
                    hint=RENAME,
                )


def _names_in(feature: Any) -> list[list[str]]:
    """Return the names of every `ClassLabel` inside a feature."""
    from datasets import ClassLabel

    if isinstance(feature, ClassLabel):
        return [list(feature.names)]
    if isinstance(feature, dict):
        return [names for part in feature.values() for names in _names_in(part)]
    if isinstance(feature, list):
        return [names for part in feature for names in _names_in(part)]
    return _names_in(feature.feature) if hasattr(feature, "feature") else []


def _join_names(lists: list[list[str]]) -> str:
    """Return lists of names as text."""
    return "; ".join(", ".join(names) for names in lists)
