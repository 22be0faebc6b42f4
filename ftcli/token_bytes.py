"""Which tokens lie within given stretches of a text, from ids alone, for tokenizers whose tokens are bytes.

The tokenizer's own offsets cost a third of its time; ids are enough where the bytes of all tokens, put together, are
those of the text, and that is looked at for every text. Knows tokenizers and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

UNKNOWN = -1  # length of a token that nobody has asked for

Span = tuple[int, int]  # characters [start, end) of a text


class TokenBytes:
    """The bytes of every token id that has been asked for: `lengths[id]` of a pool, from `starts[id]` on."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._added = {number: token.content for number, token in backend.get_added_tokens_decoder().items()}
        self._pool = bytearray()
        self._starts = np.zeros(0, np.int64)
        self._lengths = np.zeros(0, np.int64)

    def inside(
        self, ids: Sequence[list[int]], texts: Sequence[str], spans: Sequence[Sequence[Span]]
    ) -> list[list[bool] | None]:
        """Return for every token of each text whether it is in one of the text's spans, which are not empty.

        None for a text that its tokens are not the bytes of, or where one lies across the beginning of a span. All
        texts are looked at as one; where that fails, in halves.
        """
        if not ids:
            return []
        data = [text.encode() for text in texts]
        tokens, begins = np.cumsum([0, *map(len, ids)]), np.cumsum([0, *map(len, data)])
        bounds = self._bounds(np.fromiter(chain.from_iterable(ids), np.int64, tokens[-1]), b"".join(data))
        if bounds is None or not np.array_equal(bounds[tokens], begins):
            half = len(ids) // 2
            parts = [slice(half), slice(half, None)] if half else []
            return [each for part in parts for each in self.inside(ids[part], texts[part], spans[part])] or [None]
        of_all = [
            (number, begin + start, begin + end)
            for number, (text, begin, found) in enumerate(zip(texts, begins.tolist(), spans, strict=False))
            for start, end in (found if len(text) == len(data[number]) else _in_bytes(text, found))
        ]
        numbers, starts, ends = np.array(of_all, np.int64).reshape(-1, 3).T
        first, last = np.searchsorted(bounds[1:], starts, "right"), np.searchsorted(bounds[1:], ends) + 1
        is_inside = np.zeros(tokens[-1], bool)
        for start, end in zip(first.tolist(), last.tolist(), strict=True):
            is_inside[start:end] = True
        across, flags = set(numbers[bounds[first] != starts].tolist()), is_inside.tolist()
        return [None if n in across else flags[start:end] for n, (start, end) in enumerate(pairwise(tokens.tolist()))]

    def _bounds(self, ids: NDArray[np.int64], data: bytes) -> NDArray[np.int64] | None:
        """Return where tokens begin in `data`, and where the last one ends; None when they are not its bytes."""
        if (more := ids.max(initial=-1) + 1 - len(self._lengths)) > 0:
            self._starts = np.pad(self._starts, (0, more))
            self._lengths = np.pad(self._lengths, (0, more), constant_values=UNKNOWN)
        for number in set(ids[self._lengths[ids] == UNKNOWN].tolist()):
            piece = self._bytes_of(number)
            self._starts[number], self._lengths[number] = len(self._pool), len(piece)
            self._pool += piece
        lengths = self._lengths[ids]
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        if bounds[-1] != len(data):
            return None
        places = np.repeat(self._starts[ids] - bounds[:-1], lengths) + np.arange(len(data))
        return bounds if np.frombuffer(self._pool, np.uint8)[places].tobytes() == data else None

    def _bytes_of(self, number: int) -> bytes:
        token = self._added.get(number)
        if token is None:
            token = self._backend.id_to_token(number)
            if all(character in LETTERS for character in token):
                return bytes([LETTERS[character] for character in token])
        return token.encode()


def _in_bytes(text: str, spans: Sequence[Span]) -> list[Span]:
    return [(len(text[:start].encode()), len(text[:end].encode())) for start, end in spans]


def _letters() -> dict[str, int]:
    """Return the byte that each letter of byte-level tokenizers stands for: printable ones for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


LETTERS = _letters()
