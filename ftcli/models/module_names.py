"""Match names of modules by their endings, as the adapter section of a recipe and peft do. Light."""

from __future__ import annotations

from collections.abc import Iterable


def ends_with(ending: str, names: Iterable[str]) -> bool:
    """Return whether any name is `ending` or ends with a dot and `ending`.

    Args:
        ending: An ending of a module's name.
        names: Names of modules.
    """
    return any(f".{name}".endswith(f".{ending}") for name in names)


def is_in(name: str, endings: Iterable[str]) -> bool:
    """Return whether a name ends with one of `endings`, or is inside of a module whose name does.

    Args:
        name: Name of a module.
        endings: Endings of names of modules.
    """
    return any(f".{ending}." in f".{name}." for ending in endings)
