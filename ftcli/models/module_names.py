"""Match names of modules by their endings, as the adapter section of a recipe does. Light."""

from __future__ import annotations

from collections.abc import Collection, Iterable


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


def endings_for_peft(endings: Iterable[str], names: Collection[str]) -> list[str]:
    """Return endings with which peft's `modules_to_save` finds the modules that `ends_with` finds.

    peft compares the ends of names without a dot: `norm` means `input_layernorm` too. An ending that matches more than
    it should is replaced by full names. All names in peft's model begin with `base_model.model.`.

    Args:
        endings: Endings of names of modules.
        names: Names of all modules of the model without adapter.
    """
    found = []
    for ending in endings:
        meant = [name for name in names if ends_with(ending, [name])]
        if meant == [name for name in names if name.endswith(ending)]:
            found.append(ending)
        else:
            found += [name if _is_unique(name, names) else f"model.{name}" for name in meant]
    return found


def _is_unique(ending: str, names: Collection[str]) -> bool:
    """Return whether one name has an ending, with or without a dot before it."""
    return sum(name.endswith(ending) for name in names) == 1
