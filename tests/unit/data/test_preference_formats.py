"""Rows of compared, labelled, ranked and scored answers: converted rows and refusals."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ftcli.data.formats import convert, described, recognise
from ftcli.data.preference_formats import split_pair
from ftcli.runtime.errors import InputError, RowError

KINDS = ("compared", "labelled", "ranked", "scored")
USER, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "hi"), ("assistant", "a"), ("assistant", "b"))
)
SYSTEM = {"role": "system", "content": "be kind"}
AGAIN = {"role": "user", "content": "and?"}
CALLING = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
SCHEMA = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
PAIR = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD], "tools": None}


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        (["chosen", "rejected"], "compared answers"),
        (["prompt", "chosen", "rejected", "margin"], "compared answers"),
        (["prompt", "completion", "label"], "labelled answers"),
        (["messages", "label"], "labelled messages"),
        (["prompt", "responses", "ranks"], "ranked answers"),
        (["prompt", "completion", "score"], "scored answers"),
        (["prompt", "completion", "attributes"], "rated answers"),
    ],
)
def test_recognise_returns_the_format_of_the_columns(columns: list[str], name: str) -> None:
    assert recognise(columns, KINDS, "rows.jsonl").name == name


def test_columns_that_a_pair_may_have_are_used_and_others_are_named() -> None:
    columns = ["prompt", "chosen", "rejected", "margin", "weight", "ref_chosen_logps", "source"]
    assert described(recognise(columns, KINDS, "x"), columns, KINDS) == "compared answers (not used: source)"
    columns += ["responses", "ranks"]
    assert described(recognise(columns, KINDS, "x"), columns, KINDS) == (
        "compared answers, else ranked answers (not used: source)"
    )


@pytest.mark.parametrize(
    ("columns", "kinds", "words"),
    [
        (["prompt", "chosen"], ("compared",), ("no column 'chosen' and 'rejected'", "the columns are prompt, chosen")),
        (["responses", "ranks"], ("messages",), ("contains ranked answers, which this task does", "set data.columns")),
        (["prompt", "completion"], ("labelled",), ("contains prompt and completion, which this", "set task: sft")),
        (
            ["prompt", "completion", "label"],
            ("compared",),
            ("contains labelled answers, which this", "set task: unpaired_preference"),
        ),
    ],
)
def test_a_source_of_another_kind_is_refused_with_a_way_out(columns: list[str], kinds: Any, words: Any) -> None:
    with pytest.raises(InputError) as refused:
        recognise(columns, kinds, "rows.jsonl")
    (problem,) = refused.value.problems
    assert words[0] in problem.what and words[1] in problem.hint


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "hi", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "hi", "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [USER], "chosen": "a", "rejected": "b"},
        {"prompt": [{"from": "human", "value": "hi"}], "chosen": {"from": "gpt", "value": "a"}, "rejected": BAD},
    ],
)
def test_every_shape_of_a_pair_of_messages_becomes_the_same_pair(row: dict[str, Any]) -> None:
    assert convert(row, KINDS) == PAIR


def test_convert_without_a_prompt_uses_the_common_messages() -> None:
    shared = [SYSTEM, USER, GOOD, AGAIN]
    converted = convert({"chosen": [*shared, GOOD], "rejected": [*shared, BAD, AGAIN, GOOD]}, KINDS)
    assert converted["prompt"] == shared
    assert converted["chosen"] == [GOOD] and converted["rejected"] == [BAD, AGAIN, GOOD]


def test_tools_variables_and_system_belong_to_the_prompt() -> None:
    columns = {"tools": json.dumps([SCHEMA]), "chat_template_kwargs": {"thinking": False}, "system": "be kind"}
    seen = {"role": "tool", "content": "rain"}
    converted = convert({"chosen": [USER, CALLING, seen, GOOD], "rejected": [USER, BAD], **columns}, KINDS)
    assert converted["prompt"] == [SYSTEM, USER] and converted["tools"] == [SCHEMA]
    assert converted["chat_template_kwargs"] == {"thinking": False}
    assert converted["chosen"][0]["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    text = convert({"prompt": "hi", "chosen": "a", "rejected": "b", **columns}, KINDS)
    assert text == converted | {"chosen": [GOOD], "rejected": [BAD], "was_text": True}


def test_text_stays_text_with_its_numbers() -> None:
    row = {"prompt": "hi", "chosen": "a", "rejected": 7, "margin": "0.5", "weight": 2}
    assert convert(row, KINDS) == {"prompt": "hi", "chosen": "a", "rejected": "7", "margin": 0.5, "weight": 2.0}
    given = {"ref_chosen_logps": -3, "ref_rejected_logps": -4.5}
    assert convert({"prompt": "", "chosen": "a", "rejected": "b", **given}, KINDS).items() >= given.items()


@pytest.mark.parametrize(
    ("chosen", "rejected", "expected"),
    [
        ("Human: 1+1?\nBot: two", "Human: 1+1?\nBot: three", ("Human: 1+1?\nBot:", " two", " three")),
        ("Q: ab\n\nA: yes", "Q: ab\n\nA: yesterday", ("Q: ab\n\nA:", " yes", " yesterday")),
        ("Q: ab\n\nA: yes", "Q: ab\n\nA: yes sir", ("Q: ab\n\nA:", " yes", " yes sir")),
        ("line\none", "line\ntwo", ("line\n", "one", "two")),
        ("same word", "same  word", ("same", " word", "  word")),
        ("yes", "no", ("", "yes", "no")),
    ],
)
def test_an_implicit_prompt_of_text_ends_before_a_word(chosen: str, rejected: str, expected: Any) -> None:
    converted = convert({"chosen": chosen, "rejected": rejected}, KINDS)
    assert (converted["prompt"], converted["chosen"], converted["rejected"]) == expected


WORDS = st.text("ab \n", max_size=12)


@given(WORDS, WORDS)
def test_an_implicit_prompt_of_text_loses_no_character(chosen: str, rejected: str) -> None:
    assume(chosen.strip() and rejected.strip() and chosen != rejected)
    try:
        converted = convert({"chosen": chosen, "rejected": rejected}, KINDS)
    except RowError as error:  # one of them has only white space behind the shared words
        assert "no answer" in str(error) or "differ only in white space" in str(error)
        return
    assert (
        converted["prompt"] + converted["chosen"] == chosen and converted["prompt"] + converted["rejected"] == rejected
    )
    assert converted["chosen"] != converted["rejected"]
    starts_a_word = not converted["prompt"] or converted["prompt"][-1].isspace() or converted["chosen"][0].isspace()
    assert starts_a_word


ROLE = st.sampled_from(["user", "assistant"])
TURNS = st.lists(
    st.builds(lambda role, text: {"role": role, "content": text}, ROLE, st.sampled_from("xyz")), max_size=4
)


@given(TURNS, TURNS, TURNS)
def test_an_implicit_prompt_of_messages_loses_no_message(shared: Any, chosen: Any, rejected: Any) -> None:
    row = {"chosen": shared + chosen, "rejected": shared + rejected}
    try:
        converted = convert(row, KINDS)
    except RowError:
        return
    assert converted["prompt"] + converted["chosen"] == row["chosen"]
    assert converted["prompt"] + converted["rejected"] == row["rejected"]
    assert any(turn["role"] == "user" for turn in converted["prompt"])
    assert {converted[side][0]["role"] for side in ("chosen", "rejected")} == {"assistant"}
    assert converted["chosen"][0] != converted["rejected"][0]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "hi", "chosen": "a", "rejected": "a"}, "are the same answer"),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, "are equal"),
        ({"chosen": "same text", "rejected": "same text"}, "are the same answer"),
        (
            {"chosen": [USER, GOOD], "rejected": [AGAIN, BAD]},
            "they share no message of the user",
        ),
        (
            {"prompt": "ho", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            "do not contain the prompt of the column `prompt`",
        ),
        ({"prompt": [USER], "chosen": [AGAIN, GOOD], "rejected": [AGAIN, BAD]}, "`chosen` has another prompt"),
        (
            {"chosen": [USER, GOOD, AGAIN, GOOD], "rejected": [USER, GOOD, USER, BAD]},
            "its answer begins with a message of role 'user'",
        ),
        ({"chosen": [USER, GOOD], "rejected": [USER]}, "`rejected` has no answer"),
        ({"prompt": "hi", "chosen": "a", "rejected": "  "}, "`rejected` is empty"),
        ({"prompt": "hi", "chosen": "a", "rejected": [BAD]}, "must all be text, or all be messages"),
        ({"prompt": "hi", "chosen": 1.5, "rejected": "b"}, "`chosen` must be text or messages; it is float"),
        ({"prompt": "hi", "chosen": [], "rejected": "b"}, "`chosen` must be text or a list of messages, and not empty"),
        ({"prompt": [], "chosen": [GOOD], "rejected": [BAD]}, "`prompt` has no message"),
        ({"prompt": 1.5, "chosen": "a", "rejected": "b"}, "`prompt` must be text or messages; it is float"),
        ({"prompt": "hi", "chosen": "a", "rejected": None}, "it has chosen, prompt"),
    ],
)
def test_convert_of_an_invalid_pair_is_refused(row: dict[str, Any], words: str) -> None:
    with pytest.raises(RowError) as refused:
        convert(row, ("compared",))
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"margin": math.nan}, "`margin` is nan; it must be a finite float32"),
        ({"margin": "much"}, "`margin` is 'much', not a number"),
        ({"margin": True}, "`margin` is True, not a number"),
        ({"margin": 10**400}, "`margin` is 1000"),
        ({"weight": 0}, "`weight` is 0; it must be from 2^-16 to 1,000,000"),
        ({"weight": 1e-6}, "`weight` is 1e-06; it must be from 2^-16 to 1,000,000"),
        ({"weight": 1e15}, "`weight` is 1e+15; it must be from 2^-16 to 1,000,000"),
        ({"weight": -1.5}, "`weight` is -1.5; it must be from 2^-16"),
        ({"ref_chosen_logps": -1.0}, "has only `ref_chosen_logps`"),
        ({"ref_chosen_logps": 0.5, "ref_rejected_logps": -1.0}, "a log-probability is 0 at most"),
        ({"system": 5}, "`system` must be text"),
    ],
)
def test_convert_of_a_pair_with_invalid_numbers_is_refused(columns: dict[str, Any], words: str) -> None:
    row = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD], **columns}
    with pytest.raises(RowError) as refused:
        convert(row, KINDS)
    assert words in str(refused.value)


def test_labelled_answers_have_a_boolean_label() -> None:
    expected = {"prompt": "hi", "completion": "a", "label": True}
    assert convert({"prompt": "hi", "completion": "a", "label": True}, KINDS) == expected
    assert convert({"prompt": "hi", "completion": "a", "label": " TRUE"}, KINDS) == expected
    chat = {"prompt": [USER], "completion": [BAD], "label": False, "tools": None}
    assert convert({"messages": [USER, BAD], "label": "false"}, KINDS) == chat
    assert convert({"prompt": [USER], "completion": [BAD], "label": False}, KINDS) == chat
    assert convert({"prompt": "hi", "completion": [USER, BAD], "label": False}, KINDS) == chat


@pytest.mark.parametrize("label", [1, 0, 1.0, "good", "1", [True]])
def test_convert_with_a_label_that_is_not_boolean_is_refused(label: Any) -> None:
    with pytest.raises(RowError, match="`label` is .*; it must be true for a desirable answer"):
        convert({"prompt": "hi", "completion": "a", "label": label}, ("labelled",))


@pytest.mark.parametrize("messages", [[GOOD], [USER, GOOD, AGAIN], "[1, 2]"])
def test_labelled_messages_end_in_an_answer(messages: Any) -> None:
    with pytest.raises(RowError, match="two messages or more|must be the assistant's"):
        convert({"messages": messages, "label": True}, KINDS)


def test_a_pair_splits_into_a_desirable_and_an_undesirable_answer() -> None:
    pair = convert({"chosen": [USER, GOOD], "rejected": [USER, BAD], "weight": 2}, KINDS)
    assert split_pair(pair) == [
        {"prompt": [USER], "completion": [GOOD], "label": True, "tools": None, "weight": 2.0},
        {"prompt": [USER], "completion": [BAD], "label": False, "tools": None, "weight": 2.0},
    ]
    with pytest.raises(RowError, match="has margin, which only a loss of pairs uses"):
        split_pair(pair | {"margin": 0.5})


def test_convert_of_ranked_answers_keeps_the_ranks() -> None:
    row = {"prompt": "hi", "responses": ["a", "b", "c"], "ranks": [2, 1, 2]}
    assert convert(row, KINDS) == {"prompt": "hi", "responses": ["a", "b", "c"], "ranks": [2.0, 1.0, 2.0]}
    texts = {"prompt": "hi", "responses": '["a", "b"]', "ranks": "[1, 2]", "system": "be kind"}
    converted = convert(texts, KINDS)
    assert converted["prompt"] == [SYSTEM, USER] and converted["responses"] == [[GOOD], [BAD]]
    whole = convert({"responses": [[USER, GOOD], [USER, BAD]], "ranks": [1, 2]}, KINDS)
    assert whole["prompt"] == [USER] and whole["responses"] == [[GOOD], [BAD]]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"responses": ["a"], "ranks": [1]}, "two answers or more"),
        ({"responses": ["a", "b"], "ranks": [1]}, "lists of the same length"),
        ({"responses": ["a", "b"], "ranks": [1, 1]}, "all `ranks` are equal"),
        ({"responses": ["a", "b"], "ranks": [1, math.inf]}, "rank 2 is inf"),
        ({"responses": ["a", "b", "a"], "ranks": [1, 2, 3]}, "response 1 and response 3 are the same answer"),
        ({"responses": "a", "ranks": [1, 2]}, "`responses`: not JSON"),
    ],
)
def test_convert_of_a_ranking_without_order_is_refused(row: dict[str, Any], words: str) -> None:
    with pytest.raises(RowError) as refused:
        convert({"prompt": "hi", **row}, KINDS)
    assert words in str(refused.value)


def test_scored_answers_have_one_score_or_several_by_name() -> None:
    assert convert({"prompt": "hi", "completion": "a", "score": "4.5"}, ("scored",))["scores"] == {"score": 4.5}
    attributes = {"helpful": 3, "verbose": None}
    converted = convert({"messages": [USER, GOOD], "attributes": attributes}, ("scored",))
    assert converted == {
        "prompt": [USER],
        "completion": [GOOD],
        "tools": None,
        "scores": {"helpful": 3.0, "verbose": None},
    }
    assert convert({"messages": [USER, GOOD], "attributes": json.dumps(attributes)}, ("scored",)) == converted


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"score": math.nan}, "`score` is nan"),
        ({"attributes": {"helpful": None}}, "`attributes` has no number"),
        ({"attributes": {"helpful": "very"}}, "attribute helpful is 'very', not a number"),
        ({"attributes": [1]}, "must be a mapping from names to numbers"),
    ],
)
def test_convert_of_scores_that_are_not_numbers_is_refused(columns: dict[str, Any], words: str) -> None:
    with pytest.raises(RowError) as refused:
        convert({"prompt": "hi", "completion": "a", **columns}, ("scored",))
    assert words in str(refused.value)


def test_rows_are_recognised_and_converted_without_torch() -> None:
    code = (
        "import sys\n"
        "from ftcli.data.formats import convert, recognise\n"
        "recognise(['chosen', 'rejected'], ('compared',), 'x')\n"
        "convert({'prompt': 'a', 'chosen': 'b', 'rejected': 'c'}, ('compared',))\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
