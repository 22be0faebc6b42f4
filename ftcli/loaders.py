"""Prepared rows to batches on the host: the data set, the collation, and the two loaders of a run.

The order is sampling.py's, what a batch holds is the task's; no device, no rank and no backend is known here.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .faults import ignore_signals_in_workers
from .sampling import PADDING, EvalOrder, Key, TrainOrder
from .tasks import Carried

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from .cache import PreparedRows
    from .packing import Bins
    from .planning import Plan
    from .recipe import Recipe
    from .tasks.protocol import Batch, Row, Task


class WithTask:
    """What is handed to loader processes together with a task, which may be of a user's own file."""

    task: Task

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"task": Carried(self.task)}


class Rows(WithTask):
    """Prepared rows as a map-style data set over the keys of `sampling`: each is a list of the documents it holds.

    A document is a plain dictionary. Packed rows hold several, all others one. What is left out, or only fills a
    micro-batch, is blank: it keeps its shape and weighs nothing.
    """

    def __init__(
        self, rows: Any, task: Task, *, training: bool, bins: Bins | None = None, excluded: Set[int] = frozenset()
    ) -> None:
        self.rows, self.task, self.training, self.bins, self.excluded = rows, task, training, bins, excluded

    def __len__(self) -> int:
        return len(self.rows) if self.bins is None else len(self.bins)

    def __getitem__(self, key: Key) -> list[Row]:
        epoch, index = key
        documents = [max(index, 0)] if self.bins is None or index == PADDING else self.bins[index]
        return [self._document(number, epoch, blank=index == PADDING) for number in documents]

    def _document(self, number: int, epoch: int, *, blank: bool) -> Row:
        row = self.rows[number] | {"epoch": epoch, "training": self.training}
        return self.task.blank(row) | {"id": PADDING} if blank or row["id"] in self.excluded else row


@dataclass(frozen=True)
class Collate(WithTask):
    """Rows to a batch of tensors with the ids of their documents; a class: loader processes can be handed it.

    With `sources` also the number of the source of each value of the task's `loss`, in the order that the protocol
    gives them; PADDING where a blank row has one.
    """

    task: Task
    sources: bool = False

    def __call__(self, rows: list[list[Row]]) -> Batch:
        """Return the batch of some rows."""
        import torch

        documents = [document for row in rows for document in row]
        batch = self.task.collate(documents) | {"sample_ids": torch.tensor([row["id"] for row in documents])}
        if self.sources:
            values = [
                (row["source"], row.get("items", 1)) if row["id"] != PADDING else (PADDING, 0) for row in documents
            ]
            numbers, items = np.array(values).T
            of_values = np.repeat(numbers, items if self.task.item == "token" else 1)
            batch["item_sources"] = torch.from_numpy(of_values.astype(np.int16))
        return batch


def build_loaders(
    recipe: Recipe,
    plan: Plan,
    task: Task,
    rows: PreparedRows,
    first_step: int,
    excluded: Set[int] = frozenset(),
    *,
    pins: bool = False,
) -> tuple[DataLoader | None, DataLoader | None]:
    """Return loaders of host batches in global order; Accelerate gives each process its share of the batches.

    A stream has no such loader of training rows: stream_loader.py builds it for each process.

    Training documents whose id is in `excluded` are padding instead; it may grow until the loader is iterated. With
    `pins` a thread puts what loader processes hand over into pinned memory; without them copies.py does.
    """
    from torch.utils.data import DataLoader

    def loader(part: Any, order: Any, *, training: bool) -> DataLoader:
        return DataLoader(
            Rows(  # type: ignore[arg-type]
                part,
                task,
                training=training,
                bins=rows.bins if training else None,
                excluded=excluded if training else frozenset(),
            ),
            batch_sampler=order,
            collate_fn=Collate(task, sources=training and len(rows.sources) > 0),
            num_workers=recipe.data.workers if training else 0,
            pin_memory=pins and training and recipe.data.workers > 0,
            worker_init_fn=ignore_signals_in_workers,
        )

    evaluation = None
    if rows.eval is not None:
        eval_order = EvalOrder(len(rows.eval), micro_size=plan.micro_size, processes=plan.processes)
        evaluation = loader(rows.eval, eval_order, training=False)
    if rows.train_rows is None:
        return None, evaluation
    assert plan.steps is not None and plan.steps_per_epoch is not None
    train_order = TrainOrder(
        rows.train_rows,
        global_size=plan.global_size,
        micro_size=plan.micro_size,
        seed=recipe.seed,
        first_step=first_step,
        steps=plan.steps,
        steps_per_epoch=plan.steps_per_epoch,
        lengths=rows.lengths,
    )
    return loader(rows.train, train_order, training=True), evaluation
