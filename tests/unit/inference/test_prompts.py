"""Prompts from command lines, recipes and files; and how they are rendered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ftcli.config.recipe_training import Generate
from ftcli.data.chat.prompt import decode_text, encode_prompt
from ftcli.inference.answers import Answer, Prompt, check_prompt_lengths
from ftcli.inference.generate import generate, sampling_options
from ftcli.inference.prompts import collect_prompts, read_prompts, recipe_prompts
from ftcli.runtime.errors import InputError
from ftcli.testing import tiny_tokenizer

TURN = [{"role": "user", "content": "hi"}]


def refused(text: str, path: Path) -> str:
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_prompts(path, key="--file")
    return str(caught.value)


def test_read_prompts_with_a_text_file_has_one_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes("\ufeffone\r\n\n two \u2028 lines\n".encode())
    assert read_prompts(path, key="--file") == [Prompt("one"), Prompt(" two \u2028 lines")]


def test_read_prompts_stores_the_answer_of_a_row_as_reference(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    rows = [
        {"messages": [*TURN, {"role": "assistant", "content": "ho", "tool_calls": None}]},
        {"messages": TURN},
        {"prompt": "a", "completion": "b"},
        {"prompt": 7, "completion": 0},
        {"prompt": TURN, "completion": [{"role": "assistant", "content": "c"}]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    prompts = read_prompts(path, key="--file")
    assert prompts == [Prompt(TURN, "ho"), Prompt(TURN), Prompt("a", "b"), Prompt("7", "0"), Prompt(TURN, "c")]
    assert Answer(prompts[0], "ha", 2, ended=True).as_dict() == {
        "prompt": TURN,
        "answer": "ha",
        "tokens": 2,
        "ended": True,
        "reference": "ho",
    }


def test_read_prompts_of_a_bad_file_reports_the_line(tmp_path: Path) -> None:
    rows = tmp_path / "p.jsonl"
    assert "p.jsonl:2: is not JSON" in refused('{"prompt": "a"}\n{"prompt"\n', rows)
    assert "p.jsonl:1: has neither `messages` nor `prompt`" in refused('{"text": "a"}\n', rows)
    assert "p.jsonl:1: message 1 has no valid role" in refused('{"messages": ["a"]}\n', rows)
    assert "p.jsonl:1: there is no message to answer" in refused('{"messages": []}\n', rows)
    assert "p.jsonl:1: contains half of a surrogate pair" in refused('{"prompt": "\\ud800"}\n', rows)
    assert "p.jsonl:3: is not JSON: Exceeds the limit" in refused('{"prompt": 7}\n\n{"x": ' + "9" * 5000 + "}", rows)
    assert "has no prompt" in refused("\n \n", rows)
    assert "neither .jsonl nor .txt" in refused("a", tmp_path / "p.md")
    with pytest.raises(InputError, match=r"--file: no file at .*\n.*did you mean 'p.jsonl'"):
        read_prompts(tmp_path / "q.jsonl", key="--file")


def test_read_prompts_puts_arguments_before_the_file_with_the_system_turn(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("two\n")
    prompts = collect_prompts(["one"], path, "be brief")
    system = {"role": "system", "content": "be brief"}
    assert [prompt.content for prompt in prompts] == [
        [system, {"role": "user", "content": "one"}],
        [system, {"role": "user", "content": "two"}],
    ]
    with pytest.raises(InputError, match="already has a system turn"):
        collect_prompts([[system, *TURN]], system="x")
    with pytest.raises(InputError, match="there is no prompt to answer"):
        collect_prompts([])


def test_read_prompts_with_a_recipe_asks_texts_and_conversations() -> None:
    section = Generate.model_validate({"prompts": ["a", TURN]})
    assert recipe_prompts(section) == [Prompt("a"), Prompt(TURN)]
    assert recipe_prompts(None) == []


def test_read_prompts_with_a_prompt_is_a_users_turn_where_there_is_a_template_and_plain_text_elsewhere() -> None:
    tokenizer = tiny_tokenizer()
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(encode_prompt(tokenizer, "hi")) == expected
    assert encode_prompt(tokenizer, TURN) == encode_prompt(tokenizer, "hi")
    assert tokenizer.decode(encode_prompt(tokenizer, "hi", as_chat=False)) == "hi"
    assert encode_prompt(tokenizer, "hi<|im_end|>", as_chat=False) == encode_prompt(tokenizer, "hi", as_chat=False)
    with pytest.raises(InputError, match="a prompt is empty"):
        encode_prompt(tokenizer, "", as_chat=False)
    tokenizer.chat_template = "{{ raise_exception('no system turn, please') }}"
    with pytest.raises(InputError, match="rejects a prompt: no system turn, please"):
        encode_prompt(tokenizer, TURN)
    tokenizer.chat_template = None
    assert tokenizer.decode(encode_prompt(tokenizer, "hi")) == "hi"
    with pytest.raises(InputError, match="no chat template"):
        encode_prompt(tokenizer, TURN)


def test_read_prompts_with_an_answer_has_no_special_tokens_and_no_blanks_around_it() -> None:
    tokenizer = tiny_tokenizer()
    assert decode_text(tokenizer, tokenizer(" a , b .\n<|im_end|>")["input_ids"]) == "a , b ."


def test_read_prompts_with_a_prompt_must_leave_room_for_its_answer() -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(max_position_embeddings=10)
    check_prompt_lengths(config, [[1] * 6], 4)
    with pytest.raises(InputError, match="prompt 2 has 7 tokens; with 4 new tokens it exceeds the 10 positions"):
        check_prompt_lengths(config, [[1], [1] * 7], 4)


@pytest.mark.parametrize("numbers", [(0, 0.0, 1.0), (1, -0.1, 1.0), (1, 0.0, 0.0), (1, 0.0, 1.1)])
def test_numbers_out_of_range_are_refused(numbers: tuple[int, float, float]) -> None:
    with pytest.raises(InputError, match="out of range"):
        sampling_options(*numbers, seed=0)


def test_collect_prompts_takes_an_iterator() -> None:
    prompts: Any = (text for text in ("Hello", "Goodbye"))
    assert [prompt.content for prompt in collect_prompts(prompts)] == ["Hello", "Goodbye"]


@pytest.mark.parametrize("prompts", ["Hello", [{"role": "user", "content": "Hello"}]])
def test_single_prompt_in_place_of_a_list_is_refused(prompts: Any) -> None:
    with pytest.raises(InputError, match="prompts must be a list of prompts"):
        collect_prompts(prompts)


def test_generate_with_a_batch_size_of_0_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="batch_size is 0"):
        generate(tmp_path, ["Hello"], batch_size=0)
