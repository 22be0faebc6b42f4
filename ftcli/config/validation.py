"""Check plain values against a pydantic model, and describe every problem: key, place and expected value.

The descriptions come from the model's JSON schema, so a key is described once, in its declaration. This module depends
on pydantic and on no recipe, task or profile.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ftcli.config.yaml_document import Keys, parse_value
from ftcli.runtime.errors import MOST_PROBLEMS, InputError, Problem, nearest, shortened

Model = TypeVar("Model", bound=BaseModel)
Schema = dict[str, Any]
_NUMBER = re.compile(r"[-+]?[\d_]*\.?[\d_]+(?:[eE][-+]?\d+)?")

MOST_VALUE = 100  # characters of a key or value in a message

_TYPES = {"integer": "a whole number", "number": "a number", "string": "text", "boolean": "true or false"}
_BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
    "multipleOf": "a multiple of {}",
}
# Whether a number keeps to a bound.
_WITHIN: dict[str, Callable[[float, float], bool]] = {
    "minimum": operator.ge,
    "exclusiveMinimum": operator.gt,
    "maximum": operator.le,
    "exclusiveMaximum": operator.lt,
    "multipleOf": lambda value, factor: value % factor == 0,
}


def validate(
    model: type[Model],
    values: Any,
    *,
    prefix: Keys = (),
    where: Callable[[Keys], str] = lambda keys: "",
    hint_for: Callable[[Keys, list[str]], str] = lambda keys, known: nearest(str(keys[-1]), known),
) -> tuple[Model | None, list[Problem]]:
    """Check values against a pydantic model.

    Args:
        model: The model.
        values: Plain values, as read from YAML.
        prefix: Key path of the values in the document.
        where: Function that returns the place (`file:line`) of a key path.
        hint_for: Function that returns the hint for an unknown key, from its path and the known keys of its section.

    Returns:
        (instance of the model, no problems), or (None, every problem).
    """
    try:
        return model.model_validate(values), []
    except ValidationError as error:
        errors = error.errors(include_url=False)
    schema = _schema_of(model)
    problems: dict[Keys, Problem] = {}
    missing: dict[Keys, list[str]] = {}  # path of a missing key -> the keys that it requires, if it is a section
    for item in errors[: MOST_PROBLEMS + 1]:  # suggestions for thousands of keys would take minutes
        keys, node, section = _locate(item["loc"], schema)
        path = prefix + keys
        if item["type"] == "extra_forbidden":
            known = list(section.get("properties", {}))
            problem = Problem(_unknown(path), where(path), hint_for(path, known) or f"known: {', '.join(known)}")
        elif item["type"] == "missing":
            problem = Problem(f"{dotted(path)} is missing", where(path[:-1]), _need(path, node, schema))
            missing[path] = _required(node, schema)
        elif item["type"] == "value_error":
            message = item["msg"].removeprefix("Value error, ")
            problem = Problem(f"{dotted(path)}: {message}" if path else message, where(path))
        else:
            must = describe_value(node, schema)
            expected = f"and must be {must}" if must else f"which is invalid: {item['msg']}"
            hint = _hint(item["input"], node, schema)
            problem = Problem(f"{dotted(path)} is {_show(item['input'])}, {expected}", where(path), hint)
        problems.setdefault(path, problem)  # pydantic reports a union once for each of its members
    # A value with an invalid item inside is reported by that item only, and a misspelt key is not missing, too.
    left_out = {path[:end] for path in problems for end in range(len(prefix) + 1, len(path))}
    for path, problem in problems.items():
        if path and problem.what == _unknown(path):
            left_out |= {other for other, required in missing.items() if _is_meant(other, required, path, problem.hint)}
    return None, [problem for path, problem in problems.items() if path not in left_out]


@cache
def _schema_of(model: type[BaseModel]) -> Schema:
    """Return the JSON schema of a model."""
    return model.model_json_schema()


def describe_value(node: Schema, schema: Schema) -> str:
    """Return what a value must be, as text; an empty string if every value is valid.

    Args:
        node: The value's node of the JSON schema.
        schema: The whole JSON schema, for references.
    """
    texts = []
    for branch in branches(node, schema):
        if "const" in branch or "enum" in branch:
            choices = branch.get("enum", [branch.get("const")])
            texts.append(("one of " if len(choices) > 1 else "") + ", ".join(map(str, choices)))
        elif branch.get("type") == "array":
            items = describe_value(branch.get("items", {}), schema)
            texts.append(f"a list{_length(branch)}" + (f" of {items}" if items else ""))
        elif "properties" in branch:
            texts.append(f"a section with the keys {', '.join(branch['properties'])}")
        elif branch.get("type") == "object":
            texts.append("a mapping of names to values" + (", not empty" if branch.get("minProperties") else ""))
        elif branch.get("type") == "null":
            texts.append("null")
        elif branch.get("type") in _TYPES:
            bounds = [text.format(_plain(branch[key])) for key, text in _BOUNDS.items() if key in branch]
            kind = _TYPES[branch["type"]] + (", not empty" if branch.get("minLength") else "")
            texts.append(kind + (", " + " and ".join(bounds) if bounds else ""))
    return (", or " if any("," in text for text in texts) else " or ").join(texts)


def branches(node: Schema, schema: Schema) -> Iterator[Schema]:
    """Yield the alternatives that a node of the schema allows. Follows references and splits unions.

    Args:
        node: A node of the JSON schema.
        schema: The whole JSON schema, for references.
    """
    if "$ref" in node:
        yield from branches(schema["$defs"][node["$ref"].rpartition("/")[2]], schema)
    elif "anyOf" in node:
        for branch in node["anyOf"]:
            yield from branches(branch, schema)
    elif "allOf" in node:
        yield from branches(node["allOf"][0], schema)
    else:
        yield node


def dotted(keys: Keys) -> str:
    """Return a key path with dots, as on the command line."""
    return ".".join(shortened(str(key), MOST_VALUE) for key in keys)


def _locate(location: tuple[int | str, ...], schema: Schema) -> tuple[Keys, Schema, Schema]:
    """Return (key path, its node, the node of its section) without the names that pydantic gives to union members."""
    keys: list[int | str] = []
    node = section = schema
    for step in location:
        after: Schema | None = None
        if "anyOf" in node and any(_names_member(step, branch) for branch in branches(node, schema)):
            continue
        for branch in branches(node, schema):
            if isinstance(step, int) and "items" in branch:
                after = branch["items"]
            elif step in branch.get("properties", {}):
                after, section = branch["properties"][step], branch
            elif isinstance(branch.get("additionalProperties"), dict):
                after = branch["additionalProperties"]
            elif "properties" in branch:
                after, section = {}, branch
        if after is not None:
            keys.append(step)
            node = after
    return tuple(keys), node, section


def _names_member(step: int | str, branch: Schema) -> bool:
    """Return whether a step of a pydantic location names a member of a union: a section, list, mapping or literal."""
    is_section = "properties" in branch and step == branch.get("title") and step not in branch["properties"]
    start = {"array": "list[", "object": "dict["}.get(branch.get("type", ""), "")
    if "const" in branch or "enum" in branch:
        start = "literal["
    return is_section or bool(isinstance(step, str) and start and step.startswith(start))


def _unknown(path: Keys) -> str:
    """Return the message for an unknown key."""
    return f"unknown key '{shortened(str(path[-1]), MOST_VALUE)}'" + (f" in {dotted(path[:-1])}" if path[:-1] else "")


def _is_meant(missing: Keys, required: list[str], unknown: Keys, hint: str) -> bool:
    """Return whether the hint for an unknown key names a missing key: in its section, or by its path in the recipe.

    Args:
        missing: Path of the missing key.
        required: Keys that the missing key requires, if it is a section. One that is named stands for the section.
        unknown: Path of the unknown key.
        hint: Its hint.
    """
    if missing[:-1] == unknown[:-1] and f"'{missing[-1]}'" in hint:
        return True
    paths = [missing] + [(*missing, key) for key in required if len(required) == 1]
    return any(re.search(rf"(?<![\w.]){re.escape(dotted(path))}(?![\w.])", hint) for path in paths)


def _required(node: Schema, schema: Schema) -> list[str]:
    """Return the keys that a section requires; empty for a key that is no section."""
    return next((branch["required"] for branch in branches(node, schema) if branch.get("required")), [])


def _need(path: Keys, node: Schema, schema: Schema) -> str:
    """Return the hint for a missing key: its description, or the keys that a missing section requires."""
    if required := _required(node, schema):
        return f"write at least {', '.join(dotted((*path, key)) for key in required)}"
    return f"{describe_value(node, schema)}. {node.get('description', '')}".strip()


def _plain(number: float) -> str:
    """Return a number as text, without a decimal point if it is whole."""
    return str(int(number)) if float(number).is_integer() else f"{number:g}"


def _show(value: Any) -> str:
    """Return a value as text for a message."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"'{shortened(value, MOST_VALUE)}' (text)" if value else "'' (text)"
    if isinstance(value, dict):
        return "a section" if value else "an empty section"
    if isinstance(value, list):
        return f"a list of {len(value)} item{'s' * (len(value) > 1)}" if value else "an empty list"
    return shortened(str(value), MOST_VALUE)


def _hint(value: Any, node: Schema, schema: Schema) -> str:
    """Return a hint with the value that the user probably meant; an empty string if there is none."""
    types = {node.get("type"), *(branch.get("type") for branch in node.get("anyOf", []) if "const" not in branch)}
    if value is None:
        return ""
    if isinstance(value, str):
        if "enum" in node:
            return nearest(value, map(str, node["enum"]))
        if "boolean" in types and value.lower() in ("yes", "on", "no", "off", "true", "false"):
            return f"write {'true' if value.lower() in ('yes', 'on', 'true') else 'false'}"
        if types & {"integer", "number"} and _NUMBER.fullmatch(value.strip()):
            return "write it as a plain number, without quotes or underscores"
    if isinstance(value, float) and "integer" in types and value.is_integer():
        return f"write {int(value)}"
    if isinstance(value, bool | int | float) and "string" in types and not types & {"integer", "number"}:
        return "put it in quotes to make it text"
    if not isinstance(value, list) and _is_valid([value], node, schema):
        written = _in_list(value)
        return f"write {written}" if len(written) <= MOST_VALUE else "write a list"
    return ""


def _in_list(value: Any) -> str:
    """Return a list of one value as YAML, with quotes around text that YAML would split or convert."""
    if isinstance(value, str):
        with suppress(InputError):
            if parse_value(f"[{value}]", "") == [value]:
                return f"[{value}]"
    return json.dumps([value], ensure_ascii=False)


def _is_valid(value: Any, node: Schema, schema: Schema) -> bool:
    """Return whether a node of the schema allows a plain value, or a list of plain values. A section is neither."""
    return any(_fits(value, branch, schema) for branch in branches(node, schema))


def _fits(value: Any, branch: Schema, schema: Schema) -> bool:
    """Return whether one alternative of a node allows a value."""
    if isinstance(value, dict):
        return False
    if "const" in branch or "enum" in branch:
        return value in branch.get("enum", [branch.get("const")])
    kind = branch.get("type")
    if isinstance(value, list):
        is_long_enough = branch.get("minItems", 0) <= len(value) <= branch.get("maxItems", len(value))
        items = branch.get("items", {})
        return kind == "array" and is_long_enough and all(_is_valid(item, items, schema) for item in value)
    if isinstance(value, str):
        return kind in (None, "string") and len(value) >= branch.get("minLength", 0)
    if isinstance(value, bool):
        return kind in (None, "boolean")
    if kind in (None, "number") or (kind == "integer" and isinstance(value, int)):
        return all(is_within(value, branch[bound]) for bound, is_within in _WITHIN.items() if bound in branch)
    return False


def _length(branch: Schema) -> str:
    """Return the allowed length of a list, as text."""
    least, most = branch.get("minItems"), branch.get("maxItems")
    if most is None:
        return f" with at least {least} item{'s' if least > 1 else ''}, each" if least else ""
    return f" of exactly {least} items, each" if least == most else f" with {least or 0} to {most or 'any'} items, each"
