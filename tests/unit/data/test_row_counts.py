"""Rows are counted without being encoded, and too few to train on are refused before anything is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from datasets import disable_progress_bars
from PIL import Image
from pyarrow import parquet

from ftcli.config.recipe import Recipe
from ftcli.config.recipe_data import Source
from ftcli.data.row_counts import count_rows
from ftcli.data.sources import read_rows
from ftcli.launch.preflight import check_inputs
from ftcli.runtime.errors import InputError
from ftcli.testing import save_hollow

from ...support.recipes import minimal_values

ROWS = [{"prompt": f"a\n{n}", "completion": 'x, "y"'} for n in range(7)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    disable_progress_bars()
    monkeypatch.chdir(tmp_path)
    save_hollow(tmp_path / "model", model_type="llama")
    lines = [json.dumps(row) + "\n" for row in ROWS]
    Path("rows.jsonl").write_text("\n \n".join(lines))
    Path("rows.json").write_text(json.dumps(ROWS, indent=1))
    Path("table.json").write_text(json.dumps({"prompt": ["a"] * 7, "completion": ["x"] * 7}))
    Path("lines.json").write_text("".join(lines))
    Path("rows.csv").write_text('prompt,completion\n\n"a\nb",x\n' + "a,x\n" * 6)
    Path("rows.tsv").write_text("prompt\tcompletion\n" + "a,b\tx\n" * 7)
    Path("rows.txt").write_bytes(b"a\n\nb\r\nc\rd\n \ne\r\r\nf\r\ng")
    parquet.write_table(pa.Table.from_pylist(ROWS), "rows.parquet")
    for number in range(7):
        path = tmp_path / "images" / f"{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (2, 2)).save(path)
    return tmp_path


@pytest.mark.parametrize(
    "name", ["rows.jsonl", "rows.json", "rows.csv", "rows.tsv", "rows.txt", "rows.parquet", "images"]
)
def test_row_counts_are_counted_as_they_are_read(folder: Path, name: str) -> None:
    source = Source(path=name)
    assert count_rows(source, 100) == len(read_rows(source, {})) == 7
    assert count_rows(source, 5) == 5
    assert count_rows(source.model_copy(update={"max_rows": 3}), 100) == 3


@pytest.mark.parametrize("name", ["table.json", "lines.json", "org/rows", "broken.parquet", "long.json"])
def test_row_counts_of_formats_without_a_fast_count_are_unknown(folder: Path, name: str) -> None:
    Path("broken.parquet").write_bytes(b"PAR1")
    Path("long.json").write_text(json.dumps([{"text": "x" * 2**19}] * 3))
    assert count_rows(Source(path=name), 100) is None


def recipe(data: dict[str, Any], **changes: Any) -> Recipe:
    values: dict[str, Any] = minimal_values(
        model={"name": "model"}, data={"train": "rows.jsonl"} | data, batch={"global_size": 2}
    )
    return Recipe.model_validate(values | changes)


FOUR = {"path": "rows.csv", "max_rows": 4}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"eval_rows": 7}, "data.eval_rows 7 leaves no rows of rows.jsonl to train on\n    lower data.eval_rows"),
        ({"train": ["rows.jsonl", FOUR], "eval_rows": 12}, "leaves no rows of rows.jsonl, rows.csv to train on"),
        ({"train": "rows.parquet", "eval_rows": 7, "truncation": "split"}, "leaves no rows of rows.parquet"),
        ({"eval_rows": 6}, "data.train has 1 rows, fewer than batch.global_size 2"),
        ({"train": {"path": "rows.jsonl", "max_rows": 1}}, "data.train has 1 rows, fewer than batch.global_size 2"),
    ],
)
def test_check_inputs_with_too_few_rows_fails_before_a_launch(folder: Path, data: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_inputs(recipe(data))


@pytest.mark.parametrize(
    "data",
    [
        {"eval_rows": 5},
        {"eval_rows": 6, "drop_last": False},
        {"eval_rows": 6, "truncation": "split"},  # one row may become two
        {"train": {"path": "rows.jsonl", "weight": 2}, "eval_rows": 6},
        {"train": ["rows.jsonl", "org/rows"], "eval_rows": 12},  # nobody knows how many those are
    ],
)
def test_row_counts_that_may_suffice_are_accepted(folder: Path, data: dict[str, Any]) -> None:
    check_inputs(recipe(data))
