"""Divide the rows of an optimizer step into forward passes by their tokens, over all processes.

The sum over a step does not depend on which process computes which row, or together with which other rows. So rows are
shared out by their real lengths: short rows fill one pass, a row as long as the budget has a pass of its own. Every
process makes the same number of passes. The division depends only on the lengths, so every process computes the same
one, and a resumed run repeats it. This module has no state and does not import torch.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ftcli.data.packing import lengths_of, longest_documents
from ftcli.runtime.seeds import PADDING

if TYPE_CHECKING:
    from ftcli.data.cache import PreparedRows


MOST_CUTS = 256  # places between the rows of a step where padded passes may begin; the time grows with their square
TIE = 1 / 16  # of a pass's tokens: of two divisions that take the same time, the one with less padding is taken
EVEN = 4  # exponent of a pass's cost in a sum that is smallest when the passes are even


@dataclass(frozen=True)
class RowSizes:
    """The tokens of every training row.

    Attributes:
        tokens: Tokens of each row, `[rows]`.
        longest: Tokens of its longest document, `[rows]`.
        documents: Number of its documents, `[rows]`. Only documents are padded.
    """

    tokens: NDArray[np.int64]
    longest: NDArray[np.int64]
    documents: NDArray[np.int64]

    @classmethod
    def of(cls, rows: PreparedRows) -> RowSizes | None:
        """Return the sizes of the training rows; None for a stream and for rows without tokens."""
        if rows.streamed or "input_ids" not in rows.train.column_names:
            return None
        tokens = lengths_of(rows.train)
        if rows.bins is not None:
            starts, tokens = rows.bins.starts[:-1], tokens[rows.bins.documents]
            counts = np.diff(rows.bins.starts)
            return cls(np.add.reduceat(tokens, starts), np.maximum.reduceat(tokens, starts), counts)
        several = "sides" in rows.train.column_names
        documents = np.asarray(rows.train.with_format("numpy")["sides"][:]) if several else np.ones_like(tokens)
        return cls(tokens, longest_documents(rows.train), documents.astype(np.int64))

    def of_batches(self, batches: NDArray[np.int64], *, is_flat: bool) -> NDArray[np.int64]:
        """Return the tokens that the model computes for each of some micro-batches, `[batches]`.

        Args:
            batches: Row indices, `[batches, rows]`; padding counts as nothing.
            is_flat: Whether documents are concatenated; else they are padded to the longest of the micro-batch.
        """
        real = batches != PADDING
        if is_flat:
            return np.where(real, self.tokens[batches], 0).sum(axis=1)
        documents = np.where(real, self.documents[batches], 0).sum(axis=1)
        return documents * np.where(real, self.longest[batches], 0).max(axis=1)


@dataclass(frozen=True)
class PassRule:
    """How the rows of a step are divided into forward passes.

    Attributes:
        sizes: The tokens of all rows.
        processes: Number of processes.
        budget: Most tokens of a pass, with padding. A longer row has a pass of its own.
        is_flat: Whether documents are concatenated instead of padded.
        enough: Tokens of a pass below which the device does not finish earlier. Padded rows are divided further to
            save padding, down to this size.
        overhead: What each pass costs besides its tokens, in tokens.
        attention: Cost of attention to one token, as a fraction of a token's matrix products.
    """

    sizes: RowSizes
    processes: int
    budget: int
    is_flat: bool
    enough: int = 0
    overhead: int = 0
    attention: float = 0.0

    def divide(self, rows: Sequence[int]) -> list[list[int]]:
        """Return the rows of each pass in global order: pass 0 of every process, then pass 1, and so on.

        Args:
            rows: Row indices of a step. Padding is left out, and added where a pass has no row.
        """
        real = np.array([row for row in rows if row != PADDING], dtype=np.int64)
        if len(real) == 0:
            return [[PADDING]] * self.processes
        passes = self._fill(real) if self.is_flat else self._group(real)
        lists = [[int(row) for row in real[sorted(places)]] for places in passes]
        lists.sort(key=self._cost, reverse=True)
        totals = [self._cost(rows) for rows in lists]
        while len(lists) % self.processes:
            lists.append([PADDING])
            totals.append(0.0)
        return self._assign(lists, totals)

    def _assign(self, lists: list[list[int]], totals: list[float]) -> list[list[int]]:
        """Return the passes in global order, so that processes wait little for each other.

        The passes of one turn cost about the same, because shards of weights are exchanged in each of them. The most
        expensive pass of a turn goes to the process that has the least to do so far.

        Args:
            lists: Rows of each pass, the most expensive pass first.
            totals: Cost of each pass.
        """
        loads, ordered = [0.0] * self.processes, []
        for first in range(0, len(lists), self.processes):
            turn = range(first, first + self.processes)
            ranks = sorted(range(self.processes), key=lambda rank: (loads[rank], rank))
            taken = dict(zip(ranks, turn, strict=True))
            for rank in range(self.processes):
                loads[rank] += totals[taken[rank]]
                ordered.append(lists[taken[rank]])
        return ordered

    def _costs(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the cost of each row in tokens, with attention."""
        return self.sizes.tokens[rows] * (1 + self.attention * self.sizes.longest[rows])

    def _cost(self, rows: list[int]) -> float:
        """Return the cost of a pass in tokens, with attention and padding."""
        if self.is_flat:
            return float(self._costs(np.array(rows)).sum())
        width = int(self.sizes.longest[rows].max())
        return width * int(self.sizes.documents[rows].sum()) * (1 + self.attention * width)

    def _fill(self, rows: NDArray[np.int64]) -> list[list[int]]:
        """Divide rows into as few passes as the budget allows, all with about the same cost."""
        tokens, costs = self.sizes.tokens[rows], self._costs(rows)
        turns = -(-int(np.minimum(tokens, self.budget).sum()) // (self.processes * self.budget))
        while (passes := _most_even(costs, tokens.tolist(), turns * self.processes, self.budget)) is None:
            turns += 1
        return passes

    def _group(self, rows: NDArray[np.int64]) -> list[list[int]]:
        """Divide padded rows into passes of similar lengths, so that the step takes the least time.

        A pass takes the time of its tokens with padding, but never less than that of `enough` tokens, and `overhead`.
        """
        order = np.argsort(-self.sizes.longest[rows], kind="stable")
        widths = self.sizes.longest[rows[order]]
        cuts = self._cuts(widths)
        before = np.concatenate([[0], self.sizes.documents[rows[order]].cumsum()])[cuts]
        first = widths[cuts[:-1]][:, None]  # the longest document of a group that begins at a cut
        padded = first * (before[None, 1:] - before[:-1, None])  # [begin, end - 1]
        is_possible = (padded > 0) & ((padded <= self.budget) | np.eye(len(first), dtype=bool))
        cost = padded * (1 + self.attention * first)
        cost = np.where(is_possible, np.maximum(cost, self.enough) + self.overhead + TIE * cost, np.inf)
        ends = _cheapest_groups(cost, self.processes)
        bounds = cuts[[0, *ends]].tolist()
        return [order[a:b].tolist() for a, b in zip(bounds, bounds[1:], strict=False)]

    def _cuts(self, widths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the places between sorted rows where a pass may begin, with both ends."""
        count = len(widths)
        step = -(-count // MOST_CUTS)
        if step * int(widths[0]) > self.budget:
            step = 1
        return np.unique([*range(0, count, step), count])


def _most_even(costs: NDArray[np.float64], tokens: list[int], count: int, budget: int) -> list[list[int]] | None:
    """Divide rows into at most `count` passes of about the same cost; None if one would be over the budget.

    Rows are placed from the most expensive to the cheapest, each into the pass that costs the least so far (Graham
    1969).
    """
    heap = [(0.0, 0, number) for number in range(count)]
    passes: list[list[int]] = [[] for _ in range(count)]
    for place in np.argsort(-costs, kind="stable").tolist():
        cost, held, number = heap[0]
        if held and held + tokens[place] > budget:
            return None
        passes[number].append(place)
        heapq.heapreplace(heap, (cost + float(costs[place]), held + tokens[place], number))
    return [places for places in passes if places]


def _cheapest_groups(cost: NDArray[np.float64], processes: int) -> list[int]:
    """Return the ends of the groups that take the least time, on several processes at once.

    Args:
        cost: `cost[a, b]` of the group of the pieces from a to b, infinite if it is not possible.
        processes: Number of processes. Groups are sorted, so those of one turn are neighbours.
    """
    pieces = len(cost)
    even = cost if processes == 1 else cost**EVEN
    sums, chosen = np.full(pieces + 1, np.inf), []
    sums[0] = 0.0
    best, best_time, worse = [pieces], np.inf, 0
    for groups in range(1, pieces + 1):
        table = sums[:-1, None] + even
        chosen.append(table.argmin(axis=0))
        sums = np.concatenate([[np.inf], table.min(axis=0)])
        if not np.isfinite(sums[-1]) or (groups % processes and groups < pieces):
            continue
        ends = _ends(chosen, pieces)
        times = np.sort([cost[a, b - 1] for a, b in zip([0, *ends], ends, strict=False)])[::-1]
        time = times[::processes].sum()
        if time < best_time:
            best, best_time, worse = ends, time, 0
        elif (worse := worse + 1) > 1:
            break
    return best


def _ends(chosen: list[NDArray[np.int64]], pieces: int) -> list[int]:
    """Return the ends of the groups, from the begin of the last group for each number of groups and each end."""
    ends = [pieces]
    for begins in reversed(chosen[1:]):
        ends.append(int(begins[ends[-1] - 1]))
    return ends[::-1]
