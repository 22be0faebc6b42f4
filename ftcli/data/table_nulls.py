"""Remove null keys from conversations that were read from tables, such as parquet files.

A table gives every object the keys of all objects in its column, and null for missing keys. A null in the arguments of
a tool call or in a JSON schema is therefore treated as a missing key. Rows of JSON files keep their nulls, because
their objects are not stored as columns of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

Row = dict[str, Any]
SPEAKER = {"role", "from"}  # keys by which a message is recognised


def absent_keys(features: Mapping[str, Any] | None) -> Callable[[Row], Row] | None:
    """Return a function that removes null keys inside tool calls and `tools`; None if no column contains these.

    Args:
        features: Column -> its type in `datasets`; None if unknown.
    """
    changes: dict[str, Callable[[Any], Any]] = {}
    for name, feature in (features or {}).items():
        if name == "tools" and _has_objects(feature):
            changes[name] = partial(_without, feature)
        calls = _calls_of(feature)
        if calls is not None:
            changes[name] = partial(_in_messages, calls)
    if not changes:
        return None
    return lambda row: row | {name: change(row[name]) for name, change in changes.items() if name in row}


def _calls_of(feature: Any) -> Any:
    """Return the type of `tool_calls` in a column of messages; None for other columns and for calls without objects.

    Such a column has one message, a list of them, or a list of lists, such as ranked answers.
    """
    message = feature
    while hasattr(message, "feature"):
        message = message.feature
    if not isinstance(message, dict) or not SPEAKER & message.keys():
        return None
    calls = message.get("tool_calls")
    return calls if _has_objects(calls) else None


def _in_messages(calls: Any, messages: Any) -> Any:
    """Return messages, or one, without null keys inside their tool calls, which have the type `calls`."""
    if isinstance(messages, list):
        return [_in_messages(calls, message) for message in messages]
    if not messages or not messages.get("tool_calls"):
        return messages
    return messages | {"tool_calls": _without(calls, messages["tool_calls"])}


def _has_objects(feature: Any) -> bool:
    """Return whether a type is an object or a list of objects."""
    return isinstance(feature, dict) or (hasattr(feature, "feature") and _has_objects(feature.feature))


def _without(feature: Any, value: Any) -> Any:
    """Return a value of a type without null keys of its objects. JSON that is stored as text stays."""
    if isinstance(feature, dict) and isinstance(value, dict):
        return {key: _without(feature.get(key), inner) for key, inner in value.items() if inner is not None}
    if hasattr(feature, "feature") and isinstance(value, list):
        return [_without(feature.feature, item) for item in value]
    return value
