"""Convert messages of OpenAI and ShareGPT to one form, and JSON text to values.

Pure functions on plain values, without heavy imports. chat/encode.py checks the messages.
"""

from __future__ import annotations

import json
from typing import Any

from ftcli.data.chat.json_values import HALF_PAIR, has_half_pair, json_error, may_have_half_pair
from ftcli.data.chat.weights import weight_of
from ftcli.runtime.errors import RowError

SPEAKERS = {  # ShareGPT's name of a role -> OpenAI's
    "human": "user",
    "gpt": "assistant",
    "function": "tool",
    "function_call": "assistant",
    "function_response": "tool",
    "observation": "tool",
}
PLAIN = {"role", "content"}
# Keys of a call that are not its arguments, and names that programs give to arguments.
CALL_KEYS = {"name", "id", "call_id", "tool_call_id", "type", "index", "status", "description", "strict"}
ARGUMENT_KEYS = ("arguments", "parameters", "input", "args")
ROLES = ("user", "assistant", "system")  # roles of messages that need no conversion if they have no other key


def messages_of(turns: Any) -> Any:
    """Convert messages of OpenAI or ShareGPT (from, value), or a JSON text of them, to messages of OpenAI.

    Arguments of tool calls become a mapping, and `weight` becomes `train`; a weight other than 0 and 1 is kept as well.
    Null keys of a message are removed, because tables give each message the keys of all messages. Nulls inside
    arguments stay; table_nulls.py removes those of tables. Other values stay unchanged: chat/encode.py checks the
    messages.

    Args:
        turns: The messages.

    Raises:
        RowError: A text is not JSON, or a tool call or weight is invalid.
    """
    if isinstance(turns, str):
        turns = parse_json(turns, "messages")
    return [_message(number, turn) for number, turn in enumerate(turns, start=1)] if isinstance(turns, list) else turns


def _message(number: int, turn: Any) -> Any:
    """Convert one message; `number` is counted from 1."""
    if not isinstance(turn, dict) or (turn.keys() == PLAIN and None not in turn.values() and turn["role"] in ROLES):
        return turn
    turn = {key: value for key, value in turn.items() if value is not None}
    if "from" in turn and "role" not in turn:
        speaker = turn.pop("from")
        role = SPEAKERS.get(speaker, speaker) if isinstance(speaker, str) else speaker
        turn = {"role": role, "content": turn.pop("value", None), **turn}
        if speaker == "function_call":  # its value is the call, or a list of calls, often as JSON text
            called = turn["content"] or ""
            called = parse_json(called, f"message {number}") if isinstance(called, str) else called
            turn |= {"content": "", "tool_calls": called if isinstance(called, list) else [called]}
    if turn.get("role") == "function":  # OpenAI's older name of the role
        turn["role"] = "tool"
    if not turn.get("tool_calls", True):  # an empty list
        del turn["tool_calls"]
    if isinstance(turn.get("tool_calls"), list):
        turn["tool_calls"] = [_tool_call(number, call) for call in turn["tool_calls"]]
        turn.setdefault("content", "")
    if "weight" in turn:  # OpenAI's key: an answer with weight 0 is not trained
        given = turn.pop("weight")
        weight = weight_of(float(given) if isinstance(given, bool) else given, f"message {number} has weight")
        turn.setdefault("train", weight > 0)
        if weight not in (0, 1):
            turn["weight"] = weight
    return turn


def _tool_call(number: int, call: Any) -> Any:
    """Return a tool call with its arguments as a mapping, because chat templates print a mapping."""
    call = _without_null_keys(call)
    function = _without_null_keys(call.get("function", call)) if isinstance(call, dict) else None
    if isinstance(function, str):
        function = parse_json(function, f"message {number}")
    if not isinstance(function, dict) or "name" not in function:
        return call
    if "arguments" not in function:
        if unread := sorted(function.keys() - CALL_KEYS):
            keys = ", ".join(unread)
            raise RowError(f"a tool call of message {number} has no `arguments`, but {keys}: rename the key")
        if beside := [key for key in ARGUMENT_KEYS if key in call]:
            raise RowError(
                f"a tool call of message {number} has `{beside[0]}` beside `function`: put `arguments` in it"
            )
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = parse_json(arguments or "{}", f"the arguments of message {number}")
    if not isinstance(arguments, dict):
        raise RowError(f"the arguments of message {number} are not a mapping")
    other = {key: call[key] for key in ("id", "type") if "function" in call and key in call}
    return {"type": "function", **other, "function": {"name": function["name"], "arguments": arguments}}


def _without_null_keys(value: Any) -> Any:
    """Return a mapping without its null keys. Nulls inside its values stay."""
    return {key: inner for key, inner in value.items() if inner is not None} if isinstance(value, dict) else value


def without_nulls(value: Any) -> Any:
    """Remove null keys from nested mappings and lists, because a table gives each row the keys of all rows."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def parse_json(text: str, what: str) -> Any:
    """Parse JSON text.

    Args:
        text: The text.
        what: Name of the text in messages.

    Raises:
        RowError: The text is not JSON, or has half of a surrogate pair.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(f"{what}: not JSON ({json_error(error)})") from None
    if may_have_half_pair(text) and has_half_pair(value):
        raise RowError(f"{what}: {HALF_PAIR}")
    return value
