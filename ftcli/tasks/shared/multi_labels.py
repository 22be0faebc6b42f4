"""Lists of labels as names of classes, and as one truth value for each class.

A row without any label has an empty list; null is an error. Shape: C labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ftcli.data.chat.messages import parse_json
from ftcli.data.label_names import INTEGER, name_of, replace_column
from ftcli.runtime.errors import InputError, RowError
from ftcli.tasks.shared.classification import label_index
from ftcli.tasks.shared.label_columns import COLUMN
from ftcli.tasks.shared.label_options import MULTI

if TYPE_CHECKING:
    from datasets import Dataset

    from ftcli.data.mixture import SourceRows


def align_label_lists(parts: Sequence[SourceRows], given: list[str] | None) -> tuple[list[SourceRows], list[str]]:
    """Convert class indices to names, and determine the classes.

    The classes have the order of `given`. Without it, names of ClassLabel features come first, in their order, followed
    by all other names of training rows, sorted.

    Args:
        parts: The rows that each split takes from each source.
        given: The labels that the recipe lists; None if it lists none.

    Returns:
        The parts with names in place of class indices, and the names of all classes.

    Raises:
        InputError: There are fewer than two classes. The message names the first row that cannot be used, if any.
    """
    converted = {id(part.rows): _with_names(part.rows) for part in parts}
    declared = list(dict.fromkeys(name for part in parts for name in converted[id(part.rows)][1]))
    parts = [replace(part, rows=converted[id(part.rows)][0]) for part in parts]
    if given is not None:
        return parts, given
    names, first_bad = set[str](), ""
    for part in (part for part in parts if part.split == "train"):
        numbers = part.indices.tolist()
        for number, value in zip(numbers, part.rows.select_columns([COLUMN])[numbers][COLUMN], strict=True):
            try:
                names |= set(names_of(value))
            except RowError as error:  # counted when the row is encoded
                first_bad = first_bad or f"row {number + 1} of {part.path}: {error}"
    others = names - set(declared)
    labels = declared + sorted(others, key=int if all(map(INTEGER.fullmatch, others)) else str)
    if len(labels) < 2 and first_bad:
        raise InputError(first_bad)
    if len(labels) < 2:
        raise InputError(
            f"the lists of labels in data.train have {len(labels)} different labels, but two are needed",
            hint="list all labels in task_options.labels",
        )
    return parts, labels


def names_of(value: Any) -> list[str]:
    """Return the names in a list of labels.

    Raises:
        RowError: The value is not a list of labels.
    """
    if value is None:
        raise RowError("has no list of labels; a row without labels has an empty list")
    if isinstance(value, str) and value.lstrip().startswith("["):  # a field of a .csv or .tsv file
        value = parse_json(value, "`label`")
    if not isinstance(value, list | tuple):
        raise RowError(f"label {value!r} is not a list; task_options.problem_type is {MULTI}: write [{value!r}]")
    names = [None if isinstance(label, list | dict | float) else name_of(label) for label in value]
    for label, name in zip(value, names, strict=True):
        if name is None:
            raise RowError(f"has the label {label!r} in its list, which is not a name")
    return [name for name in names if name is not None]


def truth_values(value: Any, labels: list[str], *, listed: bool) -> list[bool]:
    """Return for each class whether it is in a row's list of labels, `[C]`.

    Args:
        value: The list of labels.
        labels: Names of all classes.
        listed: Whether the recipe lists the labels.

    Raises:
        RowError: The value is not a list of labels, or a label is unknown.
    """
    truths = [False] * len(labels)
    for name in names_of(value):
        truths[label_index(name, labels, listed=listed)] = True
    return truths


def _with_names(rows: Dataset) -> tuple[Dataset, list[str]]:
    """Return rows with names in place of class indices, and the names of the column's ClassLabel feature."""
    import pyarrow as pa
    from datasets import ClassLabel

    inner = getattr(rows.features[COLUMN], "feature", None)
    if not isinstance(inner, ClassLabel):
        return rows, []
    names = list(inner.names)
    lists = [
        None if value is None else [names[n] if 0 <= n < len(names) else f"class index {n}" for n in value]
        for value in rows.select_columns([COLUMN])[:][COLUMN]
    ]
    return replace_column(rows, COLUMN, pa.chunked_array([pa.array(lists, pa.list_(pa.string()))])), names
