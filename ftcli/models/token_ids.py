"""Compare the tokens of rows and prompts with the rows of a model's embeddings.

A tokenizer may have tokens that its model has no embedding for, usually because they were added to the tokenizer alone.
On a GPU such a token would abort the process. Imports torch and pyarrow inside functions only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ftcli.runtime.errors import InputError, Problem

if TYPE_CHECKING:
    from torch import nn

    from ftcli.data.cache import PreparedRows


HINT = (
    "use the tokenizer that belongs to the model; to add tokens, remove them from the tokenizer's files and name them "
    "in model.new_tokens, which adds rows"
)


def check_token_ids(model: nn.Module, name: str, tokenizer: Any, rows: PreparedRows) -> list[str]:
    """Check that a model has an embedding for every token of the prepared rows and for padding.

    Args:
        model: The model.
        name: Its name, for the message.
        tokenizer: The tokenizer of the task; None without one.
        rows: The prepared rows.

    Returns:
        A line about a stream, of whose rows only the first are known; else nothing.

    Raises:
        InputError: A token has no row.
    """
    try:
        table: Any = model.get_input_embeddings()  # type: ignore[operator]
    except (NotImplementedError, AttributeError):  # not a language model, or not a model of transformers
        return []
    size = getattr(table, "num_embeddings", None)
    if size is None or (problem := token_problem(size, name, tokenizer, rows)) is None:
        return []
    if rows.streamed and problem.hint == "":
        return [problem.what]
    raise InputError([problem])


def token_problem(size: int, name: str, tokenizer: Any, rows: PreparedRows) -> Problem | None:
    """Return the token of rows or padding that a model has no embedding for; None if there is none.

    Args:
        size: Number of rows of the embeddings.
        name: The model's name.
        tokenizer: The tokenizer of the task; None without one.
        rows: The prepared rows.

    Returns:
        The problem. It has no hint if it is about rows of a stream that are not known yet.
    """
    if tokenizer is None or "input_ids" not in rows.train.column_names:
        return None
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest < size:
        return None
    used = max((_largest_id(split) for split in (rows.train, rows.eval) if split is not None), default=0)
    if used >= size:
        return Problem(_described(used, size, name, tokenizer, "the rows have"), hint=HINT)
    if (padding := tokenizer.pad_token_id) is not None and padding >= size:
        return Problem(_described(padding, size, name, tokenizer, "padding is"), hint=HINT)
    if rows.streamed:
        return Problem(_described(largest, size, name, tokenizer, "a row of the stream ends the run if it has"))
    return None


def check_prompt_ids(config: Any, prompts: Iterable[Sequence[int]]) -> None:
    """Check that a model has an embedding for every token of prompts.

    Args:
        config: The model's configuration.
        prompts: Token ids of the prompts.

    Raises:
        InputError: A token has no row.
    """
    size = getattr(config.get_text_config(), "vocab_size", None)
    largest = max((max(ids, default=0) for ids in prompts), default=0)
    if isinstance(size, int) and largest >= size:
        raise InputError(f"a prompt has the token {largest}, and the model's embeddings have {size} rows", hint=HINT)


def embedding_rows(settings: Mapping[str, Any]) -> int | None:
    """Return the rows of the embeddings that a model's configuration declares; None if it does not."""
    text = settings.get("text_config")
    owners = [settings, text] if isinstance(text, Mapping) else [settings]
    return next((owner["vocab_size"] for owner in owners if isinstance(owner.get("vocab_size"), int)), None)


def _described(token: int, size: int, name: str, tokenizer: Any, subject: str) -> str:
    """Return the sentence about a token without an embedding."""
    text = tokenizer.convert_ids_to_tokens(token)
    return f"{subject} the token {text!r} with the id {token}, and the embeddings of {name} have {size} rows"


def _largest_id(rows: Any) -> int:
    """Return the largest token id of prepared rows, reading them in parts."""
    import pyarrow.compute as pc

    parts = rows.with_format("arrow").iter(batch_size=10_000)
    return max((pc.max(part["input_ids"].combine_chunks().flatten()).as_py() or 0 for part in parts), default=0)
