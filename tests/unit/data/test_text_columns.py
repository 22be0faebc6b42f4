"""Readers do not change, drop or add a value of a file."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from datasets import ClassLabel, Dataset, Features, disable_progress_bars
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from ftcli.config.recipe_data import Source
from ftcli.data.arrow_tables import build_dataset
from ftcli.data.formats import convert
from ftcli.data.sources import check_source, first_columns, read_rows, rename_columns
from ftcli.data.streaming.corpus import open_source
from ftcli.data.streaming.lanes import BadRow
from ftcli.data.text_files import EmptyLine
from ftcli.runtime.errors import InputError, RowError

# Texts that readers of tables and JSON take for something else.
TAKEN = [
    "NULL",
    "NA",
    "None",
    "nan",
    "N/A",
    "null",
    "01234",
    "1e5",
    "1.50",
    "True",
    "2026-01-01",
    "2026-01-01 10:00:00",
]
TEXTS = st.one_of(st.sampled_from(TAKEN), st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8))
ROWS = st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=5)
MODEST = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def _quiet() -> None:
    disable_progress_bars()


def as_file(folder: Path, suffix: str, rows: list[tuple[str, str]]) -> Path:
    """Write rows of a prompt and a completion the way that every writer of the format does."""
    path = folder / f"rows{suffix}"
    named = [{"prompt": prompt, "completion": completion} for prompt, completion in rows]
    if suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(named), path)
    elif suffix == ".json":
        path.write_text(json.dumps(named))
    elif suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in named), newline="")
    else:
        buffer = io.StringIO(newline="")
        table = csv.writer(buffer, delimiter="\t" if suffix == ".tsv" else ",")
        table.writerows([("prompt", "completion"), *rows])
        path.write_text(buffer.getvalue(), newline="")
    return path


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".json", ".jsonl"])
@given(rows=ROWS)
@example(rows=[("01234", "NULL")])
@example(rows=[("2026-01-01", "nan")] * 2)
@example(rows=[("7", "42")])
@example(rows=[(" ", " ")])
@MODEST
def test_read_rows_of_text_returns_what_was_written(suffix: str, rows: list[tuple[str, str]], tmp_path: Path) -> None:
    source = Source(path=str(as_file(tmp_path, suffix, rows)))
    check_source(source, {"prompt": "prompt", "completion": "completion"})
    table = read_rows(source, {}, ["prompt", "completion"])[:]
    assert list(zip(table["prompt"], table["completion"], strict=True)) == rows
    streamed = list(open_source(source, {}).read(0, 0))
    assert [(row["prompt"], row["completion"]) for row in streamed if isinstance(row, dict)] == rows


@given(rows=ROWS)
@settings(MODEST, max_examples=3)
def test_read_rows_of_parquet_returns_what_was_written(rows: list[tuple[str, str]], tmp_path: Path) -> None:
    path = as_file(tmp_path, ".parquet", rows)
    table = read_rows(Source(path=str(path)), {}, ["prompt", "completion"])[:]
    assert list(zip(table["prompt"], table["completion"], strict=True)) == rows


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXTS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


def alike(one: Any, other: Any) -> bool:
    """Return whether two JSON values are written the same way."""
    return json.dumps(one) == json.dumps(other)


@given(rows=st.lists(st.fixed_dictionaries({"a": VALUES}, optional={"b": VALUES}), min_size=1, max_size=5))
@example(rows=[{"a": {"x": 1}}, {"a": {"x": 1.5, "y": None}}])
@example(rows=[{"a": "5"}, {"a": [5]}, {"b": "2026-01-01"}])
@example(rows=[{"a": 3}, {"a": 2.5}, {"a": None}])
@example(rows=[{"a": 3}, {"a": 4}, {"a": 2.5}])  # in a later batch
@example(rows=[{"a": 2.5}, {"a": None}, {"a": 3}])
@example(rows=[{"a": [1]}, {"a": [2**70, 0.1 + 0.2]}])
@MODEST
def test_build_dataset_returns_the_values_it_was_given(
    rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftcli.data.arrow_tables.BATCH", 2)
    table = build_dataset(rows)
    for name in table.column_names:
        there, expected = table[:][name], [row.get(name) for row in rows]
        assert alike(there, expected)
        assert alike(table.select([len(rows) - 1])[0][name], there[-1])


def test_build_dataset_with_leading_nulls_retains_the_column_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftcli.data.arrow_tables.BATCH", 1)
    rows = [{"a": None, "b": []}, {"a": "x", "b": [1]}, {"b": None, "c": 0.5}, {"c": 1.5}]
    table = build_dataset(rows)
    assert str(table.features) == "{'a': Value('string'), 'b': List(Value('int64')), 'c': Value('float64')}"
    assert table[:] == {name: [row.get(name) for row in rows] for name in "abc"}


def test_read_rows_with_a_whole_number_beside_a_decimal_one_is_trained_as_the_file_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "p", "completion": 3}\n{"prompt": "p", "completion": 2.5}\n')
    whole, decimal = read_rows(Source(path=str(path)), {})
    assert convert(whole, ("completion",)) == {"prompt": "p", "completion": "3"}
    assert decimal == {"prompt": "p", "completion": 2.5}
    with pytest.raises(RowError, match="must both be text"):  # the file may have said 2.50
        convert(decimal, ("completion",))


def test_read_rows_of_chats_adds_no_keys_and_changes_no_number(tmp_path: Path) -> None:
    calls = [{"function": {"name": "f", "arguments": {"x": 1, "y": None}}}]
    rows = [
        {"messages": [{"role": "user", "content": "2026-01-01"}, {"role": "assistant", "tool_calls": calls}]},
        {"messages": [{"role": "user", "content": "2026-01-02", "train": False}], "late": 1},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_rows(Source(path=str(path)), {})[:] == {
        "messages": [row["messages"] for row in rows],
        "late": [None, 1],
    }


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (["0", "1", "10", ""], [0, 1, 10, None]),
        (["0", "01", "NA"], ["0", "01", "NA"]),
        (["7", "01234"], ["7", "01234"]),
        (["1.5", "01.5"], ["1.5", "01.5"]),
        (["1", "2.5", "1e3"], [1.0, 2.5, 1000.0]),
        (["1.10", "1.1"], ["1.10", "1.1"]),
        (["True", "False"], [True, False]),
        (["true", "false"], ["true", "false"]),
        (["9" * 30, "1"], ["9" * 30, "1"]),
        (["1e999", "1.5"], ["1e999", "1.5"]),
        (["", ""], [None, None]),
    ],
)
def test_read_rows_of_a_table_takes_for_numbers_only_what_stays_the_same(
    fields: list[str], expected: list[Any], tmp_path: Path
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("label,text\n" + "".join(f"{field},7\n" for field in fields))
    table = read_rows(Source(path=str(path)), {"text": "text"}, ["text"])[:]
    assert table == {"label": expected, "text": ["7"] * len(fields)}
    assert [type(value) for value in table["label"]] == [type(value) for value in expected]


def test_read_rows_of_a_table_gives_a_renamed_column_of_digits_as_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('"id, n";body;body;\n1;7;a;\n2;8;b\n')
    assert first_columns(Source(path=str(path))) == ["id, n", "body", "body.1", "Unnamed: 3"]
    table = read_rows(Source(path=str(path)), {"text": "body"}, ["text"])
    assert table[:] == {"id, n": [1, 2], "text": ["7", "8"], "body.1": ["a", "b"], "Unnamed: 3": [None, None]}


def test_read_rows_of_a_tsv_file_with_a_comma_in_its_header_are_split_at_tabs(tmp_path: Path) -> None:
    (tmp_path / "rows.tsv").write_text("id, n\ttext\n1\tx, y\n")
    source = Source(path=str(tmp_path / "rows.tsv"))
    assert first_columns(source) == ["id, n", "text"]
    assert read_rows(source, {}, ["text"])[:] == {"id, n": [1], "text": ["x, y"]}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"text\nHello, world\n", r"a.csv:2: row 1 has 2 fields, and the header has 1: .* needs quotes"),
        ("a.csv", b'a,b\n1,"x\n2,y\n', r"a.csv:2: row 1 is not a row of a table: unexpected end of data"),
        ("a.csv", b'a\tb\n1\t"so" he said\n', "a.csv:2: row 1 is not a row of a table: .* a quote in it is written"),
        ("a.csv", b"a,b\n1,2\n1,\xff\n", "a.csv:3: row 2 is not UTF-8 text"),
        ("a.json", b'[{"a": 1},\n {"a": }]', "a.json:2: line 2 is not JSON: Expecting value"),
        ("a.json", b'[{"a": 1}, 5]', "a.json: row 2 is not a JSON object"),
        ("a.jsonl", b'{"a": "\\ud800"}', "a.jsonl:1: row 1 contains half of a surrogate pair"),
        ("a.jsonl", b'{"a": 1}\n{"a": ' + b"9" * 5000 + b"}", r"a.jsonl:2: row 2 is not JSON: Exceeds the limit"),
        ("a.jsonl", b'{"a": 1}\n' + b'{"a":' * 100_000, r"a.jsonl:2: row 2 is not JSON: nested too deeply"),
    ],
)
def test_read_rows_names_the_line_that_is_no_row(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_rows(Source(path=str(tmp_path / name)), {})


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.csv", "prompt,completion\np,c\n\np,c\np,c,d\n", 5),
        ("a.jsonl", '{"prompt": "p", "completion": "c"}\n' * 2 + "\n[1]\n", 4),
    ],
)
def test_read_rows_are_counted_from_1_without_header_and_empty_lines_everywhere(
    name: str, content: str, line: int, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(InputError, match=f"{name}:{line}: row 3 "):
        read_rows(Source(path=str(path)), {})
    corpus = open_source(Source(path=str(path)), {})
    (bad,) = (BadRow(0, number, str(row)) for number, row in enumerate(corpus.read(0, 0)) if isinstance(row, RowError))
    assert corpus.describe(bad).startswith(f"row 3 of {path}: ")


def test_read_rows_of_a_txt_file_skips_empty_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\n \u00a0\ntwo\n", encoding="utf-8")
    source = Source(path=str(tmp_path / "a.txt"))
    assert read_rows(source, {})["text"] == ["one", "two"]
    rows = list(open_source(source, {}).read(0, 0))
    assert rows[0] == {"text": "one"} and rows[3] == {"text": "two"}
    assert all(isinstance(row, EmptyLine) for row in rows[1:3])


@pytest.mark.parametrize(
    ("row", "kind", "expected"),
    [
        ({"prompt": 1, "completion": 42}, "completion", {"prompt": "1", "completion": "42"}),
        ({"instruction": 1, "input": 0, "output": 42}, "completion", {"prompt": "1\n\n0", "completion": "42"}),
        ({"text": 42}, "text", {"text": "42"}),
    ],
)
def test_convert_takes_whole_numbers_for_the_text_that_they_are(
    row: dict[str, Any], kind: str, expected: dict[str, str]
) -> None:
    assert convert(row, (kind,)) == expected


def test_read_rows_of_parquet_with_a_type_that_datasets_lacks_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    column = pa.array([[("a", 1)]], type=pa.map_(pa.string(), pa.int64()))
    parquet.write_table(pa.table({"text": ["x"], "extra": column}), path)
    with pytest.raises(InputError, match="cannot read .*rows.parquet"):
        read_rows(Source(path=str(path)), {})


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"weight": "score", "margin": "score"}, {"a": 1, "weight": 2, "margin": 2}),
        ({"score": "score", "margin": "score"}, {"a": 1, "score": 2, "margin": 2}),
        ({"a": "score", "score": "a", "more": "a"}, {"a": 2, "score": 1, "more": 1}),
        ({"z": "a", "score": "a", "a": "score"}, {"z": 1, "score": 1, "a": 2}),
    ],
)
def test_read_rows_of_a_column_with_several_names_has_all_of_them(
    columns: dict[str, str], expected: dict[str, int], tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"a": 1, "score": 2}\n')
    assert read_rows(Source(path=str(tmp_path / "rows.jsonl")), columns, [])[0] == expected
    assert rename_columns({"a": 1, "score": 2}, columns) == expected


def test_read_rows_of_a_column_with_several_names_keep_its_type(tmp_path: Path) -> None:
    features = Features({"label": ClassLabel(names=["no", "yes"])})
    Dataset.from_dict({"label": [1, 0]}, features=features).to_parquet(str(tmp_path / "rows.parquet"))
    columns = {"label": "label", "other": "label"}
    rows = read_rows(Source(path=str(tmp_path / "rows.parquet")), columns, [])
    assert rows["other"][:] == rows["label"][:] and rows.features["other"] == rows.features["label"]
