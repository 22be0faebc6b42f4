"""Check that a chat template writes each message of a conversation, also those that are not trained.

turn_spans.py checks the trained turns. Messages of other roles, and turns of the assistant that are not trained, are
part of what the model reads. A template that leaves one out would train answers to another conversation.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ftcli.data.chat.rendering import Messages, Template
from ftcli.data.chat.turn_spans import unused_letters, with_mark
from ftcli.runtime.errors import RowError


def require_all_messages(
    template: Template, messages: Messages, tools: list[Any] | None, text: str, found: Collection[int]
) -> None:
    """Raise `RowError` if a template leaves out a message, or the tool calls of a message.

    A text that the template changes, such as a tool's result that it writes as JSON, is found by a second rendering
    with a mark after the text.

    Args:
        template: The chat template.
        messages: The conversation.
        tools: JSON schemas of its tools; None without tools.
        text: Its rendering.
        found: Indices of messages that were found in the text with all their parts.

    Raises:
        RowError: A message or a call is left out. The text contains the number of the message, counted from 1.
    """
    letters = unused_letters(text)
    contents: dict[int, str] = {}  # index -> the mark after a content that is not in the text as it is
    names: dict[int, list[str]] = {}  # index -> the mark after the name of each call
    for index, message in enumerate(messages):
        if index in found:
            continue
        if (message.get("content") or "").strip() not in text:
            contents[index] = next(letters)
        if calls := message.get("tool_calls"):
            names[index] = [next(letters) for _ in calls]
    if not contents and not names:
        return
    other = next(letters)
    changed = [
        with_mark(message, contents.get(index, other), str, names.get(index)) if index in contents | names else message
        for index, message in enumerate(messages)
    ]
    shown = template.render(changed, tools)
    for index, message in enumerate(messages):
        if contents.get(index, "") not in shown:
            what = "assistant's text" if message["role"] == "assistant" else f"message of the role {message['role']}"
            raise RowError(f"message {index + 1}: the chat template leaves out the {what}")
        if any(mark not in shown for mark in names.get(index, ())):
            raise RowError(f"message {index + 1}: the chat template leaves out a tool call")
