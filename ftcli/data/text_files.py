"""Parse rows from the bytes of text files: .jsonl, .json, .csv, .tsv and .txt.

Values do not change: JSON values keep their types, and fields of a table are text. Only an empty field of a table is a
missing value. Invalid content becomes an `UnreadableRow` in its place, so that every row keeps its number. This module
opens no file and imports no library.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice, repeat
from typing import Any, BinaryIO, NamedTuple

from ftcli.data.chat.json_values import HALF_PAIR, has_half_pair, json_error, may_have_half_pair
from ftcli.runtime.errors import RowError

Row = dict[str, Any]
LONGEST_LINE = 2**26  # bytes of a line, characters of a field; a longer one is an error, to limit memory
ONE_A_LINE = "a .jsonl file has one JSON object a line"
TABLES = (".csv", ".tsv")
SEPARATORS = ",;\t|"  # of a .csv file: the first of these that its header contains
QUOTES = 'a field that begins with a quote ends with one, and a quote in it is written ""'
NOT_UTF8 = re.compile("[\udc80-\udcff]")  # how Python decodes such bytes with errors="surrogateescape"
LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")  # a lone carriage return ends a line of a table too
QUOTED = re.compile(r'"[^"]*"')
WHITE = re.compile(r"[\s,]*")  # between the rows of a JSON file


class UnreadableRow(RowError):
    """An error for content that is not a row. `line` is its first line, counted from 1; 0 if unknown."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


class EmptyLine(UnreadableRow):
    """An empty line of a .txt file. It is counted like every line, and skipped."""

    def __init__(self, line: int = 0) -> None:
        super().__init__("is empty", line)


class Format(NamedTuple):
    """The reader of a file format: `split` finds the rows, and `parse` parses one. Skipped rows are not parsed."""

    split: Callable[[BinaryIO], Iterator[Any]]
    parse: Callable[[Any], Row | RowError]


class Layout(NamedTuple):
    """The separator of a table, and the key of the rows in a JSON file. None for the default of the suffix."""

    separator: str | None = None
    field: str | None = None


PLAIN = Layout()


def reader_of(suffix: str, layout: Layout = PLAIN) -> Format:
    """Return the reader of a file format.

    Args:
        suffix: Suffix of the file's name, one of `READERS`.
        layout: Separator of a table, or key of a JSON file.
    """
    if layout.field is not None:
        return Format(partial(_split_json, field=layout.field), _parsed)
    if layout.separator is not None and suffix in TABLES:
        return Format(partial(_split_table, suffix=suffix, separator=layout.separator), _parsed)
    return READERS[suffix]


def parse_rows(file: BinaryIO, suffix: str, layout: Layout = PLAIN) -> Iterator[Row | RowError]:
    """Yield the rows of an open file.

    Args:
        file: File opened for reading bytes.
        suffix: Suffix of the file's name, one of `READERS`.
        layout: Separator of a table, or key of a JSON file, if it is not the default of the suffix.

    Yields:
        A row, or an `UnreadableRow` for content that is not a row.
    """
    reader = reader_of(suffix, layout)
    return (reader.parse(unit) for unit in (_split_documents(file) if suffix == ".txt" else reader.split(file)))


def split_rows(file: BinaryIO, suffix: str) -> Iterator[Any]:
    """Yield one item for every row of an open file. Rows are parsed only if they cannot be counted otherwise.

    Args:
        file: File opened for reading bytes.
        suffix: Suffix of the file's name, one of `READERS`.
    """
    return _split_documents(file) if suffix == ".txt" else READERS[suffix].split(file)


def read_header(file: BinaryIO, suffix: str) -> tuple[list[str] | None, bool]:
    """Read the start of an open .csv or .tsv file.

    Returns:
        (column names; None if it has none, or its first row is not text), and whether anything follows them.
    """
    lines = _Lines(file)
    records = [fields for _, fields in islice(_records(lines, suffix), 2)]
    if lines.is_bad or not records or isinstance(records[0], UnreadableRow):
        return None, True
    return _column_names(records[0]), len(records) > 1


def json_objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects at the start of a text, up to the first other content."""
    decoder, at = json.JSONDecoder(), 0
    try:
        while True:
            row, at = decoder.raw_decode(text, WHITE.match(text, at).end())  # type: ignore[union-attr]
            if not isinstance(row, dict):
                return
            yield row
    except (ValueError, RecursionError):
        return


def _split_lines(file: BinaryIO) -> Iterator[tuple[int, bytes] | UnreadableRow]:
    """Yield (number, line) without line ends; an error for a line that is too long."""
    number = 0
    while line := file.readline(LONGEST_LINE):
        number += 1
        if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
            while line and not line.endswith(b"\n"):
                line = file.readline(LONGEST_LINE)
            yield UnreadableRow(f"is longer than {LONGEST_LINE // 2**20} MiB", number)
        else:
            yield number, line.rstrip(b"\r\n")


def _split_filled_lines(file: BinaryIO) -> Iterator[tuple[int, bytes] | UnreadableRow]:
    """Yield the lines with more than white space."""
    return (line for line in _split_lines(file) if isinstance(line, UnreadableRow) or line[1].strip())


def _split_text_lines(file: BinaryIO) -> Iterator[tuple[int, bytes] | UnreadableRow]:
    """Yield the lines of a .txt file, empty ones too. A single carriage return also ends a line."""
    for unit in _split_lines(file):
        if isinstance(unit, UnreadableRow):
            yield unit
        else:
            yield from ((unit[0], part) for part in unit[1].split(b"\r"))


def _split_documents(file: BinaryIO) -> Iterator[tuple[int, bytes] | UnreadableRow]:
    """Yield the lines of a .txt file with more than white space."""
    return (unit for unit in _split_text_lines(file) if isinstance(unit, UnreadableRow) or unit[1].strip())


def _parse_json(unit: tuple[int, bytes] | UnreadableRow) -> Row | RowError:
    """Parse a line of a .jsonl file."""
    if isinstance(unit, UnreadableRow):
        return unit
    number, line = unit
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return UnreadableRow("is not UTF-8 text", number)
    except (ValueError, RecursionError) as error:
        return UnreadableRow(f"is not JSON: {json_error(error)}", number)
    return _json_row(row, number, has_surrogates=may_have_half_pair(line))


def _json_row(row: Any, number: int, *, has_surrogates: bool) -> Row | RowError:
    """Return a JSON value as a row, or the error if it is not one."""
    if not isinstance(row, dict):
        return UnreadableRow("is not a JSON object", number)
    if has_surrogates and has_half_pair(row):
        return UnreadableRow(HALF_PAIR, number)
    return row


def _parse_text(unit: tuple[int, bytes] | UnreadableRow) -> Row | RowError:
    """Return a line of a .txt file as a row."""
    if isinstance(unit, UnreadableRow):
        return unit
    number, line = unit
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError:
        return UnreadableRow("is not UTF-8 text", number)
    if "\0" in text and 4 * text.count("\0") >= len(text):  # ASCII in 16 bits is valid UTF-8: every other one is NUL
        return UnreadableRow("has a NUL for every few characters: is it UTF-16 text?", number)
    return {"text": text} if text.strip() else EmptyLine(number)


def _split_json(file: BinaryIO, field: str | None = None) -> Iterator[Row | RowError]:
    """Yield the rows of a .json file: the objects of its list, or of the list under a key, or objects in sequence."""
    raw = file.read()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        yield UnreadableRow("is not UTF-8 text", raw.count(b"\n", 0, error.start) + 1)
        return
    has_surrogates = may_have_half_pair(text)
    try:
        for value in _json_values(text) if field is None else _json_values_of(text, field):
            yield _json_row(value, 0, has_surrogates=has_surrogates)
    except (ValueError, RecursionError) as error:
        yield UnreadableRow(f"is not JSON: {json_error(error)}", getattr(error, "lineno", 0))


def _json_values(text: str) -> Iterator[Any]:
    """Yield the values of a JSON list, or of a sequence of JSON values. A text in a list becomes a row of one column.

    Raises `ValueError` for text that is not JSON.
    """
    if text.lstrip().startswith("["):
        for value in json.loads(text):
            yield {"text": value} if isinstance(value, str) else value
        return
    decoder, at, end = json.JSONDecoder(), 0, len(text.rstrip())
    while (at := WHITE.match(text, at).end()) < end:  # type: ignore[union-attr]
        value, at = decoder.raw_decode(text, at)
        yield value


def _json_values_of(text: str, field: str) -> Iterator[Any]:
    """Yield the rows of the list under a key of a JSON object; raise `ValueError` if there is no such list."""
    content = json.loads(text)
    values = content.get(field) if isinstance(content, dict) else None
    if not isinstance(values, list):
        raise ValueError(f"no list under the key {field!r}")
    for value in values:
        yield {"text": value} if isinstance(value, str) else value


class _Lines:
    """Iterates over the lines of a table as text, with line ends.

    Bytes that are not UTF-8 become surrogates, and set `is_bad`.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._lines = chain.from_iterable(LINE.findall(line) for line in iter(file.readline, b""))
        self.number, self.last, self.is_bad = 0, "", False

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        raw = next(self._lines)
        line = raw.decode("utf-8", errors="surrogateescape")
        self.number, self.last = self.number + 1, line.removeprefix("\ufeff") if self.number == 0 else line
        self.is_bad = self.is_bad or (not raw.isascii() and NOT_UTF8.search(line) is not None)
        return self.last


def _records(
    lines: _Lines, suffix: str, separator: str | None = None
) -> Iterator[tuple[int, list[str] | UnreadableRow]]:
    """Yield (number of its first line, fields) of every record of a table, header first. Empty lines are skipped."""
    csv.field_size_limit(LONGEST_LINE)
    first = next((line for line in lines if line.strip()), None)
    if first is None:
        return
    bare = QUOTED.sub("", first)  # a name in quotes may contain a separator
    if separator is None:
        separator = "\t" if suffix == ".tsv" else next((mark for mark in SEPARATORS if mark in bare), ",")
    # Without strict, Python drops the quotes of `"so" he said`, and reads everything after an open quote as one field.
    reader, begin = csv.reader(chain([first], lines), delimiter=separator, strict=True), lines.number
    while True:
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield begin, UnreadableRow(f"is not a row of a table: {error}; {QUOTES}", begin)
        else:
            is_blank = begin == lines.number and not lines.last.strip() and separator not in lines.last
            if fields and not (is_blank and separator in bare):
                yield begin, fields
        begin = lines.number + 1


def _column_names(header: list[str]) -> list[str]:
    """Return the names of a header. As in pandas, empty and repeated names get a number."""
    names: list[str] = []
    for index, name in enumerate(header):
        unique = name or f"Unnamed: {index}"
        repetitions = sum(1 for earlier in header[:index] if earlier == name)
        names.append(unique if not repetitions or not name else f"{unique}.{repetitions}")
    return names


def _split_table(file: BinaryIO, suffix: str, separator: str | None = None) -> Iterator[Row | RowError]:
    """Yield the rows of a table below its header. Missing fields at the end of a row are None."""
    lines = _Lines(file)
    records = _records(lines, suffix, separator)
    names: list[str] | None = None
    for number, fields in records:
        if isinstance(fields, UnreadableRow):
            yield fields
        elif lines.is_bad:
            yield UnreadableRow("is not UTF-8 text", number)
        elif names is None:
            names = _column_names(fields)
        elif len(fields) > len(names):
            message = f"has {len(fields)} fields, and the header has {len(names)}"
            yield UnreadableRow(f"{message}: a field with the separator in it needs quotes", number)
        else:
            padded = chain(fields, repeat(""))
            yield {name: field or None for name, field in zip(names, padded, strict=False)}
        lines.is_bad = False
        if names is None:
            return  # without a header, rows have no column names


def _parsed(row: Row | RowError) -> Row | RowError:
    """Return a row that `split` has parsed already."""
    return row


READERS = {
    ".jsonl": Format(_split_filled_lines, _parse_json),
    ".ndjson": Format(_split_filled_lines, _parse_json),  # on the hub only
    ".json": Format(_split_json, _parsed),
    ".csv": Format(partial(_split_table, suffix=".csv"), _parsed),
    ".tsv": Format(partial(_split_table, suffix=".tsv"), _parsed),
    ".txt": Format(_split_text_lines, _parse_text),
}
