"""Read prepared rows as a data set, and collate them into batches on the host.

`data/sampler.py` has the order of the rows. The task collates.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from ftcli.config.task_registry import FROM_FILE, find_task
from ftcli.data.sampler import Key
from ftcli.runtime.seeds import PADDING
from ftcli.runtime.stop import ignore_signals_in_workers
from ftcli.tasks.protocol import has_companions

if TYPE_CHECKING:
    from ftcli.data.packing import Bins
    from ftcli.tasks.protocol import Batch, Row, Task

LOADER_NICENESS = 10  # of loader processes; 19 is the lowest priority


class WithTask:
    """Base class of objects that are sent to loader processes with a task. The task may be defined in a user's file."""

    task: Task

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"task": PickledTask(self.task)}


class Rows(WithTask):
    """Map-style data set of prepared rows. A key is (epoch, index), an item is the list of the row's documents.

    A document is a dictionary. A packed row has several documents, any other row one. A task with `companions` gets
    further rows with each (optional_members.py); the third number of a key, if any, is the next row of the step.
    Rows that fill up a micro-batch, and excluded documents, are replaced by another document that is blank: it does not
    contribute to the loss.

    Args:
        rows: The prepared rows.
        task: The recipe's task.
        training: Whether the rows are training rows.
        bins: The packed rows; None without packing.
        excluded: Ids of documents that are left out. `columns` are added to each document by its number.
        stand_ins: Numbers of documents that stand in for others, the best first. If all are excluded, any other does.
    """

    def __init__(
        self,
        rows: Any,
        task: Task,
        *,
        training: bool,
        bins: Bins | None = None,
        excluded: Set[int] = frozenset(),
        columns: Mapping[str, Any] | None = None,
        stand_ins: Sequence[int] = (0,),
    ) -> None:
        self.columns = {} if columns is None else columns  # an empty one may be filled in later
        self.rows, self.task, self.training, self.bins, self.excluded = rows, task, training, bins, excluded
        self.stand_ins = stand_ins
        self.index: Any = task.index_rows(rows) if has_companions(task) else None  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return len(self.rows) if self.bins is None else len(self.bins)

    def __getitem__(self, key: Key) -> list[Row]:
        epoch, index, *following = key
        documents = [index] if self.bins is None or index == PADDING else self.bins[index]
        # A packed row loses its excluded documents, unless all are: others might not fit into it.
        present = [number for number in documents if not self._is_absent(number)] or documents[:1]
        rows = [self._document(number, epoch) for number in present]
        if has_companions(self.task):
            task: Any = self.task
            for row in rows:
                numbers = task.companions(row | {"next": following[0] if following else None}, self.index)
                row["companions"] = [self._finished(number, self._document(number, epoch)) for number in numbers]
        return [self._finished(number, row) for number, row in zip(present, rows, strict=True)]

    def _is_absent(self, number: int) -> bool:
        return number == PADDING or number in self.excluded  # the id of a training row is its number

    def _document(self, number: int, epoch: int) -> Row:
        """Return a document. In place of padding, and of an excluded one, another: its own values may not be finite."""
        if self._is_absent(number):
            others = (other for other in chain(self.stand_ins, range(len(self.rows))) if other not in self.excluded)
            number = next(others, self.stand_ins[0])
        row: Row = self.rows[number] | {"epoch": epoch, "training": self.training}
        return row | {name: column[number] for name, column in self.columns.items()}

    def _finished(self, number: int, row: Row) -> Row:
        """Return the result of `_document` for a number, blank if it stands in for another document."""
        return self.task.blank(row) | {"id": PADDING} if self._is_absent(number) else row


@dataclass(frozen=True)
class Collate(WithTask):
    """Collates rows into a batch of tensors. A class, so that it can be sent to loader processes.

    Attributes:
        task: The recipe's task.
        sources: Add `item_sources [N]`, int16: the source of each value of the task's `loss`, or PADDING for values of
            blank rows.
    """

    task: Task
    sources: bool = False

    def __call__(self, rows: list[list[Row]]) -> Batch:
        """Return the task's batch with `sample_ids`, int64: one id for each document."""
        import torch

        documents = [document for row in rows for document in row]
        batch = self.task.collate(documents) | {"sample_ids": torch.tensor([row["id"] for row in documents])}
        if self.sources:
            values = [
                (row["source"], row.get("items", 1)) if row["id"] != PADDING else (PADDING, 0) for row in documents
            ]
            numbers, items = np.array(values).T
            value_sources = np.repeat(numbers, items if self.task.item == "token" else 1)
            batch["item_sources"] = torch.from_numpy(value_sources.astype(np.int16))
        return batch


class PickledTask:
    """Pickles a task for another process, where unpickling returns the task itself.

    A process that was not forked has not imported the user's file. It imports the file before it unpickles the task.
    """

    def __init__(self, task: Task) -> None:
        self._task = task

    def __reduce__(self) -> tuple[Callable[..., Task], tuple[str | None, bytes]]:
        module = sys.modules[type(self._task).__module__]
        return _unpickle, (module.__file__ if module.__name__.startswith(FROM_FILE) else None, pickle.dumps(self._task))


def start_worker(worker_id: int) -> None:
    """Ignore stop signals in a loader process, and let the training process run first (`worker_init_fn`).

    A training process that waits for a processor core starts kernels late, and all ranks wait for it. While it waits
    for rows, loader processes have the cores to themselves.
    """
    ignore_signals_in_workers(worker_id)
    with suppress(AttributeError, OSError):  # Windows has no os.nice, and a sandbox may forbid it
        os.nice(LOADER_NICENESS)


def _unpickle(file: str | None, task: bytes) -> Task:
    """Return a pickled task, after importing its file unless that is None."""
    if file is not None:
        find_task(file)
    unpickled: Task = pickle.loads(task)
    return unpickled
