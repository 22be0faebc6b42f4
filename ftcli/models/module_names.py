"""Match names of modules by their endings, as the adapter section of a recipe does. Light."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftcli.config.recipe_model import Adapter

PREFIX_OF_PEFT = "base_model.model."  # of all names in a model with an adapter


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


def is_saved(name: str, endings: Iterable[str]) -> bool:
    """Return whether `modules_to_save` means a module, or one around it.

    peft compares the ends of names without a dot in front, so `norm` means `input_layernorm` too.

    Args:
        name: Name of a module.
        endings: Endings of names of modules.
    """
    parts = name.split(".")
    around = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return any(module.endswith(ending) for module in around for ending in endings)


def describe_saved(model: Any, section: Adapter) -> list[str]:
    """Return a log line for each name in `modules_to_save` that means modules whose last part is another name.

    Args:
        model: The model of a run, not sharded by a wrapper of its own.
        section: The adapter section of the recipe.
    """
    if not section.modules_to_save:
        return []
    from peft.utils.other import ModulesToSaveWrapper

    wrapped = [name for name, module in model.named_modules() if isinstance(module, ModulesToSaveWrapper)]
    saved = [name.removeprefix(PREFIX_OF_PEFT) for name in wrapped]
    lines = []
    for ending in section.modules_to_save:
        others = [name for name in saved if name.endswith(ending) and not ends_with(ending, [name])]
        if others:
            named = next((name for name in saved if ends_with(ending, [name])), ending)
            is_one = sum(name.endswith(named) for name in saved) == 1
            lines.append(
                f"adapter.modules_to_save: {ending} means every module whose name ends so, also {others[0]} "
                f"({len(others)} others)" + (f"; {named} would mean that one only" if is_one else "")
            )
    return lines
