"""Renderings with slots equal the template's text. Templates that inspect the content are not traced."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftcli.data.chat import encode
from ftcli.data.chat.rendering import Template
from ftcli.data.chat.turn_spans import find_turns
from ftcli.runtime.errors import RowError

from ....support.chat_tables import build_tokenizer, read_table
from .test_encode import ANSWERING, CHATML, texts, word_tokenizer

SHAPES = [("user", "assistant"), ("user", "assistant") * 2, ("system", "user", "assistant")]
WRITES = ["chatml", "llama2", "llama3", "mistral", "gemma", "phi", "zephyr", "deepseek", "qwen3", "trims", "merges"]
WRITES += ["command_r7b", "endings_with_white_space", "endings_without_eos"]
WRITES += ["deepseek_r1_training", "deepseek_v3_1_training", "glm4_moe_training", "qwen3_5_training"]


def turns_of(roles: tuple[str, ...], contents: list[str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


def answers(roles: tuple[str, ...]) -> list[int]:
    return [index for index, role in enumerate(roles) if role == "assistant"]


def taught(tokenizer: Any, roles: tuple[str, ...]) -> Template:
    """Return a template that has seen two conversations with these roles."""
    template = Template(tokenizer)
    for number in range(2):
        turns = turns_of(roles, [f"a{number}", "b", "c", "d"])
        text = template.render(turns, None)
        spans = find_turns(template, turns, None, text, answers(roles))
        assert template.tracer.fill(turns, answers(roles)) is None
        template.tracer.learn(turns, answers(roles), text, spans)
    return template


@pytest.mark.parametrize("table", WRITES)
def test_trace_of_a_plain_template_fills_other_contents(table: str) -> None:
    template = taught(read_table(table)[0], SHAPES[1])
    assert template.tracer.fill(turns_of(SHAPES[1], ["x", "y", "z", "0"]), [1, 3]) is not None


@pytest.mark.parametrize("table", ANSWERING)
@settings(max_examples=40, deadline=None)
@given(contents=st.lists(texts, min_size=4, max_size=4))
def test_trace_with_contents_equals_the_rendered_template_and_its_turns(table: str, contents: list[str]) -> None:
    for roles in SHAPES:
        try:
            template = taught(read_table(table)[0], roles)
        except RowError:
            continue  # a template without a system turn
        turns = turns_of(roles, contents)
        filled = template.tracer.fill(turns, answers(roles))
        if filled is not None:
            text = template.render(turns, None)
            assert filled == (text, find_turns(template, turns, None, text, answers(roles)))


LOOKING = [
    "{% if 'x' in m.content ~ '' %}!{% endif %}{{ m.content }}",
    "{{ m.content | upper }}",
    "{{ m.content[:1] }}",
    "{% if m.content | length > 3 %}!{% endif %}{{ m.content }}",
    "{% for c in m.content %}{{ c }}{% endfor %}",
    "{% set said %}{{ m.content }}{% endset %}{{ said | replace('a', 'b') }}",
    "{% if m.content == 'a' %}!{% endif %}{{ m.content }}",
    "{{ m | tojson }}",
    "{{ m.content.split('b')[0] }}",
    "{{ '%s' | format(m.content) }}",
    "{% if m.content is lower %}!{% endif %}{{ m.content }}",
    "{% if m.content > 'a' %}!{% endif %}{{ m.content }}",
    "{% macro say(t) %}{{ t }}{% endmacro %}{{ say(m.content) | lower }}",
]


@pytest.mark.parametrize("body", LOOKING)
def test_trace_of_a_template_that_inspects_contents_is_none(body: str) -> None:
    tokenizer = build_tokenizer("<|im_start|> <|im_end|> eos=<|im_end|>", CHATML.replace("{{ m.content }}", body))
    template = Template(tokenizer)
    turns = turns_of(SHAPES[0], ["ab", "cd"])
    for _ in range(3):  # whatever is taken for their text, it must not be believed
        template.tracer.learn(turns, [], template.render(turns, None), {})
    assert template.tracer.fill(turns, []) is None


def test_trace_of_a_template_that_inspects_content_checks_every_content() -> None:
    template = taught(read_table("qwen3")[0], SHAPES[0])
    plain, thinking = turns_of(SHAPES[0], ["Hi", "Yo"]), turns_of(SHAPES[0], ["Hi", "<think>so</think>Yo"])
    assert template.tracer.fill(plain, [1]) is not None
    assert template.tracer.fill(thinking, [1]) is None


def test_trace_with_variables_of_a_template_that_inspects_content_checks_every_content() -> None:
    body = "{{ '' if mark is defined and 'x' in m.content else m.content }}"
    tokenizer = build_tokenizer("<|im_start|> <|im_end|> eos=<|im_end|>", CHATML.replace("{{ m.content }}", body))
    roles = SHAPES[0]
    whole, marked = Template(tokenizer), Template(tokenizer).using({"mark": True})
    for template in (whole, marked):
        for number in range(2):
            turns = turns_of(roles, [f"a{number}", "b"])
            text = template.render(turns, None)
            template.tracer.learn(turns, [1], text, find_turns(template, turns, None, text, [1]))
    expected_turns = turns_of(roles, ["x", "b"])
    assert whole.tracer.fill(expected_turns, [1]) is not None
    assert marked.tracer.fill(expected_turns, [1]) is None


def test_template_tracing_with_blank_answers_end_tokens_or_further_keys_renders_the_template() -> None:
    template = taught(read_table("chatml")[0], SHAPES[0])
    for turns in (
        turns_of(SHAPES[0], ["Hi", "a<|im_end|>b"]),
        turns_of(SHAPES[0], [" ", "a"]),
        [{"role": "user", "content": "Hi", "name": "me"}, {"role": "assistant", "content": "a"}],
    ):
        assert template.tracer.fill(turns, [1]) is None


@pytest.mark.parametrize("answer", ["aé🙂 b", "\u200d\u00a0x", "a\tb\r\nc"])
def test_encode_conversations_of_characters_of_several_bytes_trains_their_tokens(answer: str) -> None:
    tokenizer = word_tokenizer(CHATML, [("Ċ", "Ġ"), ("Ġ", "a")])
    ((ids, trained),) = encode.encode_conversations(tokenizer, [turns_of(SHAPES[0], ["é", answer])])
    assert tokenizer.decode([id_ for id_, flag in zip(ids, trained, strict=True) if flag]) == f"{answer}<|im_end|>"


def test_template_tracing_with_a_tokenizer_without_a_template_has_no_conversations_without_an_error() -> None:
    tokenizer = build_tokenizer("<s> </s> bos=<s> eos=</s>", "")
    tokenizer.chat_template = None
    assert encode.encode_conversations(tokenizer, []) == []


def test_encode_conversation_with_a_prefix_space_trains_the_answer() -> None:
    from tokenizers import pre_tokenizers

    other = build_tokenizer("<|im_start|> <|im_end|> eos=<|im_end|>", CHATML)
    other.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    ids, trained = encode.encode_conversation(other, turns_of(SHAPES[0], ["Hi", "Yo"]))
    assert other.decode([id_ for id_, flag in zip(ids, trained, strict=True) if flag]).strip() == "Yo<|im_end|>"
