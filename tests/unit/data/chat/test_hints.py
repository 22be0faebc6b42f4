"""Hints for refused conversations: each hint is applied as it stands, and the conversation then trains."""

from __future__ import annotations

import json
import re
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from ftcli import testing
from ftcli.config.recipe import Recipe
from ftcli.data.chat import encode
from ftcli.data.chat.hints import DEFAULT_FALLBACK, fitting_templates
from ftcli.data.chat.template_variables import templates_of
from ftcli.data.chat.training_templates import training_templates
from ftcli.inference import decode
from ftcli.reports import check
from ftcli.runtime.errors import InputError, RowError
from ftcli.tasks.build import build_task

from ....support.chat_tables import FOLDER, Case, brackets, build_tokenizer, read_table
from ....support.recipes import minimal_values

TABLES = sorted(path.stem for path in FOLDER.glob("*.txt"))
TEMPLATE, LAST = r"task_options\.chat_template: (\w+)", "train on the last answer only (task_options.train_on: last)"
VARIABLES = r"data\.chat_template_kwargs: (\{[^}]*\})"
UNTRAINED = "set `train: false` on the message"
ROWS = "set task_options.train_on: last, and write one row for every answer, which ends with that answer"
NO_TEXT = "remove the text of the message, which has tool calls too"
HINTED = {
    ("glm4_moe", "two answers"): ["glm4_moe"],
    ("deepseek_r1", "an answer without the thinking that the prompt opens"): ["deepseek_r1"],
    ("deepseek_r1", "an answer whose thinking is cut out"): ["deepseek_r1"],
    ("deepseek_v3_1", "with thinking"): ["deepseek_v3_1"],
    ("nemotron_nano_v2", "two answers"): ["nemotron_nano_v2"],
    ("nemotron3", "answers without thinking"): ["{enable_thinking: false}"],
    ("nemotron3", "answers with thinking, of which the template cuts the first"): [
        "{truncate_history_thinking: false}"
    ],
    ("qwen3_5", "two answers"): ["qwen3_5", LAST, ROWS],
    ("qwen3_6", "two answers"): ["{preserve_thinking: true}", "qwen3_5", LAST],
    ("results_in_the_turn", "a call with text, and its result"): [NO_TEXT, LAST, ROWS],
    ("gpt_oss", "two answers: the first would be taught to go on after its end"): [LAST, ROWS, UNTRAINED],
    ("qwen3", "thinking before the last answer, which the template drops"): [LAST, ROWS, UNTRAINED],
    ("qwen3", "thinking switched off, and an answer that thinks"): [
        'remove chat_template_kwargs {"enable_thinking": false}'
    ],
}
CASES = {(case.table, case.name): case for table in TABLES for case in read_table(table)[1] if case.refused}


def hints_of(case: Case) -> list[str]:
    tokenizer, _ = read_table(case.table)
    with pytest.raises(RowError) as error:
        encode.encode_conversation(tokenizer, case.messages, tools=case.tools, **case.options)
    return str(error.value).split("; ")[-1].split(", or ")


def encode_with_hint(case: Case, hint: str) -> list[str]:
    """Return the brackets of a case's rows with what a hint says."""
    tokenizer, options, rows = copy(read_table(case.table)[0]), dict(case.options), [case.messages]
    if name := re.search(TEMPLATE, hint):
        tokenizer.chat_template = training_templates()[name[1]].source
    if given := re.search(VARIABLES, hint):
        options["chat_template_kwargs"] = {**options.get("chat_template_kwargs", {}), **yaml.safe_load(given[1])}
    if hint.startswith("remove chat_template_kwargs"):
        del options["chat_template_kwargs"]
    if "task_options.train_on: last" in hint:
        options["train_on"] = "last"
    if "one row for every answer" in hint:
        ends = [index for index, message in enumerate(case.messages) if message["role"] == "assistant"]
        rows = [case.messages[: end + 1] for end in ends]
    if hint.startswith("set `train: false`"):
        rows = [[{**message, "train": False} if number == 1 else message for number, message in enumerate(rows[0])]]
    if hint == NO_TEXT:
        rows = [[{**message, "content": ""} if number == 1 else message for number, message in enumerate(rows[0])]]
    return [
        brackets(tokenizer, *encode.encode_conversation(tokenizer, row, tools=case.tools, **options)) for row in rows
    ]


@pytest.mark.parametrize("key", CASES, ids=": ".join)
def test_hint_of_every_refusal_makes_the_conversation_trainable(key: tuple[str, str]) -> None:
    case = CASES[key]
    ways = hints_of(case)
    expected = HINTED.get(key, [])
    assert len(ways) >= len(expected)
    for way, hint in zip(ways, expected, strict=False):
        assert hint in way
    for way in ways:
        if not way.startswith(("use ftcli's", "set ", "remove ", "train on ")):
            assert not expected
            continue
        for text in encode_with_hint(case, way):
            assert "⟦" in text


def test_hint_with_a_template_that_ends_every_answer_trains_calls_of_tools() -> None:
    """Follow the hint that a GLM-4.5 conversation with tools gets."""
    case = CASES["glm4_moe", "a call of a tool"]
    assert hints_of(case) == ["use a template that ends every answer with a token (task_options.chat_template)"]
    tokenizer = copy(read_table("glm4_moe")[0])
    call_ends = "            {{- '\\n</tool_call>' }}\n        {%- endfor %}\n"
    assert call_ends in tokenizer.chat_template
    end = (
        "        {%- if loop.last and not add_generation_prompt %}"
        "{{- '<|observation|>' if message.tool_calls else '<|user|>' }}{%- endif %}\n"
    )
    tokenizer.chat_template = tokenizer.chat_template.replace(call_ends, call_ends + end)
    actual = brackets(tokenizer, *encode.encode_conversation(tokenizer, case.messages, tools=case.tools))
    assert re.findall("⟦(.*?)⟧", actual, re.DOTALL) == [
        "\n<think></think>\n<tool_call>clock\n<arg_key>zone</arg_key>\n<arg_value>UTC</arg_value>\n</tool_call>"
        "<|observation|>",
        "\n<think></think>\nNoon.<|user|>",
    ]


def test_hint_names_no_setting_that_does_not_help() -> None:
    asks = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|e|>{% endfor %}{{ 'bot: ' if add_generation_prompt }}"
    messages = [{"role": role, "content": f"{role} {n}"} for n in range(2) for role in ("user", "assistant")]
    with pytest.raises(RowError) as error:
        encode.encode_conversation(build_tokenizer("<|e|> eos=<|e|>", asks), messages)
    assert str(error.value).endswith(f"; {DEFAULT_FALLBACK}")


@pytest.mark.parametrize("name", training_templates())
def test_hint_with_a_training_template_asks_as_the_models_own_and_fits_no_other_format(name: str) -> None:
    fitting = {
        table: [known.name for known, _ in fitting_templates(read_table(table)[0])]
        for table in TABLES
        if not table.endswith("_training")
    }
    owners = {table for table, names in fitting.items() if name in names}
    assert owners == {name, *(["qwen3_6"] if name == "qwen3_5" else [])}


def test_hint_with_a_training_template_that_fits_with_a_variable_is_named_with_it() -> None:
    tokenizer = copy(read_table("qwen3_5")[0])
    asks = "    {{- '\\n</think>\\n\\n' if enable_thinking is defined and not enable_thinking else '' }}"
    assert asks in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(asks, "    {{- '\\n</think>\\n\\n' }}")
    (case,) = [case for case in read_table("qwen3_5")[1] if case.name == "two answers"]
    with pytest.raises(RowError, match=r"chat_template: qwen3_5, with data.chat_template_kwargs: {enable_thinking: fa"):
        encode.encode_conversation(tokenizer, case.messages)


# --- the name of a training template in a recipe


def recipe_of(model: Path, **options: Any) -> Recipe:
    rows = model / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "Hi", "completion": "Yo"}) + "\n")
    values = minimal_values(task_options=options, model={"name": str(model)}, data={"train": str(rows)})
    return Recipe.model_validate(values)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    testing.save_tiny_causal(folder)
    return folder


def test_hint_with_a_recipe_names_a_training_template(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = recipe_of(model, chat_template="glm4_moe")
    assert templates_of(recipe) == (training_templates()["glm4_moe"].source,)
    task: Any = build_task(recipe)
    assert task.tokenizer.chat_template == training_templates()["glm4_moe"].source
    Path("glm4_moe").write_text("{{ messages[0].content }}")  # a file is preferred to a name
    assert build_task(recipe).tokenizer.chat_template == "{{ messages[0].content }}"  # type: ignore[attr-defined]
    assert templates_of(recipe) == ("{{ messages[0].content }}",)
    recipe_file = tmp_path / "recipe.yaml"
    recipe_file.write_text(json.dumps(recipe_of(model, chat_template="glm4_mo").model_dump(mode="json")))
    with pytest.raises(InputError, match=r"chat_template: cannot read .*glm4_mo"):
        check.check(recipe_file)
    with pytest.raises(InputError, match=r"chat_template: cannot read .*glm4_mo.*\n.*did you mean 'glm4_moe'"):
        build_task(recipe_of(model, chat_template="glm4_mo"))
    Path("glm4_mo").write_text("{% for message in messages %}\n{{ message.content }")
    with pytest.raises(InputError, match=r"glm4_mo:2: task_options\.chat_template is not a Jinja template"):
        check.check(recipe_file)


# --- generation stops at what was trained


@pytest.mark.parametrize(
    ("table", "stops"),
    [
        ("command_r7b", {"<|END_OF_TURN_TOKEN|>"}),
        ("endings_with_white_space", {"</s>"}),
        ("endings_without_eos", {"<eos>", "<|turn|>"}),
        ("gemma", {"<eos>", "<end_of_turn>"}),
        ("gemma4", {"<eos>", "<turn|>", "<|tool_response>"}),
        ("glm4_moe_training", {"<|endoftext|>", "<|user|>"}),
        ("gpt_oss", {"<|return|>", "<|call|>"}),
        ("llama3_tools", {"<|eot_id|>", "<|eom_id|>"}),
        ("phi", {"<|endoftext|>", "<|end|>"}),
        ("no_end_token", {"</s>"}),
        ("qwen3", {"<|im_end|>"}),
    ],
)
def test_generation_stops_at_the_tokens_that_end_a_trained_turn(table: str, stops: set[str]) -> None:
    tokenizer, _ = read_table(table)
    assert set(tokenizer.convert_ids_to_tokens(sorted(decode.end_tokens(tokenizer, None)))) == stops


@pytest.mark.parametrize("table", TABLES)
def test_hint_every_trained_turn_ends_with_a_token_at_which_generation_stops(table: str) -> None:
    tokenizer, cases = read_table(table)
    ends = decode.end_tokens(tokenizer, None)
    is_known = not table.startswith(("generation_", "dated", "endings_found_by_row"))  # no probe shows the others' end
    for case in cases:
        if case.rendered and case.options.get("train_on") != "all" and is_known:
            ids, trained = encode.encode_conversation(tokenizer, case.messages, tools=case.tools, **case.options)
            after = [*trained[1:], False]
            assert all(
                id_ in ends for id_, is_one, goes_on in zip(ids, trained, after, strict=True) if is_one > goes_on
            )
