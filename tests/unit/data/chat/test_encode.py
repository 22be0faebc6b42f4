"""Chat templates: ids equal apply_chat_template, and masks equal tables written by hand. No model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftcli.data.chat import encode
from ftcli.data.formats import convert
from ftcli.runtime.errors import RowError
from ftcli.tasks.shared.batches import fit

from ....support.chat_tables import FOLDER, Case, brackets, build_tokenizer, read_table

TABLES = sorted(path.stem for path in FOLDER.glob("*.txt"))
CASES = [case for table in TABLES for case in read_table(table)[1]]
RENDERED = [case for case in CASES if case.rendered is not None]
REFUSED = [case for case in CASES if case.refused is not None]


REWRITES = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|e|>{% endfor %}{{ 'bot: ' if add_generation_prompt }}"


def titled(case: Case) -> str:
    return f"{case.table}: {case.name}"


def as_the_template_sees_it(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    seen = []
    for message in messages:
        message = {key: value for key, value in message.items() if key != "train"}
        if isinstance(message.get("content"), list):
            message["content"] = "".join(part["text"] for part in message["content"])
        seen.append(message)
    return seen


def reference_ids(tokenizer: Any, messages: list[dict[str, Any]], tools: Any = None, **variables: Any) -> list[int]:
    seen = as_the_template_sees_it(messages)
    return list(tokenizer.apply_chat_template(seen, tools=tools, tokenize=True, return_dict=False, **variables))


@pytest.mark.parametrize("case", RENDERED, ids=titled)
def test_encode_conversation_matches_the_template_and_the_reference_mask(case: Case) -> None:
    tokenizer, _ = read_table(case.table)
    ids, trained = encode.encode_conversation(tokenizer, case.messages, tools=case.tools, **case.options)
    assert brackets(tokenizer, ids, trained) == case.rendered
    variables = case.options.get("chat_template_kwargs", {})
    assert ids == reference_ids(tokenizer, case.messages, case.tools, **variables)
    if tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id:
        assert ids[1] != tokenizer.bos_token_id


@pytest.mark.parametrize("case", REFUSED, ids=titled)
def test_encode_conversation_that_is_not_exact_is_refused_with_message_and_reason(case: Case) -> None:
    tokenizer, _ = read_table(case.table)
    with pytest.raises(RowError) as error:
        encode.encode_conversation(tokenizer, case.messages, tools=case.tools, **case.options)
    assert str(error.value).startswith(case.refused or "?")


def test_at_least_twelve_templates_have_a_table_of_masks() -> None:
    assert len({case.table for case in RENDERED}) >= 12


@pytest.mark.parametrize("table", TABLES)
def test_encode_conversations_equals_encoding_one_by_one(table: str) -> None:
    tokenizer, cases = read_table(table)
    same = [case for case in cases if not case.options]
    encoded = encode.encode_conversations(
        tokenizer, [case.messages for case in same], tools=[case.tools for case in same]
    )
    for case, each in zip(same, encoded, strict=True):
        if case.refused is None:
            assert each == encode.encode_conversation(tokenizer, case.messages, tools=case.tools)
        else:
            assert str(each).startswith(case.refused)


def test_encode_conversations_keeps_variables_separate() -> None:
    tokenizer, _ = read_table("qwen3")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    given = [{}, {"enable_thinking": False}, {"enable_thinking": True}, {"enable_thinking": False}, {}]
    encoded = encode.encode_conversations(tokenizer, [messages] * 5, chat_template_kwargs=given)
    trained = [sum(mask) for _, mask in encoded]
    assert trained[0] == trained[2] == trained[4] > trained[1] == trained[3]
    for each, variables in zip(encoded, given, strict=True):
        assert each[0] == reference_ids(tokenizer, messages, **variables)


def test_encode_with_template_variables_that_change_the_prompt_names_the_setting() -> None:
    tokenizer, _ = read_table("qwen3")
    off = {"enable_thinking": False}
    messages = [{"role": role, "content": f"{role} {n}"} for n in range(2) for role in ("user", "assistant")]
    with pytest.raises(RowError) as caught:
        encode.encode_conversation(tokenizer, messages, chat_template_kwargs=off)
    reason = 'chat_template_kwargs {"enable_thinking": false} change the prompt, but not the text of earlier answers'
    assert str(caught.value).startswith("message 2: ") and reason in str(caught.value)
    assert "task_options.train_on: last" in str(caught.value) and "one row for every answer" in str(caught.value)
    for end in (2, 4):  # what it says to do: every answer is trained behind the very prompt that asks for it
        encoded = encode.encode_conversation(tokenizer, messages[:end], train_on="last", chat_template_kwargs=off)
        prompt_ids = tokenizer.apply_chat_template(
            messages[: end - 1], add_generation_prompt=True, return_dict=False, **off
        )
        assert encoded[0][: encoded[1].index(True)] == prompt_ids
    thinks = [messages[0], {"role": "assistant", "content": "<think>\nso\n</think>\n\nyes"}]
    with pytest.raises(RowError, match="contradict the answer: change the answer, or set a column"):
        encode.encode_conversation(tokenizer, thinks, chat_template_kwargs=off)
    with pytest.raises(RowError, match=r"; use a template whose prompts are prefixes of the conversation"):
        encode.encode_conversation(build_tokenizer("<|e|> eos=<|e|>", REWRITES), messages)


def test_encode_of_truncated_rows_trains_the_remaining_part_of_a_two_token_ending() -> None:
    tokenizer, cases = read_table("command_r7b")
    (case,) = [case for case in cases if case.name == "the last answer only"]
    ids, trained = encode.encode_conversation(tokenizer, case.messages, **case.options)
    end = ids.index(tokenizer.convert_tokens_to_ids("<|CHATBOT_TOKEN|>"), 10)
    prompt_text = brackets(tokenizer, ids[: end + 1], [False] * (end + 1))
    expected = {
        len(ids): [f"{prompt_text}⟦<|START_RESPONSE|>Good bye.<|END_RESPONSE|><|END_OF_TURN_TOKEN|>⟧"],
        len(ids) - 1: [f"{prompt_text}⟦<|START_RESPONSE|>Good bye.<|END_RESPONSE|>⟧"],
        end + 2: [f"{prompt_text}⟦<|START_RESPONSE|>⟧"],
    }
    for length, texts in expected.items():
        rows = fit(ids, trained, length, "truncate")
        assert [brackets(tokenizer, row["input_ids"], row["trained"]) for row in rows] == texts
    assert len(fit(ids, trained, len(ids) - 1, "drop")) == 0
    first, second = fit(ids, trained, len(ids) - 1, "split")
    assert brackets(tokenizer, first["input_ids"], first["trained"]) == expected[len(ids) - 1][0]
    assert brackets(tokenizer, second["input_ids"], second["trained"]) == "<|END_RESPONSE|>⟦<|END_OF_TURN_TOKEN|>⟧"


def test_generation_marks_give_transformers_own_assistant_mask() -> None:
    tokenizer, cases = read_table("generation_marks")
    theirs = tokenizer.apply_chat_template(cases[0].messages, return_dict=True, return_assistant_tokens_mask=True)
    ids, trained = encode.encode_conversation(tokenizer, cases[0].messages)
    assert (ids, trained) == (theirs["input_ids"], [bool(each) for each in theirs["assistant_masks"]])


# --- any conversation at all

ANSWERING = ["chatml", "llama3", "llama2", "mistral", "gemma", "phi", "zephyr", "deepseek", "qwen3", "trims"]
ANSWERING += ["endings_with_white_space", "endings_without_eos"]
ENDS = {"gemma": "<end_of_turn>", "llama3": "<|eot_id|>", "phi": "<|end|>", "endings_without_eos": "<|close|><|turn|>"}
ENDS["endings_with_white_space"] = " \n<|end|>\n </s>"
words = st.text(st.characters(codec="utf-8", exclude_characters="⟦⟧"), max_size=20)
pieces = st.sampled_from(["<|im_end|>", "</s>", "<|user|>", "\n", " ", "assistant", "</think>", "[/INST]", "🙂", "Ġ"])
texts = st.lists(words | pieces, min_size=1, max_size=4).map("".join)


@pytest.mark.parametrize("table", ANSWERING)
@settings(max_examples=60, deadline=None)
@given(turns=st.lists(st.tuples(texts, texts), min_size=1, max_size=3))
def test_trained_text_is_exactly_the_answers_with_their_end_tokens(table: str, turns: list[tuple[str, str]]) -> None:
    tokenizer, _ = read_table(table)
    messages = []
    for question, answered in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answered}]
    (encoded,) = encode.encode_conversations(tokenizer, [messages])
    if isinstance(encoded, RowError):  # refused for a reason that the row shows
        assert any(is_delicate(text) for pair in turns for text in pair), encoded
        return
    ids, trained = encoded
    assert ids == reference_ids(tokenizer, messages)
    end = ENDS.get(table, tokenizer.eos_token)
    spans = [part.partition("⟧")[0] for part in brackets(tokenizer, ids, trained).split("⟦")[1:]]
    assert len(spans) == len(turns)
    for number, (span, (_, answered)) in enumerate(zip(spans, turns, strict=True)):
        assert span.endswith(end)
        written = span.removesuffix(end)
        if table == "qwen3" and "</think>" in answered:  # its thinking is set anew
            continue
        if table == "qwen3" and number == len(turns) - 1:
            written = written.removeprefix("<think>\n\n</think>\n\n")
        assert written.strip() == answered.strip()
        if table in ("chatml", "phi", "zephyr", "deepseek"):  # these cut no white space
            assert answered.endswith(written)


def is_delicate(text: str) -> bool:
    """Return whether a text is empty, spells a special token, or has a mark that templates search for."""
    return not text.strip() or "<" in text or "[" in text or "\r" in text


# --- edges


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + (
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def word_tokenizer(template: str, merges: list[tuple[str, str]]) -> Any:
    """Return a byte-level tokenizer whose only merges are given."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = build_tokenizer("<|im_start|> <|im_end|> eos=<|im_end|>", template)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*letters, *("".join(pair) for pair in merges)])}
    model = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    model.pre_tokenizer, model.decoder = tokenizer.backend_tokenizer.pre_tokenizer, tokenizer.backend_tokenizer.decoder
    model.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return type(tokenizer)(tokenizer_object=model, eos_token="<|im_end|>", chat_template=template)


def ask(answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": answer}]


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_encode_conversation_with_a_token_of_white_space_that_a_prompt_and_an_answer_share_is_not_trained(
    trim_offsets: bool,
) -> None:
    from tokenizers.processors import ByteLevel

    tokenizer = word_tokenizer(CHATML, [("Ċ", "Ġ")])
    tokenizer.backend_tokenizer.post_processor = ByteLevel(trim_offsets=trim_offsets)
    ids, trained = encode.encode_conversation(tokenizer, ask("   a  b  "))
    assert ids == reference_ids(tokenizer, ask("   a  b  "))
    assert brackets(tokenizer, ids, trained).endswith("assistant\n ⟦  a  b  <|im_end|>⟧\n")


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_encode_conversation_with_a_token_that_holds_the_end_of_a_prompt_and_the_first_letter_of_an_answer_is_refused(
    trim_offsets: bool,
) -> None:
    from tokenizers.processors import ByteLevel

    spaced = CHATML.replace("{{ m.role }}\n", "{{ m.role }}: ").replace("assistant\n", "assistant: ")
    tokenizer = word_tokenizer(spaced, [("Ġ", "a")])
    tokenizer.backend_tokenizer.post_processor = ByteLevel(trim_offsets=trim_offsets)
    with pytest.raises(RowError, match="the token ' a' contains the end of a prompt and the start of an answer"):
        encode.encode_conversation(tokenizer, ask("a"))


def test_encode_conversation_with_a_token_that_swallows_the_line_break_behind_it_is_still_the_end_token() -> None:
    from tokenizers import AddedToken

    tokenizer = build_tokenizer("<|im_start|> eos=<|im_start|>", CHATML)
    tokenizer.add_special_tokens({"eos_token": AddedToken("<|im_end|>", rstrip=True, special=True)})
    ids, trained = encode.encode_conversation(tokenizer, ask("a"))
    assert ids == reference_ids(tokenizer, ask("a"))
    assert [
        token for token, is_trained in zip(tokenizer.convert_ids_to_tokens(ids), trained, strict=True) if is_trained
    ] == [
        "a",
        "<|im_end|>",
    ]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages must be a list of {role, content}"),
        ("Hi", "messages must be a list of {role, content}"),
        (["Hi"], "message 1 has no text `content`"),
        ([{"role": "user"}], "message 1 has no text `content`"),
        ([{"role": "assistant", "content": 3}], "message 1 has no text `content`"),
        (
            [{"role": "bot", "content": "Hi"}],
            "message 1 has role 'bot'; known: system, developer, user, assistant, tool",
        ),
        ([{"role": "user", "content": [{"type": "image"}]}], "message 1 has a part of type 'image' in its content"),
        ([{"role": "assistant", "content": "a", "train": "no"}], "message 1 has train: 'no'; it is true or false"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "message 1 has tool_calls that are not a list of"),
    ],
)
def test_messages_of_the_wrong_shape_are_named(messages: Any, message: str) -> None:
    with pytest.raises(RowError) as error:
        encode.encode_conversation(read_table("chatml")[0], messages)
    assert str(error.value).startswith(message)


def test_encode_conversation_drops_null_keys_except_in_arguments() -> None:
    tokenizer, _ = read_table("llama3_tools")
    call = {"type": "function", "id": None, "function": {"name": "clock", "arguments": {"city": "Rome", "days": None}}}
    turns = [{"role": "user", "content": "Time?", "tool_calls": None}, {"role": "assistant", "tool_calls": [call]}]
    ids, _ = encode.encode_conversation(tokenizer, convert({"messages": turns}, ["messages"])["messages"])
    assert '"parameters": {"city": "Rome", "days": null}}<|eom_id|>' in tokenizer.decode(ids)


BEGIN = "{% for message in messages %}"
RESULT = "{% if message.role != 'tool' %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>{% endif %}"
AS_JSON = (
    "<|im_start|>{{ message.role }}\n{{ message.content | tojson if message.role == 'tool' else message.content }}"
)
CALLED = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "I look."},
    {"role": "tool", "content": 'say "noon"'},
    {"role": "assistant", "content": "Noon."},
]


@pytest.mark.parametrize("times", [1, 3])  # the second and third are rendered from the first
@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
def test_encode_with_a_template_that_leaves_out_results_of_tools_is_refused(train_on: Any, times: int) -> None:
    tokenizer = copy.deepcopy(read_table("chatml")[0])
    tokenizer.chat_template = BEGIN + RESULT + "{% endfor %}"
    for row in encode.encode_conversations(tokenizer, [CALLED] * times, train_on=train_on):
        assert str(row) == "message 3: the chat template leaves out the message of the role tool"


def test_encode_with_a_template_that_writes_results_of_tools_as_json_is_accepted() -> None:
    tokenizer = copy.deepcopy(read_table("chatml")[0])
    tokenizer.chat_template = BEGIN + AS_JSON + "<|im_end|>{% endfor %}"
    ids, trained = encode.encode_conversation(tokenizer, CALLED)
    assert '\n"say \\"noon\\""<|im_end|>' in tokenizer.decode(ids) and sum(trained) > 0
