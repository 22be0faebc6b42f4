"""Read prompts from arguments, a recipe or a file. The module never imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ftcli.config.recipe_training import Generate
from ftcli.data.chat.prompt import PromptInput
from ftcli.data.formats import as_text, conversation_options
from ftcli.data.text_files import ONE_A_LINE, READERS, UnreadableRow, split_rows
from ftcli.inference.answers import Prompt
from ftcli.runtime.errors import InputError, RowError, nearest
from ftcli.runtime.reader_errors import reading, user_path

PROMPT_FORMATS = (".jsonl", ".txt")
ROLES = ("system", "user", "assistant", "tool")


def recipe_prompts(section: Generate | None) -> list[Prompt]:
    """Return the prompts of a recipe's evaluate.generate; empty without that section.

    Raises:
        InputError: The file of prompts cannot be read.
    """
    if section is None:
        return []
    if section.file is not None:
        return read_prompts(section.file, key="evaluate.generate.file")
    return [Prompt(item if isinstance(item, str) else [m.model_dump() for m in item]) for item in section.prompts]


def collect_prompts(
    prompts: Sequence[PromptInput], file: str | Path | None = None, system: str | None = None
) -> list[Prompt]:
    """Collect the prompts of a call or a command line, followed by those of a file.

    Args:
        prompts: Texts or lists of messages.
        file: A .txt or .jsonl file with more prompts.
        system: A system turn for every prompt.

    Raises:
        InputError: There is no prompt, `prompts` is a single one, or a conversation already has a system turn.
    """
    prompts = prompts if isinstance(prompts, str) else list(prompts)  # perhaps an iterator
    if isinstance(prompts, str) or any(isinstance(item, Mapping) for item in prompts):
        what = "a text" if isinstance(prompts, str) else "the messages of a single one"
        hint = 'for one prompt give a list of one, such as ["Hello"] or [[{"role": "user", "content": "Hello"}]]'
        raise InputError(f"prompts must be a list of prompts, not {what}", hint=hint)
    collected = [Prompt(replace_surrogates(item) if isinstance(item, str) else item) for item in prompts]
    collected += [] if file is None else read_prompts(file, key="--file")
    if not collected:
        raise InputError("there is no prompt to answer", hint="give --prompt TEXT, or --file FILE")
    if system is None:
        return collected
    return [_with_system_turn(replace_surrogates(system), prompt) for prompt in collected]


def replace_surrogates(text: str) -> str:
    """Return text with U+FFFD in place of surrogates, which stand for invalid UTF-8 and which tokenizers refuse."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def read_prompts(path: str | Path, *, key: str) -> list[Prompt]:
    """Read the prompts of a file: .txt with one per line, or .jsonl with `messages` or `prompt` in each row.

    A last turn of the assistant, or a row's `completion`, becomes the reference.

    Args:
        path: The file.
        key: The option or key that names the file, for messages.

    Raises:
        InputError: The file or one of its rows cannot be read.
    """
    file = user_path(path, key)
    if file.suffix not in PROMPT_FORMATS:
        raise InputError(
            f"{key}: {file} is neither .jsonl nor .txt", hint="write one prompt or one JSON object per line"
        )
    if not file.is_file():
        suggestion = nearest(file.name, [entry.name for entry in file.parent.iterdir()]) if file.parent.is_dir() else ""
        raise InputError(f"{key}: no file at {file.absolute()}", hint=suggestion)
    with reading(f"{key}: {file}"), file.open("rb") as opened:
        prompts = [_parse_unit(unit, file) for unit in split_rows(opened, file.suffix)]
    if not prompts:
        raise InputError(f"{key}: {file} has no prompt", hint="write one prompt or one JSON object per line")
    return prompts


def _parse_unit(unit: Any, file: Path) -> Prompt:
    """Return the prompt in one unit of a file that `split_rows` yields."""
    row = READERS[file.suffix].parse(unit)
    where = f"{file}:{unit.line if isinstance(unit, UnreadableRow) else unit[0]}"
    if isinstance(row, RowError):
        hint = "write one prompt per line" if file.suffix == ".txt" else ONE_A_LINE
        raise InputError(str(row), where=where, hint=hint)
    return Prompt(row["text"]) if file.suffix == ".txt" else _parse_row(row, where)


def _parse_row(row: dict[str, Any], where: str) -> Prompt:
    """Return the prompt of a .jsonl row with its options."""
    try:
        options = conversation_options(row)
    except RowError as error:
        raise InputError(str(error), where=where) from None
    return replace(_parse_prompt(row, where), **options)


def _parse_prompt(row: dict[str, Any], where: str) -> Prompt:
    """Return the prompt of a .jsonl row and its reference."""
    if isinstance(row.get("messages"), list):
        return _parse_messages(row["messages"], where)
    prompt = as_text(row.get("prompt"))
    if isinstance(prompt, list):
        completion = row.get("completion")
        return _parse_messages(prompt + (completion if isinstance(completion, list) else []), where)
    if not isinstance(prompt, str):
        raise InputError("has neither `messages` nor `prompt`", where=where, hint='write {"prompt": "..."}')
    completion = as_text(row.get("completion"))
    return Prompt(prompt, completion if isinstance(completion, str) else None)


def _parse_messages(messages: list[Any], where: str) -> Prompt:
    """Return the prompt of a list of messages; a last turn of the assistant becomes the reference."""
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise InputError(f"message {number} has no valid role", where=where, hint=f"use one of {', '.join(ROLES)}")
    turns = [{name: value for name, value in message.items() if value is not None} for message in messages]
    is_answered = bool(turns) and turns[-1]["role"] == "assistant"
    prompt_turns = turns[:-1] if is_answered else turns
    if not prompt_turns:
        raise InputError("there is no message to answer", where=where, hint="add a message of the user")
    return Prompt(prompt_turns, str(turns[-1].get("content", "")) if is_answered else None)


def _with_system_turn(system: str, prompt: Prompt) -> Prompt:
    """Return a prompt with a system turn before its messages."""
    turns = [{"role": "user", "content": prompt.content}] if isinstance(prompt.content, str) else prompt.content
    if turns[0]["role"] == "system":
        raise InputError("--system: a prompt already has a system turn", hint="remove --system")
    return replace(prompt, content=[{"role": "system", "content": system}, *turns])
