"""Pure functions on token ids that tasks share: chat turns to ids and masks, rows to padded tensors.

Masks go by position, never by the value of a token, because the padding token may be the end token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..attention import document_bounds
from .protocol import Batch, Row, RowError

if TYPE_CHECKING:
    from torch import Tensor


def render(tokenizer: Any, messages: list[dict[str, Any]], *, prompt_only: bool = False) -> list[int]:
    """Return the token ids of a conversation as the tokenizer's own chat template renders it.

    Raises `RowError` for what the template refuses, for instance a system turn that it does not know.
    """
    from jinja2 import TemplateError

    try:
        ids = tokenizer.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=prompt_only, return_dict=False
        )
    except TemplateError as error:
        raise RowError(f"the model's chat template refuses it: {error}") from None
    return list(ids)


def encode_conversation(tokenizer: Any, messages: list[dict[str, Any]]) -> tuple[list[int], list[bool]]:
    """Return (ids, trained): every token of an assistant's turn up to its end token is trained.

    A turn's span is what the template adds to the conversation before it; raises `RowError` when the template does
    not render longer conversations as continuations of shorter ones.
    """
    ids = render(tokenizer, messages)
    trained = [False] * len(ids)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(tokenizer, messages[:index], prompt_only=True)
        after = render(tokenizer, messages[: index + 1])
        if after[: len(before)] != before or ids[: len(after)] != after:
            raise RowError(
                f"the chat template rewrites earlier turns at message {index + 1}; its answers cannot be found"
            )
        end = len(after)
        if tokenizer.eos_token_id in after[len(before) :]:  # what follows the end token (a newline) is not the answer
            end -= after[::-1].index(tokenizer.eos_token_id)
        trained[len(before) : end] = [True] * (end - len(before))
    return ids, trained


def encode_completion(tokenizer: Any, prompt: str, completion: str) -> tuple[list[int], list[bool]]:
    """Return (ids, trained) of plain text: the completion and the end token after it are trained."""
    before = tokenizer(prompt, add_special_tokens=True)["input_ids"]
    if before and before[-1] == tokenizer.eos_token_id:
        before = before[:-1]
    answer = tokenizer(completion, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    return before + answer, [False] * len(before) + [True] * len(answer)


def pad(rows: list[list[int]], value: int) -> Tensor:
    """Return `[B, T]` int64, each row filled up on the right with `value`."""
    import torch

    length = max(len(row) for row in rows)
    return torch.tensor([[*row, *[value] * (length - len(row))] for row in rows], dtype=torch.int64)


def attention_mask(lengths: list[int]) -> Tensor:
    """Return `[B, T]` int64: 1 on a row's own tokens, 0 on what follows."""
    import torch

    return (torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]).long()


def padded_batch(rows: list[Row], padding: int) -> Batch:
    """Return input_ids, attention_mask `[B, T]`; positions, targets `[N]`, positions into the flat `[B * T]`.

    The token before a trained one predicts it, so a row's first token is never a target.
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
    """Return rows laid end to end: input_ids, position_ids `[1, S]`, the rows' bounds, and positions, targets `[N]`.

    Positions begin anew in every row, and no token is the target of another row's.
    """
    import numpy as np
    import torch

    lengths = [len(row["input_ids"]) for row in rows]
    ids = np.concatenate([np.asarray(row["input_ids"], dtype=np.int64) for row in rows])
    places = np.concatenate([np.arange(length) for length in lengths])
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    return {
        "input_ids": torch.from_numpy(ids)[None],
        "position_ids": torch.from_numpy(places)[None],
        **document_bounds(lengths, attn_implementation),
        **_targets(rows, starts),
    }


def _targets(rows: list[Row], starts: list[int]) -> Batch:
    """Return positions, targets `[N]` of rows whose first tokens stand at `starts` of the flat batch."""
    import numpy as np
    import torch

    positions, targets = [], []
    for start, row in zip(starts, rows, strict=True):
        spots = 1 + np.flatnonzero(np.asarray(row["trained"], dtype=bool)[1:])
        positions.append(start + spots - 1)
        targets.append(np.asarray(row["input_ids"], dtype=np.int64)[spots])
    return {
        "positions": torch.from_numpy(np.concatenate(positions)),
        "targets": torch.from_numpy(np.concatenate(targets)),
    }
