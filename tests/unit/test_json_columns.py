"""Columns of a .jsonl file: what Arrow alone can tell of them is what `datasets` finds, and the rest is left to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import load_dataset

from ftcli.recipe import Source
from ftcli.rows import _features, read_rows

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}
TOLD: dict[str, list[Any]] = {
    "texts": [{"text": "a"}, {"text": "b"}],
    "chats": [{"messages": [USER, ANSWER]}, {"messages": [USER, ANSWER] * 2}],
    "a column that some rows lack": [{"text": "a"}, {"text": "b", "lang": None}, {"text": "c", "lang": "en"}],
    "a list that some rows lack": [{"messages": [USER]}, {"messages": None}, {"messages": []}],
    "numbers, times and lists of lists": [{"n": 1, "at": "2026-01-01", "l": [[1], []]}, {"n": 1.5, "at": "x", "l": []}],
}
LEFT: dict[str, list[Any]] = {
    "other keys in a message": [{"messages": [USER, CALL]}],
    "a key in one message only": [{"messages": [USER]}, {"messages": [ANSWER | {"train": False}]}],
    "a null in a message": [{"messages": [USER | {"content": None}, ANSWER]}],
    "arguments with keys of their own": [{"a": {"f": {"x": 1}}}, {"a": {"f": {"y": "1"}}}],
    "an object without keys": [{"text": "a", "more": {}}],
    "text and a list": [{"text": "a"}, {"text": ["b"]}],
}


@pytest.mark.parametrize("kind", [*TOLD, *LEFT])
def test_rows_and_columns_are_those_that_datasets_reads_by_itself(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (TOLD | LEFT)[kind]))
    plain = load_dataset("json", data_files=str(path), split="train")
    found = _features(path)
    assert (found is not None) == (kind in TOLD)
    rows = read_rows(Source(path=str(path)), {})
    assert rows.features == plain.features and rows.to_list() == plain.to_list()


@pytest.mark.parametrize("content", [b"\xef\xbb\xbf" + b'{"text": "a"}\n', b'\n{"text": "a"}\n\n{"text": "b"}'])
def test_a_byte_order_mark_and_empty_lines_are_no_part_of_the_columns(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    plain = load_dataset("json", data_files=str(tmp_path / "rows.jsonl"), split="train")
    assert _features(tmp_path / "rows.jsonl") == plain.features


def test_columns_are_told_from_the_first_rows_and_later_ones_may_not_break_them(tmp_path: Path) -> None:
    rows: list[Any] = [{"messages": [USER, ANSWER], "text": "x" * 2**20}] * 12
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"messages": [ANSWER | {"content": None}]}]))
    plain = load_dataset("json", data_files=str(path), split="train")
    read = read_rows(Source(path=str(path)), {})
    assert read.features == plain.features and read.to_list() == plain.to_list()
