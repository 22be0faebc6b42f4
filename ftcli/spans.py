"""Token ids back to text, in pieces that are whole characters and know whether they are trained.

Knows tokenizers and nothing else: no task, no file, no terminal. What draws the pieces passes their text through
`visible` first, because rows are other people's text and may hold escape sequences.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

BROKEN = "\ufffd"  # what decoders write for bytes that are no character (yet)
MORE = 3  # tokens that can complete a character of four bytes
JOINERS = "\u200c\u200d"  # without width, and part of how Persian words and composed emoji are written


@dataclass(frozen=True)
class Span:
    """A piece of a row as the model reads it. `ids` are its tokens; empty: text that is not made of tokens."""

    text: str
    is_trained: bool = False
    is_special: bool = False
    ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Shortened:
    """The ends of a row; `tokens` stood between `head` and `tail`, `trained` of them trained."""

    head: list[Span]
    tail: list[Span]
    tokens: int = 0
    trained: int = 0


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids of tokens that stand for no text, such as those that open and close turns."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids) | {id_ for id_, token in added.items() if token.special}


def decode_spans(tokenizer: Any, ids: Sequence[int], trained: Sequence[bool] | None = None) -> list[Span]:
    """Return the smallest spans of `ids` [T] that are whole characters; none mixes trained and other tokens.

    Tokens are decoded behind the span before them, since decoders treat the first token of a text differently. A
    character that is cut in two, by the row's end or between trained and untrained, is shown as U+FFFD.
    """
    ids = [int(id_) for id_ in ids]
    trained = [False] * len(ids) if trained is None else [bool(flag) for flag in trained]
    special = special_ids(tokenizer)
    spans: list[Span] = []
    context = start = 0  # ids[context:start] is the span before, ids[start:end] the one being gathered
    for end in range(1, len(ids) + 1):
        if ids[start] in special:
            spans.append(Span(str(tokenizer.convert_ids_to_tokens(ids[start])), trained[start], True, (ids[start],)))
        else:
            is_last = end == len(ids) or ids[end] in special or trained[end] != trained[start]
            text = _text_after(tokenizer, ids[context:start], ids[start:end])
            if not is_last and text.endswith(BROKEN) and _goes_on(tokenizer, ids[start : end + MORE], end - start):
                continue
            spans.append(Span(text, trained[start], False, tuple(ids[start:end])))
        context = end if spans[-1].text.endswith(BROKEN) else start
        start = end
    return spans


def _goes_on(tokenizer: Any, ids: list[int], count: int) -> bool:
    """Say whether what the first `count` tokens end with becomes a character with those that follow.

    Text that holds U+FFFD itself grows with every token; half a character is replaced, whether the decoder writes
    one U+FFFD for it or one for each byte.
    """
    texts = [_decode(tokenizer, ids[:end]) for end in range(count, len(ids) + 1)]
    sizes = [len(text) for text in texts]
    grows = len(sizes) > 1 and sizes[1] > sizes[0] and sizes == sorted(sizes)
    return not (grows and all(text.startswith(texts[0]) for text in texts))


def _text_after(tokenizer: Any, before: list[int], ids: list[int]) -> str:
    """Return what `ids` add to the text of the tokens before them."""
    known, whole = _decode(tokenizer, before) if before else "", _decode(tokenizer, before + ids)
    return whole[len(known) :] if whole.startswith(known) else _decode(tokenizer, ids)


def _decode(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def joined(spans: Sequence[Span]) -> list[Span]:
    """Return the spans with neighbours of the same kind made one."""
    found: list[Span] = []
    for span in spans:
        last = found[-1] if found else None
        if last is not None and (last.is_trained, last.is_special) == (span.is_trained, span.is_special):
            found[-1] = Span(last.text + span.text, span.is_trained, span.is_special, last.ids + span.ids)
        else:
            found.append(span)
    return found


def shorten(spans: Sequence[Span], characters: int | None) -> Shortened:
    """Return the first three fifths and the last two fifths of `characters`; None, or a short row: all of it."""
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


def visible(text: str) -> str:
    r"""Return text that no terminal or page takes for an order: control and format characters as \x1b, \u202e.

    Newlines stay, and so do the two joiners that words and emoji are composed with.
    """
    if text.isprintable():
        return text
    return "".join(char if char == "\n" or _is_harmless(char) else _escape(char) for char in text)


def _is_harmless(char: str) -> bool:
    return char in JOINERS or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp")


def _escape(char: str) -> str:
    short = {"\t": r"\t", "\r": r"\r"}
    code = ord(char)
    return short.get(char) or (
        f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    )
