"""`ftcli preview` and `ftcli check --data`: rows as they are trained, and what is wrong with them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import ftcli
from ftcli.__main__ import main
from ftcli.data_findings import judge
from ftcli.data_survey import prepare_data, survey, survey_data
from ftcli.errors import InputError
from ftcli.loaders import build_loaders
from ftcli.planning import derive_plan
from ftcli.preview import preview_data
from ftcli.preview_text import Style
from ftcli.testing import save_tiny_causal, save_tiny_encoder, save_tiny_vit

Write = Callable[..., Path]
HOSTILE = "x\x1b]0;owned\x07\x1b[2J \x9b31m\r \u202e <script>alert(1)</script> ⟦y⟧ 世界"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_causal(tmp_path_factory.mktemp("model"))


@pytest.fixture
def write(tmp_path: Path, model: Path) -> Write:
    """Return a function that writes rows and a recipe for them, and returns the recipe's path."""

    def write_recipe(rows: list[Any], evaluation: list[Any] | None = None, **data: Any) -> Path:
        splits = {"train": rows} | ({} if evaluation is None else {"eval": evaluation})
        for name, part in splits.items():
            path = tmp_path / f"{name}.jsonl"
            path.write_text("".join(f"{json.dumps(row)}\n" for row in part), encoding="utf-8")
            data[name] = str(path)
        recipe = {
            "task": "sft",
            "model": {"name": str(model)},
            "data": data,
            "batch": {"global_size": 2, "micro_size": 2},
            "train": {"epochs": 1},
            "optimizer": {"learning_rate": 0.001},
        }
        found = tmp_path / "recipe.yaml"
        found.write_text(json.dumps(recipe))
        return found

    return write_recipe


def turn(prompt: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}


def different(count: int) -> list[dict[str, Any]]:
    return [turn(f"question {i}", f"answer {i}") for i in range(count)]


def levels(recipe: Path) -> list[tuple[str, str]]:
    return [(finding.level, finding.what) for finding in survey_data(recipe).findings]


def test_a_conversation_is_shown_with_its_template_and_exactly_its_mask_in_brackets(write: Write) -> None:
    lines = preview_data(write([turn("Hi\nyou", "Hello"), turn("b", "c")]), row=1).lines()
    start = next(index for index, line in enumerate(lines) if line.startswith("row 1 of"))
    assert lines[start + 1 : start + 5] == [
        "<|im_start|>user↵",
        "Hi↵",
        "you<|im_end|>↵",
        "<|im_start|>assistant↵",
    ]
    assert lines[start + 5] == "⟦Hello<|im_end|>⟧↵"
    assert lines[start].endswith("step 1, 32 tokens, 6 trained")


def test_rows_come_in_the_order_in_which_the_loader_hands_them_to_training(write: Write) -> None:
    recipe = write(different(7))
    prepared = prepare_data(recipe)
    plan = derive_plan(prepared.recipe, 1, 7)
    loader, _ = build_loaders(prepared.recipe, plan, prepared.task, prepared.rows, 0)
    trained = [id_ + 1 for batch in loader for id_ in batch["sample_ids"].tolist()]
    shown = preview_data(recipe, rows=7).rows
    assert [row.number for row in shown[:6]] == trained
    assert [row.step for row in shown] == [1, 1, 2, 2, 3, 3, None]  # the seventh is left over


def test_nothing_in_the_data_reaches_the_terminal_as_an_order(write: Write) -> None:
    found = preview_data(write([turn(HOSTILE, HOSTILE), turn("a", "b")]), row=1)
    plain = "\n".join(found.lines(ids=True))
    assert not {"\x1b", "\x07", "\x9b", "\r", "\u202e"} & set(plain)
    assert r"x\x1b]0;owned\x07" in plain and "世界" in plain and r"\⟦y\⟧" in plain
    coloured = "\n".join(found.lines(Style(width=80, colour=True)))
    assert "\x1b[2J" not in coloured and "\x1b]" not in coloured and "⟦x" not in coloured
    ascii_only = "\n".join(found.lines(Style(unicode=False), ids=True))
    assert ascii_only.isascii() and "[[" in ascii_only and r"\u4e16" in ascii_only


def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Terminal:
        encoding = "UTF-8"

        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    assert Style.of(Terminal()) == Style(100, colour=True, unicode=True)  # type: ignore[arg-type]
    monkeypatch.setenv("NO_COLOR", "1")
    assert Style.of(Terminal()) == Style(100, colour=False, unicode=True)  # type: ignore[arg-type]
    with (tmp_path / "log").open("w", encoding="ascii") as log:
        assert Style.of(log) == Style(None, colour=False, unicode=False)


def test_a_long_row_is_cut_in_the_middle_unless_all_of_it_is_wanted(write: Write) -> None:
    recipe = write([turn("q" * 3000, "a" * 500), turn("b", "c")], max_length=4096)
    row = preview_data(recipe, row=1).rows[0]
    shown = sum(len(span.ids) for span in [*row.head, *row.tail])
    assert row.left_out > 1500 and shown + row.left_out == row.tokens
    assert any("tokens left out here" in line for line in preview_data(recipe, row=1).lines())
    assert preview_data(recipe, row=1, full=True).rows[0].left_out == 0


def test_a_row_that_is_not_there_is_an_error_with_the_numbers_there_are(write: Write) -> None:
    with pytest.raises(InputError, match="row 9 is not among the 2 rows") as caught:
        preview_data(write(different(2)), row=9)
    assert "from 1 to 2" in caught.value.problems[0].hint


def test_the_page_is_one_file_and_holds_no_markup_of_the_data(write: Write) -> None:
    found = preview_data(write([turn(HOSTILE, HOSTILE), turn("a", "b")]), row=1)
    page = found.as_page()
    assert "<script" not in page and "http" not in page and "\x1b" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in re.sub("<[^>]+>", "", page)
    assert "<svg" in page and 'title="' in page and ", trained" in page and "prefers-color-scheme: dark" in page
    assert found._repr_html_() in page


def test_findings_are_in_what_scripts_read(write: Write) -> None:
    found = json.loads(json.dumps(preview_data(write(different(3))).as_dict()))
    assert found["findings"] == [] and found["statistics"]["train"]["rows"] == 3
    assert found["rows"][0]["head"][0]["text"] == "<|im_start|>"


def test_sound_rows_have_no_findings(write: Write) -> None:
    assert levels(write(different(12), [turn("another", "one")])) == []


def test_equal_rows_are_an_error_and_some_duplicates_a_warning(write: Write) -> None:
    assert levels(write([turn("a", "b")] * 4)) == [("error", "all 4 training rows are the same")]
    some = levels(write([*different(8), turn("a", "b"), turn("a", "b")]))
    assert some == [("warning", "1 of 10 rows (10.0 %) repeat an earlier one")]


def test_overlap_with_the_evaluation_is_found_by_row_and_by_prompt(write: Write) -> None:
    rows = different(6)
    by_row = levels(write(rows, [rows[0], turn("x", "y"), turn("z", "y")]))
    assert by_row == [("warning", "1 of 3 rows (33.3 %) of the evaluation are training rows too")]
    assert levels(write(rows, rows[:2]))[0][0] == "error"
    by_prompt = levels(write(rows, [turn("question 1", "other"), turn("x", "y")]))
    assert len(by_prompt) == 1 and "have the prompt of a training row" in by_prompt[0][1]


def test_rows_that_are_mostly_cut_are_told(write: Write) -> None:
    found = levels(write([turn(f"q{i}", f"{i} " * 200) for i in range(4)], max_length=64))
    assert ("warning", "4 of 4 rows (100.0 %) do not fit data.max_length 64") in found


def test_rows_that_are_split_or_just_fit_lose_nothing_and_are_no_finding(write: Write) -> None:
    recipe = write([{"text": f"{i} " * 200} for i in range(4)], max_length=64)
    recipe.write_text(json.dumps(json.loads(recipe.read_text()) | {"task": "pretrain"}))
    found = survey_data(recipe)
    assert found.statistics["train"]["counts"] == {"split": 4}
    assert not [finding.what for finding in found.findings if "do not fit" in finding.what]


def test_answers_that_do_not_end_and_rows_that_begin_twice_are_told(write: Write) -> None:
    prepared = prepare_data(write(different(3)))
    found = measured(prepared)
    none, every = np.zeros(3, bool), np.ones(3, bool)

    def told(**changed: Any) -> list[tuple[str, str]]:
        findings = judge(prepared, {"train": replace(found, **changed)}, survey(prepared).statistics)
        return [(finding.level, finding.what) for finding in findings]

    assert told() == []
    assert told(has_end=none, has_other_end=none) == [
        ("error", "no answer ends with the end token <|im_end|>: the model would not learn to stop")
    ]
    assert told(has_end=none, has_other_end=every)[0][0] == "warning"
    assert told(has_two_bos=every) == [("error", "3 of 3 rows (100.0 %) begin with two BOS tokens")]
    assert told(trained=np.zeros(3, int))[0] == ("error", "3 of 3 rows (100.0 %) have no trained token (rows 1, 2, 3)")
    assert told(content=np.zeros(3, int))[0] == ("warning", "3 of 3 rows (100.0 %) have an empty answer (rows 1, 2, 3)")


def measured(prepared: Any) -> Any:
    from ftcli.row_statistics import measure, read_vocabulary

    return measure(prepared.rows.train, read_vocabulary(prepared.task.tokenizer))


def test_check_prepares_rows_only_when_asked_and_fails_for_errors_alone(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = str(write([turn("a", "b")] * 4))
    assert code(["check", wrong]) == 0
    assert "not known until" in capsys.readouterr().out
    assert code(["check", wrong, "--data"]) == 2
    assert "error: all 4 training rows are the same" in capsys.readouterr().out
    assert code(["check", wrong, "--data", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["data"]["findings"][0]["level"] == "error"
    right = str(write([*different(8), turn("a", "b"), turn("a", "b")]))
    assert code(["check", right, "--data"]) == 0
    assert "warning: 1 of 10 rows" in capsys.readouterr().out


def test_the_command_writes_a_page_and_prints_its_name(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write(different(3))
    page = recipe.parent / "page.html"
    assert code(["preview", str(recipe), "--rows", "1", "--html", str(page)]) == 0
    assert capsys.readouterr().out == f"{page}\n" and page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert code(["preview", str(recipe), "--rows", "1", "--ids"]) == 0
    out = capsys.readouterr().out
    assert '"<|im_start|>" 0' in out and "training rows" in out


def code(arguments: list[str]) -> object:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code


def test_labels_are_shown_counted_and_contradictions_told(tmp_path: Path, write: Write) -> None:
    encoder = save_tiny_encoder(tmp_path / "encoder")
    rows = [{"text": f"text {i}", "label": "ham"} for i in range(5)]
    rows += [{"text": "text 0", "label": "spam"}]
    recipe = write(rows)
    values = json.loads(recipe.read_text()) | {"task": "text_classification", "model": {"name": str(encoder)}}
    recipe.write_text(json.dumps(values))
    found = preview_data(recipe, row=6)
    assert found.rows[0].facts == {"label": "spam"}
    assert "".join(span.text for span in found.rows[0].head) == "text 0"
    assert found.statistics["train"]["answers"] == {"ham": 5, "spam": 1}
    assert [finding.what for finding in found.findings] == [
        "1 of 6 rows (16.7 %) hold what another row holds, and have another answer"
    ]


def test_images_are_shown_by_their_place_size_and_label(tmp_path: Path, write: Write) -> None:
    vit = save_tiny_vit(tmp_path / "vit")
    for label in ("cat", "dog"):
        (tmp_path / "images" / label).mkdir(parents=True)
        for index in range(2):
            Image.new("RGB", (4 + index, 3)).save(tmp_path / "images" / label / f"{index}.png")
    recipe = write([])
    values = json.loads(recipe.read_text()) | {"task": "image_classification", "model": {"name": str(vit)}}
    values["data"] = {"train": str(tmp_path / "images")}
    recipe.write_text(json.dumps(values))
    found = preview_data(recipe, row=2)
    assert found.rows[0].facts == {
        "image": str(tmp_path / "images" / "cat" / "1.png"),
        "size": "5 x 3 pixels, RGB",
        "label": "cat",
    }
    assert found.statistics["train"]["answers"] == {"cat": 2, "dog": 2}
    assert "tokens" not in found.statistics["train"]


def test_the_public_verb_is_the_function() -> None:
    assert ftcli.preview_data is preview_data


def test_packed_rows_of_several_sources_are_shown_as_they_are_trained(write: Write, tmp_path: Path) -> None:
    recipe = write(different(9), max_length=64, packing=True)
    values = json.loads(recipe.read_text())
    other = tmp_path / "other.jsonl"
    long = [turn("long", "x" * 200), turn("short", "yes")]
    other.write_text("".join(f"{json.dumps(row)}\n" for row in [*long, *({"messages": []} for _ in range(2))]))
    values["data"] |= {"train": [values["data"]["train"], str(other)], "max_bad_rows": 2, "drop_last": False}
    recipe.write_text(json.dumps(values))
    prepared = prepare_data(recipe)
    assert prepared.rows.bins is not None
    plan = derive_plan(prepared.recipe, 1, prepared.rows.train_rows)
    loader, _ = build_loaders(prepared.recipe, plan, prepared.task, prepared.rows, 0)
    trained = [[id_ for id_ in batch["sample_ids"].tolist() if id_ >= 0] for batch in loader]
    rows = [list(prepared.rows.train)[id_] for step in trained for id_ in step]
    found = preview_data(recipe, rows=99)
    names = ["train", "other"]
    assert [(row.source, row.number) for row in found.rows] == [(names[r["source"]], r["row"] + 1) for r in rows]
    assert [row.step for row in found.rows] == [n for n, step in enumerate(trained, start=1) for _ in step]
    statistics = found.statistics["train"]
    bins = len(prepared.rows.bins)
    assert statistics["rows"] == 11 and statistics["counts"] == {"cut": 1, "bad": 2}
    assert statistics["sources"]["other"]["rows"] == 2
    epoch = statistics["epoch"]
    assert (epoch["steps"], epoch["bins"], epoch["left_over"]) == (-(-bins // 2), bins, 0)
    assert epoch["fill"] == pytest.approx(statistics["tokens"] / (64 * bins), abs=1e-4)
    assert max(row.tokens for row in found.rows) == 64
    lines = [re.sub(" +", " ", line).strip() for line in found.lines()]
    fill = 100 * epoch["fill"]
    for told in ("cut off at the end 1 row of the source", "left out, unusable 2 rows of the source"):
        assert told in lines
    assert f"packing {bins} packed rows, {fill:.1f} % full" in lines
    (shown,) = preview_data(recipe, row=9).rows
    assert shown.source == "train"


def test_evaluation_rows_are_shown_as_they_are_measured_with_the_numbers_of_all_rows(write: Write) -> None:
    recipe = write(different(4), [turn("another", "one"), turn("a\nthird", "two")], max_length=64)
    found = preview_data(recipe, split="eval")
    assert [(row.source.rpartition("/")[2], row.number, row.step) for row in found.rows] == [
        ("eval", 1, None),
        ("eval", 2, None),
    ]
    lines = found.lines()
    assert lines[0] == "⟦measured⟧, <special token>, read only"
    assert lines[2].endswith("row 1 of eval, evaluation, 31 tokens, 4 measured")
    assert "⟦one<|im_end|>⟧↵" in lines
    assert found.statistics == preview_data(recipe).statistics
    tokens = [line for line in lines if line.startswith("  tokens")]
    assert " trained (" in tokens[0] and " measured (" in tokens[1]
    page = found.as_page()
    assert "row 1 of eval, evaluation" in page and ", measured" in page
    assert [row["split"] for row in found.as_dict()["rows"]] == ["eval", "eval"]
    (second,) = preview_data(recipe, split="eval", row=2).rows
    assert "third" in "".join(span.text for span in second.head)
    with pytest.raises(InputError, match="row 3 is not among the 2 rows that are evaluated on"):
        preview_data(recipe, split="eval", row=3)


def test_rows_that_are_held_out_are_shown_and_without_any_there_are_none(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    held = write(different(6), eval_rows=2)
    numbers = [{row.number for row in preview_data(held, split=split, rows=9).rows} for split in ("train", "eval")]
    assert len(numbers[1]) == 2 and numbers[0] | numbers[1] == set(range(1, 7))
    none = write(different(4))
    for arguments in (["--split", "eval"], ["--split", "tests"]):
        with pytest.raises(SystemExit) as ended:
            main(["preview", str(none), *arguments])
        assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "the recipe has no evaluation rows" in told and "set data.eval or data.eval_rows" in told
