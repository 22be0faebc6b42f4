"""What may be streamed: files, patterns, folders and addresses; what `check` says of them, and what it refuses."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ftcli.corpora import check_corpus, corpus_digest, first_rows, list_files, local_files, open_source, stream_facts
from ftcli.errors import InputError, RunError
from ftcli.recipe import Recipe, Source


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
    values: dict[str, Any] = {
        "task": "pretrain",
        "model": {"name": "m"},
        "data": {"train": "data", "streaming": True} | data,
        "batch": {"global_size": 8},
        "train": {"max_steps": 3},
        "optimizer": {"learning_rate": 1e-3},
    }
    return Recipe.model_validate(values | changes)


@pytest.mark.parametrize("path", ["data", "data/*.jsonl", "./data"])
def test_a_folder_and_a_pattern_name_their_files(folder: Path, path: str) -> None:
    files = local_files(Source(path=path))
    assert files is not None and [Path(file).name for file in files] == [f"{n}.jsonl" for n in range(4)]


def test_a_name_that_is_nowhere_here_is_on_the_hub(folder: Path) -> None:
    assert local_files(Source(path="user/corpus")) is None
    assert list_files(Source(path="user/corpus")) is None


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("data/*.csv", "no file matches"),
        ("empty", "holds no data files"),
        ("both", "several formats: csv, json"),
        ("rows.xml.gz", "no known data format"),
        ("data/9.jsonl", "no data at"),
        ("data/9.jsonl.gz", "no data at"),
        ("nosuch://bucket/a.jsonl", "unknown protocol nosuch://"),
        ("memory://bucket/a.xml", "no known data format"),
    ],
)
def test_a_source_that_cannot_be_streamed_is_told(folder: Path, path: str, told: str) -> None:
    (folder / "empty").mkdir()
    (folder / "rows.xml.gz").write_text("x")
    write(folder / "both" / "a.jsonl", 1)
    write(folder / "both" / "b.csv", 1)
    with pytest.raises(InputError, match=told):
        check_corpus(Source(path=path), {})


def test_a_protocol_whose_package_is_missing_names_it(folder: Path) -> None:
    with pytest.raises(InputError, match=r"abfs:// cannot be read here: .*adlfs"):
        check_corpus(Source(path="abfs://bucket/rows.jsonl"), {})


def test_a_column_that_is_not_there_is_told_before_anything_is_read(folder: Path) -> None:
    with pytest.raises(InputError, match="no column 'text'.*\n.*body"):
        check_corpus(Source(path="data"), {"text": "text"})


def test_compressed_files_and_addresses_are_read_and_renamed(folder: Path) -> None:
    import fsspec

    raw = (folder / "data" / "0.jsonl").read_bytes()
    (folder / "0.jsonl.gz").write_bytes(gzip.compress(raw))
    with fsspec.open("memory://corpora/0.jsonl", "wb") as file:
        file.write(raw)
    for path in ("data/0.jsonl", "0.jsonl.gz", "memory://corpora/0.jsonl", "memory://corpora/*.jsonl"):
        corpus = open_source(Source(path=path), {"text": "body"})
        assert list(corpus.read(0, 8)) == [{"text": "0-8"}, {"text": "0-9"}]
        assert corpus.sizes[0] > 0 and corpus.names[0].endswith(Path(path).name.replace("*", "0"))
    assert first_rows(Source(path="data"), {"text": "body"})["text"][9:11] == ["0-9", "1-0"]


def test_the_digest_of_a_corpus_changes_with_its_files(folder: Path) -> None:
    before = corpus_digest(Source(path="data"))
    assert corpus_digest(Source(path="data")) == before
    write(folder / "data" / "4.jsonl", 1)
    assert corpus_digest(Source(path="data")) != before


def test_a_line_that_is_no_json_is_told_with_its_file(folder: Path) -> None:
    (folder / "bad.jsonl").write_text('{"body": "x"}\n{"body": \n')
    with pytest.raises((InputError, RunError), match=r"bad.jsonl cannot be read somewhere after row 0"):
        list(open_source(Source(path="bad.jsonl"), {}).read(0, 0))


def test_check_says_which_process_reads_what(folder: Path) -> None:
    facts, notes = stream_facts(recipe({}), 2)
    assert (facts, notes) == ({"stream": "4 files in 4 lanes; each process reads and tokenises 2 of them"}, [])
    (note,) = stream_facts(recipe({"train": "data/0.jsonl"}), 2)[1]
    assert "1 file: every process reads and tokenises all of it; split it into 8 or more files" in note
    assert stream_facts(recipe({"train": "data/0.jsonl"}), 1)[1] == []
    write(folder / "data" / "big.jsonl", 1000)
    (note,) = stream_facts(recipe({}), 2)[1]
    assert "5 files of unequal size" in note and "make one lane" in note


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"eval_rows": 3}, "data.eval"),
        ({"train": ["a.jsonl", "b.jsonl"]}, "several sources"),
        ({"train": {"path": "a.jsonl", "weight": 2.0}}, "a weight"),
        ({"train": {"path": "a.jsonl", "max_rows": 2}}, "max_rows"),
        ({"group_by_length": True}, "group_by_length"),
        ({"max_bad_rows": 1}, "max_bad_rows"),
        ({"workers": 2}, "workers"),
        ({"streaming": False, "shuffle_buffer": 5}, "shuffle_buffer is for streams"),
    ],
)
def test_what_needs_all_rows_does_not_go_with_streaming(data: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        recipe(data)


def test_a_stream_needs_a_number_of_steps_and_cannot_go_back() -> None:
    with pytest.raises(ValidationError, match="data.streaming needs train.max_steps"):
        recipe({}, train={"epochs": 1.0})
    with pytest.raises(ValidationError, match="rollback does not go with data.streaming"):
        recipe({}, faults={"non_finite": "rollback"}, checkpoint={"every_steps": 1})


def test_a_task_whose_rows_depend_on_each_other_is_refused(folder: Path) -> None:
    from ftcli.checks import check_inputs

    (folder / "m").mkdir()
    (folder / "m" / "config.json").write_text("{}")
    with pytest.raises(InputError, match="data.streaming: the rows of task text_classification"):
        check_inputs(recipe({}, task="text_classification", model={"name": "./m"}))
