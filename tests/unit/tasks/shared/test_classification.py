"""Labels of classification tasks: one meaning over all sources, splits and types, or an error that names both sides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from datasets import ClassLabel, Dataset, Features, List, Value
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from ftcli import testing
from ftcli.config.recipe import Recipe
from ftcli.config.recipe_data import Source
from ftcli.data.cache import PreparedRows, prepare_rows
from ftcli.data.label_names import check_class_names, decode_class_names
from ftcli.data.mixture import SourceRows, survey_sources
from ftcli.data.streaming.corpus import open_source
from ftcli.reports.survey import survey_data
from ftcli.runtime.errors import InputError, RowError
from ftcli.tasks import text_classification
from ftcli.tasks.build import build_task
from ftcli.tasks.image_classification import Options as ImageOptions
from ftcli.tasks.shared.classification import label_index
from ftcli.tasks.shared.label_columns import align_labels
from ftcli.tasks.text_classification import Options, Task

from ....support.recipes import minimal_values

NUMBERS = [str(number) for number in range(1, 13)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return testing.save_tiny_encoder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def prepared(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that prepares the rows of text_classification from files of this folder."""
    monkeypatch.chdir(tmp_path)

    def prepare(train: Any, evaluation: Any = None, *, labels: list[str] | None = None, **data: Any) -> PreparedRows:
        values: dict[str, Any] = minimal_values(
            "text_classification",
            model={"name": str(model)},
            data={"train": train, "eval": evaluation, "max_length": 64} | data,
        )
        if labels is not None:
            values["task_options"] = {"labels": labels}
        recipe = Recipe.model_validate(values)
        return prepare_rows(recipe, build_task(recipe))

    return prepare


def encoded(path: str, names: list[str], indices: list[int], texts: list[str] | None = None) -> str:
    """Write a parquet file with a ClassLabel column."""
    rows = {"text": texts or [f"text {n}" for n in range(len(indices))], "label": indices}
    Dataset.from_dict(rows, Features({"text": Value("string"), "label": ClassLabel(names=names)})).to_parquet(path)
    return path


def table(path: str, labels: pa.Array) -> str:
    """Write a parquet file as other programs do, without features."""
    from pyarrow import parquet

    parquet.write_table(pa.table({"text": [f"text {n}" for n in range(len(labels))], "label": labels}), path)
    return path


def jsonl(path: str, labels: list[Any]) -> str:
    lines = [json.dumps({"text": f"text {n}", "label": label}) + "\n" for n, label in enumerate(labels)]
    Path(path).write_text("".join(lines))
    return path


def names_of(rows: PreparedRows, split: str = "train") -> list[str]:
    """Return the name of the class that each prepared row is trained or measured as."""
    part = rows.train if split == "train" else rows.eval
    assert part is not None
    return [rows.facts["labels"][target] for target in part["target"]]


def test_listed_labels_are_found_by_the_names_of_a_class_feature(prepared: Any) -> None:
    rows = prepared(encoded("t.parquet", ["neg", "pos"], [0, 1, 1]), labels=["pos", "neg"])
    assert names_of(rows) == ["neg", "pos", "pos"]
    assert rows.facts["labels"] == ["pos", "neg"]


def test_class_feature_with_numeric_names_has_every_name(prepared: Any) -> None:
    names = sorted(NUMBERS)  # 1, 10, 11, 12, 2, ..., as class_encode_column writes them
    rows = prepared(encoded("t.parquet", names, [n % 12 for n in range(48)]))
    assert rows.facts["labels"] == names
    assert names_of(rows) == [names[n % 12] for n in range(48)]
    rows = prepared(encoded("three.parquet", ["1", "2", "3"], [0, 1, 2]))
    assert names_of(rows) == ["1", "2", "3"]


def test_evaluation_rows_that_are_encoded_apart_have_their_own_names(prepared: Any) -> None:
    train = encoded("t.parquet", ["bad", "fair", "good"], [0, 1, 2])
    rows = prepared(train, encoded("e.parquet", ["fair", "good"], [0, 1, 1]))
    assert names_of(rows, "eval") == ["fair", "good", "good"]
    rows = prepared(train, jsonl("e.jsonl", ["good", "bad"]))
    assert names_of(rows, "eval") == ["good", "bad"]


def test_sources_with_other_class_features_share_the_classes_by_name(prepared: Any) -> None:
    sources = [encoded("a.parquet", ["neg", "pos"], [0, 1]), encoded("b.parquet", ["pos", "neg", "so-so"], [0, 1, 2])]
    rows = prepared([*sources, jsonl("c.jsonl", ["pos", "other"])])
    assert rows.facts["labels"] == ["neg", "pos", "so-so", "other"]
    assert names_of(rows) == ["neg", "pos", "pos", "neg", "so-so", "pos", "other"]


def test_numbers_are_the_same_labels_whatever_their_type(prepared: Any) -> None:
    train = table("t.parquet", pa.array([2.0, 1.0, None, 10.0], pa.float64()))
    rows = prepared([train, jsonl("u.jsonl", ["10", "2"])], jsonl("e.jsonl", [1, 2]), max_bad_rows=1)
    assert rows.facts["labels"] == ["1", "2", "10"]
    assert names_of(rows) == ["2", "1", "10", "10", "2"]
    assert names_of(rows, "eval") == ["1", "2"]
    Path("t.csv").write_text("text,label\na,2.0\nb,1\nc,10\n")
    assert names_of(prepared("t.csv", "e.jsonl")) == ["2", "1", "10"]


def test_text_that_is_no_plain_number_stays_as_it_is(prepared: Any) -> None:
    rows = prepared(jsonl("t.jsonl", ["1.0", "1", "nan", "None", "10", "2"]))
    assert rows.facts["labels"] == ["1", "1.0", "10", "2", "None", "nan"]  # sorted as text, as before


@pytest.mark.parametrize(
    ("labels", "pairs"),
    [
        (["Pos", "pos", "neg", "neg "], "'Pos' and 'pos'; 'neg' and 'neg '"),
        (["New York", "new\u00a0york", "b"], "'New York' and 'new\\xa0york'"),
        (["1", "1.0", "x"], "'1' and '1.0'"),
        (["pos", "neg"], None),
    ],
)
def test_prepare_rows_with_labels_that_look_alike_warns_with_the_pairs(
    prepared: Any, model: Path, labels: list[str], pairs: str | None
) -> None:
    rows = prepared(jsonl("t.jsonl", labels))
    assert len(rows.facts["labels"]) == len(labels)
    said = [line for line in rows.log_lines if "differ only in case" in line]
    data = {"train": "t.jsonl", "max_length": 64}
    recipe = Recipe.model_validate(minimal_values("text_classification", model={"name": str(model)}, data=data))
    warnings = [finding for finding in survey_data(recipe).findings if "differ only in case" in finding.what]
    what = f"data.train t: labels that differ only in case, white space or form of a number: {pairs}"
    assert said == ([f"{what}: if they mean the same, write them in one way"] if pairs else [])
    assert [(finding.level, finding.what) for finding in warnings] == ([("warning", what)] if pairs else [])


@pytest.mark.parametrize("pair_in", ["train", "eval", "both", "neither"])
def test_prepare_rows_evaluation_with_another_number_of_texts_than_the_training_warns(
    prepared: Any, pair_in: str
) -> None:
    for name in ("train", "eval"):
        pair = {"text_pair": "b"} if pair_in in (name, "both") else {}
        Path(f"{name}.jsonl").write_text("".join(json.dumps({"text": "a", "label": x, **pair}) + "\n" for x in "xy"))
    said = [line for line in prepared("train.jsonl", "eval.jsonl").log_lines if "per row, but data.train" in line]
    expected = {
        "train": "one text per row, but data.train has two",
        "eval": "two texts per row, but data.train has one",
    }
    hint = "name the columns in data.columns: {text: ..., text_pair: ...}"
    assert said == ([f"data.eval eval: {expected[pair_in]}: {hint}"] if pair_in in expected else [])


def test_prepare_rows_of_a_table_with_several_forms_of_a_number_warns_with_the_pairs(prepared: Any) -> None:
    Path("t.csv").write_text("text,label\na,10\nb,1e1\nc,2\n")
    rows = prepared("t.csv")
    assert names_of(rows) == ["10", "10", "2"]
    assert "data.train t: labels that are the same number were read as one label: '10' and '1e1'" in rows.log_lines[1]
    rows = prepared("t.csv", labels=["10", "1e1", "2"])
    assert names_of(rows) == ["10", "1e1", "2"]
    assert not any("read as one label" in line for line in rows.log_lines)


def test_encode_of_a_missing_label_names_file_and_row(prepared: Any) -> None:
    nan = table("nan.parquet", pa.array([0.0, 1.0, float("nan"), 1.0]))
    with pytest.raises(InputError, match=r"row 3 of nan\.parquet: has no label"):
        prepared(nan)
    assert prepared(nan, max_bad_rows=1).facts["labels"] == ["0", "1"]
    with pytest.raises(InputError, match=r"row 2 of -1\.parquet: has no label"):
        prepared(encoded("-1.parquet", ["a", "b"], [0, -1, 1]))
    with pytest.raises(InputError, match=r"row 2 of blank\.jsonl: has no label"):
        prepared(jsonl("blank.jsonl", ["a", " ", "b"]))
    with pytest.raises(InputError, match=r"row 1 of none\.jsonl has no label, and neither has any other row"):
        prepared(jsonl("none.jsonl", [None, None]))


@pytest.mark.parametrize("seed_rows", [1, 5])
def test_rows_without_a_label_have_their_number_with_held_out_rows(prepared: Any, seed_rows: int) -> None:
    path = jsonl("t.jsonl", ["a", "b"] * 6 + [None] + ["a", "b"] * 6)
    with pytest.raises(InputError, match=r"row 13 of t\.jsonl: has no label"):
        prepared(path, eval_rows=seed_rows)
    rows = prepared(path, eval_rows=seed_rows, max_bad_rows=1)
    assert len(rows.train) + len(rows.eval) == 24
    assert any(
        "1 of" in line and "cannot be used and were left out: 13; has no label" in line for line in rows.log_lines
    )


def test_find_labels_of_decimal_numbers_reports_regression(prepared: Any) -> None:
    message = r"data\.train t\.parquet has decimal numbers as labels \(0\.5 in row 3\): this is regression"
    with pytest.raises(InputError, match=message):
        prepared(table("t.parquet", pa.array([0.0, 1.0, 0.5])))
    with pytest.raises(InputError, match=r"data\.train n\.jsonl has decimal numbers as labels \(0\.5 in row 3\)"):
        prepared(jsonl("n.jsonl", [0, 1, 0.5]))
    Path("t.csv").write_text("text,label\n" + "".join(f"x,{n / 7:.3f}\n" for n in range(300)))
    with pytest.raises(InputError, match=r"data\.train t\.csv has decimal numbers as labels \(0\.143 in row 2\)"):
        prepared("t.csv")
    rows = prepared("t.parquet", labels=["0", "0.5", "1"])  # the way out that the hint names
    assert names_of(rows) == ["0", "1", "0.5"]


def test_whole_numbers_are_indices_only_where_the_recipe_lists_the_labels(prepared: Any) -> None:
    numbers, words = jsonl("n.jsonl", [1, 0]), jsonl("w.jsonl", ["pos", "neg"])
    assert names_of(prepared(numbers, labels=["neg", "pos"])) == ["pos", "neg"]
    assert names_of(prepared(numbers, words, labels=["neg", "pos"]), "eval") == ["pos", "neg"]
    for train, evaluation in ((words, numbers), (numbers, words)):
        with pytest.raises(InputError) as refused:
            prepared(train, evaluation)
        message = str(refused.value)
        assert "data.eval" in message and "data.train" in message and "neg, pos" in message and "0, 1" in message
        assert "task_options.labels" in message
    with pytest.raises(InputError, match=r"train w.jsonl has the labels neg, pos, and data.train n.jsonl has 0, 1"):
        prepared([words, numbers])
    with pytest.raises(InputError, match=r"train e.parquet has the labels a, b, and data.train n.jsonl has 0, 1"):
        prepared([encoded("e.parquet", ["a", "b"], [0, 1]), numbers])
    with pytest.raises(InputError, match=r"row 1 of n.jsonl: label 1 is not one of: 2, 3"):
        prepared(numbers, labels=["2", "3"])  # names that are numbers: no index


def test_find_labels_with_some_numbers_among_names_succeeds(prepared: Any) -> None:
    rows = prepared([jsonl("a.jsonl", ["1", "2", "other"]), jsonl("b.jsonl", [2, 1])], jsonl("e.jsonl", [2]))
    assert names_of(rows) == ["1", "2", "other", "2", "1"] and names_of(rows, "eval") == ["2"]
    ones = [jsonl(f"{name}.jsonl", [name] * 2) for name in ("ham", "spam")]
    assert prepared(ones).facts["labels"] == ["ham", "spam"]  # one file for each class


def test_find_labels_of_several_or_mixed_labels_is_refused(prepared: Any) -> None:
    with pytest.raises(InputError, match=r"row 1 of t\.jsonl has several labels"):
        prepared(jsonl("t.jsonl", [["a", "b"], ["a"]]))
    with pytest.raises(InputError, match=r"row 2 of e\.jsonl has an empty list of labels"):
        prepared(jsonl("e.jsonl", ["a", []]))
    with pytest.raises(InputError, match=r"row 1 of d\.jsonl has a mapping as label"):
        prepared(jsonl("d.jsonl", [{"x": 1}, {"x": 2}]))
    rows = prepared(jsonl("m.jsonl", [1, "x", 2.0, True]))
    assert names_of(rows) == ["1", "x", "2", "True"]


def test_find_labels_of_an_index_without_a_name_is_refused(prepared: Any, tmp_path: Path) -> None:
    path = encoded("t.parquet", ["a", "b"], [0, 1])
    from pyarrow import parquet

    written = parquet.read_table(path)
    column = pa.array([0, 5], pa.int64())
    parquet.write_table(written.set_column(1, written.schema.field("label"), column), path)
    with pytest.raises(InputError, match=r"row 2 of t.parquet: label 'class index 5' is not one of: a, b"):
        prepared(path)
    rows = prepared(path, max_bad_rows=1)
    assert names_of(rows) == ["a"] and rows.facts["labels"] == ["a", "b"]
    dataset: Any = Dataset.from_parquet(path)
    with pytest.raises(InputError, match=r"t has the class index 5, and its ClassLabel feature has 2 names"):
        decode_class_names(dataset, ["label"], "t")
    assert decode_class_names(dataset, ["text"], "t").features == dataset.features


@pytest.mark.parametrize("options", [Options, ImageOptions])
def test_labels_that_a_recipe_lists_are_distinct_and_at_least_two(options: Any) -> None:
    with pytest.raises(ValidationError, match="'a' is listed twice"):
        options(labels=["a", "b", "a"])
    with pytest.raises(ValidationError, match="at least 2"):
        options(labels=["a"])
    assert options(labels=["b", "a"]).labels == ["b", "a"]


def test_label_index_takes_values_as_well_as_names() -> None:
    assert [label_index(value, ["1", "2"]) for value in (1, 2.0, "2", "2.0")] == [0, 1, 1, 1]
    assert label_index("2", ["1.0", "2.0"]) == 1
    with pytest.raises(RowError, match=r"label 0 is not one of: x, y \(list every label in task_options"):
        label_index(0, ["x", "y"])
    assert label_index(0, ["x", "y"], listed=True) == 0
    with pytest.raises(RowError, match="label 'z' is not one of: x, y"):
        label_index("z", ["x", "y"], listed=True)
    with pytest.raises(RowError, match="has no label"):
        label_index(float("nan"), ["x", "y"], listed=True)


class OwnSurvey(Task):
    """A task that is derived from a shipped one and has its own survey."""

    def survey(self, rows: Dataset) -> dict[str, Any]:
        return {"labels": ["few", "many"], "rows": len(rows)}


def part(split: str, path: str, rows: Dataset) -> SourceRows:
    return SourceRows(split, path, path, "", rows, np.arange(len(rows)), is_table=path.endswith((".csv", ".tsv")))


def test_derived_task_with_its_own_survey_uses_it(model: Path) -> None:
    rows = Dataset.from_dict({"text": ["a", "b"], "label": [0.5, 1.5]})
    recipe: Any = Recipe.model_validate(
        minimal_values("text_classification", model={"name": str(model)}, data={"train": "t.jsonl"})
    )
    parts, facts = survey_sources(OwnSurvey(recipe, text_classification.Options()), [part("train", "t", rows)])
    assert facts == {"labels": ["few", "many"], "rows": 2}
    assert parts[0].rows["label"][:] == [0.5, 1.5]


class Plain:
    """A task of the user's own that takes what its columns hold."""

    columns = ("text", "label")

    def survey(self, rows: Dataset) -> dict[str, Any]:
        return {"rows": len(rows)}


def features_of(names: list[str]) -> Features:
    return Features({"text": Value("string"), "label": List(ClassLabel(names=names))})


def test_survey_parts_with_differing_class_features_is_refused_for_other_tasks() -> None:
    task: Any = Plain()
    rows = {name: Dataset.from_dict({"text": ["a"], "label": [[0]]}, features_of(list(name))) for name in ("xy", "yx")}
    same = [part("train", "a", rows["xy"]), part("eval", "b", rows["xy"])]
    assert survey_sources(task, same)[1] == {"rows": 1}
    with pytest.raises(InputError, match=r"'label' has the class names x, y in data.train a, and y, x in data.eval b"):
        survey_sources(task, [part("train", "a", rows["xy"]), part("eval", "b", rows["yx"])])
    text = Dataset.from_dict({"text": ["a"], "label": ["x"]})
    with pytest.raises(InputError, match="the sources of data.train have columns of different types"):
        survey_sources(task, [part("train", "a", rows["xy"]), part("train", "b", text)])
    check_class_names([("a", text), ("b", rows["xy"])], ["label"])  # types may differ: the task may know better


def test_class_features_are_text_for_language_models(tmp_path: Path, model: Path) -> None:
    features = Features({"prompt": Value("string"), "completion": ClassLabel(names=["no", "yes"])})
    path = str(tmp_path / "t.parquet")
    Dataset.from_dict({"prompt": ["a", "b"], "completion": [1, 0]}, features).to_parquet(path)
    causal = testing.save_tiny_causal(tmp_path / "causal")
    recipe = Recipe.model_validate(minimal_values(model={"name": str(causal)}, data={"train": path}))
    task: Any = build_task(recipe)
    rows = prepare_rows(recipe, task)
    assert ["yes" in task.tokenizer.decode(ids) for ids in rows.train["input_ids"]] == [True, False]
    streamed = list(open_source(Source(path=path), {}).read(0, 0))
    assert streamed == [{"prompt": "a", "completion": "yes"}, {"prompt": "b", "completion": "no"}]


WORDS = ["neg", "pos", "so-so", "nan", "1st", "007", "a b", "Ü"]
TYPES = {
    "text": pa.string(),
    "large text": pa.large_string(),
    "bytes": pa.binary(),
    "int64": pa.int64(),
    "int8": pa.int8(),
    "float64": pa.float64(),
    "float32": pa.float32(),
    "decimal": pa.decimal128(9, 2),
}


@st.composite
def sources(draw: st.DrawFn) -> tuple[list[tuple[str, Dataset, list[str | None]]], list[str] | None]:
    """Draw two to four sources of one set of classes, each in its own encoding, and the recipe's list or None.

    Each source comes with the names of its rows as they are meant; None is a row without a label.
    """
    are_numbers = draw(st.booleans())
    classes = draw(st.lists(st.sampled_from(NUMBERS if are_numbers else WORDS), min_size=2, max_size=6, unique=True))
    listed = draw(st.permutations(classes)) if draw(st.booleans()) else None
    drawn = []
    for number in range(draw(st.integers(2, 4))):
        meant: list[str | None] = draw(st.lists(st.sampled_from([*classes, None]), min_size=1, max_size=8))
        meant += classes if number == 0 else []
        kinds = ["class", "text", "large text", "bytes", "table"]
        kinds += list(TYPES)[3:] if are_numbers else ["index"] if listed else []
        kind = draw(st.sampled_from(kinds))
        path = f"{number}.csv" if kind == "table" else f"{number}.parquet"
        if kind == "class":
            names = draw(st.permutations([*classes, "unused"]))
            indices = [-1 if name is None else names.index(name) for name in meant]
            rows = Dataset.from_dict({"label": indices}, Features({"label": ClassLabel(names=names)}))
        elif kind == "index":
            assert listed is not None
            rows = Dataset.from_dict({"label": [None if name is None else listed.index(name) for name in meant]})
        else:
            holds = TYPES.get(kind, pa.string())
            is_text = pa.types.is_string(holds) or pa.types.is_large_string(holds) or pa.types.is_binary(holds)
            values: list[Any] = [None if name is None else name if is_text else int(name) for name in meant]
            if pa.types.is_floating(holds):
                values = [float("nan") if value is None else float(value) for value in values]
            if kind == "table" and are_numbers and draw(st.booleans()):
                values = [None if value is None else f"{value}.0" for value in values]
            rows = Dataset(pa.table({"label": pa.array(values, holds)}))
        drawn.append((path, rows, meant))
    return drawn, listed


@settings(max_examples=25, deadline=None)
@given(sources())
def test_align_labels_gives_every_row_its_class_over_sources_splits_and_types(
    drawn: tuple[list[tuple[str, Dataset, list[str | None]]], list[str] | None],
) -> None:
    files, listed = drawn
    splits = ["train", *("train" if n % 2 else "eval" for n in range(1, len(files)))]
    parts = [part(split, path, rows) for split, (path, rows, _) in zip(splits, files, strict=True)]
    aligned, labels = align_labels(parts, listed)
    assert listed is None or labels == listed
    assert len(set(labels)) == len(labels)
    for done, (_, _, meant) in zip(aligned, files, strict=True):
        for value, expected in zip(done.rows["label"], meant, strict=True):
            if expected is None:
                with pytest.raises(RowError, match="has no label"):
                    label_index(value, labels, listed=listed is not None)
            else:
                assert labels[label_index(value, labels, listed=listed is not None)] == expected
