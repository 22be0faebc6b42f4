"""Keys of a recipe as dotted paths, to compare two recipes. Light: never imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from ftcli.config.section import MACHINE_HINT


def machine_hints(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted path of every key that is declared as a machine hint, which does not affect the loss."""
    for name, field in section.model_fields.items():
        if MACHINE_HINT in (field.description or ""):
            yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from machine_hints(field.annotation, f"{prefix}{name}.")


def flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for every value of nested mappings, and of lists of mappings."""
    for key, value in values.items():
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            value = {str(index): item for index, item in enumerate(value)}
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def format_value(values: dict[str, Any], key: str) -> str:
    """Return the value of a key for a message."""
    return repr(values[key]) if key in values else "absent"
