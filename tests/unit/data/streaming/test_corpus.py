"""Sources of streams: files, patterns, folders and addresses, and the messages of `check` about them."""

from __future__ import annotations

import gzip
import json
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from pydantic import ValidationError

from ftcli.config.recipe import Recipe
from ftcli.config.recipe_data import Source
from ftcli.data.streaming.corpus import (
    check_corpus,
    columns_of_stream,
    corpus_digest,
    describe_stream,
    first_rows,
    open_source,
)
from ftcli.data.streaming.source_files import list_files, local_files
from ftcli.launch.preflight import check_inputs
from ftcli.runtime.errors import InputError, RunError
from ftcli.testing import save_hollow

from ....support.recipes import minimal_values


def write(path: Path, rows: int, text: str = "x") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"body": f"{text}{row}"}) + "\n" for row in range(rows)))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for number in range(4):
        write(tmp_path / "data" / f"{number}.jsonl", 10, f"{number}-")
    return tmp_path


def recipe(data: dict[str, Any], **changes: Any) -> Recipe:
    values: dict[str, Any] = minimal_values(
        "pretrain",
        model={"name": "m"},
        data={"train": "data", "streaming": True} | data,
        batch={"global_size": 8},
        train={"max_steps": 3},
    )
    return Recipe.model_validate(values | changes)


@pytest.mark.parametrize("path", ["data", "data/*.jsonl", "./data"])
def test_local_files_with_a_folder_and_a_pattern_name_their_files(folder: Path, path: str) -> None:
    files = local_files(Source(path=path))
    assert files is not None and [Path(file).name for file in files] == [f"{n}.jsonl" for n in range(4)]


@pytest.mark.parametrize("form", ["{}", "file://{}/"])
def test_list_files_of_a_folder_leaves_hidden_files_out(form: str, folder: Path) -> None:
    for hidden in (".ipynb_checkpoints/0-checkpoint.jsonl", ".Trash-0/old.jsonl", "._0.jsonl"):
        write(folder / ".data" / hidden, 2)
    write(folder / ".data" / "deep" / "0.jsonl", 3)  # the folder that was named may be hidden itself
    listed = list_files(Source(path=form.format(folder / ".data")))
    assert listed is not None and [Path(file).name for file in listed[0]] == ["0.jsonl"]


@pytest.mark.parametrize("path", ["file://data", "file://./data/", "file://data/*.jsonl"])
def test_list_files_below_a_hidden_folder_of_the_user_finds_them(
    path: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder / ".cache" / "data" / "0.jsonl", 3)
    write(folder / ".cache" / "data" / "._0.jsonl", 3)
    monkeypatch.chdir(folder / ".cache")
    listed = list_files(Source(path=path))
    assert listed is not None and [Path(file).name for file in listed[0]] == ["0.jsonl"]


@pytest.mark.parametrize("path", ["data", "file://data"])
def test_list_files_of_a_folder_with_a_suffix_in_upper_case_is_refused(path: str, folder: Path) -> None:
    write(folder / "data" / "MORE.JSONL", 2)
    with pytest.raises(InputError, match=r"^data\.train: [^ ]*MORE.JSONL: the suffix is in upper case"):
        list_files(Source(path=path))


def test_list_files_of_a_name_without_local_files_is_on_the_hub(folder: Path) -> None:
    assert local_files(Source(path="user/corpus")) is None
    assert list_files(Source(path="user/corpus")) is None


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("data/*.csv", "no file matches"),
        ("empty", "contains no data files"),
        ("both", "several formats: csv, json"),
        ("rows.xml.gz", "no known data format"),
        ("data/9.jsonl", "^data.key: no data at"),
        ("data/9.jsonl.gz", "^data.key: no data at"),
        ("nosuch://bucket/a.jsonl", "unknown protocol nosuch://"),
        ("memory://bucket/a.xml", "no known data format"),
    ],
)
def test_check_corpus_of_a_source_that_cannot_be_streamed_is_refused(folder: Path, path: str, message: str) -> None:
    (folder / "empty").mkdir()
    (folder / "rows.xml.gz").write_text("x")
    write(folder / "both" / "a.jsonl", 1)
    write(folder / "both" / "b.csv", 1)
    with pytest.raises(InputError, match=message):
        check_corpus(Source(path=path), {}, key="data.key")


def test_check_corpus_with_a_protocol_whose_package_is_missing_names_it(folder: Path) -> None:
    with pytest.raises(InputError, match=r"abfs:// cannot be read: .*adlfs"):
        check_corpus(Source(path="abfs://bucket/rows.jsonl"), {})


def test_check_corpus_with_a_missing_column_is_refused_before_reading(folder: Path) -> None:
    with pytest.raises(InputError, match="no column 'text'.*\n.*body"):
        check_corpus(Source(path="data"), {"text": "text"})


@pytest.mark.parametrize(
    "path",
    ["data/0.jsonl", "0.jsonl.gz"] + [f"memory://corpora/{n}" for n in ("0.jsonl", "*.jsonl", "z/*.gz", "z", "z/")],
)
def test_compressed_files_and_addresses_are_read_and_renamed(folder: Path, path: str) -> None:
    import fsspec

    raw = (folder / "data" / "0.jsonl").read_bytes()
    (folder / "0.jsonl.gz").write_bytes(gzip.compress(raw))
    for name, content in (("0.jsonl", raw), ("z/0.jsonl.gz", gzip.compress(raw))):
        with fsspec.open(f"memory://corpora/{name}", "wb") as file:
            file.write(content)
    check_corpus(Source(path=path), {"text": "body"})
    corpus = open_source(Source(path=path), {"text": "body"})
    assert list(corpus.read(0, 8)) == [{"text": "0-8"}, {"text": "0-9"}]
    assert corpus.sizes[0] > 0 and Path(corpus.names[0]).name.startswith("0.jsonl")
    assert first_rows(Source(path="data"), {"text": "body"})["text"][9:11] == ["0-9", "1-0"]


def test_corpus_digest_changes_with_its_files(folder: Path) -> None:
    before = corpus_digest(Source(path="data"))
    assert corpus_digest(Source(path="data")) == before
    write(folder / "data" / "4.jsonl", 1)
    assert corpus_digest(Source(path="data")) != before


def test_first_rows_skip_invalid_lines_up_to_the_bound(folder: Path) -> None:
    (folder / "bad.jsonl").write_text('{"body": "x"}\n{"body": \n{"text": "y"}\n')
    rows = first_rows(Source(path="bad.jsonl"), {}, most_bad=1)
    assert rows.to_list() == [{"body": "x", "text": None}, {"body": None, "text": "y"}]
    with pytest.raises(InputError, match="row 2 of .*bad.jsonl: is not JSON"):
        first_rows(Source(path="bad.jsonl"), {})


def test_first_rows_of_several_kinds_make_one_table_without_a_change(folder: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"text": "a", "id": 1, "list": [1]},
        {"text": 7, "id": "b"},
        {"text": "c", "id": 2.5, "list": ["x"]},
        {"text": "d", "new": {"deep": [1, "x"]}},
        {"text": "e", "new": {"deep": [2]}, "list": []},
    ]
    (folder / "mixed.jsonl").write_text("\n".join(map(json.dumps, rows)))
    names = ["text", "id", "list", "new"]
    table = first_rows(Source(path="mixed.jsonl"), {})[:]
    assert table == {name: [row.get(name) for row in rows] for name in names}
    assert len(list(open_source(Source(path="mixed.jsonl"), {}).read(0, 0))) == 5


def test_first_rows_of_parquet_may_hold_values_that_json_does_not_have(folder: Path) -> None:
    odd: dict[str, Any] = {
        "date": date(2026, 1, 2),
        "time": datetime(2026, 1, 2, 3, 4, 5),
        "bytes": b"\xff",
        "decimal": Decimal("1.50"),
        "inside": [{"at": date(2026, 1, 2)}],
    }
    rows = [{"text": f"t{number}", "tags": ["a"], **odd} for number in range(3)]
    parquet.write_table(pa.Table.from_pylist(rows), "odd.parquet")
    assert list(first_rows(Source(path="odd.parquet"), {"text": "text"})) == rows
    parquet.write_table(pa.table({"at": [date(2026, 1, 2)]}), "odd.parquet")
    assert first_rows(Source(path="odd.parquet"), {})["at"][:] == [date(2026, 1, 2)]


def test_open_source_with_a_file_that_is_another_than_it_was_ends_the_run(folder: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"body": ["a", "b"]}), folder / "0.parquet")
    for name in ("data/0.jsonl", "0.parquet"):
        corpus = open_source(Source(path=name), {})
        assert list(corpus.read(0, 1))
        (folder / name).write_bytes((folder / "data" / "1.jsonl").read_bytes()[:-30])
        with pytest.raises(RunError, match="bytes and had .* must not change"):
            list(corpus.read(0, 0))


def test_columns_of_stream_of_compressed_files_are_looked_at(folder: Path) -> None:
    (folder / "0.jsonl.gz").write_bytes(gzip.compress((folder / "data" / "0.jsonl").read_bytes()))
    assert columns_of_stream(Source(path="0.jsonl.gz")) == ["body"]
    with pytest.raises(InputError, match="no column 'text'.*\n.*body"):
        check_corpus(Source(path="0.jsonl.gz"), {"text": "text"})
    (folder / "1.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(InputError, match="1.jsonl.gz is not compressed as its name says: Not a gzipped file"):
        check_corpus(Source(path="1.jsonl.gz"), {})


def test_check_corpus_skips_an_empty_first_file(folder: Path) -> None:
    (folder / "data" / "0.jsonl").write_text("")
    check_corpus(Source(path="data"), {"text": "body"})
    assert len(first_rows(Source(path="data"), {"text": "body"})) == 30


@pytest.mark.parametrize("name", ["0.jsonl", "0.jsonl.gz"])
def test_check_corpus_with_a_first_line_that_is_no_row_is_refused_only_beyond_the_bound(
    folder: Path, name: str
) -> None:
    raw = b'{"body": \n\n7\n' + (folder / "data" / "0.jsonl").read_bytes()
    (folder / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    check_corpus(Source(path=name), {"text": "body"}, most_bad=2)
    with pytest.raises(InputError, match=f"row 1 of .*{name}: is not JSON"):
        check_corpus(Source(path=name), {"text": "body"})
    with pytest.raises(InputError, match=f"row 2 of .*{name}: is not a JSON object .more than .* 1 rows cannot"):
        check_corpus(Source(path=name), {"text": "body"}, most_bad=1)
    with pytest.raises(InputError, match="no column 'text'.*\n.*body"):
        check_corpus(Source(path=name), {"text": "text"}, most_bad=2)


def test_check_corpus_skips_files_without_rows_and_refuses_only_such_files(
    folder: Path,
) -> None:
    (folder / "data" / "0.jsonl").write_text("\n \n")
    check_corpus(Source(path="data"), {"text": "body"})
    with pytest.raises(InputError, match="data/0.jsonl has no rows"):
        check_corpus(Source(path="data/0.jsonl"), {})


@pytest.mark.parametrize("streams", [True, False])
def test_check_inputs_with_a_first_row_of_another_shape_is_refused_only_beyond_the_bound(
    folder: Path, streams: bool
) -> None:
    save_hollow(folder / "model", model_type="llama")
    (folder / "rows.jsonl").write_text('{"note": "x"}\n{"text": "a"}\n')
    (folder / "renamed.jsonl").write_text('{"note": "x"}\n{"body": "a"}\n')
    for name, columns in (("rows.jsonl", {}), ("renamed.jsonl", {"text": "body"})):
        data = {"train": name, "columns": columns, "streaming": streams}
        check_inputs(recipe(data | {"max_bad_rows": 1}, model={"name": "model"}))
        with pytest.raises(InputError, match="the columns are note;"):
            check_inputs(recipe(data, model={"name": "model"}))


def test_check_corpus_of_an_unreachable_hub_data_set_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="user/corpus is neither on this machine nor reachable on the hub"):
        corpus_digest(Source(path="user/corpus"))


def test_check_of_a_stream_prints_which_process_reads_which_files(folder: Path) -> None:
    facts, notes = describe_stream(recipe({}), 2)
    assert (facts, notes) == ({"stream": "4 files in 4 lanes; each process reads and tokenizes 2 of them"}, [])
    (note,) = describe_stream(recipe({"train": "data/0.jsonl"}), 2)[1]
    assert "1 file: every process reads and tokenizes all of it; split it into 8 or more files" in note
    assert describe_stream(recipe({"train": "data/0.jsonl"}), 1)[1] == []
    write(folder / "data" / "big.jsonl", 1000)
    (note,) = describe_stream(recipe({}), 2)[1]
    assert "5 files of unequal size" in note and "make one lane" in note


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"eval_rows": 3}, "data.eval"),
        ({"train": ["a.jsonl", "b.jsonl"]}, "several sources"),
        ({"train": {"path": "a.jsonl", "weight": 2.0}}, "a weight"),
        ({"train": {"path": "a.jsonl", "max_rows": 2}}, "max_rows"),
        ({"group_by_length": True}, "group_by_length"),
        ({"workers": 2}, "workers"),
        ({"streaming": False, "shuffle_buffer": 5}, "shuffle_buffer is for streams"),
    ],
)
def test_recipe_with_streaming_and_options_that_need_all_rows_is_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        recipe(data)


def test_recipe_with_streaming_needs_max_steps() -> None:
    with pytest.raises(ValidationError, match="data.streaming needs train.max_steps"):
        recipe({}, train={"epochs": 1.0})


def test_check_inputs_with_a_task_whose_rows_depend_on_each_other_is_refused(folder: Path) -> None:
    from ftcli.launch.preflight import check_inputs

    save_hollow(folder / "m")
    with pytest.raises(InputError, match="data.streaming: the rows of task text_classification"):
        check_inputs(recipe({}, task="text_classification", model={"name": "./m"}))
