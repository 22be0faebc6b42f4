"""Pure functions on token ids that tasks share: chat turns to ids and masks, rows to padded tensors.

Masks go by position, never by the value of a token, because the padding token may be the end token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .protocol import Row, RowError

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


def pad(rows: list[list[int]], value: int) -> Tensor:
    """Return `[B, T]` int64, each row filled up on the right with `value`."""
    import torch

    length = max(len(row) for row in rows)
    return torch.tensor([[*row, *[value] * (length - len(row))] for row in rows], dtype=torch.int64)


def attention_mask(lengths: list[int]) -> Tensor:
    """Return `[B, T]` int64: 1 on a row's own tokens, 0 on what follows."""
    import torch

    return (torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]).long()
