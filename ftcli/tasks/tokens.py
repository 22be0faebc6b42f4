"""Pure functions on token ids that tasks share: plain text to ids and masks, rows to padded tensors.

Masks go by position, never by the value of a token, because the padding token may be the end token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .protocol import Row

if TYPE_CHECKING:
    from torch import Tensor


def encode_completion(tokenizer: Any, prompt: str, completion: str) -> tuple[list[int], list[bool]]:
    """Return (ids, trained) of plain text: the completion and one end token after it are trained.

    The two are tokenised together where the prompt's own tokens come out unchanged, as a model is given them; else
    apart, so that no token is half prompt.
    """
    eos, bos = tokenizer.eos_token_id, tokenizer.bos_token_id
    before = _without_end(tokenizer(prompt)["input_ids"], eos)
    whole = _without_end(tokenizer(prompt + completion)["input_ids"], eos)
    together = whole[: len(before)] == before
    answer = whole[len(before) :] if together else tokenizer(completion, add_special_tokens=False)["input_ids"]
    if before[:2] == [bos, bos]:  # the text has one too
        before = before[1:]
    answer = [*_without_end(answer, eos), eos]
    return before + answer, [False] * len(before) + [True] * len(answer)


def fit(ids: list[int], trained: list[bool], length: int, policy: str) -> list[Row]:
    """Return prepared rows of at most `length` tokens: {"input_ids", "trained", "items"}, "cut" where some are gone.

    `policy` is that of data.truncation. Pieces of a row that is split overlap by one token, which is context for the
    next and not trained there: a row's first token is predicted by nothing, so without it one would be lost a piece.
    """
    if len(ids) <= length:
        return [{"input_ids": ids, "trained": trained, "items": sum(trained[1:])}]
    if policy == "drop":
        return []
    if policy == "truncate":
        return [{**fit(ids[:length], trained[:length], length, policy)[0], "cut": True}]
    pieces = []
    for start in range(0, len(ids) - 1, length - 1):
        marks = [False, *trained[start + 1 : start + length]] if start else trained[:length]
        pieces.append({"input_ids": ids[start : start + length], "trained": marks, "items": sum(marks[1:])})
    return pieces


def _without_end(ids: list[int], eos: int) -> list[int]:
    """Return the ids less one end token at their end."""
    return list(ids[:-1] if ids and ids[-1] == eos else ids)


def pad(rows: list[list[int]], value: int) -> Tensor:
    """Return `[B, T]` int64, each row filled up on the right with `value`."""
    import torch

    length = max(len(row) for row in rows)
    return torch.tensor([[*row, *[value] * (length - len(row))] for row in rows], dtype=torch.int64)


def attention_mask(lengths: list[int]) -> Tensor:
    """Return `[B, T]` int64: 1 on a row's own tokens, 0 on what follows."""
    import torch

    return (torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]).long()
