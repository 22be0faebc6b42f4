"""Apply the types that a data set on the hub declares for the columns of its text files.

A declared class label adds names to a column, and a declared number converts the text of a table to numbers. Other
values stay as they are in the file: a declared text is not converted to numbers or dates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from ftcli.runtime.errors import RowError

Row = dict[str, Any]
TRUTH = {"True": True, "true": True, "False": False, "false": False}


def unknown_types(features: Mapping[str, Any]) -> list[str]:
    """Return the columns with a declared type that this module does not support, such as times and images."""
    return [name for name, feature in features.items() if not _is_known(feature)]


def text_types(features: Mapping[str, Any]) -> list[str]:
    """Return the columns that are declared as text."""
    return [name for name, feature in features.items() if _dtype(feature) in ("string", "large_string")]


def class_types(features: Mapping[str, Any]) -> dict[str, Any]:
    """Return the types of the columns with class labels, or lists of class labels."""
    return {name: feature for name, feature in features.items() if _is_class(feature) or _is_class(_inner(feature))}


def convert_declared(features: Mapping[str, Any], text: Collection[str]) -> Callable[[Row], Row | RowError]:
    """Return a function that converts the values of a row to their declared types; classes become indices.

    Args:
        features: Column -> its type in `datasets`.
        text: Columns whose texts stay text, even if a number is declared.

    Returns:
        A function that returns the converted row, or a `RowError` for a value that does not have its declared type.
    """
    changes = {name: partial(_as_type, feature) for name, feature in features.items()}

    def change(row: Row) -> Row | RowError:
        converted = dict(row)
        for name in changes.keys() & row.keys():
            value = row[name]
            is_text = isinstance(value, str) and name in text and not _is_class(features[name])
            if value is None or is_text:
                continue
            try:
                converted[name] = changes[name](value)
            except (ValueError, TypeError, OverflowError):
                shown = json.dumps(value, ensure_ascii=False)[:80]
                return RowError(
                    f"has {shown} in column {name!r}, which the data set declares as {_describe_type(features[name])}"
                )
        return converted

    return change


def with_class_names(features: Mapping[str, Any]) -> Callable[[Row], Row | RowError]:
    """Return a function that replaces the class indices of a row by names; other values stay."""
    classes = {name: feature for name, feature in class_types(features).items() if _is_class(feature)}
    index = convert_declared(classes, ())

    def change(row: Row) -> Row | RowError:
        indexed = index(row)
        if isinstance(indexed, RowError):
            return indexed
        names = {name: indexed[name] for name in classes.keys() & indexed.keys()}
        return indexed | {
            name: None if value is None or value < 0 else classes[name].names[value] for name, value in names.items()
        }

    return change


def _as_type(feature: Any, value: Any) -> Any:
    """Return a value as its declared type; raise `ValueError` or `TypeError` if that is not possible."""
    if _is_class(feature):
        return _class_index(feature, value)
    if _is_class(_inner(feature)):
        return [None if each is None else _class_index(_inner(feature), each) for each in value]
    kind = _dtype(feature)
    if kind in ("string", "large_string"):
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if kind == "bool":
        return value if isinstance(value, bool) else _truth_value(TRUTH, value)
    if kind.startswith(("int", "uint")):
        number = int(value)
        if not isinstance(value, str) and number != value:
            raise ValueError("not a whole number")
        return number
    return float(value) if kind.startswith("float") else value


def _class_index(feature: Any, value: Any) -> int:
    """Return the index of a class that is given as a name or an index; -1 means no class."""
    if isinstance(value, str) and value in feature.names:
        return list(feature.names).index(value)
    if isinstance(value, bool | float) and value != int(value):
        raise ValueError("not an index")
    index = int(value)
    if not -1 <= index < len(feature.names):
        raise ValueError("no class has this index")
    return index


def _truth_value(known: dict[str, bool], value: Any) -> bool:
    """Return the truth value of a text; raise `ValueError` for other texts."""
    if value not in known:
        raise ValueError("not a truth value")
    return known[value]


def _is_known(feature: Any) -> bool:
    """Return whether a type is supported: a plain type, a class label, a list of class labels, or JSON."""
    kind = _dtype(feature)
    if kind:
        return kind in ("string", "large_string", "bool", "null") or kind.startswith(("int", "uint", "float"))
    return _is_class(feature) or _is_class(_inner(feature)) or _is_json(feature)


def _is_json(feature: Any) -> bool:
    """Return whether a type consists of objects, lists and plain values."""
    if isinstance(feature, dict):
        return all(map(_is_json, feature.values()))
    if (inner := _inner(feature)) is not None:
        return _is_json(inner)
    if type(feature).__name__ == "Json":
        return True
    return bool(_dtype(feature)) and _is_known(feature)


def _inner(feature: Any) -> Any:
    """Return the type of the items of a list; None for other types."""
    if isinstance(feature, list):
        return feature[0]
    return getattr(feature, "feature", None)


def _is_class(feature: Any) -> bool:
    """Return whether a type is a class label."""
    return type(feature).__name__ == "ClassLabel"


def _dtype(feature: Any) -> str:
    """Return the name of a plain type; an empty string for other types."""
    return str(feature.dtype) if type(feature).__name__ == "Value" else ""


def _describe_type(feature: Any) -> str:
    """Return a declared type as text for a message."""
    if _is_class(feature) or _is_class(_inner(feature)):
        return "a class label"
    return _dtype(feature)
