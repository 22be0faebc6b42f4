"""Union, intersection and difference of time intervals, for traces. Pure functions on lists of (start, end).

Arguments of `union` may be in any order and may overlap. All other functions take results of `union`, `intersection`
or `difference`: sorted, without overlaps. The unit is that of the caller.
"""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def union(*parts: Iterable[Interval]) -> list[Interval]:
    """Return the times that are in at least one interval, sorted and without overlaps. Empty intervals are dropped."""
    merged: list[Interval] = []
    for start, end in sorted(interval for part in parts for interval in part):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def intersection(first: list[Interval], second: list[Interval]) -> list[Interval]:
    """Return the times that are in both."""
    common: list[Interval] = []
    at_first = at_second = 0
    while at_first < len(first) and at_second < len(second):
        start = max(first[at_first][0], second[at_second][0])
        end = min(first[at_first][1], second[at_second][1])
        if start < end:
            common.append((start, end))
        if first[at_first][1] < second[at_second][1]:
            at_first += 1
        else:
            at_second += 1
    return common


def difference(first: list[Interval], second: list[Interval]) -> list[Interval]:
    """Return the times that are in `first` and not in `second`."""
    kept: list[Interval] = []
    at = 0
    for start, end in first:
        while at < len(second) and second[at][1] <= start:
            at += 1
        following = at
        while following < len(second) and second[following][0] < end:
            hole_start, hole_end = second[following]
            if start < hole_start:
                kept.append((start, hole_start))
            start = max(start, hole_end)
            following += 1
        if start < end:
            kept.append((start, end))
    return kept


def total(intervals: Iterable[Interval]) -> float:
    """Return the sum of the lengths."""
    return sum(end - start for start, end in intervals)
