"""Refuse a conversation if a trained turn contains text that the model does not write, such as the result of a tool.

Some templates write the results of calls inside of the assistant's turn, between the calls and the text. The position
of a message is found by rendering the conversation again with a mark in that message.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from os.path import commonprefix
from typing import Any

from ftcli.data.chat.rendering import MARKS, Messages, Template
from ftcli.data.chat.template_tracing import Span
from ftcli.data.chat.turn_spans import UntrainableTurn

KIND = "foreign"  # of the refusal, by which hints.py selects a fix
# Keys of an assistant's message, or of one of its calls, that contain what tools answered.
RESULT_KEYS = tuple(
    f"{name}{plural}"
    for name in ("tool_response", "tool_result", "tool_output", "observation", "response", "result", "output")
    for plural in ("", "s")
)


def require_own_text(
    template: Template,
    messages: Messages,
    tools: list[Any] | None,
    text: str,
    spans: Mapping[int, Sequence[Span]],
) -> None:
    """Check that the spans of assistant turns contain no text of other messages, and no results of tools.

    Args:
        template: The chat template.
        messages: The conversation.
        tools: JSON schemas of its tools; None without tools.
        text: Its rendering.
        spans: Index of each selected message of the assistant -> its spans.

    Raises:
        UntrainableTurn: A span contains such text. The message names both messages.
    """
    if not spans:
        return
    owners = sorted((start, end, index) for index, several in spans.items() for start, end in several)
    for (_, end, index), (start, _, later) in zip(owners, owners[1:], strict=False):
        if start < end and index != later:
            raise _foreign(index, f"message {later + 1}")
    for index in spans:
        if keys := [key for key in RESULT_KEYS if _holds(messages[index], key)]:
            at = _first_change(template, _without(messages, index, keys), tools, text)
            if (owner := _owner_of(at, owners)) is not None:
                raise _foreign(owner, f"`{keys[0]}` of message {index + 1}")
    suspects = [
        other
        for other, message in enumerate(messages)
        if other not in spans and (message["role"] == "tool" or _may_be_inside(message, text, owners))
    ]
    for other, at in _positions(template, messages, tools, text, suspects):
        if (owner := _owner_of(at, owners)) is not None:
            what = "the result of a tool" if messages[other]["role"] == "tool" else "the text"
            raise _foreign(owner, f"{what} in message {other + 1}")


def _foreign(index: int, what: str) -> UntrainableTurn:
    problem = f"the chat template writes {what} inside of it, where it would be trained as the assistant's text"
    return UntrainableTurn(index, problem, KIND)


def _owner_of(at: int | None, owners: Iterable[tuple[int, int, int]]) -> int | None:
    """Return the message whose span contains the character `at`."""
    return next((index for start, end, index in owners if at is not None and start <= at < end), None)


def _may_be_inside(message: Mapping[str, Any], text: str, owners: Iterable[tuple[int, int, int]]) -> bool:
    """Return whether the text of a message also occurs in a span, which most often is a quotation."""
    content = str(message.get("content") or "").strip()
    return bool(content) and any(content in text[start:end] for start, end, _ in owners)


def _positions(
    template: Template, messages: Messages, tools: list[Any] | None, text: str, suspects: Sequence[int]
) -> Iterable[tuple[int, int | None]]:
    """Return (index, position of the end of its content in the text) of messages.

    All suspects are marked in one rendering. If the template changes its text for the marks, each message is changed
    alone, and the position is that of the first difference.
    """
    if not suspects:
        return []
    letters = [chr(code) for code in MARKS[: 2 * len(suspects) + len(text)] if chr(code) not in text][: len(suspects)]
    marks = dict(zip(letters, suspects, strict=True))
    marked = template.render(_marked(messages, {index: mark for mark, index in marks.items()}), tools)
    parts = re.split(f"([{''.join(letters)}])", marked)
    if "".join(parts[::2]) == text:
        found, at = [], 0
        for part, mark in zip(parts[::2], parts[1::2], strict=False):
            at += len(part)
            found.append((marks[mark], max(0, at - 1)))
        return found
    return [
        (index, _first_change(template, _marked(messages, {index: mark}), tools, text)) for mark, index in marks.items()
    ]


def _marked(messages: Messages, marks: Mapping[int, str]) -> Messages:
    """Return the messages with a mark in some contents: before their last white space, which templates trim."""
    changed = list(messages)
    for index, mark in marks.items():
        content = str(messages[index].get("content") or "")
        words = content.rstrip()
        changed[index] = messages[index] | {"content": words + mark + content[len(words) :]}
    return changed


def _first_change(template: Template, changed: Messages, tools: list[Any] | None, text: str) -> int | None:
    """Return the position of the first character that differs in the rendering of changed messages; None if none."""
    other = template.render(changed, tools)
    return None if other == text else len(commonprefix([text, other]))


def _holds(message: Mapping[str, Any], key: str) -> bool:
    """Return whether a message or one of its calls has a key."""
    calls = message.get("tool_calls") or ()
    return key in message or any(key in call or key in call.get("function", ()) for call in calls)


def _without(messages: Messages, index: int, keys: Sequence[str]) -> Messages:
    """Return the messages, one of them without some keys."""

    def rest(values: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in values.items() if key not in keys}

    message = rest(messages[index])
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [
            rest(call) | ({"function": rest(call["function"])} if "function" in call else {}) for call in calls
        ]
    return [*messages[:index], message, *messages[index + 1 :]]
