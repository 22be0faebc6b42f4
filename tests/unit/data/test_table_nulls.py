"""Nulls inside of tool calls and JSON schemas: kept as JSON writes them, absent where a table made them up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Features, Json, List, Value

from ftcli import testing
from ftcli.config.recipe import Recipe
from ftcli.config.recipe_data import Source
from ftcli.data.cache import prepare_rows
from ftcli.data.sources import read_rows
from ftcli.data.streaming.corpus import open_source
from ftcli.data.table_nulls import absent_keys
from ftcli.tasks.build import build_task

from ...support.recipes import minimal_values
from ..tasks.test_sft import TOOLS_TEMPLATE

USER = {"role": "user", "content": "Hi"}


def calls(**arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


def schema(**properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}


ROWS: list[dict[str, Any]] = [
    {"messages": [USER, calls(city="Rome", days=None)], "tools": [schema(city={"type": "string", "default": None})]},
    {"messages": [USER, calls(city="Rome")], "tools": [schema(city={"type": "string"})]},
    {"messages": [USER, calls(days=2, at={"hour": None})], "tools": [schema(days={"type": "integer"})]},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = testing.save_tiny_causal(tmp_path_factory.mktemp("model"))
    (folder / "tools.jinja").write_text(TOOLS_TEMPLATE)
    return folder


def prepared(model: Path, rows: Path) -> list[str]:
    values = minimal_values(
        task_options={"chat_template": str(model / "tools.jinja")},
        model={"name": str(model)},
        data={"train": str(rows)},
    )
    recipe = Recipe.model_validate(values)
    task: Any = build_task(recipe)
    return [task.tokenizer.decode(row["input_ids"]) for row in prepare_rows(recipe, task).train]


@pytest.mark.parametrize("rows", [ROWS, ROWS[:1] * 2], ids=["some", "the same in every row"])
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_read_rows_retains_json_nulls_and_absent_keys(
    model: Path, tmp_path: Path, suffix: str, rows: list[dict[str, Any]]
) -> None:
    path = tmp_path / f"rows{suffix}"
    lines = [json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) if suffix == ".jsonl" else f"[{','.join(lines)}]")
    texts = prepared(model, path)
    for text, row in zip(texts, rows, strict=True):
        call = row["messages"][1]["tool_calls"][0]["function"]
        assert json.dumps(call) in text
        assert text.startswith(json.dumps(row["tools"][0]["function"]))


def test_read_rows_of_a_table_drops_null_keys(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    Dataset.from_list([ROWS[1], ROWS[2]]).to_parquet(path)
    texts = prepared(model, path)
    assert '{"name": "f", "arguments": {"city": "Rome"}}' in texts[0]
    assert '{"name": "f", "arguments": {"at": {}, "days": 2}}' in texts[1].replace(
        '"days": 2, "at": {}', '"at": {}, "days": 2'
    )
    assert '{"city": {"type": "string"}}' in texts[0] and '{"days": {"type": "integer"}}' in texts[1]
    (first, _) = open_source(Source(path=str(path)), {}).read(0, 0)
    assert first["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}
    assert first["tools"] == [schema(city={"type": "string"})]


def test_read_rows_of_a_table_drops_null_keys_of_single_messages_and_of_lists_of_answers(tmp_path: Path) -> None:
    answers, path = [calls(city="Rome"), calls(days=2)], tmp_path / "rows.parquet"
    Dataset.from_list([{"chosen": one, "responses": [[other] for other in answers]} for one in answers]).to_parquet(
        path
    )
    rows = read_rows(Source(path=str(path)), {})
    clean = absent_keys(rows.features)
    assert clean is not None
    for row, one in zip(map(clean, rows), answers, strict=True):
        assert row == {"chosen": one, "responses": [[other] for other in answers]}


def test_read_rows_of_json_text_in_a_table_retains_nulls() -> None:
    function = {"name": Value("string"), "arguments": Json()}
    messages = List({"role": Value("string"), "content": Value("string"), "tool_calls": List({"function": function})})
    clean = absent_keys(Features({"messages": messages, "tools": Json()}))
    assert clean is not None
    assert clean(ROWS[0]) == ROWS[0]


def test_read_rows_other_columns_and_plain_conversations_are_left_alone() -> None:
    plain = List({"role": Value("string"), "content": Value("string")})
    assert (
        absent_keys(Features({"messages": plain, "meta": {"a": {"b": Value("string")}}, "n": Value("int64")})) is None
    )
    assert absent_keys(None) is None
