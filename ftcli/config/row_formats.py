"""Declare the columns of each text format. data/formats.py recognises and converts the formats."""

from __future__ import annotations

from dataclasses import dataclass

CONVERSATION = ("tools", "system", "chat_template_kwargs")  # columns that a conversation may have besides
WEIGHTED = (*CONVERSATION, "weight")


@dataclass(frozen=True)
class RowFormat:
    """One text format: the columns that its rows must have and may have."""

    name: str
    kind: str  # messages, completion, text; compared, labelled, ranked, scored
    required: tuple[str, ...]
    optional: tuple[str, ...] = WEIGHTED


MESSAGES = RowFormat("messages", "messages", ("messages",))
SHAREGPT = RowFormat("ShareGPT conversations", "messages", ("conversations",))
COMPLETION = RowFormat("prompt and completion", "completion", ("prompt", "completion"))
ALPACA = RowFormat("Alpaca instructions", "completion", ("instruction", "output"), ("input", "history", *WEIGHTED))
TEXT = RowFormat("raw text", "text", ("text",), ("weight",))

COMPARED = RowFormat(
    "compared answers",
    "compared",
    ("chosen", "rejected"),
    ("prompt", *WEIGHTED, "margin", "ref_chosen_logps", "ref_rejected_logps"),
)
LABELLED = RowFormat("labelled answers", "labelled", ("prompt", "completion", "label"), WEIGHTED)
LABELLED_CHATS = RowFormat("labelled messages", "labelled", ("messages", "label"), WEIGHTED)
RANKED = RowFormat("ranked answers", "ranked", ("responses", "ranks"), ("prompt", *WEIGHTED))
SCORED = RowFormat("scored answers", "scored", ("prompt", "completion", "score"), WEIGHTED)
SCORED_CHATS = RowFormat("scored messages", "scored", ("messages", "score"), WEIGHTED)
RATED = RowFormat("rated answers", "scored", ("prompt", "completion", "attributes"), WEIGHTED)
RATED_CHATS = RowFormat("rated messages", "scored", ("messages", "attributes"), WEIGHTED)

ROW_FORMATS = (  # the first that fits is taken
    *(MESSAGES, SHAREGPT, COMPLETION, ALPACA, TEXT),
    *(COMPARED, LABELLED, LABELLED_CHATS, RANKED, SCORED, SCORED_CHATS, RATED, RATED_CHATS),
)


def columns_of_kinds(kinds: tuple[str, ...]) -> list[str]:
    """Return the names of all columns that rows of these kinds may have, each once."""
    names = (name for known in ROW_FORMATS if known.kind in kinds for name in (*known.required, *known.optional))
    return list(dict.fromkeys(names))
