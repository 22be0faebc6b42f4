"""Prepared rows to batches on the host: the data set, the collation, and the two loaders of a run.

The order is sampling.py's, what a batch holds is the task's; no device, no rank and no backend is known here.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .faults import ignore_signals_in_workers
from .sampling import PADDING, EvalOrder, Key, TrainOrder
from .tasks import Carried

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from .cache import PreparedRows
    from .planning import Plan
    from .recipe import Recipe
    from .tasks.protocol import Batch, Row, Task


class _WithTask:
    """What is handed to loader processes together with a task, which may be of a user's own file."""

    task: Task

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"task": Carried(self.task)}


class Rows(_WithTask):
    """Prepared rows as a map-style data set over the keys of `sampling`; rows are plain dictionaries."""

    def __init__(self, rows: Any, task: Task, *, training: bool, excluded: Set[int] = frozenset()) -> None:
        self.rows, self.task, self.training, self.excluded = rows, task, training, excluded

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: Key) -> Row:
        epoch, index = key
        row = self.rows[max(index, 0)] | {"epoch": epoch, "training": self.training}
        return self.task.blank(row) | {"id": PADDING} if index == PADDING or row["id"] in self.excluded else row


@dataclass(frozen=True)
class Collate(_WithTask):
    """Rows to a batch of tensors with the ids of its rows; a class, so that loader processes can be handed it."""

    task: Task

    def __call__(self, rows: list[Row]) -> Batch:
        """Return the batch of some rows."""
        import torch

        return self.task.collate(rows) | {"sample_ids": torch.tensor([row["id"] for row in rows])}


def build_loaders(
    recipe: Recipe, plan: Plan, task: Task, rows: PreparedRows, first_step: int, excluded: Set[int] = frozenset()
) -> tuple[DataLoader, DataLoader | None]:
    """Return loaders of host batches in global order; Accelerate gives each process its share of the batches.

    Training rows whose id is in `excluded` are padding instead; it may grow until the loader is iterated.
    """
    from torch.utils.data import DataLoader

    def loader(part: Any, order: Any, *, training: bool) -> DataLoader:
        return DataLoader(
            Rows(part, task, training=training, excluded=excluded if training else frozenset()),  # type: ignore[arg-type]
            batch_sampler=order,
            collate_fn=Collate(task),
            num_workers=recipe.data.workers if training else 0,
            worker_init_fn=ignore_signals_in_workers,
        )

    assert plan.steps is not None and plan.steps_per_epoch is not None
    train_order = TrainOrder(
        len(rows.train),
        global_size=plan.global_size,
        micro_size=plan.micro_size,
        seed=recipe.seed,
        first_step=first_step,
        steps=plan.steps,
        steps_per_epoch=plan.steps_per_epoch,
    )
    train = loader(rows.train, train_order, training=True)
    if rows.eval is None:
        return train, None
    eval_order = EvalOrder(len(rows.eval), micro_size=plan.micro_size, processes=plan.processes)
    return train, loader(rows.eval, eval_order, training=False)
