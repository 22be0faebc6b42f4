"""Read YAML files as plain Python values, with the line of every value for error messages.

Scalars follow YAML 1.2's core schema: 1e-4 is a number, and only true and false are booleans (on, off, yes and NO are
text). A duplicate key is a problem. This module does not depend on recipes or profiles.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ftcli.runtime.errors import InputError, Problem, shortened
from ftcli.runtime.reader_errors import reason
from ftcli.runtime.whole_numbers import whole_number

Keys = tuple[str | int, ...]  # keys and list positions from the top of the document

MOST_BYTES = 2**20  # size of a file; a larger file is probably data, and parsing it would take minutes
MOST_VALUES = 20_000  # keys, values and list items of a file
MOST_DEPTH = 100  # nested sections
MOST_INTEGER = 2**63  # integers have 64 bits in other programs, and so have sizes in ftcli

_SURROGATE = re.compile("[\ud800-\udfff]")
_TAG = "tag:yaml.org,2002:"
_SCALARS = [  # (tag, pattern, possible first characters); "" is an empty value
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", [*"-+0123456789"]),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        [*"-+.0123456789"],
    ),
]


class _Loader(yaml.SafeLoader):
    """Builds nodes with the types of `_SCALARS`."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    values = depth = 0  # number of nodes, and nesting of the current one

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose a node; raise an error for aliases and for too large documents."""
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, "aliases are not supported: repeat the value", mark)
        self.values += 1
        if self.values > MOST_VALUES or self.depth > MOST_DEPTH:
            problem = f"more than {MOST_VALUES:,} values" if self.values > MOST_VALUES else "nested too deeply"
            raise yaml.composer.ComposerError(None, None, problem, self.peek_event().start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes every text that YAML 1.1 or 1.2 would read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return True, so that repeated values are written in full."""
        return True


for _name, _pattern, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _name, re.compile(f"^(?:{_pattern})$"), _first)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Return the node of a text. Unusual line breaks are escaped, because a reader would replace them by spaces."""
    style = '"' if set(text) & set("\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


@dataclass(frozen=True)
class Document:
    """The mapping in a YAML file."""

    name: str  # of the file, for messages
    values: dict[str, Any]
    places: dict[Keys, str] = field(default_factory=dict)  # key path -> `file:line`
    problems: list[Problem] = field(default_factory=list)  # such as duplicate keys

    def where(self, keys: Sequence[str | int]) -> str:
        """Return `file:line` of a key path, or of its nearest parent with a line.

        Args:
            keys: The key path.
        """
        for length in range(len(keys), -1, -1):
            place = self.places.get(tuple(keys[:length]))
            if place is not None:
                return place
        return self.name


def read_document(path: str | Path) -> Document:
    """Read a file whose top level is a mapping. An empty file is an empty mapping.

    Args:
        path: Path of the file.

    Returns:
        The document. Its `problems` include duplicate keys.

    Raises:
        InputError: The file is missing, unreadable, too large or not YAML.
    """
    name = str(path)
    try:
        with Path(path).open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            hint = "is it a data file? write its path into data.train or data.eval"
            raise InputError(f"is larger than {MOST_BYTES // 2**20} MiB", where=name, hint=hint)
        text = content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except FileNotFoundError:
        raise InputError("no such file", where=name) from None
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        message, where = f"is not UTF-8 text: byte {error.start} cannot be read", f"{name}:{line}"
        raise InputError(message, where, "save it as UTF-8") from None
    except OSError as error:
        raise InputError(f"cannot be read: {reason(error)}", where=name) from None
    if name.endswith(".json"):
        text = text.replace("\t", " ")  # JSON may be indented by tabs, YAML may not
    return parse_document(text, name)


def parse_document(text: str, name: str) -> Document:
    """Parse a YAML text whose top level is a mapping.

    Args:
        text: The text.
        name: Name of the file in messages.

    Raises:
        InputError: The text is not YAML, or not a mapping.
    """
    node = _compose(text, name)
    if node is None:
        return Document(name, {}, {(): f"{name}:1"})
    if not isinstance(node, yaml.MappingNode):
        hint = "write lines of the form `key: value`"
        raise InputError("the file is not a mapping", where=f"{name}:{_line(node)}", hint=hint)
    reader = _Reader(name)
    values = reader.construct(node, ())
    return Document(name, values, {(): f"{name}:1", **reader.places}, reader.problems)


def parse_value(text: str, name: str) -> Any:
    """Parse one YAML value, with the rules of a file.

    Args:
        text: The text.
        name: Place of the text in messages.

    Raises:
        InputError: The text is not YAML.
    """
    node = _compose(text, name, lines=False)
    if node is None:
        return None
    reader = _Reader(name, lines=False)
    value = reader.construct(node, ())
    if reader.problems:
        raise InputError(reader.problems)
    return value


def dump_document(values: dict[str, Any]) -> str:
    """Return values as YAML text. ftcli and YAML 1.1 readers read the same values from it.

    Args:
        values: Plain values. Keys keep their order.
    """
    return str(yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100))


def by_place(problem: Problem) -> tuple[bool, int]:
    """Return the sort key of a problem: by line, and problems without a line last.

    Args:
        problem: The problem.
    """
    line = whole_number(problem.where.rpartition(":")[2])
    return line is None, line or 0


def _compose(text: str, name: str, *, lines: bool = True) -> Any:
    """Return the root node of a YAML text; None if it is empty. Raises `InputError` for invalid YAML."""
    try:
        loader = _Loader(text)
        return loader.get_single_node()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        place = f"{name}:{mark.line + 1}" if lines and mark is not None else name
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        context = getattr(error, "context", None)
        hint = next((hint for mistake, hint in _MISTAKES.items() if mistake in problem), "") if lines else ""
        message = f"not valid YAML: {problem}" + (f" ({context})" if context else "")
        raise InputError(message, where=place, hint=hint) from None
    except RecursionError:
        raise InputError("not valid YAML: nested too deeply", where=name) from None


# Messages of PyYAML for the commonest mistakes -> hints.
_MISTAKES = {
    "mapping values are not allowed here": "is a colon missing in the line above, or is this one indented too far?",
    "expected <block end>": "keys of one section have the same indentation: is this line indented like those above?",
    "could not find expected ':'": "a key is followed by a colon and a space: is one missing in the line above?",
    "cannot start any token": "indent with spaces, not with tabs, and quote text that begins with a special character",
}


@dataclass
class _Reader:
    """Converts nodes to plain values, and collects the places of key paths and the problems."""

    name: str
    lines: bool = True
    places: dict[Keys, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def construct(self, node: Any, keys: Keys) -> Any:
        """Return the plain value of the node at a key path."""
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, keys)
        if isinstance(node, yaml.SequenceNode):
            paths: list[Keys] = [(*keys, index) for index in range(len(node.value))]
            self.places |= {path: self._place(item) for path, item in zip(paths, node.value, strict=True)}
            return [self.construct(item, path) for path, item in zip(paths, node.value, strict=True)]
        return self._scalar(node)

    def _mapping(self, node: Any, keys: Keys) -> dict[str, Any]:
        """Return the mapping of a node; a key that is not text or a duplicate becomes a problem."""
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            place = self._place(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.append(Problem("a key is a list or a mapping", place, "keys are plain text"))
                continue
            key, path = str(key_node.value), (*keys, str(key_node.value))
            shown = shortened(key, 60)
            if key_node.tag not in (_TAG + "str", _TAG + "bool", _TAG + "null"):
                self.problems.append(Problem(f"the key {shown} is not text", place, "put it in quotes"))
            elif path in self.places:
                name = ".".join(map(str, (*keys, shown)))
                line = f", first given in line {self.places[path].rpartition(':')[2]}" if self.lines else ""
                self.problems.append(Problem(f"duplicate key '{name}'{line}", place, "keep one of the two"))
            else:
                self.places[path] = place
                mapping[key] = self.construct(value_node, path)
        return mapping

    def _scalar(self, node: Any) -> Any:
        """Return the value of a scalar node; an invalid one becomes a problem and None."""
        text, tag = str(node.value), str(node.tag).removeprefix(_TAG)
        if tag == "str":
            if not text.isascii() and _SURROGATE.search(text):
                message = "this text contains half of a surrogate pair"
                self.problems.append(Problem(message, self._place(node), "write the character itself, or \\UXXXXXXXX"))
                return None
            return text
        pattern = next((pattern for name, pattern, _ in _SCALARS if name == tag), None)
        if pattern is None or not re.fullmatch(pattern, text):
            message = f"'{shortened(text, 60)}' with the tag {shortened(str(node.tag), 60)} is not supported"
            self.problems.append(Problem(message, self._place(node), "write a plain value"))
            return None
        if tag == "null":
            return None
        if tag == "bool":
            return text.lower() == "true"
        if tag == "int":
            # Python refuses to read more than 4,300 decimal digits.
            value = int(text, {"0o": 8, "0x": 16}.get(text[:2], 10)) if len(text) < 100 else MOST_INTEGER
            if not -MOST_INTEGER <= value < MOST_INTEGER:
                message = f"the number {shortened(text, 60)} is too large"
                self.problems.append(Problem(message, self._place(node), "whole numbers have at most 64 bits"))
                return None
            return value
        return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))

    def _place(self, node: Any) -> str:
        """Return `file:line` of a node."""
        return f"{self.name}:{_line(node)}" if self.lines else self.name


def _line(node: Any) -> int:
    """Return the line of a node, counted from 1."""
    return int(node.start_mark.line) + 1
