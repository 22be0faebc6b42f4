"""Tokenize one or two texts as one row, without reading much more of a long text than the row can hold."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ftcli.models.structure import base_model_of
from ftcli.tasks.protocol import Batch, Row
from ftcli.tasks.shared.batches import pad

if TYPE_CHECKING:
    from ftcli.data.mixture import SourceRows

PAIR_COLUMN = "text_pair"
# Names of two text columns in public data sets, such as those of GLUE, SuperGLUE, XNLI and PAWS.
USUAL_PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("question", "passage"),
    ("question", "context"),
    ("question", "answer"),
    ("query", "passage"),
    ("query", "document"),
    ("claim", "evidence"),
    ("sentence_a", "sentence_b"),
    ("sentence_A", "sentence_B"),
    ("sentence_1", "sentence_2"),
    ("text_a", "text_b"),
    ("text1", "text2"),
    ("text_1", "text_2"),
)
USUAL_NAMES = tuple({"text": first, PAIR_COLUMN: second} for first, second in USUAL_PAIRS)
SEGMENTS = "token_type_ids"
CHARACTERS_PER_TOKEN = 8  # of the part of a long text that is tokenized first; longer parts follow if that is too few
LEAST_CHARACTERS = 256  # of that part: WordPiece has one token for a word of more than 100 characters


def tokenize_texts(tokenizer: Any, texts: list[str], length: int) -> tuple[Row, bool]:
    """Tokenize one text, or two as the tokenizer joins them.

    Args:
        tokenizer: A fast tokenizer.
        texts: One or two texts.
        length: The most tokens of a row. A longer row still ends with its special token.

    Returns:
        ({"input_ids"}, with "token_type_ids" for two texts if the tokenizer tells them apart; whether it was cut).
    """
    heads = [_head(tokenizer, text, length) for text in texts]
    if heads != texts and len(texts) == 2:
        heads = _in_order(tokenizer, heads, texts, length)
    encoded = tokenizer(*heads, verbose=False)
    is_cut = len(encoded["input_ids"]) > length
    if is_cut:
        encoded = tokenizer(*heads, truncation=True, max_length=length)
    row = {"input_ids": encoded["input_ids"]}
    if len(texts) == 2 and any(encoded.get(SEGMENTS) or ()):
        row[SEGMENTS] = encoded[SEGMENTS]
    return row, is_cut


def note_other_texts(parts: list[SourceRows]) -> list[SourceRows]:
    """Add a note to evaluation sources of one text if all training rows have two, and the other way round.

    Args:
        parts: The rows that each split takes from each source.
    """
    trained = {PAIR_COLUMN in part.rows.column_names for part in parts if part.split == "train"}

    def noted(part: SourceRows) -> SourceRows:
        has_pair = PAIR_COLUMN in part.rows.column_names
        if has_pair in trained:
            return part
        what = f"{'two texts' if has_pair else 'one text'} per row, but data.train has {'one' if has_pair else 'two'}"
        return replace(
            part, notes=(*part.notes, (what, "name the columns in data.columns: {text: ..., text_pair: ...}"))
        )

    return [noted(part) for part in parts]


def _head(tokenizer: Any, text: str, length: int) -> str:
    """Return a part of a text that has more than `length` tokens, and the first `length` in common with the text.

    A part is long enough if one of twice its size has the same first tokens. A tokenizer that cuts texts on the left
    gets a part from the end. The part is short because a fast tokenizer also returns what it cuts off, and for two
    texts as all pairs of their pieces.
    """
    size, is_left = max(CHARACTERS_PER_TOKEN * length, LEAST_CHARACTERS), tokenizer.truncation_side == "left"
    before, before_kept = text, list[int]()
    while size < len(text):
        part = _part(tokenizer, text, size)
        ids = _ids(tokenizer, part)
        kept = ids[-length - 1 :] if is_left else ids[: length + 1]
        if len(kept) > length and before_kept == kept:
            return before
        before, before_kept, size = part, kept, 2 * size
    return text


def _in_order(tokenizer: Any, heads: list[str], texts: list[str], length: int) -> list[str]:
    """Return parts of two texts, of which that of the longer text has more tokens.

    If both are cut to half of an odd number of tokens, the tokenizer gives the odd one to the longer text, and to the
    second of two equally long ones. Only then are long texts read as a whole, for the numbers of their tokens.

    Args:
        tokenizer: A fast tokenizer.
        heads: The texts, or parts of them that have more than `length` tokens.
        texts: The whole texts.
        length: The most tokens of a row.
    """
    room = length - tokenizer.num_special_tokens_to_add(pair=True)
    if room % 2 == 0:
        return heads
    counts = [len(_ids(tokenizer, head)) for head in heads]
    if min(counts) <= room // 2:
        return heads
    first, second = (len(_ids(tokenizer, text)) for text in texts)
    longer = 0 if first > second else 1
    enough = counts[1 - longer] + (longer == 0)
    part, text = heads[longer], texts[longer]
    while part != text and len(_ids(tokenizer, part)) < enough:
        part = _part(tokenizer, text, 2 * len(part))
    return [part, heads[1]] if longer == 0 else [heads[0], part]


def _part(tokenizer: Any, text: str, size: int) -> str:
    """Return the first `size` characters of a text, or the last ones if the tokenizer cuts texts on the left."""
    return text[-size:] if tokenizer.truncation_side == "left" else text[:size]


def _ids(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text alone, without special ones."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def collate_segments(tokenizer: Any, rows: list[Row], *, on_left: bool = False) -> Batch:
    """Return {"token_type_ids"} `[B, T]` int64 if a row has them, with zeros for rows of one text; else nothing.

    Padding is on the right, or on the left.
    """
    if all(row.get(SEGMENTS) is None for row in rows):
        return {}
    segments = [list(row.get(SEGMENTS) or [0] * len(row["input_ids"])) for row in rows]
    return {SEGMENTS: pad(segments, tokenizer.pad_token_type_id, on_left=on_left)}


def takes_segments(model: Any) -> bool:
    """Return whether a model tells the parts of a row apart by `token_type_ids`."""
    base = base_model_of(model)
    kinds = getattr(base.config, "type_vocab_size", None)
    return SEGMENTS in inspect.signature(base.forward).parameters and (kinds is None or kinds > 1)
