"""Numbers of prepared rows, worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
from datasets import Dataset

from ftcli.reports.row_statistics import (
    Vocabulary,
    count_contradictions,
    count_duplicates,
    count_overlap,
    examples,
    histogram,
    measure,
    padding_share,
    percentiles,
)

# Tokens: 0 BOS, 1 end, 2 another special one; 3 and above are letters of 1, 2, 3, ... characters.
VOCABULARY = Vocabulary(
    characters=np.array([0, 0, 0, 1, 2, 3, 4, 5, 6, 7]),
    is_special=np.array([True] * 3 + [False] * 7),
    ends=np.array([1]),
    bos=0,
)


def rows_of(*rows: tuple[list[int], list[int]]) -> Dataset:
    """Return prepared rows of (ids, marks), marks being 1 where a token is trained."""
    return Dataset.from_list(
        [
            {"input_ids": ids, "trained": [bool(mark) for mark in marks], "items": sum(marks[1:]), "id": index}
            for index, (ids, marks) in enumerate(rows)
        ]
    )


def test_tokens_are_counted_by_row_over_row_boundaries() -> None:
    statistics = measure(
        rows_of(
            ([0, 3, 4, 1], [0, 0, 1, 1]),
            ([0, 0, 5], [0, 0, 0]),
            ([7, 2], [1, 1]),
            ([0], [0]),
            ([0, 3, 1], [0, 0, 1]),
        ),
        VOCABULARY,
    )
    assert statistics.length.tolist() == [4, 3, 2, 1, 3]
    assert statistics.trained.tolist() == [2, 0, 1, 0, 1]  # a row's first token has nothing before it
    assert statistics.content.tolist() == [1, 0, 1, 0, 0]  # the last answer is its end token alone
    assert statistics.characters.tolist() == [3, 3, 5, 0, 1]
    assert statistics.plain.tolist() == [2, 1, 1, 0, 1]
    assert statistics.has_end.tolist() == [True, False, False, False, True]
    assert statistics.has_other_end.tolist() == [True, False, True, False, True]
    assert statistics.has_two_bos.tolist() == [False, True, False, False, False]
    assert statistics.has_prompt.tolist() == [True, False, False, False, True]


def test_duplicates_are_rows_with_the_same_tokens_in_the_same_places() -> None:
    same, moved = ([0, 3, 4, 1], [0, 0, 1, 1]), ([0, 4, 3, 1], [0, 0, 1, 1])
    longer = ([0, 3, 4, 1, 1], [0, 0, 1, 1, 1])
    statistics = measure(rows_of(same, moved, same, longer, same), VOCABULARY)
    repeated, copies = count_duplicates(statistics)
    assert repeated == 2 and copies.tolist() == [0, 2, 4]


def test_examples_of_several_sources_name_them() -> None:
    one = {"input_ids": [0, 3], "trained": [False, True], "items": 1}
    rows = [one | {"source": source, "row": 7, "id": source} for source in range(2)]
    both = np.array([True, True])
    assert examples(measure(Dataset.from_list(rows), VOCABULARY), both) == "row 8 of source 1, row 8 of source 2"
    assert examples(measure(Dataset.from_list(rows[:1]), VOCABULARY), both[:1]) == "row 8"


def test_row_statistics_with_a_row_that_its_source_repeats_is_no_duplicate() -> None:
    row = {"input_ids": [0, 3], "trained": [False, True], "items": 1, "source": 1}
    again = Dataset.from_list([row | {"row": 4, "id": 0}, row | {"row": 4, "id": 1}, row | {"row": 5, "id": 2}])
    assert count_duplicates(measure(again, VOCABULARY))[0] == 1


def test_overlap_distinguishes_equal_rows_from_equal_prompts() -> None:
    train = measure(rows_of(([0, 3, 4, 1], [0, 0, 1, 1]), ([0, 5, 6, 1], [0, 0, 1, 1])), VOCABULARY)
    evaluation = measure(
        rows_of(
            ([0, 3, 4, 1], [0, 0, 1, 1]),  # trained on
            ([0, 3, 9, 1], [0, 0, 1, 1]),  # another answer
            ([0, 4, 4, 1], [0, 0, 1, 1]),  # another prompt
            ([0, 9, 9, 1], [1, 1, 1, 1]),  # no prompt
        ),
        VOCABULARY,
    )
    assert count_overlap(train, evaluation) == (1, 1)


@pytest.mark.parametrize("rows", [3, 1500, 2049])
def test_row_statistics_rows_are_measured_alike_in_any_number_of_batches(rows: int) -> None:
    data = rows_of(*[([0, 3 + i % 7, 1], [0, 0, 1]) for i in range(rows)])
    statistics = measure(data, VOCABULARY)
    assert len(statistics) == rows and len(np.unique(statistics.whole)) == min(rows, 7)
    assert statistics.length.sum() == 3 * rows


def test_row_statistics_rows_without_tokens_are_compared_by_what_they_hold_and_their_answer() -> None:
    data = Dataset.from_list(
        [
            {"path": "a", "target": 0, "items": 1, "id": 0},
            {"path": "a", "target": 1, "items": 1, "id": 1},
            {"path": "b", "target": 1, "items": 1, "id": 2},
            {"path": "b", "target": 1, "items": 1, "id": 3},
        ]
    )
    statistics = measure(data, None, answers=("target",))
    assert count_duplicates(statistics)[0] == 1 and count_contradictions(statistics) == 1


def test_histogram_and_percentiles_cover_every_row() -> None:
    lengths = np.array([34, 35, 50, 51, 99, 120])
    assert histogram(lengths) == [
        (30, 39, 2),
        (40, 49, 0),
        (50, 59, 2),
        (60, 69, 0),
        (70, 79, 0),
        (80, 89, 0),
        (90, 99, 1),
        (100, 109, 0),
        (110, 119, 0),
        (120, 129, 1),
    ]
    assert percentiles(np.arange(1, 101)) == {"min": 1, "p5": 5, "median": 50, "p95": 95, "p99": 99, "max": 100}
    assert histogram(np.array([7, 7])) == [(7, 7, 2)]


def test_histogram_of_a_long_tail_doubles_its_bins() -> None:
    bars = histogram(np.array([3, 4, 5, 6, 7, 2048]))
    assert bars[:2] == [(3, 4, 2), (5, 8, 3)] and bars[-1] == (1025, 2048, 1)
    assert sum(rows for _, _, rows in bars) == 6


def test_padding_share_compares_rows_with_the_longest_of_the_micro_batch() -> None:
    assert padding_share(np.array([1, 3, 2, 2, 9]), 2) == pytest.approx(2 / 10)  # the fifth makes no whole batch
    assert padding_share(np.array([5]), 2) == 0
    # Two rows of two documents: 4 + 2 and 3 + 3 tokens, all padded to 4.
    lengths, longest, sides = np.array([6, 6]), np.array([4, 3]), np.array([2, 2])
    assert padding_share(lengths, 2, longest, sides) == pytest.approx(4 / 16)
