"""Arithmetic of time intervals, by hand."""

from __future__ import annotations

import random

import pytest

from ftcli.reports.tracing.intervals import Interval, difference, intersection, total, union


def test_union_of_overlapping_touching_and_empty_intervals_merges_them() -> None:
    assert union([(5, 7), (0, 2)], [(1, 3), (3, 4), (6, 6.5), (9, 9)]) == [(0, 4), (5, 7)]


def test_intersection_of_two_lists_is_what_both_have() -> None:
    assert intersection([(0, 4), (6, 9)], [(1, 2), (3, 7), (8, 12)]) == [(1, 2), (3, 4), (6, 7), (8, 9)]


def test_difference_of_two_lists_cuts_holes_and_ends() -> None:
    assert difference([(0, 4), (6, 9)], [(1, 2), (3, 7), (8.5, 12)]) == [(0, 1), (2, 3), (7, 8.5)]


def test_difference_of_a_hole_over_several_intervals_removes_all() -> None:
    assert difference([(1, 2), (3, 4), (5, 6)], [(0, 5.5)]) == [(5.5, 6)]


@pytest.mark.parametrize("seed", range(5))
def test_functions_of_random_intervals_agree_with_sets_of_points(seed: int) -> None:
    draw = random.Random(seed)

    def some() -> list[Interval]:
        starts = [draw.randrange(60) for _ in range(12)]
        return union((float(start), float(start + draw.randrange(6))) for start in starts)

    def points(intervals: list[Interval]) -> set[int]:
        return {point for start, end in intervals for point in range(int(start), int(end))}

    first, second = some(), some()
    assert points(union(first, second)) == points(first) | points(second)
    assert points(intersection(first, second)) == points(first) & points(second)
    assert points(difference(first, second)) == points(first) - points(second)
    assert total(first) == len(points(first))
