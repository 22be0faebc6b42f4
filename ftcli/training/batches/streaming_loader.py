"""Load streamed training rows and collate them into batches on the host.

lanes.py has the order of the rows, corpus.py opens their files. The loader is endless. It records the cursor of each
lane after every step, for checkpoints. It also counts what all processes have read, which the control message of each
step sums. This module is independent of device and backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from ftcli.data.packing import pack
from ftcli.data.streaming.corpus import open_source
from ftcli.data.streaming.cursors import COLUMNS, Counts, Cursor, as_table, from_table
from ftcli.data.streaming.lanes import BadRow, Bin, Lane, StreamOrder, assign_files, bad_rows_error, lanes_of
from ftcli.data.streaming.samples import stream_digests
from ftcli.data.task_encoders import encode_rows
from ftcli.runtime.errors import InputError, RunError
from ftcli.runtime.log import log_line
from ftcli.runtime.seeds import PADDING
from ftcli.training.batches.dataloaders import Collate, WithTask, start_worker

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ftcli.config.plan import Plan
    from ftcli.config.recipe import Recipe
    from ftcli.hardware.collectives import Ranks
    from ftcli.runtime.errors import RowError
    from ftcli.tasks.protocol import Batch, Row, Task


SHUFFLE_BUFFER = 10_000  # rows, if the recipe does not set data.shuffle_buffer
STEPS_REMEMBERED = 4  # whose cursors are kept; the loop reads one window ahead
MOST_ROWS_NAMED = 8  # rows of one step that the log names
PROGRESS_SCALE = 10**6  # processes sum their progress as integers, in units of 1 / PROGRESS_SCALE of a pass

LaneCursors = list[tuple[int, Cursor]]  # (lane, cursor) for each lane of this process


class StreamLoader:
    """Endless loader of this process's micro-batches.

    Args:
        order: The order of the rows, with the cursors at which it starts.
        task: The recipe's task.
        accumulation: Micro-batches in one step.
        workers: Number of loader processes.
        max_bad_rows: Unusable rows that are left out before the run fails.
        excluded: Ids of documents that are replaced by padding. The set may grow until the loader is iterated.
        collect: Gathers an object from every process. A collective.
        digests: Digests of the sources' files when the run began, for checkpoints (`stream_digests`).
    """

    def __init__(
        self,
        order: StreamOrder,
        task: Task,
        *,
        accumulation: int,
        workers: int,
        max_bad_rows: int = 0,
        excluded: Set[int] = frozenset(),
        collect: Callable[[list[BadRow]], list[list[BadRow]]] = lambda mine: [mine],
        digests: list[str | None] | None = None,
    ) -> None:
        self.digests = digests
        self.order, self.rows = order, _BatchDataset(order, Collate(task), excluded)
        self.accumulation, self.workers, self.max_bad_rows, self.collect = accumulation, workers, max_bad_rows, collect
        self.set_position(0, order.cursors)

    def set_position(self, step: int, cursors: list[Cursor]) -> None:
        """Continue after `step` steps, with one cursor for every lane."""
        self.first_step, self.order.cursors = step, cursors
        mine = lanes_of(self.order.rank, self.order.processes, len(self.order.lanes))
        self._cursors: dict[int, LaneCursors] = {step: [(lane, cursors[lane]) for lane in mine]}
        self._newest, self._new_bad_rows = step, list[BadRow]()
        self.counts, self.epoch = Counts(), 0.0  # of all processes, up to the step that is being trained
        for lane, cursor in enumerate(cursors):
            self.counts = self.counts.plus(cursor.counts)
            self.epoch += self.order.lanes[lane].progress(cursor) / len(cursors)

    def seek(self, step: int, table: Any) -> None:
        """Continue from a checkpoint.

        Args:
            step: Number of steps that are done.
            table: The entry `stream` of state.json: one row of integers for each lane.

        Raises:
            InputError: The checkpoint was written for another stream.
        """
        lanes = len(self.order.lanes)
        if table is None or len(table) != lanes or len(table[0]) != COLUMNS:
            raise InputError(
                "the checkpoint has no position in this stream: data.train or batch.global_size was different",
                hint="start a new run, or restore data.train and batch.global_size",
            )
        self.set_position(step, from_table(np.array(table, dtype=np.int64), lanes))

    def __iter__(self) -> Iterator[Batch]:
        loader = DataLoader(
            self.rows,
            batch_size=None,
            num_workers=self.workers,
            collate_fn=_identity,
            worker_init_fn=start_worker,
        )
        for number, item in enumerate(loader, start=1):
            if isinstance(item, Exception):
                raise item
            batch, cursors, bad_rows = item
            self._new_bad_rows += bad_rows
            step, remainder = divmod(number, self.accumulation)
            if remainder == 0:
                self._newest = self.first_step + step
                self._cursors[self._newest] = cursors
                self._cursors.pop(self._newest - STEPS_REMEMBERED, None)
            yield batch

    @property
    def description(self) -> str:
        """One line for the log: files, lanes, and lanes of each process."""
        lanes, files = self.order.lanes, sum(len(lane.files) for lane in self.order.lanes)
        mine = len(lanes_of(self.order.rank, self.order.processes, len(lanes)))
        block = lanes[0].block
        return f"data.train: {files} files in {len(lanes)} lanes of {block} shuffled rows, {mine} read by each process"

    def cursors(self, step: int) -> NDArray[np.int64]:
        """Return the cursors of this process's lanes after one of the newest steps, as `[lanes, 10]` integers."""
        return as_table(self._cursors[step])

    def tally(self) -> list[int]:
        """Return this process's progress and counts up to the newest step. `advance` takes the sums over processes."""
        if not self.order.reports_bad_rows:
            return [0] * (1 + len(Counts()))
        passes, counts = 0, Counts()
        for lane, cursor in self._cursors[self._newest]:
            counts = counts.plus(cursor.counts)
            passes += int(PROGRESS_SCALE * self.order.lanes[lane].progress(cursor))
        return [passes, *counts]

    def advance(self, sums: Sequence[int], step: int) -> None:
        """Update counts and epoch for the step to be trained, and log the rows that are left out.

        A collective if there are new unusable rows.

        Args:
            sums: The sums of `tally` over all processes.
            step: The step to be trained.

        Raises:
            InputError: There are more unusable rows than data.max_bad_rows. On every process.
        """
        before, self.counts = self.counts.bad, Counts(*sums[1:])
        self.epoch = sums[0] / PROGRESS_SCALE / len(self.order.lanes)
        if self.counts.bad == before:
            return
        newest = sorted(bad for rows in self.collect(self._new_bad_rows) for bad in rows)
        self._new_bad_rows = []
        corpus = self.order.lanes[0].corpus
        if self.counts.bad > self.max_bad_rows:
            raise bad_rows_error(corpus, newest, self.counts.bad, self.max_bad_rows)
        if self.order.rank == 0:
            for bad in newest[:MOST_ROWS_NAMED]:
                log_line(f"step {step}: left out {corpus.describe(bad)}")
            more = f", {len(newest) - MOST_ROWS_NAMED:,} more at this step" if len(newest) > MOST_ROWS_NAMED else ""
            total = f"{self.counts.bad:,} rows left out so far (data.max_bad_rows {self.max_bad_rows:,})"
            log_line(f"step {step}: {total}{more}")

    def metrics(self) -> dict[str, int | float]:
        """Return metrics of the stream: passes done, rows read, and numbers of rows shortened or left out."""
        outcomes = {f"{name}_rows": count for name, count in self.counts._asdict().items() if name != "rows"}
        return {"epoch": self.epoch, "rows_read": self.counts.rows} | outcomes

    def summary(self) -> str:
        """Return one line for the log: rows read so far, and numbers of rows shortened or left out."""
        counts = self.counts
        outcomes = {
            "shortened": counts.cut,
            "too long and left out": counts.dropped,
            "with nothing to train on": counts.untrained,
            "that cannot be used": counts.bad,
        }
        listed = ", ".join(f"{count:,} {outcome}" for outcome, count in outcomes.items() if count)
        return f"data.train: {counts.rows:,} rows read, {self.epoch:.2f} passes" + (f"; {listed}" if listed else "")


class _BatchDataset(IterableDataset):
    """Batches with the cursors after them.

    Errors are yielded and raised by the loader, because a worker of DataLoader would replace the message by a stack
    trace.
    """

    def __init__(self, order: StreamOrder, collate: Collate, excluded: Set[int]) -> None:
        self.order, self.collate, self.excluded = order, collate, excluded

    def __iter__(self) -> Iterator[tuple[Batch, LaneCursors, list[BadRow]] | Exception]:
        try:
            for share in self.order:
                rows = self._without_excluded(share.rows)
                yield self.collate(rows), share.cursors, share.bad
        except (InputError, RunError) as error:
            yield error

    def _without_excluded(self, rows: list[list[Row]]) -> list[list[Row]]:
        """Return rows without excluded documents. A row of nothing else becomes the shortest other document, blank.

        The values of an excluded document are not computed again, because they may not be finite.
        """
        if not self.excluded:
            return rows
        kept = [[document for document in row if document["id"] not in self.excluded] for row in rows]
        others = sorted((document for row in kept for document in row), key=lambda row: len(row.get("input_ids", ())))
        blank = self.collate.task.blank
        return [left or [blank((others or row)[0]) | {"id": PADDING}] for left, row in zip(kept, rows, strict=True)]


@dataclass(frozen=True)
class Encode(WithTask):
    """Encodes raw rows to documents by the task. A class, so that it can be sent to loader processes."""

    task: Task
    facts: dict[str, Any]

    def __call__(self, rows: list[Row]) -> list[list[Row] | RowError]:
        """Return the documents of each row, or its error."""
        return [
            result if isinstance(result, ValueError) else [row | TRAINING_COLUMNS for row in result]
            for result in encode_rows(self.task, rows, self.facts)
        ]


TRAINING_COLUMNS = {"training": True, "source": 0}


def as_single_rows(documents: list[Row]) -> list[Bin]:
    """Return one row for each document."""
    return [[document] for document in documents]


def pack_documents(documents: list[Row], capacity: int) -> list[Bin]:
    """Pack documents into rows of at most `capacity` tokens."""
    bins = pack(np.array([len(document["input_ids"]) for document in documents], dtype=np.int64), capacity)
    return [[documents[i] for i in bins[number]] for number in range(len(bins))]


def build_stream(
    recipe: Recipe, plan: Plan, task: Task, facts: dict[str, Any], ranks: Ranks, excluded: Set[int] = frozenset()
) -> StreamLoader:
    """Build the loader of a streaming recipe for this process, at the start of the stream.

    Args:
        recipe: The recipe, with one source of training rows.
        plan: The plan of the run.
        task: The recipe's task.
        facts: Facts about the rows, as `prepare_rows` found them.
        ranks: The ranks of the run.
        excluded: Ids of documents that are replaced by padding.
    """
    (source,) = recipe.data.train_sources
    corpus = open_source(source, recipe.data.columns_of(source))
    files, max_bad_rows = assign_files(corpus.sizes, plan.global_size), recipe.data.max_bad_rows
    into = partial(pack_documents, capacity=recipe.data.max_length) if recipe.data.packing else as_single_rows
    block = -(-(recipe.data.shuffle_buffer or SHUFFLE_BUFFER) // len(files))
    lanes = [
        Lane(n, len(files), files[n], corpus, Encode(task, facts), into, recipe.seed, block, max_bad_rows)
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
        max_bad_rows=max_bad_rows,
        excluded=excluded,
        collect=ranks.collect,
        digests=stream_digests(recipe),
    )


def _identity(batch: Any) -> Any:
    return batch
