"""Variables of chat templates: which a template reads, whether it asks what day it is, and where they come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ftcli.config.recipe import Recipe
from ftcli.data.cache import PreparedRows, prepare_rows
from ftcli.data.chat.encode import encode_conversations
from ftcli.data.chat.template_variables import (
    check_variables,
    dated,
    parse_variables,
    templates_of,
    texts_of,
    variables_of,
)
from ftcli.reports import check
from ftcli.reports.survey import survey_data
from ftcli.runtime.errors import InputError, RowError
from ftcli.tasks.build import build_task
from ftcli.testing import save_tiny_causal, tiny_tokenizer

from ....support.chat_tables import FOLDER, read_table
from ....support.recipes import minimal_values

THINKING = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' and thinking is defined and not thinking %}-{% endif %}"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if thinking is defined and not thinking %}-{% endif %}"
    "{% endif %}"
)
CLOCK = "{{ strftime_now('%d %b %Y') }}"
ROWS = [{"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"a{n}"}]} for n in "abcd"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = save_tiny_causal(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(THINKING)
    return folder


def recipe_of(model: Path, rows: list[dict[str, Any]], **data: Any) -> Recipe:
    path = model.parent / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return Recipe.model_validate(
        minimal_values(model={"name": str(model)}, data={"train": str(path), **data}, batch={"global_size": 2})
    )


def write(recipe: Recipe, folder: Path) -> Path:
    path = folder / "r.yaml"
    path.write_text(json.dumps(recipe.model_dump(mode="json")))
    return path


def texts(recipe: Recipe) -> list[str]:
    task = build_task(recipe)
    return [task.tokenizer.decode(row["input_ids"]) for row in prepare_rows(recipe, task).train]  # type: ignore[attr-defined]


@pytest.mark.parametrize("table", sorted(path.stem for path in FOLDER.glob("*.txt")))
def test_variables_of_with_a_template_reads_some_of_the_names_that_transformers_finds(table: str) -> None:
    from transformers.utils.chat_template_utils import _get_template_variables

    source = read_table(table)[0].chat_template
    variables = variables_of((source,))
    assert variables is not None and "messages" in variables and variables <= _get_template_variables(source)


def test_variables_of_ignores_names_that_the_template_sets() -> None:
    qwen = read_table("qwen3")[0].chat_template  # which sets reasoning_content in one branch and reads it in another
    assert variables_of((qwen,)) == {"messages", "tools", "add_generation_prompt", "enable_thinking"}
    assert variables_of(("{% set x = x + y %}{{ x }}",)) == {"x", "y"}
    assert variables_of(("{% if a %}{% set x = 1 %}{% endif %}{{ x }}",)) == {"a"}
    assert variables_of(("{% if", qwen)) is None


def test_template_variables_without_effect_are_refused() -> None:
    refused = {
        "thinkin": "never reads thinkin\n    did you mean 'thinking'?",
        "documents": "never reads documents\n    it reads thinking",
        "add_generation_prompt": "add_generation_prompt is set by ftcli for each conversation",
        "chat_template": "is not a template variable\n    set a template with task_options.chat_template",
    }
    for name, message in refused.items():
        with pytest.raises(InputError) as caught:
            check_variables({name: True}, (THINKING,))
        assert message in str(caught.value)
    with pytest.raises(InputError, match="thinking needs a chat template, and there is none"):
        check_variables({"thinking": True}, ())
    check_variables({"thinking": None}, (THINKING,))


def test_parse_variables_with_a_command_line_gives_words_or_an_object() -> None:
    variables = parse_variables(["thinking=false", 'documents=[{"title": "a"}]', "day=26 Jul 2024", '{"b": null}'])
    assert variables == {"thinking": False, "documents": [{"title": "a"}], "day": "26 Jul 2024", "b": None}
    for wrong in (["thinking"], ["=1"], ["a b=1"], ["a=1", "a=2"], ["a=1", '{"a": 1}']):
        with pytest.raises(InputError, match="--chat-template-kwargs"):
            parse_variables(wrong)


def test_dated_finds_the_variable_that_fixes_the_date() -> None:
    day = read_table("dated")[0].chat_template
    assert dated((day,), {}) == 'set data.chat_template_kwargs: {date_string: "26 Jul 2024"}'
    assert dated((day,), {"date_string": "24 Dec 2025"}) is None
    assert "with a fixed date" in (dated((CLOCK,), {}) or "")
    assert "with a fixed date" in (dated(("{% if tools %}" + CLOCK + "{% endif %}",), {}) or "")
    assert dated(("{% if clock %}" + CLOCK + "{% endif %}",), {}) is None
    assert "with a fixed date" in (dated(("{% if clock %}" + CLOCK + "{% endif %}",), {"clock": True}) or "")
    assert dated((THINKING,), {}) is None


def test_templates_are_read_from_files_as_the_tokenizer_reads_them(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    for template in (THINKING, {"default": THINKING, "tool_use": CLOCK}, None):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        (folder / "config.json").write_text("{}")
        recipe = recipe_of(folder, ROWS)
        assert sorted(templates_of(recipe) or ()) == sorted(texts_of(template))
    old = json.loads((folder / "tokenizer_config.json").read_text())
    for known in (THINKING, [{"name": "default", "template": THINKING}]):
        (folder / "tokenizer_config.json").write_text(json.dumps(old | {"chat_template": known}))
        assert templates_of(recipe) == (THINKING,)
    other = recipe.model_copy(update={"model": recipe.model.model_copy(update={"name": "someone/model"})})
    assert templates_of(other) is None


def test_template_variables_rows_are_rendered_with_the_recipes_variables_and_their_own_before_them(model: Path) -> None:
    plain = texts(recipe_of(model, ROWS))
    assert plain[0].endswith("<|im_start|>assistant\naa<|im_end|>\n")
    given = recipe_of(model, ROWS, chat_template_kwargs={"thinking": False})
    assert [text.replace("\n-a", "\na") for text in texts(given)] == plain != texts(given)
    own = [
        ROWS[0] | {"chat_template_kwargs": {"thinking": True}},
        ROWS[1],
        ROWS[2] | {"chat_template_kwargs": {"thinking": None}},  # what a table writes for a key that a row lacks
        {"prompt": "qd", "completion": "ad", "chat_template_kwargs": '{"thinking": false}'},
    ]
    assert [text.split("\n")[-2][0] for text in texts(recipe_of(model, own[:3]))] == ["a"] * 3
    mixed = texts(recipe_of(model, own[:3], chat_template_kwargs={"thinking": False}))
    assert [text.split("\n")[-2][0] for text in mixed] == ["a", "-", "-"]
    assert texts(recipe_of(model, own[3:] * 2))[0].endswith("\n-ad<|im_end|>\n")
    with pytest.raises(InputError, match="never reads thinkin"):
        texts(recipe_of(model, [ROWS[0] | {"chat_template_kwargs": {"thinkin": True}}]))


def test_encode_conversations_with_other_variables_does_not_reuse_a_trace() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = THINKING
    rows = [row["messages"] for row in ROWS * 6]
    given: list[dict[str, Any]] = [{}, {}, {}, {"thinking": False}, {"thinking": True}, {"thinking": False}] * 4
    for each, messages, variables in zip(
        encode_conversations(tokenizer, rows, chat_template_kwargs=given), rows, given, strict=True
    ):
        assert not isinstance(each, RowError)
        assert each[0] == tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **variables)


def test_prepare_rows_other_variables_have_another_cache_key_and_other_rows_another_fingerprint(model: Path) -> None:
    def rows(**data: Any) -> PreparedRows:
        recipe = recipe_of(model, ROWS, **data)
        return prepare_rows(recipe, build_task(recipe))

    plain, empty = rows(), rows(chat_template_kwargs={})
    off, on = (rows(chat_template_kwargs={"thinking": value}) for value in (False, True))
    assert plain.folder == empty.folder and len({plain.folder, off.folder, on.folder}) == 3
    assert on.fingerprint == plain.fingerprint != off.fingerprint  # true is the template's own default


def test_check_refuses_a_variable_that_nothing_reads_before_anything_is_loaded(model: Path) -> None:
    wrong = write(recipe_of(model, ROWS, chat_template_kwargs={"thinkin": True}), model.parent)
    with pytest.raises(InputError, match="data.chat_template_kwargs: the chat template never reads thinkin"):
        check.check(wrong)
    for task, columns in (
        ("pretrain", "{text: messages}"),
        ("text_classification", "{text: messages, label: messages}"),
    ):
        with pytest.raises(InputError, match=f"task {task} uses no chat template"):
            check.check(wrong, overrides=[f"task={task}", f"data.columns={columns}"])
    right = check.check(wrong, overrides=["data.chat_template_kwargs={thinking: false}"])
    assert not [note for note in right.notes if "date" in note]


def test_check_and_preview_of_a_dated_template_print_the_setting_that_fixes_the_date(model: Path) -> None:
    (model / "chat_template.jinja").write_text(read_table("dated")[0].chat_template)
    recipe = write(recipe_of(model, ROWS), model.parent)
    message, hint = "the chat template writes today's date into the rows", '{date_string: "26 Jul 2024"}'
    (note,) = [note for note in check.check(recipe).notes if "date" in note]
    assert message in note and hint in note
    (finding,) = [finding for finding in survey_data(recipe).findings if message in finding.what]
    assert finding.level == "warning" and hint in finding.hint
    fixed = [f"data.chat_template_kwargs={hint}"]
    assert not [note for note in check.check(recipe, overrides=fixed).notes if "date" in note]
    assert not [finding for finding in survey_data(recipe, overrides=fixed).findings if message in finding.what]
