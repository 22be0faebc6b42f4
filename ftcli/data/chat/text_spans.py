"""Decode token ids to spans of text. A span consists of complete characters, and is trained or not trained.

Callers must pass the text of spans through `visible` before printing it, because rows may contain escape sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ftcli.tasks.protocol import Span

BROKEN = "\ufffd"  # decoders write this character for incomplete or invalid bytes
MORE = 3  # further tokens that can complete a character of four bytes


@dataclass(frozen=True)
class Shortened:
    """The start and the end of a row."""

    head: list[Span]
    tail: list[Span]
    tokens: int = 0  # omitted tokens between head and tail
    trained: int = 0  # trained tokens among the omitted ones


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids of special tokens, such as those at the start and end of turns.

    Args:
        tokenizer: The tokenizer.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids) | {id_ for id_, token in added.items() if token.special}


def decode_spans(tokenizer: Any, ids: Sequence[int], trained: Sequence[bool] | None = None) -> list[Span]:
    """Decode token ids to the smallest spans of complete characters. No span has both trained and untrained tokens.

    Tokens are decoded together with the span before them, because decoders treat the first token of a text differently.
    A character that is divided by the end of the row, or between trained and untrained tokens, becomes U+FFFD.

    Args:
        tokenizer: The tokenizer.
        ids: Token ids, `[T]`.
        trained: Whether each token is trained, `[T]`; None for no token.
    """
    ids = [int(id_) for id_ in ids]
    trained = [False] * len(ids) if trained is None else [bool(flag) for flag in trained]
    special = special_ids(tokenizer)
    spans: list[Span] = []
    context = start = 0  # ids[context:start] is the span before, ids[start:end] the current one
    for end in range(1, len(ids) + 1):
        if ids[start] in special:
            spans.append(Span(str(tokenizer.convert_ids_to_tokens(ids[start])), trained[start], True, (ids[start],)))
        else:
            is_last = end == len(ids) or ids[end] in special or trained[end] != trained[start]
            text = _text_after(tokenizer, ids[context:start], ids[start:end])
            if not is_last and text.endswith(BROKEN) and _continues(tokenizer, ids[start : end + MORE], end - start):
                continue
            spans.append(Span(text, trained[start], False, tuple(ids[start:end])))
        context = end if spans[-1].text.endswith(BROKEN) else start
        start = end
    return spans


def _continues(tokenizer: Any, ids: list[int], count: int) -> bool:
    """Return whether the first `count` tokens end with an incomplete character, which later tokens complete.

    A U+FFFD of the text itself stays when more tokens are decoded. The U+FFFD of an incomplete character is replaced by
    the complete character.
    """
    texts = [_decode(tokenizer, ids[:end]) for end in range(count, len(ids) + 1)]
    sizes = [len(text) for text in texts]
    grows = len(sizes) > 1 and sizes[1] > sizes[0] and sizes == sorted(sizes)
    return not (grows and all(text.startswith(texts[0]) for text in texts))


def _text_after(tokenizer: Any, before: list[int], ids: list[int]) -> str:
    """Return the text that `ids` add to the text of the tokens before them."""
    known, both = _decode(tokenizer, before) if before else "", _decode(tokenizer, before + ids)
    return both[len(known) :] if both.startswith(known) else _decode(tokenizer, ids)


def _decode(tokenizer: Any, ids: list[int]) -> str:
    """Decode token ids with special tokens and unchanged spaces."""
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def joined(spans: Sequence[Span]) -> list[Span]:
    """Merge neighbouring spans of the same kind.

    Args:
        spans: Spans of a row, in order.
    """
    merged: list[Span] = []
    for span in spans:
        last = merged[-1] if merged else None
        if last is not None and _kind(last) == _kind(span):
            merged[-1] = replace(last, text=last.text + span.text, ids=last.ids + span.ids)
        else:
            merged.append(span)
    return merged


def _kind(span: Span) -> tuple[bool, bool, str]:
    return span.is_trained, span.is_special, span.part


def shorten(spans: Sequence[Span], characters: int | None) -> Shortened:
    """Shorten a row to its start and its end.

    Args:
        spans: Spans of the row, in order.
        characters: Number of characters to keep: three fifths at the start, two fifths at the end. None: all.
    """
    sizes = [len(span.text) for span in spans]
    if characters is None or sum(sizes) <= characters:
        return Shortened(list(spans), [])
    first, room = 0, characters * 3 // 5
    while first < len(spans) and sizes[first] <= room:
        room -= sizes[first]
        first += 1
    last, room = len(spans), characters * 2 // 5
    while last > first and sizes[last - 1] <= room:
        room -= sizes[last - 1]
        last -= 1
    hidden = spans[first:last]
    return Shortened(
        list(spans[:first]),
        list(spans[last:]),
        tokens=sum(len(span.ids) for span in hidden),
        trained=sum(len(span.ids) for span in hidden if span.is_trained),
    )
