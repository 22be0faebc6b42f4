"""Find raw rows whose text spells control tokens, such as `<|im_end|>`, which then become real ones.

The prepared rows do not show who wrote a token: the chat template or the text. So the sources are read again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ftcli.config.row_formats import columns_of_kinds
from ftcli.data.chat.rendering import any_of
from ftcli.data.chat.template_variables import texts_of
from ftcli.data.chat.text_spans import special_ids
from ftcli.tasks.protocol import properties_of

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe
    from ftcli.tasks.protocol import Task


MOST_SHOWN = 3  # rows of a split whose text is shown
AROUND = 30  # characters of text before and after a token
BATCH = 1024  # rows that are read at once
ANSWERS = ("assistant", "gpt", "model", "bot", "chatgpt")  # roles of the texts that a model writes
ANSWER_COLUMNS = ("completion", "output", "chosen", "rejected", "responses")
NO_TEXT = ("label", "image")  # columns that are not tokenized


@dataclass
class SpelledTokens:
    """The rows of a split whose text spells control tokens.

    Attributes:
        rows: Number of raw rows.
        found: Number of those that spell a token.
        tokens: Token -> number of rows that spell it.
        shown: (number of the row in its source from 1, source, text around the first token).
    """

    rows: int = 0
    found: int = 0
    tokens: Counter[str] = field(default_factory=Counter)
    shown: list[tuple[int, str, str]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the values by name."""
        return asdict(self) | {"tokens": dict(self.tokens.most_common())}


def find_spelled_tokens(recipe: Recipe, task: Task) -> dict[str, SpelledTokens]:
    """Search the texts of all raw rows for the tokenizer's control tokens.

    Control tokens are special tokens. In a conversation they are also the other added tokens that the chat template
    writes, such as `<tool_call>`, unless the text is an answer.

    Args:
        recipe: The recipe, with resolved commits.
        task: The recipe's task, with its tokenizer loaded.

    Returns:
        Split -> its rows; without splits in which no row spells a token, and empty for a task without a tokenizer.
    """
    from ftcli.data.mixture import read_sources

    tokenizer = getattr(task, "tokenizer", None)
    if tokenizer is None:
        return {}
    special, others = _control_tokens(task)
    anywhere, in_prompts = any_of(special), any_of([*special, *others])
    splits: dict[str, SpelledTokens] = {}
    for part in read_sources(recipe, task):
        split = splits.setdefault(part.split, SpelledTokens())
        split.rows += len(part.indices)
        texts = part.rows.select_columns(_text_columns(task, part.rows.column_names))
        for start in range(0, len(part.indices), BATCH):
            numbers = part.indices[start : start + BATCH]
            columns: dict[str, list[Any]] = texts[numbers.tolist()]
            for at, number in enumerate(numbers.tolist()):
                row = {name: values[at] for name, values in columns.items()}
                if hits := list(_hits(row, anywhere, in_prompts)):
                    split.found += 1
                    split.tokens.update({hit.group() for hit in hits})
                    if len(split.shown) < MOST_SHOWN:
                        split.shown.append((number + 1, part.label, _around(hits[0])))
    return {name: split for name, split in splits.items() if split.found}


def _control_tokens(task: Any) -> tuple[list[str], list[str]]:
    """Return (special tokens, other added tokens that the chat template writes) of a task's tokenizer."""
    tokenizer = task.tokenizer
    special = {str(tokenizer.convert_ids_to_tokens(id_)) for id_ in special_ids(tokenizer)}
    sources = texts_of(tokenizer.chat_template) if "messages" in properties_of(task).formats else ()
    added = {str(token) for token in getattr(tokenizer, "added_tokens_decoder", {}).values()} - special
    written = {token for token in added if token.strip() and any(token in source for source in sources)}
    return sorted(token for token in special if token.strip()), sorted(written)


def _text_columns(task: Any, present: Sequence[str]) -> list[str]:
    """Return the columns of a source that a task tokenizes; all but labels for a task that declares none."""
    properties = properties_of(task)
    known = {*task.columns, *properties.optional_columns, *columns_of_kinds(properties.formats)} or set(present)
    return [name for name in present if name in known and name not in NO_TEXT]


def _hits(row: dict[str, Any], anywhere: re.Pattern[str], in_prompts: re.Pattern[str]) -> Iterator[re.Match[str]]:
    """Yield the control tokens in the texts of a row."""
    pending: list[tuple[Any, bool]] = [(value, name in ANSWER_COLUMNS) for name, value in reversed(row.items())]
    while pending:
        value, is_answer = pending.pop()
        if isinstance(value, str):
            yield from (anywhere if is_answer else in_prompts).finditer(value)
        elif isinstance(value, list):
            pending += [(item, is_answer) for item in reversed(value)]
        elif isinstance(value, dict):
            role = value.get("role") or value.get("from")
            is_answer = role in ANSWERS if isinstance(role, str) else is_answer
            pending += [(item, is_answer) for item in reversed(value.values())]


def _around(hit: re.Match[str]) -> str:
    """Return the text around a token, with an ellipsis where text is left out."""
    start, end = max(0, hit.start() - AROUND), hit.end() + AROUND
    text = hit.string[start:end]
    return ("..." if start else "") + text + ("..." if end < len(hit.string) else "")
