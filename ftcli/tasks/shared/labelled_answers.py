"""Single answers that are desirable or not, each with the mismatched answer from which KTO estimates its baseline.

A prepared row holds two sides, as a pair does (pairs.py): the prompt with its own answer, then, where the row has one,
the same prompt with the answer of another row. The loss is on own answers, which `trained` marks. Mismatched answers
only need a forward pass; `mismatched_answer` marks them, one value for each token of their side.

R: rows of a micro-batch, N: trained tokens of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ftcli.data.chat.encode import Encoded
from ftcli.runtime.errors import InputError, RowError
from ftcli.tasks.protocol import Batch, Row, Span
from ftcli.tasks.shared.batches import cut_marks, fit, flat_batch, padded_batch
from ftcli.tasks.shared.pair_reports import answer_spans
from ftcli.tasks.shared.pairs import encode_answers, side_layout, side_sizes, weight_units

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


MISMATCHED_COLUMN = "mismatched_answers"  # of raw rows: JSON text with one answer of another row for each own answer


def with_mismatched(answers: list[dict[str, Any]], row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the labelled answers of a raw row with their "mismatched" answers, if the row has some."""
    text = row.get(MISMATCHED_COLUMN)
    if text is None:
        return answers
    return [answer | {"mismatched": other} for answer, other in zip(answers, json.loads(text), strict=True)]


def prompt_numbers(rows: Sequence[Mapping[str, Any]]) -> NDArray[np.int64]:
    """Return a number for each row `[R]`, equal for rows with the same prompt, tools and template variables."""
    import numpy as np

    seen: dict[str, int] = {}
    keys = [repr([row.get(name) for name in ("prompt", "tools", "chat_template_kwargs")]) for row in rows]
    return np.array([seen.setdefault(key, len(seen)) for key in keys], dtype=np.int64)


def encode_labelled(
    tokenizer: Any,
    rows: Sequence[Mapping[str, Any]],
    *,
    as_chat: bool,
    variables: Mapping[str, Any],
    length: int,
    policy: str,
) -> list[list[Row] | RowError]:
    """Return the prepared rows of labelled answers, or the `RowError` of one that cannot be encoded.

    A row has `input_ids` and `trained` of its sides, `own_length` (tokens of the first side), `label`, `items` (1, or 0
    where nothing of the own answer is left) and `weight` where one is given. A mismatched side is cut to `length`.

    Args:
        tokenizer: A fast tokenizer.
        rows: Rows of the kind "labelled" (data/preference_formats.py); "mismatched" is the completion of another row.
        as_chat: As in `pairs.encode_answers`.
        variables: As in `pairs.encode_answers`.
        length: The most tokens of a side.
        policy: What happens to longer answers: truncate or drop.

    Raises:
        InputError: For the policy split.
    """
    if policy == "split":
        raise InputError("data.truncation: split makes several rows of one, and an answer is judged as a whole")
    examples, owners = [], []
    for number, row in enumerate(rows):
        for name in ("completion", "mismatched"):
            if row.get(name) is not None:
                examples.append({**row, "answer": row[name]})
                owners.append((number, name))
    encoded = dict(zip(owners, encode_answers(tokenizer, examples, as_chat=as_chat, variables=variables), strict=True))
    results: list[list[Row] | RowError] = []
    for number, row in enumerate(rows):
        own, other = encoded[number, "completion"], encoded.get((number, "mismatched"))
        error = next((side for side in (own, other) if isinstance(side, RowError)), None)
        if error is not None:
            results.append(error)
            continue
        assert isinstance(own, tuple) and not isinstance(other, RowError)
        results.append(_labelled_row(row, own, other, length, policy))
    return results


def own_sides(rows: Sequence[Row]) -> list[Row]:
    """Return each row's prompt with its own answer, {"input_ids", "trained"}."""
    return [{name: row[name][: row["own_length"]] for name in ("input_ids", "trained")} for row in rows]


def mismatched_sides(rows: Sequence[Row]) -> list[Row]:
    """Return each row's prompt with the answer of another row, {"input_ids", "trained"}."""
    return [
        {"input_ids": row["input_ids"][row["own_length"] :], "trained": row.get("mismatched_answer", [])}
        for row in rows
    ]


def blank_labelled(row: Row) -> Row:
    """Return a row as padding: the same shape, nothing trained, no weight."""
    blank = row | {"trained": [False] * len(row["trained"]), "items": 0}
    if "mismatched_answer" in row:
        blank["mismatched_answer"] = [False] * len(row["mismatched_answer"])
    return blank


def describe_labelled(tokenizer: Any, row: Row) -> tuple[list[Span], dict[str, str]]:
    """Return the spans of the prompt, of its own answer and of the mismatched one, and the label and weight."""
    sides, names = own_sides([row]), ["own answer"]
    if "mismatched_answer" in row:
        (other,) = mismatched_sides([row])
        sides, names = [*sides, {**other, "trained": [False] * len(other["trained"])}], [*names, "mismatched answer"]
    facts = {"label": "desirable" if row["label"] else "undesirable"}
    if row.get("weight") is not None:
        facts["weight"] = f"{row['weight']:g}"
    return answer_spans(tokenizer, sides, names), facts


def collate_labelled(
    rows: Sequence[Row], sides: Sequence[Row], padding: int, *, is_flat: bool, attn_implementation: str | None
) -> Batch:
    """Return the batch of one side of each of R rows.

    Args:
        rows: Prepared rows; blank ones have `items` 0.
        sides: `own_sides` or `mismatched_sides` of the rows.
        padding: The token that fills padded rows.
        is_flat: Whether rows are concatenated as documents, instead of padded rows `[R, T]`.
        attn_implementation: The attention kernel of the recipe, for documents.

    Returns:
        What `batches.padded_batch` or `batches.flat_batch` gives for the sides, `side_layout` without `is_chosen`,
        `is_desirable [R]` bool and `weight_units [R]` int64 (0: padding).
    """
    import torch

    batch = flat_batch(list(sides), attn_implementation) if is_flat else padded_batch(list(sides), padding)
    layout = side_layout(sides)
    del layout["is_chosen"]
    units = [weight_units(row.get("weight") or 1.0) if row["items"] else 0 for row in rows]
    return {
        **batch,
        **layout,
        "is_desirable": torch.tensor([row["label"] for row in rows], dtype=torch.bool),
        "weight_units": torch.tensor(units, dtype=torch.int64),
    }


def _labelled_row(row: Mapping[str, Any], own: Encoded, other: Encoded | None, length: int, policy: str) -> list[Row]:
    fitted = fit(*own, length, policy)
    if not fitted:
        return []
    (side,) = fitted
    ids, trained = side["input_ids"], [False, *side["trained"][1:]]
    prepared: Row = {"own_length": len(ids), "label": row["label"], "items": int(side["items"] > 0), "is_piece": False}
    if other is not None:
        (mismatched,) = fit(*other, length, "truncate")
        own_ids, ids = ids, [*ids, *mismatched["input_ids"]]
        prepared["mismatched_answer"] = [False, *mismatched["trained"][1:]]
        prepared |= side_sizes([len(own_ids), len(mismatched["input_ids"])])
        trained = [*trained, *[False] * len(mismatched["input_ids"])]
    prepared |= {"input_ids": ids, "trained": trained}
    prepared |= {name: row[name] for name in ("weight",) if name in row}
    return [prepared | cut_marks([side])]
