"""Text files of a data set on the hub, in the hub's cache on this machine: splits, declared types, and what is left."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from ftcli.config.load import load_recipe
from ftcli.config.recipe import Recipe
from ftcli.config.recipe_data import Source
from ftcli.data import hub_files
from ftcli.data.cache import PreparedRows, prepare_rows
from ftcli.data.cached_counts import cached_row_counts
from ftcli.data.declared_types import convert_declared
from ftcli.data.hub_commits import commit_of
from ftcli.data.hub_files import find_hub_files
from ftcli.data.mixture import SourceRows
from ftcli.data.revisions import resolve
from ftcli.data.sources import is_table, read_rows
from ftcli.data.streaming.corpus import open_source
from ftcli.runtime.errors import InputError, RowError
from ftcli.tasks.build import build_task
from ftcli.tasks.shared.label_columns import align_labels
from ftcli.testing import save_tiny_causal
from ftcli.training.resume import check_rows, reread_sets

from ...support.recipes import minimal_values

COMMIT, NEWER = "d" * 40, "e" * 40
SOURCE = Source(path="org/texts")
LABELS = "    class_label:\n      names:\n        '0': bad\n        '1': good\n"
Put = Callable[[dict[str, str]], Path]


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Put]:
    """Return a function that puts the files of a data set into the hub's cache, as a download leaves them."""
    monkeypatch.setenv("FTCLI_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "prepared")
    repository = Path(os.environ["HF_HUB_CACHE"], "datasets--org--texts")

    def write(files: dict[str, str]) -> Path:
        for name, content in {"../../refs/main": COMMIT, **files}.items():
            path = repository / "snapshots" / COMMIT / name
            (repository / "snapshots" / COMMIT).mkdir(parents=True, exist_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, newline="")
        return repository / "snapshots" / COMMIT

    commit_of.cache_clear()
    yield write
    commit_of.cache_clear()
    shutil.rmtree(repository, ignore_errors=True)


def declared(*columns: str) -> str:
    """Return a README.md that declares types, each `name: type`."""
    lines = "".join(
        f"  - name: {name}\n    dtype:\n  {LABELS.replace(chr(10), chr(10) + '  ').rstrip()}\n"
        if kind == "class"
        else f"  - name: {name}\n    dtype: {kind}\n"
        for name, kind in (column.split(": ") for column in columns)
    )
    return f"---\ndataset_info:\n  features:\n{lines}---\n"


def stream(source: Source) -> list[Any]:
    corpus = open_source(source, {})
    return [row for file in range(len(corpus.sizes)) for row in corpus.read(file, 0)]


def test_read_rows_takes_the_rows_of_a_split_and_of_a_part_of_it(put: Put) -> None:
    put({f"data/train-{n}.csv": f"text\n{n}0\n{n}1\n" for n in (1, 2)} | {"data/test-1.csv": "text\nNA\n"})
    read = {
        split: read_rows(SOURCE.model_copy(update={"split": split}), {}, ["text"])["text"][:]
        for split in ("train", "test", "train[:3]", "test+train[25%:50%]", "all")
    }
    assert read == {
        "train": ["10", "11", "20", "21"],
        "test": ["NA"],
        "train[:3]": ["10", "11", "20"],
        "test+train[25%:50%]": ["NA", "11"],
        "all": ["10", "11", "20", "21", "NA"],
    }
    assert [row["text"] for row in stream(SOURCE)] == read["train"]
    for split in ("dev", "train[:1]+dev"):
        with pytest.raises(InputError, match="data set org/texts has no split 'dev'"):
            read_rows(SOURCE.model_copy(update={"split": split}), {})


def test_read_rows_gives_columns_the_types_that_the_data_set_declares(put: Put) -> None:
    put(
        {
            "README.md": declared("text: string", "answer: int64", "score: float64", "label: class"),
            "train.csv": "text,answer,score,label,note\n1,007,2,good,3\n2,8,3,0,4\n3,9,,,5\n",
        }
    )
    rows = read_rows(SOURCE, {})
    assert rows[:] == {
        "text": ["1", "2", "3"],
        "answer": [7, 8, 9],
        "score": [2.0, 3.0, None],
        "label": [1, 0, None],
        "note": [3, 4, 5],
    }
    assert rows.features["label"].names == ["bad", "good"]
    assert read_rows(SOURCE, {}, ["answer"])["answer"][:] == ["007", "8", "9"]
    assert stream(SOURCE)[0] == {"text": "1", "answer": "007", "score": "2", "label": "good", "note": "3"}


def test_read_rows_with_a_value_that_is_not_of_the_declared_type_raises_with_file_and_row(put: Put) -> None:
    put({"README.md": declared("label: class", "n: int64"), "train.csv": "label,n\ngood,1\nbetter,2\n"})
    with pytest.raises(InputError, match="row 2 has \"better\" in column 'label', which .* declares as a class label"):
        read_rows(SOURCE, {})
    assert isinstance(stream(SOURCE)[1], RowError)
    put({"train.csv": "label,n\ngood,1\nbad,one\n"})
    with pytest.raises(InputError, match="org/texts/train.csv: row 2 has \"one\" in column 'n', .* declares as int64"):
        read_rows(SOURCE, {})


def test_read_rows_with_a_bad_line_raises_with_the_file_of_the_data_set_and_its_line(put: Put) -> None:
    put({"train-0.jsonl": '{"text": "a"}\n', "train-1.jsonl": '{"text": "b"}\n\n{"text": \n'})
    with pytest.raises(InputError, match="org/texts/train-1.jsonl:3: row 2 is not JSON"):
        read_rows(SOURCE, {})


def test_tables_of_one_split_with_other_columns_are_an_error(put: Put) -> None:
    put({"train-0.csv": "text\na\n", "train-1.csv": "b\nc\n"})
    with pytest.raises(InputError, match="org/texts/train-1.csv: the columns are b, and in .*/train-0.csv"):
        read_rows(SOURCE, {})


def test_read_rows_with_a_json_file_without_the_declared_key_raises(put: Put) -> None:
    readme = "---\nconfigs:\n- config_name: default\n  data_files: train.json\n  field: rows\n---\n"
    put({"README.md": readme, "train.json": '{"data": []}'})
    with pytest.raises(InputError, match="no list under the key 'rows'"):
        read_rows(SOURCE, {})


@pytest.mark.parametrize(
    ("setting", "content", "why"),
    [
        ("skiprows: 1", "#\ntext\nNA\n", "its README.md sets skiprows"),
        ('na_values: ["-"]', "text\n-\n", "its README.md sets na_values"),
        ("encoding: latin-1", "text\nNA\n", "its README.md sets encoding"),
        ('sep: "::"', "text\nNA\n", "its separator is '::'"),
    ],
)
def test_settings_that_only_datasets_knows_leave_the_files_to_it(
    setting: str, content: str, why: str, put: Put
) -> None:
    readme = f"---\nconfigs:\n- config_name: default\n  data_files: train.csv\n  {setting}\n---\n"
    put({"README.md": readme, "train.csv": content})
    located = find_hub_files(SOURCE)
    assert located is not None and located.why_not == why


def test_declared_times_and_archives_leave_the_files_to_datasets(put: Put) -> None:
    snapshot = put({"README.md": declared("text: string", "at: timestamp[s]"), "train.csv": "text,at\na,b\n"})
    located = find_hub_files(SOURCE)
    assert located is not None and "declares a type for at" in located.why_not
    shutil.rmtree(snapshot)
    put({"train.csv": "text\na\n", "train-2.csv.zip": ""})
    located = find_hub_files(SOURCE)
    assert located is not None and "train-2.csv.zip is among its files" in located.why_not


def test_read_rows_with_a_copy_that_lacks_numbered_files_is_not_read(put: Put) -> None:
    put({f"data/train-0000{n}-of-00003.csv": f"text\n{n}\n" for n in (0, 2)})
    assert find_hub_files(SOURCE) is None
    with pytest.raises(InputError, match="neither on this machine nor reachable"):
        read_rows(SOURCE, {})
    put({"data/train-00001-of-00003.csv": "text\nNA\n"})
    assert read_rows(SOURCE, {})["text"][:] == ["0", "NA", "2"]


def test_labels_of_a_table_on_the_hub_have_no_type(put: Put) -> None:
    put({"train.csv": "text,label\na,1.0\nb,2\nc,1\n"})
    rows = read_rows(SOURCE, {}, ["text", "label"])
    part = SourceRows("train", "texts", "org/texts", "", rows, np.arange(3), is_table=is_table(SOURCE))
    assert align_labels([part], None)[1] == ["1", "2"]


def test_resume_of_an_older_run_logs_that_values_are_read_from_the_files(put: Put, tmp_path: Path) -> None:
    put({"train.csv": "prompt,completion\n007,NULL\n"})
    recipe = minimal_values(model={"name": str(tmp_path)}, data={"train": "org/texts", "max_length": 8})
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    loaded = load_recipe(tmp_path / "recipe.json")
    (entry,) = resolve(loaded).entries
    assert entry == {"key": "data.train", "name": "org/texts", "revision": None, "commit": COMMIT, "reader": "ftcli"}
    older = {name: value for name, value in entry.items() if name != "reader"}
    state = {"data": {"formula": "rows-1", "fingerprint": "then", "digests": {"train": "a"}}, "versions": {}}
    assert reread_sets(state | {"resolution": [entry]}, loaded) == []
    assert reread_sets(state | {"resolution": [older]}, loaded) == reread_sets(state, loaded) == ["org/texts"]
    check_rows(state, "then", anyway=False, reread=lambda: ["org/texts"])
    with pytest.raises(InputError, match="values of org/texts are now those of its files; older versions read it"):
        check_rows(
            state,
            "now",
            anyway=False,
            digests={"train": "b"},
            reread=lambda: reread_sets(state | {"resolution": [older]}, loaded),
        )


def test_prepared_rows_of_another_commit_are_not_reused(put: Put, tmp_path: Path) -> None:
    model = save_tiny_causal(tmp_path / "model")
    values = minimal_values("pretrain", model={"name": str(model)}, data={"train": "org/texts", "max_length": 8})
    recipe = Recipe.model_validate(values)

    def prepared() -> tuple[Recipe, PreparedRows]:
        commit_of.cache_clear()
        resolved = resolve(recipe).recipe
        return resolved, prepare_rows(resolved, build_task(resolved))

    old = put({"train.jsonl": '{"text": "old"}\n'})
    first, before = prepared()
    (old.parent / NEWER).mkdir()
    (old.parent / NEWER / "train.jsonl").write_text('{"text": "newer"}\n')
    (old.parents[1] / "refs" / "main").write_text(NEWER)
    commit_of.cache_clear()
    assert cached_row_counts(first) == {"train": 1} and cached_row_counts(resolve(recipe).recipe) is None
    second, after = prepared()
    assert [each.data.train_sources[0].revision for each in (first, second)] == [COMMIT, NEWER]
    assert len(before.train[0]["input_ids"]) == 4 and len(after.train[0]["input_ids"]) == 6  # with the end token
    assert before.folder != after.folder and prepare_rows(first, build_task(first)).folder == before.folder


def test_types_that_datasets_inferred_for_its_own_copy_are_not_taken_for_declared(put: Put) -> None:
    snapshot = put({"train.csv": "text,n\nNA,007\n"})
    datasets.load_dataset_builder(str(snapshot)).download_and_prepare()
    assert read_rows(SOURCE, {}, ["text"])[:] == {"text": ["NA"], "n": ["007"]}


def test_files_that_are_noted_and_gone_are_an_error_without_a_network(put: Put) -> None:
    snapshot = put({"train.csv": "text\na\n"})
    located = find_hub_files(SOURCE)
    assert located is not None
    hub_files._write(
        hub_files._listing_file("org/texts", None, COMMIT), asdict(located) | {"layout": [*located.layout]}
    )
    (snapshot / "train.csv").unlink()
    assert find_hub_files(SOURCE) == located
    with pytest.raises(InputError, match="data set org/texts is neither on this machine nor reachable on the hub"):
        read_rows(SOURCE, {})


@pytest.mark.parametrize("setting", ["encoding: utf8", "header: 0", "keep_default_na: false", 'delimiter: "|"'])
def test_reader_settings_equal_to_the_defaults_are_accepted(setting: str, put: Put) -> None:
    readme = f"---\nconfigs:\n- config_name: default\n  data_files: train.csv\n  {setting}\n---\n"
    put({"README.md": readme, "train.csv": "text|n\nNA|1\n"})
    assert read_rows(SOURCE, {}, ["text"])[:] == {"text": ["NA"], "n": [1]}


def test_as_declared_converts_values_or_gives_the_reason() -> None:
    label = datasets.ClassLabel(names=["bad", "good"])
    features = {
        "label": label,
        "tags": datasets.List(label),
        "n": datasets.Value("int32"),
        "yes": datasets.Value("bool"),
    }
    change = convert_declared(features | {"text": datasets.Value("string")}, ())
    given = {"label": "1", "tags": ["good", 0, None], "n": 7.0, "yes": "false", "text": {"a": "é"}, "other": "007"}
    expected = {"label": 1, "tags": [1, 0, None], "n": 7, "yes": False, "text": '{"a": "é"}', "other": "007"}
    assert change(given) == expected
    for name, value in [("label", 2), ("label", "-2"), ("label", 0.5), ("tags", ["fair"]), ("n", 7.5), ("yes", "no")]:
        converted = change({name: value})
        assert isinstance(converted, RowError) and f"in column '{name}'" in str(converted), (name, value)
