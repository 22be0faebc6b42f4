"""Streamed rows to batches on the host: what a run reads instead of a loader of prepared rows.

The order is streaming.py's, where the rows come from is corpora.py's. The loader knows where each lane stands after
every step, for the checkpoint; it is endless, and no device and no backend is known here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from .corpora import open_source
from .encoding import encode_rows
from .errors import InputError, RunError
from .faults import ignore_signals_in_workers
from .loaders import Collate, WithTask
from .packing import pack
from .streaming import Bin, Cursor, Lane, StreamOrder, as_table, from_table, lanes_of, share_out

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .planning import Plan
    from .recipe import Recipe
    from .tasks.protocol import Batch, Row, RowError, Task

SHUFFLE_BUFFER = 10_000  # rows, where the recipe does not say
REMEMBERED = 4  # steps; the loop asks for one window ahead of the step it is at

Places = list[tuple[int, Cursor]]  # lanes of this process and where each stands


class StreamLoader:
    """This process's micro-batches from `first_step` on, without end."""

    def __init__(self, order: StreamOrder, task: Task, *, first_step: int, accumulation: int, workers: int) -> None:
        self.order, self.rows = order, _Batches(order, Collate(task))
        self.first_step, self.accumulation, self.workers = first_step, accumulation, workers
        mine = lanes_of(order.rank, order.processes, len(order.lanes))
        self._places: dict[int, Places] = {first_step: [(lane, order.cursors[lane]) for lane in mine]}

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
            batch, places = found
            step, more = divmod(number, self.accumulation)
            if not more:
                self._places[self.first_step + step] = places
                self._places.pop(self.first_step + step - REMEMBERED, None)
            yield batch

    @property
    def told(self) -> str:
        """What is read by whom, as one line for the log."""
        lanes, files = self.order.lanes, sum(len(lane.files) for lane in self.order.lanes)
        mine = len(lanes_of(self.order.rank, self.order.processes, len(lanes)))
        block = lanes[0].block
        return f"data.train: {files} files in {len(lanes)} lanes of {block} shuffled rows, {mine} read by each process"

    def places(self, step: int) -> NDArray[np.int64]:
        """Return where the lanes of this process stand after one of the newest steps: `[lanes, 5]`, `as_table`."""
        return as_table(self._places[step])


class _Batches(IterableDataset):
    """Batches with the places after their step. What is wrong with a row is handed on, to be raised by the loader.

    A worker of DataLoader would raise it with a stack trace for a text.
    """

    def __init__(self, order: StreamOrder, collate: Collate) -> None:
        self.order, self.collate = order, collate

    def __iter__(self) -> Iterator[tuple[Batch, Places] | Exception]:
        try:
            for rows, places in self.order:
                yield self.collate(rows), places
        except (InputError, RunError) as error:
            yield error


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
    recipe: Recipe, plan: Plan, task: Task, facts: dict[str, Any], rank: int, start: tuple[int, Any] | None = None
) -> StreamLoader:
    """Return the loader of a streaming recipe on one process.

    `start` is (step, what state.json says of the stream) of the checkpoint to go on from. Raises `InputError` when
    that is no place in this stream.
    """
    (source,) = recipe.data.train_sources
    corpus = open_source(source, recipe.data.columns_of(source))
    files = share_out(corpus.sizes, plan.global_size)
    into = partial(packed, capacity=recipe.data.max_length) if recipe.data.packing else alone
    block = -(-(recipe.data.shuffle_buffer or SHUFFLE_BUFFER) // len(files))
    lanes = [
        Lane(n, len(files), files[n], corpus, Encode(task, facts), into, recipe.seed, block, _refuse)
        for n in range(len(files))
    ]
    order = StreamOrder(
        lanes, rank=rank, processes=plan.processes, global_size=plan.global_size, micro_size=plan.micro_size
    )
    first_step = 0
    if start is not None:
        first_step, table = start
        if table is None or len(table) != len(lanes):
            told = "the checkpoint knows no place in this stream: it was read otherwise, or from other files"
            raise InputError(told, hint="train anew, or set data.train and batch.global_size back")
        order.cursors = from_table(np.array(table, dtype=np.int64), len(lanes))
    return StreamLoader(order, task, first_step=first_step, accumulation=plan.accumulation, workers=recipe.data.workers)


def _as_it_is(found: Any) -> Any:
    return found


def _refuse(told: str) -> NoReturn:
    raise InputError(told, hint="mend that row, or take it out: a stream leaves none out that the task cannot use")
