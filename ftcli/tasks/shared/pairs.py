"""Pairs of answers as prepared rows and as batches: one forward pass computes both answers of every pair.

A pair is one row: `input_ids` and `trained` hold the tokens of the chosen answer with its prompt, then those of the
rejected answer with the same prompt; `chosen_length` is the number of the former. So the length of a row is the sum of
both, which packing by best fit needs. Each of the two is a *side*; `sides` is their number and `longest` the tokens of
the longer one. A batch has the sides in the order c1 r1 c2 r2 ..., as padded rows or as concatenated documents.

P: pairs, S = 2 P: sides, N: trained tokens of a micro-batch, in the order of the sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ftcli.data.chat.encode import Encoded, encode_conversations
from ftcli.data.formats import ONLY_IN_CHATS
from ftcli.data.preference_formats import WAS_TEXT
from ftcli.runtime.errors import InputError, RowError
from ftcli.tasks.protocol import Batch, Row
from ftcli.tasks.shared.batches import cut_marks, encode_completion, fit, flat_batch, padded_batch
from ftcli.tasks.shared.preference_losses import PairLogps

if TYPE_CHECKING:
    from torch import Tensor

SIDES = 2  # answers of a pair
WEIGHT_UNIT = 2**16  # weights are whole numbers of 1 / 2^16, so that their sum does not depend on the order of ranks
PAIR_COLUMNS = ("margin", "ref_chosen_logps", "ref_rejected_logps")  # numbers of a row that a batch has as [P]
BATCH_KEYS = (  # of a batch of pairs or of labelled answers, and not for the model
    *("side_slots", "side_width", "side_tokens", "is_chosen", "is_desirable", "weight_units", "pair_sources"),
    *("row_sources", "row_numbers"),
    *PAIR_COLUMNS,
)


def encode_answers(
    tokenizer: Any, examples: Sequence[Mapping[str, Any]], *, as_chat: bool, variables: Mapping[str, Any]
) -> list[Encoded | RowError]:
    """Return (ids, trained) of prompts with one answer each, or the `RowError` of one that cannot be encoded.

    Args:
        tokenizer: A fast tokenizer.
        examples: {"prompt", "answer"}, with "tools" and "chat_template_kwargs"; see data/preference_formats.py.
        as_chat: Whether text becomes a user's and an assistant's turn where the tokenizer has a chat template. A text
            without a prompt stays plain text.
        variables: Variables of the chat template; those of an example override them.

    Returns:
        For each example its tokens. The assistant's turns of the answer are trained, nothing of the prompt is.
    """
    results: list[Any] = [None] * len(examples)
    chats: list[tuple[int, list[Any]]] = []
    for number, example in enumerate(examples):
        try:
            turns = _as_turns(example, tokenizer, as_chat=as_chat)
        except RowError as error:
            results[number] = error
            continue
        if turns is None:
            results[number] = encode_completion(tokenizer, example["prompt"], example["answer"])
        else:
            chats.append((number, turns))
    encoded = encode_conversations(
        tokenizer,
        [turns for _, turns in chats],
        tools=[examples[number].get("tools") for number, _ in chats],
        chat_template_kwargs=[{**variables, **examples[number].get("chat_template_kwargs", {})} for number, _ in chats],
    )
    for (number, _), result in zip(chats, encoded, strict=True):
        results[number] = result
    return results


def encode_pairs(
    tokenizer: Any,
    pairs: Sequence[Mapping[str, Any]],
    *,
    as_chat: bool,
    variables: Mapping[str, Any],
    length: int,
    policy: str,
    needs_prompt: bool = True,
) -> list[list[Row] | RowError]:
    """Return the prepared rows of pairs, or the `RowError` of a pair that compares nothing.

    Args:
        tokenizer: A fast tokenizer.
        pairs: Rows of the kind "compared"; see data/preference_formats.py.
        as_chat: As in `encode_answers`.
        variables: As in `encode_answers`.
        length: The most tokens of a side (`fit_pair`).
        policy: What happens to longer sides: truncate or drop (`fit_pair`).
        needs_prompt: Whether a pair of texts without a common prompt is refused.
    """
    examples = [{**pair, "answer": pair[side]} for pair in pairs for side in ("chosen", "rejected")]
    sides = encode_answers(tokenizer, examples, as_chat=as_chat, variables=variables)
    results: list[list[Row] | RowError] = []
    for pair, chosen, rejected in zip(pairs, sides[::2], sides[1::2], strict=True):
        try:
            results.append(_pair_row(pair, chosen, rejected, length, policy, needs_prompt))
        except RowError as error:
            results.append(error)
    return results


def fit_pair(chosen: Encoded, rejected: Encoded, length: int, policy: str) -> list[Row]:
    """Return the prepared row of a pair whose sides have at most `length` tokens, or none.

    Both sides are cut as `batches.fit` cuts a row. A pair of which one side is cut and the other is whole is left out:
    the lost end of an answer would decide the comparison. `items` is 0 where a side has nothing to train on, or where
    the cut sides are equal.

    Args:
        chosen: (ids, trained) of the chosen answer with its prompt.
        rejected: (ids, trained) of the rejected answer with its prompt.
        length: The most tokens of a side.
        policy: `data.truncation`: truncate or drop.

    Raises:
        InputError: For the policy split.
    """
    if policy == "split":
        raise InputError("data.truncation: split makes several rows of one, and a pair of answers is compared whole")
    fitted = [fit(*side, length, policy) for side in (chosen, rejected)]
    if not all(fitted):
        return []
    (left,), (right,) = fitted
    was_cut = [side.get("cut", False) for side in (left, right)]
    if any(was_cut) and not all(was_cut):
        return []
    ids = [*left["input_ids"], *right["input_ids"]]
    # The first token of a side is predicted by nothing.
    trained = [False, *left["trained"][1:], False, *right["trained"][1:]]
    is_compared = bool(left["items"] and right["items"]) and left["input_ids"] != right["input_ids"]
    sizes = [len(side["input_ids"]) for side in (left, right)]
    row = {"input_ids": ids, "trained": trained, "chosen_length": sizes[0], **side_sizes(sizes)}
    row["items"] = int(is_compared)
    return [row | cut_marks([left, right])]


def side_sizes(lengths: Sequence[int]) -> Row:
    """Return the columns that describe the sides of a row: their number, and the tokens of the longest.

    Args:
        lengths: Tokens of each side.
    """
    return {"sides": len(lengths), "longest": max(lengths)}


def weight_units(weight: float) -> int:
    """Return the weight of a row as a whole number of units."""
    return round(weight * WEIGHT_UNIT)


def blank_pair(row: Row) -> Row:
    """Return a pair as padding: the same shape, nothing trained, no weight."""
    return row | {"trained": [False] * len(row["trained"]), "items": 0}


def sides_of(rows: Sequence[Row]) -> list[Row]:
    """Return the S sides of P pairs, each {"input_ids", "trained"}, in the order c1 r1 c2 r2 ..."""
    sides = []
    for row in rows:
        middle = row["chosen_length"]
        for part in (slice(None, middle), slice(middle, None)):
            sides.append({"input_ids": row["input_ids"][part], "trained": row["trained"][part]})
    return sides


def collate_pairs(rows: Sequence[Row], padding: int, *, is_flat: bool, attn_implementation: str | None) -> Batch:
    """Return the batch of P pairs, for one forward pass over all sides.

    Args:
        rows: Prepared pairs; blank ones have `items` 0.
        padding: The token that fills padded rows.
        is_flat: Whether sides are concatenated as documents, instead of padded rows `[S, T]`.
        attn_implementation: The attention kernel of the recipe, for documents.

    Returns:
        What `batches.padded_batch` or `batches.flat_batch` gives for the sides, `side_layout`, `weight_units [P]`
        int64 (0: padding), and each of `PAIR_COLUMNS` that a row has, `[P]` float64.
    """
    import torch

    sides = sides_of(rows)
    batch = flat_batch(sides, attn_implementation) if is_flat else padded_batch(sides, padding)
    units = [weight_units(row.get("weight") or 1.0) if row["items"] else 0 for row in rows]
    batch |= {**side_layout(sides), "weight_units": torch.tensor(units, dtype=torch.int64)}
    for name in PAIR_COLUMNS:
        values = [row.get(name) for row in rows]
        if any(value is not None for value in values):
            numbers = [
                value if value is not None and row["items"] else 0.0 for row, value in zip(rows, values, strict=True)
            ]
            batch[name] = torch.tensor(numbers, dtype=torch.float64)
    return batch


def side_layout(sides: Sequence[Row]) -> Batch:
    """Return where the values of N trained tokens go in a table of one row per side.

    Returns:
        `side_slots [N]` int64: places in the flattened table `[S * side_width]`, each used once; `side_width`: the
        most trained tokens of a side, a plain number; `side_tokens [S]` int64: trained tokens of each side;
        `is_chosen [N]` bool: whether the token belongs to a chosen answer.
    """
    import numpy as np
    import torch

    counts = np.array([int(np.count_nonzero(np.asarray(side["trained"], dtype=bool)[1:])) for side in sides])
    width = max(1, int(counts.max()))
    slots = np.concatenate([number * width + np.arange(count) for number, count in enumerate(counts)])
    return {
        "side_slots": torch.from_numpy(slots.astype(np.int64)),
        "side_width": width,
        "side_tokens": torch.from_numpy(counts.astype(np.int64)),
        "is_chosen": torch.from_numpy(np.repeat(np.arange(len(sides)) % SIDES == 0, counts)),
    }


def side_sums(values: Tensor, batch: Batch) -> Tensor:
    """Return the sum of the values of each side, `[S]` float64 of N values `[N]`, the same bits in every run.

    Sums are in float64, because losses compare them: near -5000, the log-probability of an answer of 900 tokens, values
    of float32 are 5e-4 apart. Values are copied into a table and added up row by row. `index_add` would add them in the
    order in which a GPU's threads come.
    """
    rows, width = batch["side_tokens"].shape[0], batch["side_width"]
    wide = values.double()
    table = wide.new_zeros(rows * width).index_copy(0, batch["side_slots"], wide)
    return table.view(rows, width).sum(-1)


def pair_logps(nll: Tensor, batch: Batch) -> PairLogps:
    """Return the inputs of pairwise losses. They include reference log-probabilities and margins of the batch.

    Args:
        nll: `[N]` float32, the negative log-likelihoods of the trained tokens.
        batch: The collated batch of P pairs.
    """
    chosen, rejected = (-side_sums(nll, batch)).view(-1, SIDES).unbind(-1)
    chosen_tokens, rejected_tokens = batch["side_tokens"].view(-1, SIDES).unbind(-1)
    return PairLogps(
        chosen,
        rejected,
        chosen_tokens,
        rejected_tokens,
        ref_chosen=batch.get("ref_chosen_logps"),
        ref_rejected=batch.get("ref_rejected_logps"),
        margin=batch.get("margin"),
    )


def pair_weights(batch: Batch) -> Tensor:
    """Return the weight of each pair or labelled answer, `[P]` float32; 0: padding."""
    weights: Tensor = batch["weight_units"].float() / WEIGHT_UNIT
    return weights


def token_weights(batch: Batch) -> Tensor:
    """Return the weight of each trained token `[N]` float32: that of its pair in a chosen answer, else 0."""
    pair = batch["side_slots"] // (batch["side_width"] * SIDES)
    return pair_weights(batch)[pair] * batch["is_chosen"]


def model_inputs(batch: Batch) -> Batch:
    """Return the part of a batch of pairs or labelled answers that the model is called with."""
    return {name: value for name, value in batch.items() if name not in BATCH_KEYS}


def _as_turns(example: Mapping[str, Any], tokenizer: Any, *, as_chat: bool) -> list[Any] | None:
    """Return prompt and answer as messages, those of the prompt untrained; None where they stay plain text."""
    prompt, answer = example["prompt"], example["answer"]
    has_template = tokenizer.chat_template is not None
    if isinstance(prompt, str) and isinstance(answer, str) and not (as_chat and has_template and prompt.strip()):
        return None
    if example.get(WAS_TEXT) and not as_chat:
        raise RowError(ONLY_IN_CHATS)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(answer, str):  # of a row whose prompt is text, next to a prompt of messages
        answer = [{"role": "assistant", "content": answer}]
    if not has_template:
        raise RowError("has messages, but the tokenizer has no chat template")
    before = []
    for number, turn in enumerate(prompt, start=1):
        if isinstance(turn, dict) and turn.get("train"):
            raise RowError(
                f"message {number} has train: true, but it belongs to the prompt, which is not trained; delete train"
            )
        is_answer = isinstance(turn, dict) and turn.get("role") == "assistant"
        before.append({**turn, "train": False} if is_answer else turn)
    return [*before, *answer]


def _pair_row(
    pair: Mapping[str, Any],
    chosen: Encoded | RowError,
    rejected: Encoded | RowError,
    length: int,
    policy: str,
    needs_prompt: bool,
) -> list[Row]:
    for name, side in (("chosen", chosen), ("rejected", rejected)):
        if isinstance(side, RowError):
            raise RowError(f"`{name}`: {side}")
    assert isinstance(chosen, tuple) and isinstance(rejected, tuple)
    prompt = pair["prompt"][-1]["content"] if pair.get(WAS_TEXT) else pair["prompt"]
    if needs_prompt and isinstance(prompt, str) and not prompt.strip():
        raise RowError("has no prompt: `prompt` is missing or empty, and the answers have no beginning in common")
    if chosen[0] == rejected[0]:
        raise RowError("`chosen` and `rejected` have the same tokens")
    numbers = {name: pair[name] for name in (*PAIR_COLUMNS, "weight") if name in pair}
    return [row | numbers for row in fit_pair(chosen, rejected, length, policy)]
