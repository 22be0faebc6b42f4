"""Convert rows with compared, labelled, ranked or scored answers to one format for each kind, and check them.

    compared    {"prompt", "chosen", "rejected"}, with "margin", "weight", "ref_chosen_logps", "ref_rejected_logps"
    labelled    {"prompt", "completion", "label"}
    ranked      {"prompt", "responses", "ranks"}
    scored      {"prompt", "completion", "scores"}: scores by name, None where one is unknown

Prompt and answers are all text, or all lists of messages. Rows with messages have "tools" and may have
"chat_template_kwargs". The first message of an answer is the assistant's. Every kind may have "weight". Pure functions
on plain values, without heavy imports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os.path import commonprefix
from typing import Any

from ftcli.config.row_formats import (
    COMPARED,
    LABELLED,
    LABELLED_CHATS,
    RANKED,
    RATED,
    RATED_CHATS,
    SCORED,
    SCORED_CHATS,
    RowFormat,
)
from ftcli.data.chat.messages import messages_of, parse_json
from ftcli.data.chat.weights import number_of
from ftcli.data.formats import Row, as_text, conversation, conversation_options
from ftcli.runtime.errors import RowError

Answer = str | list[Any]  # text, or messages

WAS_TEXT = "was_text"  # of a row of text that became messages, because it has parts that need a chat template
SHARED = ("prompt", "tools", "chat_template_kwargs", "weight", WAS_TEXT)  # keys that both answers of a pair have
TRUTHS = {"true": True, "false": False}  # booleans in tables without types
SCORE = "score"  # name of the score of a row with a column `score`
WEIGHTS = (2.0**-16, 1e6)  # least and largest weight; sums of weights in units of 2^-16 then fit into 64 bits


def split_pair(pair: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Split a pair into two labelled answers. The label of the chosen answer is true.

    Args:
        pair: A converted row of the kind `compared`.

    Returns:
        Two rows of the kind `labelled`.

    Raises:
        RowError: The row has a column that is only valid for a pair.
    """
    unused = [name for name in ("margin", "ref_chosen_logps", "ref_rejected_logps") if name in pair]
    if unused:
        raise RowError(f"has {', '.join(unused)}, which only a loss of pairs uses; this task splits pairs")
    shared = {name: pair[name] for name in SHARED if name in pair}
    return [{**shared, "completion": pair[name], "label": name == "chosen"} for name in ("chosen", "rejected")]


def _from_compared(row: Row) -> dict[str, Any]:
    """Convert a pair of answers to one prompt.

    Without a column `prompt`, the prompt is the common beginning of both answers: complete messages, or text up to the
    start of a word. It is "" if texts have no common beginning.
    """
    answers = [_answer(row[name], f"`{name}`") for name in ("chosen", "rejected")]
    prompt, (chosen, rejected) = _prompt_and_answers(row, answers, ("`chosen`", "`rejected`"))
    if chosen == rejected:
        raise RowError("`chosen` and `rejected` are the same answer")
    return {**_row_of(prompt, {"chosen": chosen, "rejected": rejected}, row), **_numbers(row)}


def _from_labelled(row: Row) -> dict[str, Any]:
    """Convert a row with a labelled completion."""
    prompt, (completion,) = _prompt_and_answers(row, [_answer(row["completion"], "`completion`")], ("`completion`",))
    return {**_row_of(prompt, {"completion": completion}, row), "label": _truth(row["label"]), **_numbers(row)}


def _from_labelled_chat(row: Row) -> dict[str, Any]:
    """Convert a conversation whose last answer is labelled."""
    prompt, completion = _last_answer(row["messages"])
    return {**_row_of(prompt, {"completion": completion}, row), "label": _truth(row["label"]), **_numbers(row)}


def _from_ranked(row: Row) -> dict[str, Any]:
    """Convert the ranked answers to one prompt. Rank 1 is the best; equal ranks are ties."""
    responses = parse_json(row["responses"], "`responses`") if isinstance(row["responses"], str) else row["responses"]
    ranks = parse_json(row["ranks"], "`ranks`") if isinstance(row["ranks"], str) else row["ranks"]
    if not isinstance(responses, list) or not isinstance(ranks, list) or len(responses) != len(ranks):
        raise RowError("`responses` and `ranks` must be lists of the same length")
    if len(responses) < 2:
        raise RowError("`responses` must have two answers or more")
    values = [number_of(rank, f"rank {number}") for number, rank in enumerate(ranks, start=1)]
    if len(set(values)) == 1:
        raise RowError("all `ranks` are equal, so no answer is better than another")
    names = [f"response {number}" for number in range(1, len(responses) + 1)]
    texts = [_answer(response, name) for response, name in zip(responses, names, strict=True)]
    prompt, answers = _prompt_and_answers(row, texts, names)
    for number, answer in enumerate(answers):
        first = answers.index(answer)
        if values[first] != values[number]:
            raise RowError(f"{names[first]} and {names[number]} are the same answer with different ranks")
    return {**_row_of(prompt, {"responses": answers}, row), "ranks": values, **_numbers(row)}


def _from_scored(row: Row) -> dict[str, Any]:
    """Convert a row with a scored completion."""
    prompt, (completion,) = _prompt_and_answers(row, [_answer(row["completion"], "`completion`")], ("`completion`",))
    return {**_row_of(prompt, {"completion": completion}, row), "scores": _scores(row), **_numbers(row)}


def _from_scored_chat(row: Row) -> dict[str, Any]:
    """Convert a conversation whose last answer is scored."""
    prompt, completion = _last_answer(row["messages"])
    return {**_row_of(prompt, {"completion": completion}, row), "scores": _scores(row), **_numbers(row)}


PREFERENCE_CONVERTERS: dict[RowFormat, Callable[[Row], dict[str, Any]]] = {
    COMPARED: _from_compared,
    LABELLED: _from_labelled,
    LABELLED_CHATS: _from_labelled_chat,
    RANKED: _from_ranked,
    SCORED: _from_scored,
    SCORED_CHATS: _from_scored_chat,
    RATED: _from_scored,
    RATED_CHATS: _from_scored_chat,
}


def _answer(value: Any, name: str) -> Answer:
    """Return an answer as text or as a list of messages. A single message becomes a list."""
    value = as_text(value)
    if isinstance(value, dict):
        value = [value]
    if isinstance(value, list):
        if not value or not all(isinstance(turn, dict) for turn in value):
            raise RowError(f"{name} must be text or a list of messages, and not empty")
        messages: list[Any] = messages_of(value)
        return messages
    if not isinstance(value, str):
        raise RowError(f"{name} must be text or messages; it is {type(value).__name__}")
    if not value.strip():
        raise RowError(f"{name} is empty")
    return value


def _prompt_and_answers(row: Row, answers: Sequence[Answer], names: Sequence[str]) -> tuple[Answer, list[Answer]]:
    """Return (prompt, answers without the prompt) of a row: all text, or all messages."""
    prompt = as_text(row.get("prompt"))
    texts = [answer for answer in answers if isinstance(answer, str)]
    chats = [answer for answer in answers if isinstance(answer, list)]
    if texts and chats:
        raise RowError(f"{' and '.join(names)} must all be text, or all be messages")
    if prompt is not None and not isinstance(prompt, str | list):
        raise RowError(f"`prompt` must be text or messages; it is {type(prompt).__name__}")
    if texts and isinstance(prompt, list):
        chats = [[{"role": "assistant", "content": text}] for text in texts]
    if chats:
        turns, rest = _split_chats(prompt, chats, names)
        return turns, list(rest)
    if prompt is None:
        beginning = _shared_beginning(texts) if len(texts) > 1 else ""
        rest_of_texts = [text[len(beginning) :] for text in texts]
        _require_rest(rest_of_texts, names)
        return beginning, list(rest_of_texts)
    assert isinstance(prompt, str)
    return prompt, list(texts)


def _split_chats(
    prompt: str | list[Any] | None, chats: list[list[Any]], names: Sequence[str]
) -> tuple[list[Any], list[list[Any]]]:
    """Return (messages of the prompt, messages of each answer).

    The answers may begin with the prompt even if it has its own column. Raises `RowError` if the prompts differ.
    """
    if isinstance(prompt, list):
        turns = messages_of(prompt)
        if not turns:
            raise RowError("`prompt` has no message")
        if all(chat[: len(turns)] == turns for chat in chats):
            chats = [chat[len(turns) :] for chat in chats]
    elif prompt is not None and all(_role(chat) == "assistant" for chat in chats):
        turns = [{"role": "user", "content": prompt}]
    else:
        length = _shared_messages(chats) if len(chats) > 1 else len(chats[0]) - 1
        turns, chats = chats[0][:length], [chat[length:] for chat in chats]
        questions = [turn.get("content") for turn in turns if turn.get("role") == "user"]
        if not questions:
            raise RowError(f"{' and '.join(names)} have different prompts: they share no message of the user")
        if prompt is not None and prompt not in questions:
            raise RowError(f"{' and '.join(names)} do not contain the prompt of the column `prompt`")
    _require_rest(chats, names)
    for chat, name in zip(chats, names, strict=True):
        if _role(chat) != "assistant":
            raise RowError(f"{name} has another prompt: its answer begins with a message of role {_role(chat)!r}")
    return turns, chats


def _require_rest(rest: Sequence[Answer], names: Sequence[str]) -> None:
    """Raise `RowError` if an answer is empty without the prompt."""
    if all(not (answer.strip() if isinstance(answer, str) else answer) for answer in rest):
        raise RowError(f"{' and '.join(names)} are equal, or differ only in white space")
    for answer, name in zip(rest, names, strict=True):
        if not (answer.strip() if isinstance(answer, str) else answer):
            raise RowError(f"{name} has no answer: it contains only the prompt that it shares with the others")


def _shared_messages(chats: Sequence[list[Any]]) -> int:
    """Return the number of messages at the start that all conversations share."""
    shared = 0
    for turns in zip(*chats, strict=False):
        if any(turn != turns[0] for turn in turns):
            break
        shared += 1
    return shared


def _shared_beginning(texts: Sequence[str]) -> str:
    """Return the common beginning of texts up to the start of a word. Spaces before a word belong to the answer.

    If one text is the beginning of another, its last word is its answer.
    """
    shared = commonprefix(list(texts))
    if not all(text[len(shared) :][:1].isspace() for text in texts):
        shared = shared[: max((index + 1 for index, char in enumerate(shared) if char.isspace()), default=0)]
    return shared.rstrip(" ")


def _last_answer(messages: Any) -> tuple[list[Any], list[Any]]:
    """Return (prompt, last answer) of a conversation."""
    turns = messages_of(messages)
    if not isinstance(turns, list) or len(turns) < 2 or not all(isinstance(turn, dict) for turn in turns):
        raise RowError("`messages` must be a list of two messages or more")
    if _role(turns[-1:]) != "assistant":
        raise RowError(f"the last message has role {_role(turns[-1:])!r}; it must be the assistant's answer")
    return turns[:-1], turns[-1:]


def _role(chat: list[Any]) -> Any:
    """Return the role of the first message."""
    return chat[0].get("role")


def _row_of(prompt: Answer, answers: dict[str, Any], row: Row) -> dict[str, Any]:
    """Return a row of prompt and answers. Text becomes messages if the row has a system message, tools or variables."""
    if isinstance(prompt, list):
        chat = conversation(prompt, row)
        return {"prompt": chat.pop("messages"), **answers, **chat}
    options = conversation_options(row)
    if not options and not row.get("system"):
        return {"prompt": prompt, **answers}
    chat = conversation([{"role": "user", "content": prompt}], row)
    turns = {name: _as_chat(value) for name, value in answers.items()}
    return {"prompt": chat.pop("messages"), **turns, **chat, WAS_TEXT: True}


def _as_chat(answer: Any) -> Any:
    """Return the text of one answer as messages; a list of texts becomes a list of lists of messages."""
    if isinstance(answer, list):
        return [_as_chat(text) for text in answer]
    return [{"role": "assistant", "content": answer}]


def _truth(value: Any) -> bool:
    """Return the value of a column `label`."""
    label = TRUTHS.get(value.strip().lower()) if isinstance(value, str) else value
    if not isinstance(label, bool):
        raise RowError(f"`label` is {value!r}; it must be true for a desirable answer and false for an undesirable one")
    return label


def _scores(row: Row) -> dict[str, float | None]:
    """Return the scores of a row by name; None for an unknown score."""
    if row.get(SCORE) is not None:
        return {SCORE: number_of(row[SCORE], f"`{SCORE}`")}
    attributes = row["attributes"]
    attributes = parse_json(attributes, "`attributes`") if isinstance(attributes, str) else attributes
    if not isinstance(attributes, dict):
        raise RowError("`attributes` must be a mapping from names to numbers")
    scores = {
        name: None if value is None else number_of(value, f"attribute {name}") for name, value in attributes.items()
    }
    if all(value is None for value in scores.values()):
        raise RowError("`attributes` has no number")
    return scores


def _numbers(row: Row) -> dict[str, float]:
    """Return the numbers of a row that belong to its answers: margin, weight and reference log-probabilities."""
    names = [
        name for name in ("margin", "weight", "ref_chosen_logps", "ref_rejected_logps") if row.get(name) is not None
    ]
    numbers = {name: number_of(row[name], f"`{name}`") for name in names}
    least, largest = WEIGHTS
    if not least <= numbers.get("weight", 1.0) <= largest:
        raise RowError(f"`weight` is {numbers['weight']:g}; it must be from 2^-16 to {largest:,.0f}")
    references = [name for name in ("ref_chosen_logps", "ref_rejected_logps") if name in numbers]
    if len(references) == 1:
        raise RowError(f"has only `{references[0]}`; log-probabilities of both answers are needed")
    for name in references:
        if numbers[name] > 0:
            raise RowError(f"`{name}` is {numbers[name]:g}; a log-probability is 0 at most")
    return numbers
