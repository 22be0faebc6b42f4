"""Positions of the lanes of a stream, with the counts of the rows that were read, and their form as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

COLUMNS = 10  # columns of a table of cursors: lane, position, counts


class Counts(NamedTuple):
    """Counts of the rows that were read. The rows of a block are counted when its first bin is trained."""

    rows: int = 0  # read in all passes
    cut: int = 0  # shortened
    dropped: int = 0  # left out because they are too long
    untrained: int = 0  # left out because they contain no trainable tokens
    bad: int = 0  # left out because the task cannot use them; first pass only, because later passes repeat them

    def plus(self, more: Counts) -> Counts:
        """Return the sums of two sets of counts."""
        return Counts(*(count + other for count, other in zip(self, more, strict=True)))


class Cursor(NamedTuple):
    """Position of a lane: the pass over its files, and the file and row at which the current block begins."""

    epoch: int  # pass, counted from 0
    file: int  # index in the order of this pass
    row: int  # counted from 0
    taken: int  # trained bins of the block
    counts: Counts = Counts()  # with those of the block if `taken` is above 0


def as_table(cursors: Sequence[tuple[int, Cursor]]) -> np.ndarray:
    """Return cursors as a table.

    Args:
        cursors: (lane, cursor) of some lanes.

    Returns:
        `[lanes, 10]` int64: lane, epoch, file, row, taken, and the five counts.
    """
    rows = [(lane, *cursor[:4], *cursor.counts) for lane, cursor in cursors]
    return np.array(rows, dtype=np.int64).reshape(-1, COLUMNS)


def from_table(table: np.ndarray, lanes: int) -> list[Cursor]:
    """Return the cursors of all lanes. Rows of the table for the same lane are equal.

    Args:
        table: `[rows, 10]` int64, as from `as_table`.
        lanes: Number of lanes.
    """
    cursors = {
        lane: Cursor(epoch, file, row, taken, Counts(*counts))
        for lane, epoch, file, row, taken, *counts in table.tolist()
    }
    assert len(cursors) == lanes
    return [cursors[lane] for lane in range(lanes)]
