"""The formats of rows: recognised columns, converted rows, and refusals."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest

from ftcli.data.chat.message_checks import checked_messages
from ftcli.data.formats import convert, described, recognise
from ftcli.runtime.errors import InputError, RowError

CHAT = ("messages", "completion")
USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
SYSTEM = {"role": "system", "content": "be kind"}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
SCHEMA = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("columns", "kinds", "name"),
    [
        (["messages"], CHAT, "messages"),
        (["id", "conversations", "tools"], CHAT, "ShareGPT conversations"),
        (["prompt", "completion"], CHAT, "prompt and completion"),
        (["instruction", "input", "output"], CHAT, "Alpaca instructions"),
        (["text"], ("text",), "raw text"),
        (["prompt", "chosen", "rejected", "completion"], CHAT, "prompt and completion"),
        (["messages", "text"], ("text",), "raw text"),
        (["text", "messages", "prompt", "completion"], CHAT, "messages"),
    ],
)
def test_recognise_returns_the_format_of_the_columns(columns: list[str], kinds: tuple[str, ...], name: str) -> None:
    assert recognise(columns, kinds, "rows.jsonl").name == name


@pytest.mark.parametrize(
    ("columns", "kinds", "words"),
    [
        (["prompt", "chosen", "rejected"], CHAT, ("rows.jsonl contains pairs of answers", "{completion: chosen}")),
        (["text", "label"], CHAT, ("rows.jsonl contains raw text, which this task", "set task: pretrain")),
        (["messages"], ("text",), ("rows.jsonl contains messages, which this task", "set task: sft")),
        (["question", "answer"], CHAT, ("no column 'messages', nor 'conv", "the columns are question, answer; name")),
    ],
)
def test_recognise_other_columns_are_refused_with_a_way_out(
    columns: list[str], kinds: tuple[str, ...], words: Any
) -> None:
    with pytest.raises(InputError) as caught:
        recognise(columns, kinds, "rows.jsonl")
    assert words[0] in caught.value.problems[0].what and words[1] in caught.value.problems[0].hint


def test_recognise_names_unused_columns() -> None:
    columns = ["output", "instruction", "score", "id", "input"]
    assert described(recognise(columns, CHAT, "x"), columns, CHAT) == "Alpaca instructions (not used: score)"


def messages_of(row: dict[str, Any]) -> Any:
    """Return the converted messages of a row, with the parts of their content joined."""
    messages = convert(row, CHAT)["messages"]
    turns, wishes = checked_messages(messages)
    return [turn | ({} if wish is None else {"train": wish}) for turn, wish in zip(turns, wishes, strict=True)]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [USER, ANSWER]}, [USER, ANSWER]),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}, [USER, ANSWER]),
        ({"conversations": [USER, ANSWER]}, [USER, ANSWER]),
        ({"prompt": [USER], "completion": [ANSWER]}, [USER, ANSWER]),
        ({"messages": json.dumps([USER, ANSWER])}, [USER, ANSWER]),
        ({"messages": [USER, ANSWER], "system": "be kind"}, [{"role": "system", "content": "be kind"}, USER, ANSWER]),
        ({"messages": [SYSTEM, USER, ANSWER], "system": SYSTEM["content"]}, [SYSTEM, USER, ANSWER]),
        (
            {"messages": [SYSTEM | {"content": [{"type": "text", "text": "be kind"}]}, USER], "system": "be kind"},
            [SYSTEM, USER],
        ),
        (
            {"instruction": "hi", "input": "", "output": "hello", "history": [["a", "b"]]},
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, USER, ANSWER],
        ),
        (
            {"messages": [USER | {"content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}, ANSWER]},
            [USER, ANSWER],
        ),
        ({"messages": [USER, ANSWER | {"weight": 0}]}, [USER, ANSWER | {"train": False}]),
        ({"messages": [USER, ANSWER | {"weight": 0.5}]}, [USER, ANSWER | {"train": True}]),
        ({"messages": [USER | {"name": None}, ANSWER | {"tool_calls": None}]}, [USER, ANSWER]),
    ],
)
def test_recognise_every_shape_of_a_conversation_becomes_the_same_messages(row: dict[str, Any], expected: Any) -> None:
    assert messages_of(row) == expected


CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
SEEN = {"role": "tool", "content": "rain"}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, SEEN, ANSWER]},
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}],
                },
                {"role": "function", "content": "rain"},
                ANSWER,
            ]
        },
        {
            "conversations": [
                {"from": "human", "value": "hi"},
                {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
                {"from": "observation", "value": "rain"},
                {"from": "gpt", "value": "hello"},
            ]
        },
        {
            "conversations": [
                {"from": "human", "value": "hi"},
                {"from": "function_call", "value": {"name": "weather", "arguments": {"city": "Oslo"}}},
                {"from": "observation", "value": "rain"},
                {"from": "gpt", "value": "hello"},
            ]
        },
    ],
)
def test_tool_calls_of_every_spelling_become_the_same_messages(row: dict[str, Any]) -> None:
    assert messages_of(row) == [USER, CALLING, SEEN, ANSWER]


@pytest.mark.parametrize("tools", [[SCHEMA], json.dumps([SCHEMA]), [json.dumps(SCHEMA)]])
def test_tools_may_be_a_list_or_json(tools: Any) -> None:
    assert convert({"messages": [USER, ANSWER], "tools": tools}, CHAT)["tools"] == [SCHEMA]
    assert convert({"messages": [USER, ANSWER], "tools": ""}, CHAT)["tools"] is None


def test_call_that_has_only_a_name_has_no_arguments() -> None:
    for call in ({"name": "f"}, {"name": "f", "id": "1", "type": "function", "index": 0}):
        _, turn = convert({"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]}, CHAT)[
            "messages"
        ]
        assert turn["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


def test_convert_retains_nulls_in_arguments_and_schemas() -> None:
    given = {"city": "Oslo", "days": None}
    for arguments in (given, json.dumps(given)):
        call = {"id": None, "function": {"name": "weather", "arguments": arguments}}
        (_, answer) = messages_of({"messages": [USER, ANSWER | {"tool_calls": [call]}]})
        assert answer["tool_calls"] == [{"type": "function", "function": {"name": "weather", "arguments": given}}]
    schema = SCHEMA | {"default": None}
    for tools in ([schema], json.dumps([schema]), [json.dumps(schema)]):
        assert convert({"messages": [USER, ANSWER], "tools": tools}, CHAT)["tools"] == [schema]


def test_convert_keeps_weights_of_rows_and_turns() -> None:
    assert convert({"prompt": "a", "completion": "b", "weight": "0.5"}, CHAT)["weight"] == 0.5
    assert convert({"text": "a", "weight": 2}, ("text",)) == {"text": "a", "weight": 2.0}
    assert convert({"text": "a", "weight": Decimal("0.5")}, ("text",))["weight"] == 0.5
    for absent in (None, ""):
        assert "weight" not in convert({"prompt": "a", "completion": "b", "weight": absent}, CHAT)
    (_, answer) = convert({"messages": [USER, ANSWER | {"weight": 0.5}]}, CHAT)["messages"]
    assert answer == ANSWER | {"weight": 0.5, "train": True}


def test_prompts_stay_text() -> None:
    pair = {"prompt": "a", "completion": "b"}
    assert convert(pair, CHAT) == pair
    assert convert({"instruction": "add", "input": "1 2", "output": "3"}, CHAT) == {
        "prompt": "add\n\n1 2",
        "completion": "3",
    }
    assert convert({"instruction": "a", "input": None, "output": "b", "system": None}, CHAT) == pair
    assert convert({"text": " a ", "label": 1}, ("text",)) == {"text": " a "}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": []}, "must be a list of"),
        ({"messages": "hello"}, "not JSON"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "message 2 has no text `content`"),
        ({"messages": [USER, {"role": "bot", "content": "x"}]}, "message 2 has role 'bot'; known: system, developer"),
        ({"messages": [USER | {"content": [{"type": "image"}]}, ANSWER]}, "message 1 has a part of type 'image'"),
        (
            {"messages": [USER, ANSWER | {"tool_calls": [{"function": {}}]}]},
            "message 2 has tool_calls that are not a list of",
        ),
        ({"messages": [USER, ANSWER | {"tool_calls": "f()"}]}, "message 2 has tool_calls that are not a list of"),
        ({"messages": [USER, ANSWER | {"tool_calls": [CALL | {"function": "f"}]}]}, "message 2: not JSON"),
        (
            {"messages": [USER, ANSWER | {"tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}]},
            "the arguments of message 2 are not a mapping",
        ),
        *(
            (
                {"messages": [USER, ANSWER | {"tool_calls": [call]}]},
                f"a tool call of message 2 has no `arguments`, but {key}",
            )
            for key in ("parameters", "input")
            for call in ({"name": "f", key: {"city": "Oslo"}}, {"function": {"name": "f", key: {"city": "Oslo"}}})
        ),
        *(
            (
                {"messages": [USER, ANSWER | {"tool_calls": [{"function": {"name": "f"}, key: {"city": "Oslo"}}]}]},
                f"a tool call of message 2 has `{key}` beside `function`: put `arguments` in it",
            )
            for key in ("arguments", "parameters")
        ),
        ({"conversations": [{"from": "function_call", "value": 5}]}, "message 1 has tool_calls that are not a list"),
        *(
            ({"messages": [USER, ANSWER], "tools": f'["a{half}"]'}, "`tools`: contains half of a surrogate pair")
            for half in ("\\ud83d", "\\uD83D")
        ),
        ({"messages": '[{"role": "user", "content": "a\\ud83d"}]'}, "messages: contains half of a surrogate pair"),
        ({"messages": [USER, ANSWER], "tools": "[" * 100_000}, "`tools`: not JSON (nested too deeply)"),
        ({"messages": [USER, ANSWER | {"weight": -1}]}, "message 2 has weight -1; it must be a number, 0 or above"),
        ({"messages": [USER, ANSWER | {"weight": "much"}]}, "message 2 has weight 'much'; it must be a number"),
        ({"messages": [USER, ANSWER], "weight": float("nan")}, "`weight` is nan; it must be a number, 0 or above"),
        ({"messages": [USER, ANSWER], "weight": "x"}, "`weight` is 'x'; it must be a number, 0 or above"),
        ({"prompt": "a", "completion": "b", "weight": -0.5}, "`weight` is -0.5; it must be a number, 0 or above"),
        ({"prompt": "a", "completion": "b", "weight": 2e38}, "0 or above, and below 1e+38"),
        ({"prompt": "a", "completion": "b", "weight": True}, "`weight` is True; it must be a number, 0 or above"),
        ({"prompt": "a", "completion": "b", "weight": [1]}, "`weight` is [1]; it must be a number, 0 or above"),
        ({"messages": [USER, ANSWER | {"thinking": ["hm"]}]}, "message 2 has `thinking` that is not text"),
        (
            {"messages": [USER, {"role": "assistant", "content": "", "reasoning_content": {"a": 1}}]},
            "message 2 has `reasoning_content` that is not text",
        ),
        ({"messages": [USER | {"content": []}, ANSWER]}, "message 1 has no text `content`"),
        ({"messages": ["hi"], "system": "be kind"}, "message 2 has no text `content`"),
        (
            {"messages": [USER, ANSWER | {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "the arguments of message 2: not JSON",
        ),
        ({"conversations": [{"from": "human", "value": None}]}, "message 1 has no text"),
        ({"prompt": "a", "completion": " "}, "empty completion"),
        ({"prompt": [USER], "completion": "b"}, "must both be text"),
        ({"prompt": None, "completion": "b"}, "it has completion"),
        ({"instruction": "a", "output": ""}, "empty output"),
        ({"instruction": "a", "output": "b", "history": ["x"]}, "`history` must be"),
        ({"instruction": "a", "output": "b", "history": 5}, "`history` must be"),
        ({"messages": [USER, ANSWER], "tools": {}, "system": 5}, "`system` must be text"),
        ({"messages": [USER, ANSWER], "tools": {"a": 1}}, "`tools` must be a list"),
        (
            {"messages": [SYSTEM, USER, ANSWER], "system": "be brief"},
            "has a column `system` and another text in a system message",
        ),
    ],
)
def test_convert_row_of_another_shape_is_refused(row: dict[str, Any], words: str) -> None:
    with pytest.raises(RowError) as caught:
        checked_messages(convert(row, CHAT).get("messages"))
    assert words in str(caught.value)


def test_convert_row_with_an_empty_text_is_refused() -> None:
    with pytest.raises(RowError, match="has no text"):
        convert({"text": "  "}, ("text",))
