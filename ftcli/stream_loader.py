"""Streamed rows to batches on the host: what a run reads instead of a loader of prepared rows.

The order is streaming.py's, where the rows come from is corpora.py's. The loader knows where each lane stands after
every step, for the checkpoint, and what all processes read, which travels in the control message of each step; it is
endless, and no device and no backend is known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from .corpora import open_source
from .encoding import encode_rows
from .errors import InputError, RunError
from .faults import ignore_signals_in_workers
from .loaders import Collate, WithTask
from .packing import pack
from .sampling import PADDING
from .streaming import (
    COLUMNS,
    Bad,
    Bin,
    Counts,
    Cursor,
    Lane,
    StreamOrder,
    as_table,
    from_table,
    lanes_of,
    one_too_many,
    share_out,
)
from .supervision import say

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .hardware.ranks import Ranks
    from .planning import Plan
    from .recipe import Recipe
    from .tasks.protocol import Batch, Row, RowError, Task

SHUFFLE_BUFFER = 10_000  # rows, where the recipe does not say
REMEMBERED = 4  # steps; the loop asks for one window ahead of the step it is at
MOST_NAMED = 8  # rows of one step that the log names
PASS = 10**6  # parts of a pass in which processes add up how far they are

Places = list[tuple[int, Cursor]]  # lanes of this process and where each stands


class StreamLoader:
    """This process's micro-batches from `first_step` on, without end.

    `collect` brings together an object of every process. Documents whose id is in `excluded` are padding instead; it
    may grow until the loader is iterated.
    """

    def __init__(
        self,
        order: StreamOrder,
        task: Task,
        *,
        accumulation: int,
        workers: int,
        most_bad: int = 0,
        excluded: Set[int] = frozenset(),
        collect: Callable[[list[Bad]], list[list[Bad]]] = lambda mine: [mine],
    ) -> None:
        self.order, self.rows = order, _Batches(order, Collate(task), excluded)
        self.accumulation, self.workers, self.most_bad, self.collect = accumulation, workers, most_bad, collect
        self.go_to(0, order.cursors)

    def go_to(self, step: int, cursors: list[Cursor]) -> None:
        """Begin after `step` steps, where every lane stands at its cursor."""
        self.first_step, self.order.cursors = step, cursors
        mine = lanes_of(self.order.rank, self.order.processes, len(self.order.lanes))
        self._places: dict[int, Places] = {step: [(lane, cursors[lane]) for lane in mine]}
        self._newest, self._bad = step, list[Bad]()
        self.counts, self.epoch = Counts(), 0.0  # of all processes, up to the step that is trained
        for lane, cursor in enumerate(cursors):
            self.counts = self.counts.plus(cursor.counts)
            self.epoch += self.order.lanes[lane].progress(cursor) / len(cursors)

    def go_back(self, step: int, table: Any) -> None:
        """Begin where a checkpoint stands; `table` is what its state.json says of the stream."""
        lanes = len(self.order.lanes)
        if table is None or len(table) != lanes or len(table[0]) != COLUMNS:
            told = "the checkpoint knows no place in this stream: it was read otherwise, or from other files"
            raise InputError(told, hint="train anew, or set data.train and batch.global_size back")
        self.go_to(step, from_table(np.array(table, dtype=np.int64), lanes))

    def __iter__(self) -> Iterator[Batch]:
        loader = DataLoader(
            self.rows,
            batch_size=None,
            num_workers=self.workers,
            collate_fn=_as_it_is,
            worker_init_fn=ignore_signals_in_workers,
        )
        for number, found in enumerate(loader, start=1):
            if isinstance(found, Exception):
                raise found
            batch, places, bad = found
            self._bad += bad
            step, more = divmod(number, self.accumulation)
            if not more:
                self._newest = self.first_step + step
                self._places[self._newest] = places
                self._places.pop(self._newest - REMEMBERED, None)
            yield batch

    @property
    def told(self) -> str:
        """What is read by whom, as one line for the log."""
        lanes, files = self.order.lanes, sum(len(lane.files) for lane in self.order.lanes)
        mine = len(lanes_of(self.order.rank, self.order.processes, len(lanes)))
        block = lanes[0].block
        return f"data.train: {files} files in {len(lanes)} lanes of {block} shuffled rows, {mine} read by each process"

    def places(self, step: int) -> NDArray[np.int64]:
        """Return where the lanes of this process stand after one of the newest steps: `[lanes, 10]`, `as_table`."""
        return as_table(self._places[step])

    def tally(self) -> list[int]:
        """Return what this process has to say of the newest step's reading; processes' sums are for `settle`."""
        if not self.order.speaks:
            return [0] * (1 + len(Counts()))
        passes, counts = 0, Counts()
        for lane, cursor in self._places[self._newest]:
            counts = counts.plus(cursor.counts)
            passes += int(PASS * self.order.lanes[lane].progress(cursor))
        return [passes, *counts]

    def settle(self, sums: Sequence[int], step: int) -> None:
        """Take the sums over all processes for the step to be trained; tells of rows that are left out.

        A collective where there are some. Raises the same `InputError` on every process when they are too many.
        """
        before, self.counts = self.counts.bad, Counts(*sums[1:])
        self.epoch = sums[0] / PASS / len(self.order.lanes)
        if self.counts.bad == before:
            return
        newest, self._bad = sorted(bad for found in self.collect(self._bad) for bad in found), []
        corpus = self.order.lanes[0].corpus
        if self.counts.bad > self.most_bad:
            raise one_too_many(corpus, newest, self.counts.bad, self.most_bad)
        if self.order.rank == 0:
            for bad in newest[:MOST_NAMED]:
                say(f"ftcli: step {step}: left out {corpus.told(bad)}")
            more = f", {len(newest) - MOST_NAMED:,} more at this step" if len(newest) > MOST_NAMED else ""
            say(f"ftcli: step {step}: {self.counts.bad:,} of data.max_bad_rows {self.most_bad:,} left out{more}")

    def facts(self) -> dict[str, int | float]:
        """Return what a row of metrics says of the stream: passes done, rows read, and what became of them."""
        named = {f"{name}_rows": count for name, count in self.counts._asdict().items() if name != "rows"}
        return {"epoch": self.epoch, "rows_read": self.counts.rows} | named

    def summary(self) -> str:
        """Return what was read so far, as one line for the log."""
        counts = self.counts
        told = {
            "shortened": counts.cut,
            "too long and left out": counts.dropped,
            "with nothing to train on": counts.untrained,
            "that cannot be used": counts.bad,
        }
        found = ", ".join(f"{count:,} {what}" for what, count in told.items() if count)
        return f"data.train: {counts.rows:,} rows read, {self.epoch:.2f} passes" + (f"; {found}" if found else "")


class _Batches(IterableDataset):
    """Batches with the places after their step. What is wrong with a row is handed on, to be raised by the loader.

    A worker of DataLoader would raise it with a stack trace for a text.
    """

    def __init__(self, order: StreamOrder, collate: Collate, excluded: Set[int]) -> None:
        self.order, self.collate, self.excluded = order, collate, excluded

    def __iter__(self) -> Iterator[tuple[Batch, Places, list[Bad]] | Exception]:
        try:
            for share in self.order:
                rows = [[self._document(document) for document in row] for row in share.rows]
                yield self.collate(rows), share.places, share.bad
        except (InputError, RunError) as error:
            yield error

    def _document(self, row: Row) -> Row:
        return self.collate.task.blank(row) | {"id": PADDING} if row["id"] in self.excluded else row


@dataclass(frozen=True)
class Encode(WithTask):
    """Rows of a file to documents, as the task makes them; a class: loader processes can be handed it."""

    task: Task
    facts: dict[str, Any]

    def __call__(self, rows: list[Row]) -> list[list[Row] | RowError]:
        """Return the documents of each row, or what is wrong with it."""
        return [
            found if isinstance(found, ValueError) else [row | _OF_TRAINING for row in found]
            for found in encode_rows(self.task, rows, self.facts)
        ]


_OF_TRAINING = {"training": True, "source": 0}


def alone(documents: list[Row]) -> list[Bin]:
    """Return each document as a row of its own."""
    return [[document] for document in documents]


def packed(documents: list[Row], capacity: int) -> list[Bin]:
    """Return documents in rows of at most `capacity` tokens."""
    bins = pack(np.array([len(document["input_ids"]) for document in documents], dtype=np.int64), capacity)
    return [[documents[i] for i in bins[number]] for number in range(len(bins))]


def build_stream(
    recipe: Recipe, plan: Plan, task: Task, facts: dict[str, Any], ranks: Ranks, excluded: Set[int] = frozenset()
) -> StreamLoader:
    """Return the loader of a streaming recipe on one process, at the beginning of the stream."""
    (source,) = recipe.data.train_sources
    corpus = open_source(source, recipe.data.columns_of(source))
    files, most_bad = share_out(corpus.sizes, plan.global_size), recipe.data.max_bad_rows
    into = partial(packed, capacity=recipe.data.max_length) if recipe.data.packing else alone
    block = -(-(recipe.data.shuffle_buffer or SHUFFLE_BUFFER) // len(files))
    lanes = [
        Lane(n, len(files), files[n], corpus, Encode(task, facts), into, recipe.seed, block, most_bad)
        for n in range(len(files))
    ]
    order = StreamOrder(
        lanes, rank=ranks.rank, processes=plan.processes, global_size=plan.global_size, micro_size=plan.micro_size
    )
    return StreamLoader(
        order,
        task,
        accumulation=plan.accumulation,
        workers=recipe.data.workers,
        most_bad=most_bad,
        excluded=excluded,
        collect=ranks.collect,
    )


def _as_it_is(found: Any) -> Any:
    return found
