"""Report pairs of answers: values that are watched in training, metrics of an evaluation, and rows as a preview.

Names are those of TRL's trainers. P: pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ftcli.data.chat.text_spans import decode_spans
from ftcli.tasks.protocol import ITEMS, Row, Span
from ftcli.tasks.shared.pairs import PAIR_COLUMNS, sides_of

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

CHOSEN, REJECTED, ACCURACIES, MARGINS = (f"rewards/{name}" for name in ("chosen", "rejected", "accuracies", "margins"))
PAIR_NOTES = (CHOSEN, REJECTED, ACCURACIES, MARGINS, "logps/chosen", "logps/rejected")
PAIR_METRICS = ("loss", *PAIR_NOTES)
BY_SOURCE = (ACCURACIES, MARGINS)  # that are reported for each of several sources
# Rewards that differ by less than this share of the log-probabilities count as equal. Before the first update policy
# and reference differ by rounding only, and an accuracy from that would be another one on each profile.
ROUNDING = 1e-5


def pair_notes(sources: Sequence[str], names: Sequence[str] = PAIR_NOTES) -> dict[str, str]:
    """Return name -> count of the notes of pairs, in total and for each of several sources."""
    counts = dict.fromkeys(names, ITEMS)
    return counts | {f"{label}/{name}": _count_of(label) for label in sources for name in BY_SOURCE}


def source_notes(values: Mapping[str, Tensor], numbers: Tensor, sources: Sequence[str]) -> dict[str, Tensor]:
    """Return the notes of each of several sources, each `[P]` with 0 for pairs of other sources.

    Args:
        values: Notes of all pairs, `[P]`; 0 for padding.
        numbers: Number of the source of each pair, `[P]`.
        sources: Names of the sources; empty for one source.
    """
    return {
        f"{label}/{name}": values[name] * (numbers == place)
        for place, label in enumerate(sources)
        for name in BY_SOURCE
    }


def source_counts(numbers: Tensor, is_real: Tensor, sources: Sequence[str]) -> dict[str, int]:
    """Return the pairs of each of several sources that are not padding, on the host.

    Args:
        numbers: As in `source_notes`.
        is_real: `[P]` bool.
        sources: As in `source_notes`.
    """
    return {_count_of(label): int(((numbers == place) & is_real).sum()) for place, label in enumerate(sources)}


def pair_metrics(
    rows: dict[str, np.ndarray], sources: Sequence[str], names: Sequence[str] = PAIR_NOTES
) -> dict[str, float]:
    """Return the mean of each value over all evaluation rows, and over the rows of each of several sources.

    Args:
        rows: Values of all rows by name, and `pair_sources`, each `[rows]`.
        sources: Names of the sources of evaluation rows; empty for one source.
        names: Names of the values.
    """
    means = {name: float(rows[name].mean()) for name in names}
    for place, label in enumerate(sources):
        there = rows["pair_sources"] == place
        if there.any():
            means |= {f"{label}/{name}": float(rows[name][there].mean()) for name in BY_SOURCE}
    return means


def is_right(margins: Any, logps: Any, beta: float) -> Any:
    """Return whether each chosen answer has the higher reward. Equal rewards count as wrong.

    Args:
        margins: Reward of the chosen answer less that of the rejected one, `[P]`, a tensor or an array.
        logps: Sum of the log-probabilities of both answers, `[P]`.
        beta: Scale of the rewards.
    """
    return margins > beta * ROUNDING * abs(logps)


def answer_pairs(places: Sequence[np.ndarray], is_desirable: np.ndarray) -> np.ndarray:
    """Return the numbers of the desirable answers whose pair's undesirable answer is the next row, `[P]`.

    Args:
        places: Sources and numbers of the rows of the data that the answers came from, `[R]` each, in the order of ids.
        is_desirable: `[R]` bool.
    """
    import numpy as np

    is_same = np.logical_and.reduce([place[1:] == place[:-1] for place in places])
    return np.flatnonzero(is_same & is_desirable[:-1] & ~is_desirable[1:])


def mean_by_weight(sums: np.ndarray, weights: np.ndarray) -> float:
    """Return the sum of weighted values, divided by the sum of the weights; 0 without rows."""
    total = float(weights.sum())
    return float(sums.sum()) / total if total else 0.0


def describe_pair(tokenizer: Any, row: Row) -> tuple[list[Span], dict[str, str]]:
    """Return the spans of a pair's prompt, chosen and rejected answer, and the numbers of the pair."""
    spans = answer_spans(tokenizer, sides_of([row]), ("chosen", "rejected"))
    names = [name for name in (*PAIR_COLUMNS, "weight") if row.get(name) is not None]
    return spans, {name: f"{row[name]:g}" for name in names}


def answer_spans(tokenizer: Any, sides: Sequence[Row], names: Sequence[str]) -> list[Span]:
    """Return the spans of several answers to one prompt, the prompt once before them.

    Args:
        tokenizer: The tokenizer.
        sides: The answers, each with its prompt: {"input_ids", "trained"}.
        names: Name of each answer, the `part` of its spans.
    """
    ids = [side["input_ids"] for side in sides]
    # What all sides begin with, up to the first trained token of any.
    shared = 0
    for tokens in zip(*ids, strict=False):
        if len(set(tokens)) > 1 or any(side["trained"][shared] for side in sides):
            break
        shared += 1
    spans = decode_spans(tokenizer, ids[0][:shared], sides[0]["trained"][:shared])
    for side, name in zip(sides, names, strict=True):
        own = decode_spans(tokenizer, side["input_ids"][shared:], side["trained"][shared:])
        spans += [Span(span.text, span.is_trained, span.is_special, span.ids, part=name) for span in own]
    return spans


def _count_of(label: str) -> str:
    return f"pairs of {label}"
