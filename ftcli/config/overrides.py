"""Apply `--set KEY=VALUE` to a recipe's document, and find the overrides that cause a problem. Imports no library."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ftcli.config.yaml_document import Document, Keys, parse_value
from ftcli.runtime.errors import MOST_PROBLEMS, InputError, Problem

FLAG = "--set"


def place_at_overrides(
    problems: Sequence[Problem], overrides: Sequence[str], problems_with: Callable[[list[str]], list[Problem]]
) -> list[Problem]:
    """Return the problems of a recipe. Problems that overrides cause get these overrides as their place.

    The value of an override has its place already. But a rule between keys is reported at a section or at another key,
    which the file may contain. An override causes such a problem if the problem disappears without the override.

    Args:
        problems: All problems of the recipe with its overrides.
        overrides: Texts of the form `a.b=c`.
        problems_with: Function that returns the problems of the recipe with other overrides.
    """
    if len(problems) > MOST_PROBLEMS or all(problem.where.startswith(FLAG) for problem in problems):
        return list(problems)  # each further check of a file with so many mistakes would take seconds
    texts = {problem.what for problem in problems}
    without: dict[str, set[str]] = {}
    for override in overrides:
        others = problems_with([other for other in overrides if other != override])
        without[override] = {problem.what for problem in others}
    placed = []
    for problem in problems:
        # A new problem can prevent the check that found this one. Then the override is not its cause.
        causes = [override for override, rest in without.items() if problem.what not in rest and rest <= texts]
        if causes and not problem.where.startswith(FLAG):
            problem = replace(problem, where=" ".join(f"{FLAG} {override}" for override in causes))
        placed.append(problem)
    return placed


def apply_overrides(
    document: Document, overrides: Sequence[str], exclusive: Mapping[str, str] | None = None
) -> Document:
    """Return a copy of the document with every override applied. Missing sections are created.

    Args:
        document: The document of a recipe or another YAML file.
        overrides: Texts of the form `a.b=c`. Values are read as YAML.
        exclusive: Keys that exclude each other, as key -> other key. Setting one removes the other, unless another
            override has set that one too.

    Returns:
        The changed document. Overrides that cannot be read or applied are in its `problems`.
    """
    if isinstance(overrides, str | Mapping):
        hint = 'give a list, such as overrides=["train.max_steps=4"]'
        raise InputError(f"overrides must be a list of texts KEY=VALUE, not a {type(overrides).__name__}", hint=hint)
    values, places, problems = copy.deepcopy(document.values), dict(document.places), list(document.problems)
    seen: dict[str, str] = {}
    for override in overrides:
        place = f"{FLAG} {override}"
        name, equals, text = override.partition("=")
        name = name.strip()
        if not equals or not all(name.split(".")):
            problems.append(Problem("is not of the form KEY=VALUE", place, f"for instance {FLAG} a.b=c"))
            continue
        if name in seen:
            problems.append(Problem(f"sets {name} again", place, f"keep one of the two; the other is {seen[name]}"))
            continue
        seen[name] = place
        try:
            value = parse_value(text, place)
        except InputError as error:
            problems += error.problems
            continue
        keys: Keys = tuple(name.split("."))
        problem = _write(values, places, keys, value, place)
        if problem is not None:
            problems.append(problem)
        other = (exclusive or {}).get(name)
        if other is not None and not places.get(tuple(other.split(".")), "").startswith(FLAG):
            _remove(values, places, tuple(other.split(".")))
    return Document(document.name, values, places, problems)


def _write(values: dict[str, Any], places: dict[Keys, str], keys: Keys, value: Any, place: str) -> Problem | None:
    """Set one value and its place; return a problem if the key path leads through a value that is not a section."""
    section: Any = values
    for depth, key in enumerate(keys[:-1], start=1):
        if section.get(key) is None:
            section[key] = {}
            places[keys[:depth]] = place
        section = section[key]
        if not isinstance(section, dict):
            name = ".".join(map(str, keys[:depth]))
            kind = "a list" if isinstance(section, list) else "a single value"
            return Problem(f"{name} is {kind}, not a section", place, f"set the whole value: {FLAG} {name}=...")
    for known in [known for known in places if known[: len(keys)] == keys]:
        del places[known]
    section[keys[-1]] = value
    places[keys] = place
    return None


def _remove(values: dict[str, Any], places: dict[Keys, str], keys: Keys) -> None:
    """Remove one value and its place, if the key is present."""
    section: Any = values
    for key in keys[:-1]:
        section = section.get(key)
        if not isinstance(section, dict):
            return
    section.pop(keys[-1], None)
    places.pop(keys, None)
