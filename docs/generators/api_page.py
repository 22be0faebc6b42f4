"""Generate reference/python-api.md: signatures and docstrings of the public functions and classes."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any

from markup import header

import ftcli
from ftcli.task_contract import check_task
from ftcli.tasks import optional_members, protocol
from ftcli.testing import (
    run_on_cpu,
    save_tiny_causal,
    save_tiny_encoder,
    save_tiny_mobilenet,
    save_tiny_resnet,
    save_tiny_vision_language,
    save_tiny_vit,
    tiny_tokenizer,
)
from ftcli.training.step import Step

# Heading -> public names below it. A name that is in no group is added to the last one.
GROUPS = {
    "Training": ["train", "prepare", "steps", "evaluate", "save_checkpoint"],
    "Before a run": ["load_recipe", "check", "plan", "doctor", "preview_data"],
    "After a run": ["write_report", "compare_runs", "export", "generate", "RunFolder"],
    "Comparing hardware": ["compare_profiles", "trace"],
    "For tasks of your own": ["disable_adapter"],
    "Errors": ["InputError", "LaunchError"],
    "More": [],
}
TESTING = [
    check_task,
    run_on_cpu,
    tiny_tokenizer,
    save_tiny_causal,
    save_tiny_encoder,
    save_tiny_vit,
    save_tiny_mobilenet,
    save_tiny_resnet,
    save_tiny_vision_language,
]
# Further methods of tasks, and the classes of the values that tasks have, return or are given.
OPTIONAL_PROTOCOLS: list[type] = [
    optional_members.Showing,
    optional_members.Writes,
    optional_members.Companions,
    optional_members.Draws,
]
TASK_VALUES: list[type] = [protocol.TaskProperties, protocol.Span, protocol.Term, protocol.Seen]
# Classes that users read, and the members that the page lists.
MEMBERS = {"ftcli.RunFolder": ["final", "status", "metrics", "training_rows"]}
HEAD = """\
The command line and Python use the same functions. `import ftcli` is fast: torch is imported when a function needs it.
A path to a recipe may also be the name of a recipe that comes with ftcli.
"""
WIDTH = 100
SECTION = re.compile(r"^(Args|Arguments|Returns|Yields|Raises|Attributes|Examples?):$")


def page() -> str:
    """Return the text of the page."""
    lines = [*header("Python API", "signatures and docstrings"), *HEAD.splitlines()]
    grouped = {name for names in GROUPS.values() for name in names}
    groups = GROUPS | {"More": [name for name in ftcli.__all__ if name not in grouped]}
    for heading, names in groups.items():
        if names:
            lines += ["", f"## {heading}"]
        for name in names:
            lines += _entry(f"ftcli.{name}", getattr(ftcli, name))
            if name == "steps":
                lines += _fields("ftcli.training.step.Step", Step)
    lines += ["", "## Task protocol", *_documented(protocol.Task)]
    for name, method in _methods(protocol.Task):
        lines += _entry(f"Task.{name}", method)
    for optional in OPTIONAL_PROTOCOLS:
        lines += _fields(f"ftcli.tasks.optional_members.{optional.__name__}", optional)
        for name, method in _methods(optional):
            lines += _entry(f"{optional.__name__}.{name}", method)
    for value in TASK_VALUES:
        lines += _fields(f"ftcli.tasks.protocol.{value.__name__}", value)
    lines += ["", "## ftcli.testing"]
    for function in TESTING:
        lines += _entry(f"ftcli.testing.{function.__name__}", function)
    return "\n".join(lines) + "\n"


def _entry(name: str, value: Any) -> list[str]:
    lines = ["", f"### {name}", "", "```python", _signature(name, value), "```", *_documented(value)]
    for member in MEMBERS.get(name, ()):
        attribute = vars(value)[member]
        signature = f"{member}{_signature('', attribute, is_method=True)}" if inspect.isfunction(attribute) else member
        lines += ["", f"- `{signature}`: {(inspect.getdoc(attribute) or '').splitlines()[0]}"]
    return lines


def _fields(name: str, value: type) -> list[str]:
    """Return a class that users read but do not build: its docstring, and its attributes with their types."""
    lines = ["", f"### {name}", *_documented(value), ""]
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    defaults = {field.name: f" = {field.default!r}" for field in fields if field.default is not dataclasses.MISSING}
    for field, annotation in inspect.get_annotations(value).items():
        lines.append(f"- `{field}: {annotation}{defaults.get(field, '')}`")
    for field, member in vars(value).items():
        if function := getattr(member, "func", None):
            lines.append(f"- `{field}: {function.__annotations__['return']}`: {inspect.getdoc(function)}")
    return lines


def _methods(value: type) -> Iterator[tuple[str, Any]]:
    for name, member in vars(value).items():
        if inspect.isfunction(member) and not name.startswith("_"):
            yield name, member


def _signature(name: str, value: Any, *, is_method: bool = False) -> str:
    signature = inspect.signature(value)
    parameters = [item for item in signature.parameters.values() if item.name != "self"]
    pieces: list[str] = []
    for item in parameters:
        if item.kind is item.KEYWORD_ONLY and "*" not in pieces and not any(p.startswith("*") for p in pieces):
            pieces.append("*")
        stars = {item.VAR_POSITIONAL: "*", item.VAR_KEYWORD: "**"}.get(item.kind, "")
        typed = "" if item.annotation is item.empty else f": {_annotation(item.annotation)}"
        default = "" if item.default is item.empty else f"{' = ' if typed else '='}{item.default!r}"
        pieces.append(f"{stars}{item.name}{typed}{default}")
    returned = signature.return_annotation
    after = "" if inspect.isclass(value) or returned is signature.empty else f" -> {_annotation(returned)}"
    line = f"{name}({', '.join(pieces)}){after}"
    if len(line) <= WIDTH or is_method:
        return line
    return "\n".join([f"{name}(", *(f"    {piece}," for piece in pieces), f"){after}"])


def _annotation(value: Any) -> str:
    return value if isinstance(value, str) else getattr(value, "__name__", str(value))


def _documented(value: Any) -> list[str]:
    """Return a docstring as Markdown: sections in bold, arguments and errors as lists, examples as code."""
    lines: list[str] = [""]
    section = ""
    for line in (inspect.getdoc(value) or "").splitlines():
        if heading := SECTION.match(line):
            if section.startswith("Example"):
                lines = [*lines[:-1], "```", ""] if not lines[-1] else [*lines, "```", ""]
            section = heading.group(1)
            lines += [f"**{section}**", ""]
            lines += ["```python"] if section.startswith("Example") else []
        elif section.startswith("Example"):
            if line and not line.startswith("    "):
                lines += ["```", "", line]
                section = ""
            else:
                lines.append(line[4:])
        elif section and line.startswith("    ") and not line.startswith("     "):
            name, colon, meaning = line.strip().partition(": ")
            is_item = section not in ("Returns", "Yields") and colon
            lines.append(f"- `{name}`: {meaning}" if is_item else line.strip())
        elif section and line.startswith("     "):
            lines.append(f"  {line.strip()}")
        else:
            section = section if not line else ""
            lines.append(line)
    return [*lines, "```"] if section.startswith("Example") else lines
