"""Check the messages of conversations before a chat template renders them, and read their weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ftcli.data.chat.rendering import Messages
from ftcli.data.chat.turn_spans import REASONING
from ftcli.data.chat.weights import weight_of
from ftcli.runtime.errors import RowError

ROLES = ("system", "developer", "user", "assistant", "tool")


def checked_messages(messages: Any) -> tuple[Messages, list[bool | None]]:
    """Check messages, and separate their keys `train`.

    Args:
        messages: A list of OpenAI messages.

    Returns:
        (messages for the template, the `train` of each message or None).

    Raises:
        RowError: A message is invalid. The text contains its number, counted from 1.
    """
    if not isinstance(messages, list) or not messages:
        raise RowError("messages must be a list of {role, content}")
    turns: Messages = []
    train_flags: list[bool | None] = []
    for number, message in enumerate(messages, start=1):
        if _is_plain(message):
            turns.append(message)
            train_flags.append(None)
            continue
        if not isinstance(message, dict):
            raise RowError(f"message {number} has no text `content`")
        turn = {key: value for key, value in message.items() if value is not None}
        train_flag = turn.pop("train", None)
        turn.pop("weight", None)  # `turn_weights` reads it
        if train_flag is not None and not isinstance(train_flag, bool):
            raise RowError(f"message {number} has train: {train_flag!r}; it is true or false")
        if isinstance(turn.get("content"), list) and turn["content"]:
            turn["content"] = join_parts(turn["content"], number)
        calls = turn.get("role") == "assistant" and turn.get("tool_calls")
        if not isinstance(turn.get("content"), str) and not (calls and "content" not in turn):
            raise RowError(f"message {number} has no text `content`")
        if turn.get("role") not in ROLES:
            raise RowError(f"message {number} has role {turn.get('role')!r}; known: {', '.join(ROLES)}")
        if unreadable := [key for key in REASONING if key in turn and not isinstance(turn[key], str)]:
            raise RowError(f"message {number} has `{unreadable[0]}` that is not text")
        if "tool_calls" in turn:
            _check_calls(turn["tool_calls"], number)
        turns.append(turn)
        train_flags.append(train_flag)
    return turns, train_flags


def _is_plain(message: Any) -> bool:
    """Return whether a message has only a role and a text, like most messages."""
    return (
        isinstance(message, dict)
        and len(message) == 2
        and isinstance(message.get("content"), str)
        and message.get("role") in ROLES
    )


def join_parts(parts: list[Any], number: int) -> str:
    """Return the text of content in parts ([{"type": "text", "text": ...}])."""
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RowError(f"message {number} has a part of type {kind!r} in its content; only text can be trained")
        texts.append(part["text"])
    return "".join(texts)


def _check_calls(calls: Any, number: int) -> None:
    """Raise `RowError` for tool calls without functions and names."""
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError(f"message {number} has tool_calls that are not a list of {{function: {{name, arguments}}}}")


def turn_weights(messages: Sequence[Any], train_flags: Sequence[bool | None]) -> dict[int, float]:
    """Return the weights of trained turns by index, for messages that `checked_messages` accepts.

    Raises:
        RowError: A weight is not a number above 0, or belongs to a message that is not the assistant's.
    """
    weights = {}
    for index, (message, train_flag) in enumerate(zip(messages, train_flags, strict=True)):
        if message.get("weight") is not None and train_flag is not False:
            weights[index] = weight_of(message["weight"], f"message {index + 1} has weight")
            if message.get("role") != "assistant":
                raise RowError(f"message {index + 1} has a weight, which only messages of the assistant can have")
    return weights
