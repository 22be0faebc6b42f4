"""`--set a.b=c`: the one door from the command line into a document.

The value is read by the rules of a file. Which keys exist is not known here: an unknown one is found
afterwards, by the same check as in a file, and told at the place `--set a.b=c`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from .documents import Document, Keys, parse_value
from .errors import InputError, Problem

FLAG = "--set"


def apply_overrides(document: Document, overrides: Sequence[str], rivals: Mapping[str, str] | None = None) -> Document:
    """Return the document with every override `a.b=c` written into it; missing sections are made.

    `rivals` names keys that exclude each other: setting one removes the other, unless that was set by an
    override too. What cannot be read or written becomes a problem of the returned document.
    """
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
        rival = (rivals or {}).get(name)
        if rival is not None and not places.get(tuple(rival.split(".")), "").startswith(FLAG):
            _remove(values, places, tuple(rival.split(".")))
    return Document(document.name, values, places, problems)


def _write(values: dict[str, Any], places: dict[Keys, str], keys: Keys, value: Any, place: str) -> Problem | None:
    """Write one value and its place; returns why it cannot be done."""
    section: Any = values
    for depth, key in enumerate(keys[:-1], start=1):
        if section.get(key) is None:
            section[key] = {}
            places[keys[:depth]] = place
        section = section[key]
        if not isinstance(section, dict):
            name = ".".join(map(str, keys[:depth]))
            kind = "a list" if isinstance(section, list) else "a single value"
            return Problem(f"{name} is {kind}, not a section", place, f"set it whole: {FLAG} {name}=...")
    for known in [known for known in places if known[: len(keys)] == keys]:
        del places[known]
    section[keys[-1]] = value
    places[keys] = place
    return None


def _remove(values: dict[str, Any], places: dict[Keys, str], keys: Keys) -> None:
    section: Any = values
    for key in keys[:-1]:
        section = section.get(key)
        if not isinstance(section, dict):
            return
    section.pop(keys[-1], None)
    places.pop(keys, None)
