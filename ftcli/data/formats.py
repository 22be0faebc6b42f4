"""Recognise the format of text rows by their column names, and convert each row to one of a few kinds.

For tasks with fixed columns: the usual names of these columns in public data sets, and the columns that are not used.

    messages          messages for a chat template, with tools and variables of the template
    completion        a prompt and its completion, both text
    text              text

Answers that are compared, labelled, ranked or scored are converted by preference_formats.py.

Pure functions on plain values, without heavy imports. chat/encode.py checks the messages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ftcli.config.row_formats import (
    ALPACA,
    COMPARED,
    COMPLETION,
    MESSAGES,
    ROW_FORMATS,
    SHAREGPT,
    TEXT,
    RowFormat,
    columns_of_kinds,
)
from ftcli.config.task_registry import tasks_where
from ftcli.data.chat.message_checks import join_parts
from ftcli.data.chat.messages import messages_of, parse_json, without_nulls
from ftcli.data.chat.weights import row_weight
from ftcli.runtime.errors import InputError, RowError
from ftcli.tasks.protocol import properties_of

Row = Mapping[str, Any]

PREFERENCES = {"chosen", "rejected"}
ONLY_IN_CHATS = "has parts that need a chat template (system, tools, ...), but task_options.chat is never"
COLUMNS_HINT = "set data.columns to the columns that this task trains on"


def recognise(columns: Collection[str], kinds: Sequence[str], where: str) -> RowFormat:
    """Recognise the format of rows by their columns.

    Args:
        columns: Names of the columns.
        kinds: Kinds of rows that the task accepts.
        where: Name of the source in messages.

    Raises:
        InputError: The columns match no format, or only formats of other tasks.
    """
    matches = [known for known in ROW_FORMATS if set(known.required) <= set(columns)]
    if accepted := [known for known in matches if known.kind in kinds]:
        return accepted[0]
    present = ", ".join(columns)
    if set(columns) >= PREFERENCES:
        others = " or ".join(tasks_where(lambda task: COMPARED.kind in task.formats))
        raise InputError(
            f"{where} contains pairs of answers (chosen, rejected), but this task trains on one answer",
            hint="to train on the chosen answers: data.columns: {completion: chosen}, with a column 'prompt'"
            + (f"; to train on pairs: task: {others}" if others else ""),
        )
    if matches:
        best = max(matches, key=lambda known: len(known.required))  # a labelled answer has a completion too
        others = " or ".join(tasks_where(lambda task: best.kind in task.formats))
        raise InputError(
            f"{where} contains {best.name}, which this task does not train on",
            hint=f"set task: {others}, or set data.columns to other columns" if others else COLUMNS_HINT,
        )
    required = ", nor ".join(" and ".join(map(repr, known.required)) for known in ROW_FORMATS if known.kind in kinds)
    raise InputError(
        f"{where} has rows of no known format: no column {required}",
        hint=f"the columns are {present}; name the right ones in data.columns, or in `columns` of this source",
    )


def text_columns(task: Any) -> set[str]:
    """Return the columns of a task that always hold text, even if the text looks like a number."""
    properties = properties_of(task)
    usual = {stored for names in properties.usual_names for stored in names.values()}
    return set(columns_of_kinds(properties.formats)) | set(getattr(task, "text_columns", ())) | usual


def convert(row: Row, kinds: Sequence[str]) -> dict[str, Any]:
    """Convert a row to {"messages", "tools"}, {"prompt", "completion"} or {"text"}, according to its columns.

    Messages have `chat_template_kwargs` if the row has them, and every result has its `weight`. The result for
    compared, labelled, ranked and scored answers is described in preference_formats.py.

    Args:
        row: A row of the source, with columns renamed.
        kinds: Kinds of rows that the task accepts.

    Raises:
        RowError: The row lacks a required column, or a value has the wrong type.
    """
    for known in ROW_FORMATS:
        if known.kind in kinds and all(row.get(name) is not None for name in known.required):
            converted = _converter(known)(row)
            return converted | row_weight(row) if known in CONVERTERS else converted
    present = ", ".join(sorted(name for name, value in row.items() if value is not None and name != "id"))
    required = ", or ".join(
        " and ".join(f"`{n}`" for n in known.required) for known in ROW_FORMATS if known.kind in kinds
    )
    raise RowError(f"needs {required}; it has {present or 'nothing'}")


def _converter(known: RowFormat) -> Callable[[Row], dict[str, Any]]:
    """Return the function that converts rows of a format."""
    from ftcli.data.preference_formats import PREFERENCE_CONVERTERS  # that module imports this one

    return CONVERTERS[known] if known in CONVERTERS else PREFERENCE_CONVERTERS[known]


def described(row_format: RowFormat, columns: Collection[str], kinds: Sequence[str]) -> str:
    """Return one line about a source: its format, further formats that some rows may have, and columns not used.

    Args:
        row_format: The recognised format.
        columns: Names of all columns.
        kinds: Kinds of rows that the task accepts.
    """
    # `convert` takes the first format of which a row has all values.
    others = [known for known in ROW_FORMATS if known.kind in kinds and set(known.required) <= set(columns)]
    used = {name for known in (row_format, *others) for name in (*known.required, *known.optional)}
    unused = sorted(set(columns) - used - {"id"})
    text = ", else ".join([row_format.name, *(known.name for known in others if known != row_format)])
    return text + (f" (not used: {', '.join(unused)})" if unused else "")


def with_usual_names(task: Any, columns: Mapping[str, str], present: Collection[str], *, where: str) -> dict[str, str]:
    """Add the names that public data sets use for columns of a task, if the source has these instead.

    Args:
        task: The task, or its class.
        columns: Name the task expects -> name in the source, as the recipe maps them.
        present: Columns of the source.
        where: Name of the source in messages.

    Returns:
        The map with the names that were found.

    Raises:
        InputError: The source has several sets of such names.
    """
    own = dict(columns)
    matches = [
        names
        for names in properties_of(task).usual_names
        if set(names.values()) <= set(present)
        and not any(name in present or own.get(name, name) != name for name in names)
    ]
    if len(matches) > 1:
        pairs = " and ".join(", ".join(names.values()) for names in matches)
        first = ", ".join(f"{name}: {stored}" for name, stored in matches[0].items())
        raise InputError(f"has several columns of texts: {pairs}", where=where, hint=f"set data.columns: {{{first}}}")
    return own | dict(matches[0]) if matches else own


def unused_columns(task: Any, columns: Collection[str]) -> str:
    """Return a remark about the columns that a task with fixed columns does not read; "" if there are none.

    A custom task may read columns that it does not declare.

    Args:
        task: The task, or its class.
        columns: Columns of a source, by the names that the task expects.
    """
    if not task.columns:
        return ""
    known = {*task.columns, *properties_of(task).optional_columns, "id"}
    unused = ", ".join(sorted(set(columns) - known))
    kind = task if isinstance(task, type) else type(task)
    what = "not used" if kind.__module__.startswith("ftcli.tasks.") else "not declared by the task"
    return f"{what}: {unused}" if unused else ""


def described_columns(task: Any, columns: Collection[str]) -> str:
    """Return the columns of a source that a task with fixed columns reads, and those that it does not use."""
    used = [name for name in (*task.columns, *properties_of(task).optional_columns) if name in columns]
    unused = unused_columns(task, columns)
    return ", ".join(used) + (f" ({unused})" if unused else "")


def _from_messages(row: Row) -> dict[str, Any]:
    """Convert a row with a column `messages`."""
    return conversation(row["messages"], row)


def _from_sharegpt(row: Row) -> dict[str, Any]:
    """Convert a row with a column `conversations`."""
    return conversation(row["conversations"], row)


def conversation(turns: Any, row: Row) -> dict[str, Any]:
    """Return a conversation as {"messages", "tools"}, and `chat_template_kwargs` if the row has them.

    Args:
        turns: Messages of OpenAI or ShareGPT, or a JSON text of them.
        row: The row. Its column `system` becomes the first message if the conversation has no system message.

    Raises:
        RowError: A value cannot be converted, or the row has two system messages.
    """
    messages = messages_of(turns)
    system = row.get("system")
    if system is not None and not isinstance(system, str):
        raise RowError("`system` must be text")
    if system and isinstance(messages, list):
        if not _begins_with_system(messages):
            messages = [{"role": "system", "content": system}, *messages]
        elif _text_of(messages[0].get("content")) != system:
            raise RowError("has a column `system` and another text in a system message; remove one of them")
    return {"messages": messages, "tools": None, **conversation_options(row)}


def _text_of(content: Any) -> Any:
    """Return the text of the content of a first message, which may have parts."""
    return join_parts(content, 1) if isinstance(content, list) else content


def _begins_with_system(messages: list[Any]) -> bool:
    """Return whether the first message is a system message."""
    return bool(messages) and isinstance(messages[0], dict) and messages[0].get("role") == "system"


def as_text(value: Any) -> Any:
    """Return a whole number as text, and every other value unchanged.

    JSON files and typed tables may have numbers in a column of text. A float stays, because it can be written in
    several ways.
    """
    return str(value) if type(value) is int else value


def text_of(row: Row, name: str, missing: str) -> str:
    """Return the text in a column.

    Args:
        row: The row.
        name: Name of the column.
        missing: What to say of a row without it.

    Raises:
        RowError: There is no text.
    """
    text = as_text(row[name])
    if isinstance(text, float) and text == text:
        raise RowError(f"`{name}` is the number {text}: write it as text, in quotes")
    if not isinstance(text, str) or not text.strip():
        raise RowError(missing)
    return text


def _from_completion(row: Row) -> dict[str, Any]:
    """Convert a row with `prompt` and `completion`, both text or both lists of messages."""
    prompt, completion = as_text(row["prompt"]), as_text(row["completion"])
    if isinstance(prompt, list) and isinstance(completion, list):
        return conversation(prompt + completion, row)
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise RowError("`prompt` and `completion` must both be text, or both lists of messages")
    if not completion.strip():
        raise RowError("has an empty completion")
    return _prompt_and_completion(prompt, completion, row)


def _prompt_and_completion(prompt: str, completion: str, row: Row) -> dict[str, Any]:
    """Return {"prompt", "completion"}; with messages too if the row has a system message, tools or variables."""
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    chat = conversation(turns, row)
    is_plain = chat["messages"] == turns and not chat["tools"] and "chat_template_kwargs" not in chat
    plain = {"prompt": prompt, "completion": completion}
    return plain if is_plain else chat | plain


def conversation_options(row: Row) -> dict[str, Any]:
    """Return the `tools` and `chat_template_kwargs` (variables of the template) of a row, if it has them.

    Args:
        row: A row of the source.

    Raises:
        RowError: The tools are not a list, or the variables are not a mapping.
    """
    tools = _tools(row.get("tools"))
    variables = row.get("chat_template_kwargs")
    variables = (
        parse_json(variables.strip() or "null", "`chat_template_kwargs`")
        if isinstance(variables, str)
        else without_nulls(variables)
    )
    if variables and not isinstance(variables, dict):
        raise RowError("`chat_template_kwargs` must be a mapping of variables of the chat template")
    return {name: value for name, value in (("tools", tools), ("chat_template_kwargs", variables)) if value}


def _from_alpaca(row: Row) -> dict[str, Any]:
    """Convert a row of Alpaca's format. The prompt is the instruction, followed by its input."""
    instruction, context, output = (as_text(row.get(name)) for name in ("instruction", "input", "output"))
    context = "" if context is None else context
    if not all(isinstance(value, str) for value in (instruction, context, output)):
        raise RowError("`instruction`, `input` and `output` must be text")
    if not output.strip():
        raise RowError("has an empty output")
    prompt = f"{instruction}\n\n{context}" if context.strip() else instruction
    history = row.get("history") or []
    if not history:
        return _prompt_and_completion(prompt, output, row)
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise RowError("`history` must be a list of pairs [instruction, output]")
    pairs = [*history, [prompt, output]]
    turns = [{"role": r, "content": t} for pair in pairs for r, t in zip(("user", "assistant"), pair, strict=True)]
    return conversation(turns, row)


def _from_text(row: Row) -> dict[str, Any]:
    """Convert a row with a column `text`."""
    return {"text": text_of(row, "text", "has no text")}


CONVERTERS: dict[RowFormat, Callable[[Row], dict[str, Any]]] = {
    MESSAGES: _from_messages,
    SHAREGPT: _from_sharegpt,
    COMPLETION: _from_completion,
    ALPACA: _from_alpaca,
    TEXT: _from_text,
}


def _tools(tools: Any) -> list[Any] | None:
    """Return the tools of a conversation as a list of JSON schemas; None without tools."""
    tools = parse_json(tools.strip() or "null", "`tools`") if isinstance(tools, str) else tools
    if not tools:
        return None
    if not isinstance(tools, list):
        raise RowError("`tools` must be a list of JSON schemas")
    return [parse_json(tool, "`tools`") if isinstance(tool, str) else tool for tool in tools]
