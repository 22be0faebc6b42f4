"""Which bytes of a text each of its tokens is, from ids alone, for tokenizers whose tokens are bytes.

The tokenizer's own offsets cost a third of its time; ids are enough where the bytes of all tokens, put together, are
those of the text, and that is looked at for every text. Knows tokenizers and nothing else.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any


class TokenBytes(dict[int, bytes]):
    """The bytes of every token id that has been asked for."""

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self._backend = backend
        self._added = {number: token.content for number, token in backend.get_added_tokens_decoder().items()}

    def __missing__(self, number: int) -> bytes:
        token = self._added.get(number)
        if token is None:
            token = self._backend.id_to_token(number)
            if all(character in LETTERS for character in token):
                self[number] = bytes([LETTERS[character] for character in token])
                return self[number]
        self[number] = token.encode()
        return self[number]

    def ends(self, ids: list[int], data: bytes) -> list[int] | None:
        """Return where each token ends in `data`, a text's UTF-8; None when the tokens are not that text's bytes."""
        pieces = list(map(self.__getitem__, ids))
        return list(accumulate(map(len, pieces))) if b"".join(pieces) == data else None


def _letters() -> dict[str, int]:
    """Return the byte that each letter of byte-level tokenizers stands for: printable ones for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


LETTERS = _letters()
