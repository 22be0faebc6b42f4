"""Preparation of raw rows: several sources, limits, weights, and rows that are too long, empty or invalid."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftcli import testing
from ftcli.config.recipe import Recipe
from ftcli.config.recipe_data import Source
from ftcli.data.cache import PreparedRows, prepare_rows
from ftcli.data.encode import PARALLEL_FROM, Counts, encode_source, encoded_files
from ftcli.data.mixture import read_sources
from ftcli.data.revisions import hub_notes
from ftcli.data.sources import check_source, first_columns, read_rows
from ftcli.launch.preflight import describe_formats
from ftcli.runtime.errors import InputError
from ftcli.tasks.build import build_task
from ftcli.tasks.shared.batches import fit
from ftcli.training.evaluation import source_losses

from ...support.recipes import minimal_values


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return testing.save_tiny_causal(tmp_path_factory.mktemp("model"))


def recipe_of(model: Path, data: dict[str, Any], **changes: Any) -> Recipe:
    values = minimal_values("pretrain", model={"name": str(model)}, data={"max_length": 64} | data)
    return Recipe.model_validate(values | changes)


def prepared(recipe: Recipe) -> PreparedRows:
    return prepare_rows(recipe, build_task(recipe))


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def texts(path: Path, letter: str, count: int) -> str:
    """Write texts of one letter each, as many times as the row's number says."""
    return write(path, [{"text": letter * (number + 1)} for number in range(count)])


def chats(path: Path, answers: list[str | None]) -> str:
    return write(path, [{"prompt": "p", "completion": answer} for answer in answers])


@given(
    st.lists(st.booleans(), min_size=1, max_size=40),
    st.integers(2, 12),
)
def test_splitting_neither_loses_nor_doubles_a_trained_token(trained: list[bool], length: int) -> None:
    ids = list(range(len(trained)))  # each token is its own place
    rows = fit(ids, trained, length, "split")
    pairs = [list(zip(row["input_ids"], row["trained"], strict=True))[1:] for row in rows]
    targets = [token for row in pairs for token, is_trained in row if is_trained]
    assert targets == [t for t in ids[1:] if trained[t]]
    assert all(2 <= len(row["input_ids"]) <= length or len(ids) == 1 for row in rows)
    assert all(row["items"] == sum(row["trained"][1:]) for row in rows)
    for row in rows[1:]:  # the token before the first target is there
        assert row["input_ids"] == list(range(row["input_ids"][0], row["input_ids"][-1] + 1))
        assert not row["trained"][0]


def test_fit_with_a_long_row_is_cut_dropped_or_split() -> None:
    ids, trained = [1, 2, 3, 4, 5], [False, True, True, True, True]
    cut = {"input_ids": [1, 2, 3], "trained": [False, True, True], "items": 2}
    assert fit(ids, trained, 3, "truncate") == [cut | {"cut": True}]
    assert fit(ids, trained, 3, "drop") == []
    assert fit(ids, trained, 3, "split") == [cut, {"input_ids": [3, 4, 5], "trained": [False, True, True], "items": 2}]
    for policy in ("truncate", "drop", "split"):
        assert fit(ids, trained, 5, policy) == [{"input_ids": ids, "trained": trained, "items": 4}]


def test_fit_with_a_long_row_that_trains_nothing_at_any_length_says_so() -> None:
    for first in (False, True):  # nothing predicts the first token, so its mark trains nothing
        (cut,) = fit([1, 2, 3, 4], [first, False, False, False], 3, "truncate")
        assert cut["items"] == 0 and cut["cut"] and cut["never_trained"]
    (cut,) = fit([1, 2, 3, 4], [True, False, False, True], 3, "truncate")
    assert cut["items"] == 0 and cut["cut"] and "never_trained" not in cut


def test_prepare_rows_every_document_of_raw_text_ends_with_the_end_token_and_is_trained_whole(
    model: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(model, {"train": write(tmp_path / "t.jsonl", [{"text": "ab"}, {"text": "x" * 100}])})
    rows, end = prepared(recipe), build_task(recipe).tokenizer.eos_token_id
    documents = list(rows.train)
    assert [len(row["input_ids"]) for row in documents] == [3, 64, 38]  # 101 tokens, one of them in both pieces
    assert documents[0]["input_ids"][-1] == documents[2]["input_ids"][-1] == end
    assert [row["items"] for row in documents] == [2, 63, 37]
    assert [(row["id"], row["row"], row["source"]) for row in documents] == [(0, 0, 0), (1, 1, 0), (2, 1, 0)]
    assert rows.log_lines == [
        "data.train t: raw text, 2 rows, 105 tokens, 102 trained",
        "data.train t: 1 of 2 rows were longer than 64 tokens and were split into 2 rows",
    ]
    assert rows.tokens == 105


@pytest.mark.parametrize(
    ("policy", "lengths", "line"),
    [
        ("truncate", [5, 64], "data.train t: 1 of 2 rows were longer than 64 tokens and were cut"),
        ("drop", [5], "data.train t: 1 of 2 rows were longer than 64 tokens and were left out"),
    ],
)
def test_prepare_rows_logs_truncated_and_dropped_rows(
    model: Path, tmp_path: Path, policy: str, lengths: list[int], line: str
) -> None:
    source = write(tmp_path / "t.jsonl", [{"text": "abcd"}, {"text": "x" * 100}])
    rows = prepared(recipe_of(model, {"train": source, "truncation": policy}))
    assert [len(ids) for ids in rows.train["input_ids"]] == lengths
    assert rows.log_lines[1:] == [line]


def test_prepare_rows_with_no_usable_row_names_the_reasons(model: Path, tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", [{"text": "a" * 99}, {"text": "b" * 99}, {"text": "c", "weight": 0}])
    with pytest.raises(InputError) as caught:
        prepared(recipe_of(model, {"train": rows, "truncation": "drop"}))
    (problem,) = caught.value.problems
    assert problem.what.endswith("rows.jsonl has no usable row")
    assert problem.hint == ("2 of 3 rows are longer than data.max_length 64: raise it; 1 of 3 rows have weight 0")


def test_reason_why_no_row_is_usable_names_the_first_bad_row() -> None:
    counts = Counts(rows=24, bad=[(2, "label 10 is not one of: a, b"), (3, "another")])
    assert counts.why_none(64) == "2 of 24 rows cannot be used; row 3: label 10 is not one of: a, b"


def test_prepare_rows_with_an_epoch_takes_the_weight_of_a_source_times_its_rows(model: Path, tmp_path: Path) -> None:
    sources = [
        {"path": texts(tmp_path / "a.jsonl", "a", 10), "weight": 0.5},
        {"path": texts(tmp_path / "b.jsonl", "b", 8), "weight": 2.25, "label": "bees"},
        {"path": texts(tmp_path / "c.jsonl", "c", 9), "max_rows": 4},
    ]
    rows = prepared(recipe_of(model, {"train": sources}))
    seen = Counter(zip(rows.train["source"], rows.train["row"], strict=True))
    assert Counter(rows.train["source"]) == {0: 5, 1: 18, 2: 4}
    assert sorted(count for (source, _), count in seen.items() if source == 1) == [2] * 6 + [3] * 2
    assert all(count == 1 for (source, _), count in seen.items() if source != 1)
    assert list(rows.train["id"]) == list(range(27))
    assert rows.labels == {"train": ["a", "bees", "c"]}
    assert "data.train bees: 3 times in an epoch, the last time 2 of them" in rows.log_lines
    for row in rows.train:  # the row is what it says it is
        assert len(row["input_ids"]) == row["row"] + 2
    again = prepared(recipe_of(model, {"train": sources}, batch={"global_size": 2}))
    assert list(again.train["row"]) == list(rows.train["row"])
    other = prepared(recipe_of(model, {"train": sources}, seed=1))
    assert list(other.train["row"]) != list(rows.train["row"])


def test_prepare_rows_with_a_weight_that_leaves_no_row_raises(model: Path, tmp_path: Path) -> None:
    source = {"path": texts(tmp_path / "a.jsonl", "a", 4), "weight": 0.1}
    with pytest.raises(InputError, match=r"weight 0.1 leaves none of the 4 rows of .*a\.jsonl"):
        prepared(recipe_of(model, {"train": source}))


def test_prepare_rows_held_out_of_several_sources_are_never_trained_on(model: Path, tmp_path: Path) -> None:
    sources = [{"path": texts(tmp_path / f"{name}.jsonl", name, 20), "weight": 2.0} for name in "ab"]
    rows = prepared(recipe_of(model, {"train": sources, "eval_rows": 7}))
    assert rows.eval is not None and len(rows.eval) == 7 and len(rows.train) == 2 * 33
    pairs = [set(zip(part["source"], part["row"], strict=True)) for part in (rows.train, rows.eval)]
    assert len(pairs[0]) == 33 and not pairs[0] & pairs[1]
    assert rows.labels["eval"] == ["a", "b"]


def test_sources_of_different_formats_and_columns_make_one_set(model: Path, tmp_path: Path) -> None:
    sources = [
        {"path": chats(tmp_path / "pairs.jsonl", ["yes", "no"])},
        {
            "path": write(tmp_path / "alpaca.jsonl", [{"instruction": "p", "input": "", "output": "yes", "id": "x"}]),
        },
        {"path": write(tmp_path / "qa.jsonl", [{"q": "p", "a": "no"}]), "columns": {"prompt": "q", "completion": "a"}},
    ]
    rows = prepared(recipe_of(model, {"train": sources}, task="sft"))
    ids = list(rows.train["input_ids"])
    assert ids[2] == ids[0] and ids[3] == ids[1] and len(ids) == 4
    assert [line.split(", ")[0] for line in rows.log_lines] == [
        "data.train pairs: prompt and completion",
        "data.train alpaca: Alpaca instructions",
        "data.train qa: prompt and completion",
    ]


def test_prepare_rows_that_cannot_be_used_are_counted_up_to_the_bound_and_named(model: Path, tmp_path: Path) -> None:
    path = chats(tmp_path / "c.jsonl", ["a", " ", "b", None, *"cdefgh"])
    data = {"train": path, "max_bad_rows": 2}
    rows = prepared(recipe_of(model, data, task="sft"))
    assert list(rows.train["row"]) == [0, 2, 4, 5, 6, 7, 8, 9]
    message = "data.train c: 2 of 10 rows cannot be used and were left out: 2, 4; has an empty completion"
    assert rows.log_lines[1] == message and prepared(recipe_of(model, data, task="sft")).log_lines[1] == message
    counts = json.loads((rows.folder / "meta.json").read_text())["counts"]
    assert [number for number, _ in counts[0]["bad"]] == [1, 3]
    with pytest.raises(InputError, match=r"row 2 of .*c\.jsonl: has an empty completion \(more than"):
        prepared(recipe_of(model, data | {"max_bad_rows": 1}, task="sft"))
    with pytest.raises(InputError, match=r"row 2 of .*c\.jsonl: has an empty completion\n"):
        prepared(recipe_of(model, {"train": path}, task="sft"))


def test_prepare_rows_bound_holds_for_all_sources_together(model: Path, tmp_path: Path) -> None:
    sources = [chats(tmp_path / f"{name}.jsonl", ["a", " ", "b"]) for name in "cd"]
    assert len(prepared(recipe_of(model, {"train": sources, "max_bad_rows": 2}, task="sft")).train) == 4
    with pytest.raises(InputError, match="row 2 of .*d.jsonl"):
        prepared(recipe_of(model, {"train": sources, "max_bad_rows": 1}, task="sft"))


def test_prepare_rows_blame_the_length_limit_only_for_answers_that_it_cuts_off(model: Path, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "p" * 200}, {"role": "assistant", "content": "c", "train": False}]
    path = write(tmp_path / "c.jsonl", [{"messages": turns}, {"messages": [turns[0], {**turns[1], "train": True}]}])
    with pytest.raises(InputError, match="2 of 2 rows .* 1 of them because data.max_length is 64"):
        prepared(recipe_of(model, {"train": path}, task="sft"))
    write(tmp_path / "c.jsonl", [{"messages": turns}])
    with pytest.raises(InputError, match="0 of them because data.max_length is 64\n.*fix or remove these rows"):
        prepared(recipe_of(model, {"train": path}, task="sft"))


def long_prompts(path: Path, long: int) -> str:
    rows = [{"prompt": "p" * (200 if n < long else 1), "completion": "c"} for n in range(200)]
    return write(path, rows)


def test_prepare_rows_with_nothing_to_train_on_are_counted_and_more_than_a_hundredth_raises(
    model: Path, tmp_path: Path
) -> None:
    rows = prepared(recipe_of(model, {"train": long_prompts(tmp_path / "two.jsonl", 2)}, task="sft"))
    assert len(rows.train) == 198
    assert rows.log_lines[1:] == [
        "data.train two: 2 of 200 rows were longer than 64 tokens and were cut",
        "data.train two: 2 of 200 rows contain no trainable tokens and were left out",
    ]
    with pytest.raises(
        InputError, match="3 of 200 rows of .*three.jsonl contain no trainable tokens, 3 of them because"
    ):
        prepared(recipe_of(model, {"train": long_prompts(tmp_path / "three.jsonl", 3)}, task="sft"))
    split = prepared(recipe_of(model, {"train": str(tmp_path / "three.jsonl"), "truncation": "split"}, task="sft"))
    assert len(split.train) == 200 and min(split.train["items"]) > 0  # pieces without an answer are left out


@pytest.mark.parametrize(("long", "most_bad", "raises"), [(2, 0, False), (3, 0, True), (3, 3, False)])
def test_prepare_rows_limits_the_rows_without_trained_tokens_at_the_start_of_a_stream_only(
    long: int, most_bad: int, raises: bool, model: Path, tmp_path: Path
) -> None:
    rows = [{"prompt": "p" * (200 if n < long or n >= 256 else 1), "completion": "c"} for n in range(300)]
    data = {"train": write(tmp_path / "rows.jsonl", rows), "streaming": True, "max_bad_rows": most_bad}
    recipe = recipe_of(model, data, task="sft", train={"max_steps": 1})
    if raises:
        with pytest.raises(InputError, match="3 of 256 rows of .* contain no trainable tokens"):
            prepared(recipe)
    else:
        assert len(prepared(recipe).train) == 256 - long


class Slow:
    """A task whose rows decide what it does."""

    def encode(self, row: dict[str, Any], facts: dict[str, Any]) -> list[dict[str, Any]]:
        if row["text"] == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if row["text"] == "fail":
            raise KeyError("a mistake of the task's own")
        return [{"input_ids": [len(row["text"])], "items": 1, "note": None if len(row["text"]) < 1000 else "long"}]


def raw(rows: list[str]) -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"text": rows})


def encode(rows: list[str], folder: Path, processes: int) -> Any:
    indices = np.arange(len(rows))
    task: Any = Slow()
    return encode_source(task, raw(rows), indices, {}, folder, title="t", most_bad=0, processes=processes)


def test_prepare_rows_several_processes_write_what_one_does(tmp_path: Path) -> None:
    rows = ["x" * (number % 2000) for number in range(PARALLEL_FROM + 1)]
    counts = [encode(rows, tmp_path / str(processes), processes) for processes in (1, 3)]
    assert counts[0] == counts[1] and counts[0].documents == len(rows)
    files = [encoded_files(tmp_path / folder) for folder in ("1", "3")]
    assert len(files[0]) == 1 + 8  # the first chunk is short, so that processes start soon
    for one, other in zip(*files, strict=True):
        assert one.name == other.name and one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize(("word", "message"), [("die", "a process that prepares rows died"), ("fail", "a mistake of")])
def test_prepare_rows_with_a_process_that_dies_or_fails_ends_the_preparation(
    tmp_path: Path, word: str, message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        encode(["x"] * PARALLEL_FROM + [word], tmp_path / "out", 2)
    assert multiprocessing.active_children() == []


def test_source_losses_equal_the_losses_of_the_rows_of_each_source() -> None:
    rows = {"loss": np.array([1.0, 2.0, 6.0]), "items": np.array([1.0, 1.0, 3.0])}
    sources = np.array([0, 1, 0])
    assert source_losses(rows, sources, ["a", "b"]) == {"a/loss": 7 / 4, "b/loss": 2.0}
    assert source_losses(rows, np.zeros(3, dtype=int), ["a"]) == {}
    assert source_losses(rows, np.zeros(3, dtype=int), ["a", "b"]) == {"a/loss": 9 / 5}  # a dry run


def test_prepare_rows_with_an_evaluation_of_two_sources_gives_the_loss_of_each(model: Path, tmp_path: Path) -> None:
    from ftcli.training.evaluation import evaluate
    from ftcli.training.setup import prepare

    paths = {name: texts(tmp_path / f"{name}.jsonl", name, 5) for name in "ab"}
    both = evaluate(prepare(recipe_of(model, {"train": paths["a"], "eval": list(paths.values())}), cpu=True))
    assert set(both) == {"loss", "perplexity", "a/loss", "b/loss"}
    alone = {
        name: evaluate(prepare(recipe_of(model, {"train": paths["a"], "eval": path}), cpu=True))["loss"]
        for name, path in paths.items()
    }
    assert {name: both[f"{name}/loss"] for name in paths} == pytest.approx(alone, rel=1e-6)
    assert both["loss"] == pytest.approx(sum(alone.values()) / 2, rel=1e-6)  # as many tokens in each


def test_check_prints_the_format_of_every_source_from_its_first_row(model: Path, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"messages": [], "score": 1}])
    (tmp_path / "b.json").write_text('[{"instruction": "x", "output": "y"}]')
    (tmp_path / "c.csv").write_text("question,completion\nx,y\n")
    data = {
        "train": [str(tmp_path / "a.jsonl"), {"path": str(tmp_path / "c.csv"), "columns": {"prompt": "question"}}],
        "eval": str(tmp_path / "b.json"),
    }
    facts = describe_formats(recipe_of(model, data, task="sft"))
    assert facts == {
        "data.train a": f"{tmp_path / 'a.jsonl'}: messages (not used: score)",
        "data.train c": f"{tmp_path / 'c.csv'}: prompt and completion",
        "data.eval": f"{tmp_path / 'b.json'}: Alpaca instructions",
    }
    (tmp_path / "q.csv").write_text("q,a\nx,y\n")
    data = {"train": str(tmp_path / "q.csv"), "columns": {"prompt": "q", "completion": "q"}}
    twice = recipe_of(model, data, task="sft")
    assert describe_formats(twice) == {"data.train": f"{tmp_path / 'q.csv'}: prompt and completion (not used: a)"}
    hub = describe_formats(recipe_of(model, {"train": "org/rows"}))
    assert hub == {"data.train": "org/rows: format unknown until rows are prepared"}
    with pytest.raises(InputError, match="contains scored messages, which this task does not train on"):
        describe_formats(recipe_of(model, {"train": str(tmp_path / "a.jsonl")}))


@pytest.mark.parametrize(
    ("name", "content", "columns"),
    [
        ("header.csv", "prompt,completion\nx,y\n", ["prompt", "completion"]),
        ("blank.csv", "\n\nprompt,completion\nx,y\n", ["prompt", "completion"]),
        ("wide.csv", f"prompt,completion\n{'x' * 200_000},y\n", ["prompt", "completion"]),
        ("rows.jsonl", '\n{"a": 1}\n{"b": 2}\n{"c": 3}\n', ["a", "b"]),
        ("rows.json", '[{"a": 1}, {"b": 2}, {"c": 3}]', ["a", "b"]),
        ("text.txt", "a line\n", ["text"]),
    ],
)
def test_first_columns_with_a_missing_column_is_refused_before_reading_all_rows(
    name: str, content: str, columns: list[str], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    source = Source(path=str(tmp_path / name))
    assert first_columns(source, most_bad=1) == columns
    check_source(source, {"prompt": columns[0]}, most_bad=1)
    with pytest.raises(InputError, match="no column 'elsewhere'"):
        check_source(source, {"prompt": "elsewhere"}, most_bad=1)


@pytest.mark.parametrize(("name", "header"), [("a.csv", "prompt,completion\n"), ("a.tsv", "\nprompt\tcompletion")])
def test_first_columns_of_a_table_without_rows_are_refused(name: str, header: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(header)
    with pytest.raises(InputError, match=f"{name} has no rows"):
        first_columns(Source(path=str(tmp_path / name)))


def test_check_source_of_a_folder_of_tables_names_a_file(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "p", "completion": "c"}\n')
    with pytest.raises(InputError, match=r"name the file of rows, such as rows.jsonl"):
        check_source(Source(path=str(tmp_path)), {})


@pytest.mark.parametrize("path", ["shards/train3/", "shards/a/b", "shards/train3/x"])
def test_a_path_that_cannot_be_a_name_on_the_hub_is_local(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shards" / "train2").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"^data\.eval\.1: no data at") as caught:
        check_source(Source(path=path), {}, key="data.eval.1")
    assert path != "shards/train3/" or "did you mean 'train2'?" in str(caught.value)


def test_prepare_rows_names_the_key_of_a_source_that_is_gone(model: Path, tmp_path: Path) -> None:
    there, gone = texts(tmp_path / "there.jsonl", "a", 9), str(tmp_path / "gone.jsonl")
    recipe = recipe_of(model, {"train": [there, gone]})
    for read in (prepared, lambda recipe: read_sources(recipe, build_task(recipe))):
        with pytest.raises(InputError, match=r"^data\.train\.1: no data at"):
            read(recipe)
    other = write(tmp_path / "other.jsonl", [{"prompt": "a", "completion": "b"}])
    with pytest.raises(InputError, match=r"^data\.train\.1: .*other\.jsonl contains "):
        prepared(recipe_of(model, {"train": [there, str(other)]}))


def test_notes_of_names_on_the_hub_have_a_similar_local_name(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shards" / "train2").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    recipe = recipe_of(model, {"train": ["shards/train3", "far/away"], "eval": "far/away"})
    end = "is a name on the hub: download it with `ftcli fetch`"
    assert hub_notes(recipe) == [f"data set shards/train3 {end} (did you mean 'train2'?)", f"data set far/away {end}"]
    elsewhere = recipe.model_copy(update={"model": recipe.model.model_copy(update={"name": "nobody/nothing"})})
    assert hub_notes(elsewhere)[0] == f"model nobody/nothing {end}"


@pytest.mark.parametrize(
    ("content", "message"),
    [("\n[1]\n", ":2: row 1 is not a JSON object"), ("\n\xff\n", ":2: row 1 is not UTF-8 text"), ("\n", "is empty")],
)
def test_first_columns_with_a_bad_line_is_refused_before_reading_all_rows(
    content: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content.encode("latin-1"))
    with pytest.raises(InputError, match=message):
        first_columns(Source(path=str(tmp_path / "rows.jsonl")))


@pytest.mark.parametrize("name", ["rows.json", "rows.csv"])
def test_first_columns_of_a_file_that_is_not_utf8_is_none(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes('{"é": 1}'.encode("latin-1"))
    assert first_columns(Source(path=str(tmp_path / name))) is None


@pytest.mark.parametrize(
    ("task", "policy", "words"),
    [
        ("text_classification", "split", "a part of a text has no label"),
        ("image_classification", "drop", "applies to texts"),
    ],
)
def test_prepare_rows_with_a_truncation_that_a_task_cannot_do_is_refused(
    model: Path, task: str, policy: str, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        build_task(recipe_of(model, {"train": "rows.jsonl", "truncation": policy}, task=task))


@pytest.mark.parametrize("truncation", [None, "truncate", "drop", "split"])
def test_documents_of_any_length_are_packed_once_each_into_rows_of_max_length(
    model: Path, tmp_path: Path, truncation: str | None
) -> None:
    sources = [
        {
            "path": write(tmp_path / "long.jsonl", [{"text": "x" * length} for length in range(1, 200, 13)]),
            "weight": 1.5,
        },
        texts(tmp_path / "short.jsonl", "a", 20),
    ]
    rows = prepared(recipe_of(model, {"train": sources, "packing": True, "truncation": truncation}))
    assert rows.bins is not None
    lengths = [len(ids) for ids in rows.train["input_ids"]]
    assert max(lengths) <= 64 and rows.tokens <= sum(lengths)  # tokens of rows that are taken twice are counted once
    assert sorted(number for index in range(len(rows.bins)) for number in rows.bins[index]) == list(range(len(lengths)))
    assert max(sum(lengths[n] for n in rows.bins[index]) for index in range(len(rows.bins))) <= 64
    if truncation in (None, "split"):  # every token of every text, and one more a text and seam
        assert sum(rows.train["items"]) == sum(n for n, source in written(rows) if source == 0) + sum(range(1, 21))


def written(rows: PreparedRows) -> list[tuple[int, int]]:
    """Return (characters, source) of every text that an epoch holds, one that is taken twice twice."""
    beginnings = [row for row in rows.train if not row["input_ids"] or row["trained"][0]]
    return [(1 + 13 * row["row"], row["source"]) for row in beginnings]


@pytest.mark.parametrize("bad", [0, 2999, 3001])  # also in another record batch than the first
def test_parquet_row_with_text_that_is_not_utf_8_is_named(bad: int, tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    texts = [b"half a letter \xc3" if number == bad else b"text" for number in range(3002)]
    column = pa.array(texts, pa.binary()).view(pa.string())
    inner = pa.StructArray.from_arrays([column], ["content"])
    nested = pa.ListArray.from_arrays(pa.array(range(3003), pa.int32()), inner)
    for name, table in {"flat": {"text": column}, "nested": {"messages": nested}}.items():
        path = tmp_path / f"{name}.parquet"
        parquet.write_table(pa.table(table), path, row_group_size=1500)
        with pytest.raises(
            InputError, match=rf"data.eval: row {bad + 1} of .*{name}.parquet has text that is not UTF-8"
        ):
            read_rows(Source(path=str(path)), {}, key="data.eval")


def test_parquet_file_with_other_contents_and_the_same_modification_time_is_read_again(tmp_path: Path) -> None:
    from datasets import Dataset

    path, seen = tmp_path / "rows.parquet", []
    for text in ("first", "other"):
        Dataset.from_dict({"text": [text]}).to_parquet(str(path))
        os.utime(path, ns=(10**18, 10**18))
        seen.append(read_rows(Source(path=str(path)), {"text": "text"})["text"][0])
    assert seen == ["first", "other"]
