"""Mismatched prompts and answers, from which KTO estimates its baseline.

Which answer a prompt is given is drawn once for the whole data set. So it depends on neither the micro-batch size nor
the number of processes, and a micro-batch of one row has a mismatched answer too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ftcli.data.sampler import epoch_order
from ftcli.runtime.errors import InputError, RowError
from ftcli.runtime.seeds import seed_of
from ftcli.tasks.shared.labelled_answers import MISMATCHED_COLUMN, prompt_numbers

if TYPE_CHECKING:
    from ftcli.data.mixture import SourceRows

SALT = 0x4B544F  # keeps these draws apart from the order of rows under the same seed


class LabelCounts(NamedTuple):
    """How many answers of each kind an epoch of a split has. Repeated rows count each time."""

    desirable: int = 0
    undesirable: int = 0


def mismatched_partners(
    prompts: NDArray[np.int64], seed: int, folds: int = 1, where: str = "the data"
) -> NDArray[np.int64]:
    """Return for each row the rows whose answers it is given: `folds` different ones, all of another prompt.

    Rows are put in a random order in which those of one prompt stand together, and this order is turned like a wheel by
    at least the size of the largest prompt. Each fold is a permutation of the rows without a fixed point.

    Args:
        prompts: `[R]`, a number for each row; rows with the same prompt have the same number.
        seed: The seed of the recipe.
        folds: Partners of each row.
        where: Name of the rows in messages.

    Returns:
        `[folds, R]` int64, indices of rows.

    Raises:
        InputError: If one prompt has so many rows that they cannot all have partners of another prompt.
    """
    rows = len(prompts)
    _, group, sizes = np.unique(np.asarray(prompts), return_inverse=True, return_counts=True)
    largest = int(sizes.max()) if rows else 0
    if largest + folds - 1 > rows - largest:
        raise InputError(
            f"one prompt has {largest} of the {rows} answers of {where}, too many to give each one of another prompt",
            hint="KTO's baseline needs answers to other prompts: add rows, or use the loss apo_zero_unpaired",
        )
    rank = np.empty(len(sizes), dtype=np.int64)
    rank[epoch_order(len(sizes), seed_of(seed, SALT), 0)] = np.arange(len(sizes))
    inside = np.empty(rows, dtype=np.int64)
    inside[epoch_order(rows, seed_of(seed, SALT), 1)] = np.arange(rows)
    wheel = np.lexsort((inside, rank[group]))
    partners = np.empty((folds, rows), dtype=np.int64)
    for fold in range(folds):
        partners[fold, wheel] = np.roll(wheel, -(largest + fold))
    return partners


def add_mismatched_answers(
    parts: Sequence[SourceRows], labelled: Callable[[dict[str, Any]], list[dict[str, Any]]], *, seed: int, needed: bool
) -> tuple[list[SourceRows], dict[str, LabelCounts], set[str]]:
    """Return the parts with the answers of other rows in a further column, and facts of each split.

    Rows of one split share their answers, whatever their source. Invalid rows are left alone; their encoding reports
    them.

    Args:
        parts: The rows that each split takes from each source.
        labelled: Returns the labelled answers of a raw row; raises `RowError`.
        seed: The seed of the recipe.
        needed: Whether mismatched answers are needed. Without them the parts are returned as they are.

    Returns:
        The parts, the answers of an epoch by split, and the splits that have a row with several answers.

    Raises:
        InputError: One prompt has too many of the rows of a split.
    """
    completed, counts, paired = list(parts), dict[str, LabelCounts](), set[str]()
    for split in dict.fromkeys(part.split for part in parts):
        places = [place for place, part in enumerate(parts) if part.split == split]
        owners: list[tuple[int, int]] = []
        answers: list[dict[str, Any]] = []
        for place in places:
            for index in parts[place].indices.tolist():
                try:
                    several = labelled(parts[place].rows[index])
                except RowError:
                    continue
                owners += [(place, index)] * len(several)
                paired |= {split} if len(several) > 1 else set()
                answers += several
        times = {place: parts[place].times_of_rows() for place in places}
        of_answers = [int(times[place][index]) for place, index in owners]
        desirable = sum(number for number, answer in zip(of_answers, answers, strict=True) if answer["label"])
        counts[split] = LabelCounts(desirable, sum(of_answers) - desirable)
        if not needed:
            continue
        (partners,) = mismatched_partners(prompt_numbers(answers), seed, where=f"data.{split}")
        columns: dict[int, dict[int, list[Any]]] = {place: {} for place in places}
        for (place, index), partner in zip(owners, partners.tolist(), strict=True):
            columns[place].setdefault(index, []).append(answers[partner]["completion"])
        for place, of_rows in columns.items():
            rows = parts[place].rows
            texts = [json.dumps(of_rows[index]) if index in of_rows else None for index in range(len(rows))]
            completed[place] = replace(parts[place], rows=rows.add_column(MISMATCHED_COLUMN, texts))
    return completed, counts, paired
