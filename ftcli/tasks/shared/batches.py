"""Encode plain text, fit rows to a length, and build batches: pure functions on token ids that tasks share.

Masks depend on positions, never on token values, because the padding token may be the end token.
Shapes: B rows, T tokens of the longest row, S tokens of a flat batch, N trained tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ftcli.models.kernels.document_attention import document_bounds
from ftcli.tasks.protocol import Batch, Row

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


# Flat batches are padded to a multiple of this number. GPUs multiply 16-bit matrices slower if the number of rows is no
# multiple of 8. Compilers reuse a kernel for all multiples of 16.
ALIGNED = 16


def encode_completion(tokenizer: Any, prompt: str, completion: str) -> tuple[list[int], list[bool]]:
    """Encode a prompt and its completion as plain text. The completion and one end token are trained.

    Both are tokenized together if this does not change the tokens of the prompt, which a model sees alone when it
    generates. Otherwise they are tokenized separately, so that no token contains parts of both.

    Args:
        tokenizer: A tokenizer with an end token.
        prompt: Text before the completion.
        completion: Text to train.

    Returns:
        Token ids, and for each one whether it is trained.
    """
    eos, bos = tokenizer.eos_token_id, tokenizer.bos_token_id
    context = _without_end(tokenizer(prompt)["input_ids"], eos)
    whole = _without_end(tokenizer(prompt + completion)["input_ids"], eos)
    is_prefix = whole[: len(context)] == context
    answer = whole[len(context) :] if is_prefix else tokenizer(completion, add_special_tokens=False)["input_ids"]
    if context[:2] == [bos, bos]:  # the text begins with the token that the tokenizer adds
        context = context[1:]
    answer = [*_without_end(answer, eos), eos]
    return context + answer, [False] * len(context) + [True] * len(answer)


def cut_marks(sides: Sequence[Row]) -> Row:
    """Return the marks of `fit` for a row that consists of several fitted rows, all of them needed.

    Args:
        sides: The fitted rows. If one was cut, all were.

    Returns:
        Empty if none was cut; else {"cut"}, with "never_trained" if one of them has nothing to train at any length.
    """
    if not any(side.get("cut") for side in sides):
        return {}
    return {"cut": True} | ({"never_trained": True} if any(side.get("never_trained") for side in sides) else {})


def fit(
    ids: list[int], trained: list[bool], length: int, policy: str, turn_weights: list[float] | None = None
) -> list[Row]:
    """Return prepared rows of at most `length` tokens.

    Rows of a split example overlap by one token, which is context in the second row. The first token of a row has no
    context and cannot be trained, so without the overlap one trained token per row would be lost.

    Args:
        ids: Token ids of an example.
        trained: For each token whether it is trained.
        length: Largest number of tokens of a row.
        policy: truncate, split or drop, as in `data.truncation`.
        turn_weights: The factor of the loss of each token; None: all are 1.

    Returns:
        Rows {"input_ids", "trained", "items"}, with "turn_weights" if they are given, and with "cut" if tokens were
        removed; then also with "never_trained" if the whole example has nothing to train.
    """
    weighted = {} if turn_weights is None else {"turn_weights": turn_weights}
    if len(ids) <= length:
        items = trained.count(True) - trained[:1].count(True)
        return [{"input_ids": ids, "trained": trained, "items": items, **weighted}]
    if policy == "drop":
        return []
    first = None if turn_weights is None else turn_weights[:length]
    if policy == "truncate":
        never_trained = {} if any(trained[1:]) else {"never_trained": True}
        return [{**fit(ids[:length], trained[:length], length, policy, first)[0], "cut": True, **never_trained}]
    rows = []
    for start in range(0, len(ids) - 1, length - 1):
        marks = [False, *trained[start + 1 : start + length]] if start else trained[:length]
        own = {name: values[start : start + length] for name, values in weighted.items()}
        rows.append({"input_ids": ids[start : start + length], "trained": marks, "items": sum(marks[1:]), **own})
    return rows


def _without_end(ids: list[int], eos: int) -> list[int]:
    """Return the ids without one end token at their end."""
    return list(ids[:-1] if ids and ids[-1] == eos else ids)


def pad(rows: list[list[int]], value: int, *, on_left: bool = False) -> Tensor:
    """Return rows of token ids as `[B, T]` int64, padded with `value` on the right, or on the left."""
    import torch

    length = max(len(row) for row in rows)
    padding = [[value] * (length - len(row)) for row in rows]
    pairs = zip(padding, rows, strict=True) if on_left else zip(rows, padding, strict=True)
    return torch.tensor([[*first, *second] for first, second in pairs], dtype=torch.int64)


def attention_mask(lengths: list[int], *, on_left: bool = False) -> Tensor:
    """Return the mask of rows of the given lengths, `[B, T]` int64: 1 for tokens, 0 for padding on the given side."""
    import torch

    mask = (torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]).long()
    return mask.flip(1) if on_left else mask


def padded_batch(rows: list[Row], padding: int) -> Batch:
    """Return a batch of padded rows. The first token of a row is never a target, because no token predicts it.

    Args:
        rows: Prepared rows.
        padding: Id of the padding token.

    Returns:
        `input_ids` and `attention_mask` `[B, T]`; `targets` `[N]` and `positions` `[N]`, the indices into `[B * T]` of
        the tokens that predict them. All int64, on the host. If a row has weights, also `weights` `[N]` float32.
    """
    ids = [list(row["input_ids"]) for row in rows]
    length = max(len(row) for row in ids)
    starts = [length * b for b in range(len(rows))]
    return {
        "input_ids": pad(ids, padding),
        "attention_mask": attention_mask([len(row) for row in ids]),
        **_targets(rows, starts),
    }


def flat_batch(rows: list[Row], attn_implementation: str | None) -> Batch:
    """Return a flat batch: all rows concatenated in one row, without padding between them.

    Positions restart in each row. No token predicts a token of another row. An untrained row at the end makes S a
    multiple of `ALIGNED`.

    Args:
        rows: Prepared rows.
        attn_implementation: The attention kernel of the recipe.

    Returns:
        `input_ids` and `position_ids` `[1, S]`, the bounds of the rows (`document_bounds`), and `targets`,
        `positions` and `weights` `[N]` as in `padded_batch`.
    """
    import numpy as np
    import torch

    lengths = [len(row["input_ids"]) for row in rows]
    ids = [np.asarray(row["input_ids"], dtype=np.int64) for row in rows]
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    if spare := -sum(lengths) % ALIGNED:
        lengths, ids = [*lengths, spare], [*ids, np.zeros(spare, dtype=np.int64)]
    position_ids = np.concatenate([np.arange(length) for length in lengths])
    return {
        "input_ids": torch.from_numpy(np.concatenate(ids))[None],
        "position_ids": torch.from_numpy(position_ids)[None],
        **document_bounds(lengths, attn_implementation),
        **_targets(rows, starts),
    }


def _targets(rows: list[Row], starts: list[int]) -> Batch:
    """Return `positions`, `targets` and `weights` `[N]` of rows whose first tokens are at `starts` of a flat batch."""
    import numpy as np
    import torch

    positions, targets, weights = [], [], []
    for start, row in zip(starts, rows, strict=True):
        indices = 1 + np.flatnonzero(np.asarray(row["trained"], dtype=bool)[1:])
        positions.append(start + indices - 1)
        targets.append(np.asarray(row["input_ids"], dtype=np.int64)[indices])
        weights.append(_weights_at(row, indices))
    batch = {
        "positions": torch.from_numpy(np.concatenate(positions)),
        "targets": torch.from_numpy(np.concatenate(targets)),
    }
    if any(has_weights(row) for row in rows):
        batch["weights"] = torch.from_numpy(np.concatenate(weights).astype(np.float32))
    return batch


def has_weights(row: Row) -> bool:
    """Return whether a prepared row has a weight, or weights of its turns."""
    return row.get("weight") is not None or row.get("turn_weights") is not None


def _weights_at(row: Row, indices: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the weights of the tokens with these indices: the row's weight times those of their turns."""
    import numpy as np

    weights = np.ones(len(indices)) if row.get("turn_weights") is None else np.asarray(row["turn_weights"])[indices]
    return weights if row.get("weight") is None else weights * row["weight"]
