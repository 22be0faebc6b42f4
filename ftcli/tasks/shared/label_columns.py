"""Convert the label columns of several sources to class names, so that a name means the same class in all of them.

    ClassLabel feature         the feature's name for each index; -1 is no label
    numbers                    the shortest form: 1 and 1.0 are both "1"; NaN is no label
    .csv and .tsv              numbers if every field of the column is a number, else text
    text                       the text itself; blank text is no label
    booleans, dates            their form in Python

An integer is an index only if the recipe lists the labels (`label_index` in classification.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ftcli.data.label_names import INTEGER, NUMBER, joined_groups, name_of, number_name, replace_column
from ftcli.runtime.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

    from ftcli.data.mixture import SourceRows


COLUMN = "label"
MAX_SHOWN = 6  # labels in a message
ONE_LABEL_HINT = "give each row one text or one number, or set task_options.problem_type to multi_label_classification"
LIST_LABELS_HINT = "list every label in task_options.labels: whole numbers are then indices into the list"


@dataclass(frozen=True)
class LabelColumn:
    """The labels of one source as names.

    Attributes:
        names: One text per row of the source; null for a row without a label.
        declared: Names of a ClassLabel feature, in its order; else empty.
        is_number: Whether the labels are numbers.
        written: Name -> all forms in which the fields of a table have it, such as 10 and 1e1.
    """

    names: pa.ChunkedArray
    declared: list[str]
    is_number: bool
    written: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class SourceLabels:
    """The labels of the rows that one split takes from one source.

    Attributes:
        part: The rows.
        column: The label column of the source.
        names: Names that occur in the rows.
    """

    part: SourceRows
    column: LabelColumn
    names: set[str]

    @property
    def where(self) -> str:
        """The split and the source, for a message."""
        return f"data.{self.part.split} {self.part.path}"

    @property
    def known(self) -> set[str]:
        """The names that occur or that a ClassLabel feature declares."""
        return self.names | set(self.column.declared)


def align_labels(parts: list[SourceRows], given: list[str] | None) -> tuple[list[SourceRows], list[str]]:
    """Convert the labels of all sources to names, and determine the classes.

    The classes have the order of `given`. Without it, names of the training rows' ClassLabel features come first, in
    the features' order, followed by all other names, sorted.

    Args:
        parts: The rows that each split takes from each source.
        given: The labels that the recipe lists; None if it lists none.

    Returns:
        The same rows with labels as class names, and the names of all classes in order.

    Raises:
        InputError: A row has several labels, a label that is not listed is a decimal number, there are fewer than two
            classes, or one source has numbers and another one names.
    """
    columns: dict[int, LabelColumn] = {}
    sources = []
    for part in parts:
        if id(part.rows) not in columns:  # held-out rows come from the same source as training rows
            columns[id(part.rows)] = read_labels(part.rows, part.path, given, is_table=part.is_table)
        column = columns[id(part.rows)]
        names = column.names if len(part.indices) == len(part.rows) else column.names.take(part.indices)
        occurring = {name for name in names.unique().to_pylist() if name is not None}
        source = SourceLabels(part, column, occurring & set(column.declared) if column.declared else occurring)
        if given is None and column.is_number:
            _check_whole(source)
        sources.append(source)
    if given is None:
        labels = _order_labels([source for source in sources if source.part.split == "train"])
        _check_kinds(sources)
    else:
        labels = given

    def class_of(name: str | None) -> str | None:
        index = None if name is None else find_label(name, labels, listed=given is not None)
        return name if index is None else labels[index]

    # Each distinct name is looked up once, not for every row.
    names = {key: _map_names(column.names, class_of) for key, column in columns.items()}
    rows = {id(part.rows): replace_column(part.rows, COLUMN, names[id(part.rows)]) for part in parts}
    notes = [_notes_on_forms(source, class_of) for source in sources]
    return [
        replace(part, rows=rows[id(part.rows)], notes=note) for part, note in zip(parts, notes, strict=True)
    ], labels


def _notes_on_forms(source: SourceLabels, class_of: Callable[[str | None], str | None]) -> tuple[tuple[str, str], ...]:
    """Return a note if a source writes one class in several forms, such as 10 and 1e1."""
    forms: dict[str | None, list[str]] = {}
    for name in sorted(source.names):
        forms.setdefault(class_of(name), []).extend(source.column.written.get(name, [name]))
    groups = [sorted(set(several)) for several in forms.values() if len(set(several)) > 1]
    what = f"labels that are the same number were read as one label: {joined_groups(groups)}"
    return ((what, "if they differ, list them as text in task_options.labels"),) if groups else ()


def read_labels(rows: Dataset, path: str, known: Sequence[str] | None = None, *, is_table: bool = False) -> LabelColumn:
    """Convert the label column of a source to names.

    Args:
        rows: Rows of the source, with a column `label`.
        path: The source, for messages.
        known: The labels that the recipe lists.
        is_table: Whether the source is a .csv or .tsv file, whose numbers are text.

    Raises:
        InputError: A row has several labels.
    """
    import pyarrow as pa
    from datasets import ClassLabel, Value

    feature = rows.features[COLUMN]
    labels = rows.select_columns([COLUMN])
    if not isinstance(feature, ClassLabel | Value):
        values = [_single_label(value, number, path) for number, value in enumerate(labels[:][COLUMN], start=1)]
        names = [name_of(value, keep=known or ()) for value in values]
        are_numbers = {type(value) for value in values} - {type(None)} == {int, float}
        return LabelColumn(pa.chunked_array([pa.array(names, pa.string())]), [], is_number=are_numbers)
    column = labels.with_format("arrow")[:][COLUMN]
    if isinstance(feature, ClassLabel):
        declared = list(feature.names)
        return LabelColumn(_map_names(column, lambda index: _class_name(index, declared)), declared, is_number=False)
    kind = column.type
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    if is_table and (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        values = [value for value in column.unique().to_pylist() if value is not None and value.strip()]
        if values and all(NUMBER.fullmatch(value) for value in values):
            listed, written = known or (), dict[str, list[str]]()

            def name_in_table(text: str | None) -> str | None:
                name = text if text in listed else number_name(text or "")
                if name is not None:
                    written.setdefault(name, []).append(str(text))
                return name

            return LabelColumn(_map_names(column, name_in_table), [], is_number=True, written=written)
    return LabelColumn(_map_names(column, lambda value: name_of(value, keep=known or ())), [], is_number=is_number)


def find_label(name: str, labels: Sequence[str], *, listed: bool) -> int | None:
    """Return the index of a name among the classes; None if it is not among them.

    "1.0" and "1" are the same name unless both are listed.

    Args:
        name: Name of a label.
        labels: Names of the classes.
        listed: Whether the recipe lists the labels. A whole number is then an index, unless a listed label is a number.
    """
    if name in labels:
        return labels.index(name)
    number = number_name(name)
    if number is None:
        return None
    numbers = [number_name(label) for label in labels]
    if listed and INTEGER.fullmatch(number) and not any(numbers):
        return int(number) if 0 <= int(number) < len(labels) else None
    return numbers.index(number) if number in numbers else None


def _single_label(value: Any, number: int, path: str) -> Any:
    """Return a label; raises `InputError` for a list or mapping."""
    row = f"row {number} of {path}"
    if isinstance(value, dict):
        raise InputError(f"{row} has a mapping as label", hint="give each row one text or one number")
    if isinstance(value, list):
        what = "several labels" if len(value) > 1 else "a list of one label" if value else "an empty list of labels"
        raise InputError(f"{row} has {what}", hint=ONE_LABEL_HINT)
    return value


def _class_name(index: int | None, names: list[str]) -> str | None:
    """Return the name of a class index; for an index without a name, a text that matches no class."""
    if index is None or index == -1:
        return None
    return names[index] if 0 <= index < len(names) else f"class index {index}"


def _map_names(column: pa.ChunkedArray, name: Any) -> pa.ChunkedArray:
    """Return a column with `name` applied to every value; it is called once per distinct value."""
    import pyarrow as pa

    if pa.types.is_null(column.type):
        return pa.chunked_array([pa.nulls(len(column), pa.string())])
    chunks = []
    for chunk in column.chunks:
        encoded = chunk.dictionary_encode()
        names = pa.array([name(value) for value in encoded.dictionary.to_pylist()], pa.string())
        chunks.append(names.take(encoded.indices))
    return pa.chunked_array(chunks, pa.string())


def _check_whole(source: SourceLabels) -> None:
    """Raise `InputError` for a decimal number, which is probably a value to predict and not a class."""
    decimals = sorted(name for name in source.names if not INTEGER.fullmatch(name))
    if decimals:
        rows = (int(row) for row in source.part.indices if source.column.names[int(row)].as_py() in decimals)
        row = next(rows)
        raise InputError(
            f"{source.where} has decimal numbers as labels ({source.column.names[row].as_py()} in row {row + 1}): "
            "this is regression, but the task is classification",
            hint="set task_options.problem_type to regression; if the numbers are classes, list all of them as text in "
            "task_options.labels",
        )


def _order_labels(train: list[SourceLabels]) -> list[str]:
    """Return the names of all classes: declared names in their order, then other names, sorted."""
    declared = list(dict.fromkeys(name for source in train for name in source.column.declared))
    others = set().union(*(source.names for source in train)) - set(declared)
    is_number = any(source.column.is_number for source in train) and all(map(INTEGER.fullmatch, others))
    labels = declared + sorted(others, key=int if is_number else str)
    if not labels:
        first = train[0].part
        raise InputError(f"row {int(first.indices[0]) + 1} of {first.path} has no label, and neither has any other row")
    if len(labels) < 2:
        raise InputError(f"data.train has one label only: {labels[0]}", hint="a classifier needs two or more labels")
    return labels


def _check_kinds(sources: list[SourceLabels]) -> None:
    """Raise `InputError` if one source has whole numbers as labels and another one has names."""
    train = [source for source in sources if source.part.split == "train"]
    for source in sources:
        others = [other for other in train if other is not source]
        known = set().union(*(other.known for other in others))
        has_numbers, overlap = _is_numeric(source.names), source.names & known
        for other in others:
            differs = bool(source.names and other.known) and has_numbers != _is_numeric(other.known)
            if differs and (overlap != source.names if has_numbers else not overlap):
                raise InputError(
                    f"{source.where} has the labels {_join_names(source.names)}, "
                    f"and {other.where} has {_join_names(other.known)}",
                    hint=f"write the same names in both, or {LIST_LABELS_HINT}",
                )


def _is_numeric(names: Iterable[str]) -> bool:
    """Return whether all names are whole numbers."""
    return all(map(INTEGER.fullmatch, names))


def _join_names(names: Iterable[str]) -> str:
    """Return the first names in alphabetical order, for a message."""
    ordered = sorted(names)
    return ", ".join(ordered[:MAX_SHOWN]) + (", ..." if len(ordered) > MAX_SHOWN else "")
