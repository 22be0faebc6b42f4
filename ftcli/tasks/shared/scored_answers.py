"""Ranked and scored answers as prepared rows and as batches for a reward model, which scores the last token of each.

A prepared row holds the tokens of its answers one after the other, each with the prompt; `lengths` has the tokens of
each. So the length of a row is the sum over its answers, and packing keeps the answers to a prompt together.

R: rows of a micro-batch, A: their answers, P: pairs of answers with different ranks, K: attributes that are scored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan, nan
from typing import TYPE_CHECKING, Any

from ftcli.data.chat.encode import Encoded
from ftcli.data.formats import convert, recognise
from ftcli.runtime.errors import InputError, RowError
from ftcli.tasks.protocol import Batch, Row
from ftcli.tasks.shared.batches import cut_marks, fit, flat_batch, padded_batch
from ftcli.tasks.shared.pairs import encode_answers, side_sizes, weight_units
from ftcli.tasks.shared.reward_losses import ranked_pairs
from ftcli.tasks.shared.row_sums import row_index

if TYPE_CHECKING:
    from torch import Tensor

    from ftcli.data.mixture import SourceRows

BATCH_KEYS = (  # of a batch of answers, and not for the model
    *("last_positions", "weight_units", "answers", "answer_slots", "is_real_answer", "scores"),
    *("better", "worse", "shares", "margins", "row_index", "row_of_item"),
)


def encode_ranked(
    tokenizer: Any,
    rows: Sequence[Mapping[str, Any]],
    *,
    as_chat: bool,
    variables: Mapping[str, Any],
    length: int,
    policy: str,
) -> list[list[Row] | RowError]:
    """Return the prepared rows of ranked answers, or the `RowError` of one that cannot be encoded.

    A row has `input_ids`, `lengths`, `ranks`, `items` and `weight` where one is given. A row of which some answers are
    cut and others are whole is left out. `items` is 1; it is 0 where the cut leaves nothing of an answer, or makes
    answers of different ranks equal.

    Args:
        tokenizer: A fast tokenizer.
        rows: Rows of the kind "ranked"; see data/preference_formats.py.
        as_chat: As in `pairs.encode_answers`.
        variables: As in `pairs.encode_answers`.
        length: The most tokens of an answer with its prompt.
        policy: What happens to longer ones: truncate or drop.

    Raises:
        InputError: For the policy split.
    """
    examples = [{**row, "answer": response} for row in rows for response in row["responses"]]
    encoded = iter(encode_answers(tokenizer, examples, as_chat=as_chat, variables=variables))
    results: list[list[Row] | RowError] = []
    for row in rows:
        answers = [next(encoded) for _ in row["responses"]]
        results.append(_fitted(row, answers, length, policy, {"ranks": row["ranks"]}))
    return results


def encode_scored(
    tokenizer: Any,
    rows: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    *,
    as_chat: bool,
    variables: Mapping[str, Any],
    length: int,
    policy: str,
) -> list[list[Row] | RowError]:
    """Return the prepared rows of scored answers, or the `RowError` of one that cannot be encoded.

    A row has `input_ids`, `lengths` (of one answer), `scores` (one number for each name, NaN where it is unknown),
    `items` and `weight` where one is given. `items` is 1; it is 0 where the cut leaves nothing of the answer.

    Args:
        tokenizer: A fast tokenizer.
        rows: Rows of the kind "scored"; see data/preference_formats.py.
        names: The K attributes that the model scores, in the order of its outputs.
        as_chat: As in `pairs.encode_answers`.
        variables: As in `pairs.encode_answers`.
        length: The most tokens of an answer with its prompt.
        policy: What happens to longer ones: truncate or drop.

    Raises:
        InputError: For the policy split.
    """
    examples = [{**row, "answer": row["completion"]} for row in rows]
    encoded = encode_answers(tokenizer, examples, as_chat=as_chat, variables=variables)
    results: list[list[Row] | RowError] = []
    for row, answer in zip(rows, encoded, strict=True):
        others = sorted(name for name, value in row["scores"].items() if value is not None and name not in names)
        known = [row["scores"].get(name) for name in names]
        if others:
            results.append(RowError(f"has scores for {', '.join(others)}; the attributes are {', '.join(names)}"))
        elif all(value is None for value in known):
            results.append(RowError(f"has no score for {' or '.join(names)}"))
        else:
            scores = [nan if value is None else value for value in known]
            results.append(_fitted(row, [answer], length, policy, {"scores": scores}))
    return results


def answers_of(rows: Sequence[Row]) -> list[Row]:
    """Return the A answers of R rows, each {"input_ids", "trained"} with nothing trained: a score is on the whole."""
    answers = []
    for row in rows:
        start = 0
        for length in row["lengths"]:
            ids = row["input_ids"][start : start + length]
            answers.append({"input_ids": ids, "trained": [False] * length})
            start += length
    return answers


def collate_answers(rows: Sequence[Row], padding: int, *, is_flat: bool, attn_implementation: str | None) -> Batch:
    """Return the batch of all answers of R rows, for one forward pass.

    Args:
        rows: Prepared rows, all ranked or all scored; blank ones have `items` 0.
        padding: The token that fills padded rows.
        is_flat: Whether answers are concatenated as documents, instead of padded rows `[A, T]`.
        attn_implementation: The attention kernel of the recipe, for documents.

    Returns:
        input_ids and what belongs to them (`batches`), `last_positions [A]` int64 (`scored_positions`), `answers [R]`
        int64, `answer_slots` (`table_of_answers`), `is_real_answer [A]` bool and `weight_units [R]` int64 (0: padding).
        Ranked rows: `better`, `worse` `[P]` int64, numbers of answers, `shares [P]` float32, which add up to 1 in each
        row, `margins [P]` float32, and the index of `row_sums.row_index` of pairs. Scored rows: `scores [R, K]`
        float32, NaN where unknown and in padding.
    """
    import torch

    answers = answers_of(rows)
    batch = flat_batch(answers, attn_implementation) if is_flat else padded_batch(answers, padding)
    for name in ("positions", "targets"):  # of a language model's head
        del batch[name]
    units = [weight_units(row.get("weight") or 1.0) if row["items"] else 0 for row in rows]
    counts = torch.tensor([len(row["lengths"]) for row in rows])
    batch |= {
        "last_positions": scored_positions(answers, padding, is_flat=is_flat),
        "weight_units": torch.tensor(units, dtype=torch.int64),
        "answers": counts,
        "is_real_answer": torch.tensor(units).repeat_interleave(counts) > 0,
    }
    batch |= {"answer_slots": row_index(counts.tolist())["row_index"]}
    if "ranks" in rows[0]:
        # Equal ranks make no pair, so a blank row has none.
        ranks = [row["ranks"] if row["items"] else [0.0] * len(row["lengths"]) for row in rows]
        pairs = ranked_pairs(ranks)
        batch |= dict(zip(("better", "worse", "shares"), map(torch.from_numpy, pairs), strict=True))
        batch |= row_index([pairs_of(of_row) for of_row in ranks])
        margins = torch.tensor([row.get("margin") or 0.0 for row in rows], dtype=torch.float32)
        return batch | {"margins": margins[batch["row_of_item"]]}
    scores = [row["scores"] if row["items"] else [nan] * len(row["scores"]) for row in rows]
    return batch | {"scores": torch.tensor(scores, dtype=torch.float32)}


def scored_positions(answers: Sequence[Row], padding: int, *, is_flat: bool) -> Tensor:
    """Return the place in the flattened hidden states at which transformers scores each answer, `[A]` int64.

    It is the last token that is not the padding token, even where the padding token is the end token of the answer; the
    first token if all are.

    Args:
        answers: A answers.
        padding: The padding token in the configuration of the model.
        is_flat: Whether answers are concatenated as documents.
    """
    import numpy as np
    import torch

    places = []
    for answer in answers:
        tokens = np.flatnonzero(np.asarray(answer["input_ids"]) != padding)
        places.append(int(tokens[-1]) if len(tokens) else 0)
    lengths = np.array([len(answer["input_ids"]) for answer in answers], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths if is_flat else np.arange(len(lengths)) * lengths.max()
    return torch.from_numpy(starts + np.array(places, dtype=np.int64))


def losses_of_rows(batch: Batch) -> Tensor:
    """Return how many losses each row has, `[R]` int64: 1 of ranked rows, the known scores of scored rows."""
    import torch

    if "scores" not in batch:
        return torch.ones_like(batch["weight_units"])
    known: Tensor = (~batch["scores"].isnan()).sum(-1)
    return known


def table_of_answers(values: Tensor, batch: Batch) -> Tensor:
    """Return the values of answers `[A]` by row, `[R, most answers]`; NaN where a row has fewer."""
    import torch

    table: Tensor = torch.cat([values, values.new_full((1,), nan)])[batch["answer_slots"]]
    return table


def model_inputs(batch: Batch) -> Batch:
    """Return the part of a batch of answers that the model is called with."""
    return {name: value for name, value in batch.items() if name not in BATCH_KEYS}


def pairs_of(ranks: Sequence[float]) -> int:
    """Return how many pairs of answers with different ranks a row has."""
    return len(ranked_pairs([ranks]).better)


def as_ranked(row: Row) -> Row:
    """Return a row of compared answers as one of ranked answers, and any other row as it is."""
    if "chosen" not in row:
        return row
    names = ("prompt", "tools", "chat_template_kwargs", "margin", "weight")
    shared = {name: row[name] for name in names if name in row}
    return {**shared, "responses": [row["chosen"], row["rejected"]], "ranks": [1.0, 2.0]}


def find_attributes(parts: Sequence[SourceRows], formats: tuple[str, ...], given: Sequence[str] | None) -> list[str]:
    """Return the names of the scores that training rows have; none for rows that are compared or ranked.

    Args:
        parts: The rows that each split takes from each source.
        formats: Kinds of rows.
        given: Names that the recipe lists, or None.

    Raises:
        InputError: Some sources have scores and others have none, or no training row has a score.
    """
    kinds = {
        part.path: recognise(part.rows.column_names, formats, f"data.{part.split}: {part.path}").kind for part in parts
    }
    without = [path for path, kind in kinds.items() if kind != "scored"]
    if without and len(without) < len(kinds):
        raise InputError(
            f"{without[0]} has compared or ranked answers, but other sources have scored ones",
            hint="train them in two runs: the first has a loss of pairs, the second one of scores",
        )
    if without and given is not None:
        raise InputError(
            f"task_options.attributes: {without[0]} has compared or ranked answers, which have no attributes",
            hint="delete task_options.attributes",
        )
    if without:
        return []
    if given is not None:
        return list(given)
    names, problem = set[str](), ""
    for part in parts:
        if part.split == "train":
            for index in part.indices.tolist():
                try:
                    scores = convert(part.rows[index], formats)["scores"]
                except RowError as error:  # reported when the row is encoded, if other rows have a score
                    problem = problem or f": row {index + 1} of {part.path}: {error}"
                    continue
                names |= {name for name, value in scores.items() if value is not None}
    if not names:
        raise InputError(f"no training row has a score{problem}")
    return sorted(names)


def describe_answers(row: Row, attributes: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the names of a row's answers for a preview, and its scores, margin and weight."""
    facts = {name: f"{row[name]:g}" for name in ("margin", "weight") if row.get(name) is not None}
    if not attributes:
        return [f"answer {place}, rank {rank:g}" for place, rank in enumerate(row["ranks"], start=1)], facts
    shown = zip(attributes, row["scores"], strict=True)
    return ["answer"], {name: "unknown" if isnan(score) else f"{score:g}" for name, score in shown} | facts


def _fitted(
    row: Mapping[str, Any], answers: Sequence[Encoded | RowError], length: int, policy: str, columns: Row
) -> list[Row] | RowError:
    if policy == "split":
        raise InputError("data.truncation: split makes several rows of one, and an answer is judged as a whole")
    for number, answer in enumerate(answers, start=1):
        if isinstance(answer, RowError):
            return RowError(f"response {number}: {answer}") if len(answers) > 1 else answer
    whole = [answer for answer in answers if not isinstance(answer, RowError)]
    ranks = columns.get("ranks", [])
    if same := _equal_answers([ids for ids, _ in whole], ranks):
        return RowError("responses {} and {} have the same tokens and different ranks".format(*same))
    fitted = [fit(*answer, length, policy) for answer in whole]
    if not all(fitted):
        return []
    sides = [side for (side,) in fitted]
    was_cut = [side.get("cut", False) for side in sides]
    if any(was_cut) and not all(was_cut):
        return []
    is_judged = all(side["items"] for side in sides if side.get("cut"))
    is_judged = is_judged and not _equal_answers([side["input_ids"] for side in sides], ranks)
    prepared: Row = {
        "input_ids": [token for side in sides for token in side["input_ids"]],
        "lengths": [len(side["input_ids"]) for side in sides],
        "items": int(is_judged),
        **side_sizes([len(side["input_ids"]) for side in sides]),
        **columns,
        **{name: row[name] for name in ("margin", "weight") if name in row},
    }
    return [prepared | cut_marks(sides)]


def _equal_answers(answers: Sequence[Sequence[int]], ranks: Sequence[float]) -> tuple[int, int] | None:
    """Return the numbers, from 1, of two answers with equal tokens and different ranks; None if there are none."""
    for later, rank in enumerate(ranks):
        for earlier in range(later):
            if ranks[earlier] != rank and answers[earlier] == answers[later]:
                return earlier + 1, later + 1
    return None
