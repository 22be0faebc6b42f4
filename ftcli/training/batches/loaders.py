"""Build the training and evaluation loaders of a run."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ftcli.data.sampler import EvalOrder, TrainOrder
from ftcli.tasks.protocol import has_companions
from ftcli.training.batches.dataloaders import Collate, Rows, start_worker
from ftcli.training.pass_sizes import order_of

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from ftcli.config.plan import Plan
    from ftcli.config.recipe import Recipe
    from ftcli.hardware.interface import Hardware
    from ftcli.training.batches.streaming_loader import StreamLoader
    from ftcli.training.prepared_data import PreparedData


@dataclass(frozen=True)
class Loaders:
    """The loaders of a run.

    Attributes:
        train: Training batches. A `DataLoader` in global order, which Accelerate divides, or a stream.
        evaluation: Evaluation batches in global order; None without an evaluation.
        order: The batch sampler of the training rows; None for a stream.
    """

    train: DataLoader | StreamLoader
    evaluation: DataLoader | None
    order: TrainOrder | None

    @property
    def map_style(self) -> list[DataLoader | None]:
        """The training and evaluation loaders for `Accelerator.prepare`; None if there is none.

        A stream is not included, because each process builds its own part of it.
        """
        train: Any = None if self.order is None else self.train
        return [train, self.evaluation]

    def with_prepared(self, prepared: list[Any]) -> Loaders:
        """Return these loaders after replacing those of `map_style` by the ones that Accelerate returned."""
        train, evaluation = prepared
        return replace(self, train=self.train if train is None else train, evaluation=evaluation)


def build_loaders(
    recipe: Recipe,
    data: PreparedData,
    first_step: int = 0,
    hardware: Hardware | None = None,
    excluded: Set[int] = frozenset(),
) -> Loaders:
    """Build the loaders of training and evaluation rows.

    Args:
        recipe: The recipe.
        data: The task, its rows and the plan.
        first_step: Number of optimizer steps that are done. A stream begins at its start and is moved later.
        hardware: The device, which decides about pinned memory, and the ranks, which a stream needs.
        excluded: Ids of training documents that are replaced by padding. The set may grow until the first iteration.

    Returns:
        Loaders of host batches in global order, and for a stream the loader of this process.
    """
    from torch.utils.data import DataLoader

    task, rows, plan = data.task, data.rows, data.plan
    on_gpu = hardware is not None and hardware.accelerator.device.type == "cuda"
    is_pinned = on_gpu and recipe.data.workers > 0  # without workers prefetch.py pins

    def loader(split: Any, order: Any, *, training: bool) -> DataLoader:
        return DataLoader(
            Rows(  # type: ignore[arg-type]
                split,
                task,
                training=training,
                bins=rows.bins if training else None,
                excluded=excluded if training else frozenset(),
                columns=rows.derived["train" if training else "eval"],
                stand_ins=data.stand_ins if training else (0,),
            ),
            batch_sampler=order,
            collate_fn=Collate(task, sources=training and len(rows.sources) > 0),
            num_workers=recipe.data.workers if training else 0,
            pin_memory=training and is_pinned,
            prefetch_factor=batches_ahead(plan, recipe.data.workers) if training and is_pinned else None,
            worker_init_fn=start_worker,
        )

    evaluation = None
    if rows.eval is not None:
        eval_order = EvalOrder(len(rows.eval), micro_size=plan.micro_size, processes=plan.processes)
        evaluation = loader(rows.eval, eval_order, training=False)
    if rows.train_rows is None:
        from ftcli.training.batches.streaming_loader import build_stream  # imports torch

        assert hardware is not None
        return Loaders(build_stream(recipe, plan, task, rows.facts, hardware.ranks, excluded), evaluation, None)
    names_next = has_companions(task)
    train_order = order_of(recipe, plan, rows, first_step=first_step, passes=data.passes, names_next=names_next)
    return Loaders(loader(rows.train, train_order, training=True), evaluation, train_order)


def batches_ahead(plan: Plan, workers: int) -> int:
    """Return how many batches each loader process prepares ahead: together those of a step, and one more of each.

    A step takes all its batches before its first forward pass, because their trained tokens are counted first. With
    PyTorch's two batches for each process, the device would wait for the rest at the start of each step. The thread
    that pins memory takes them out of shared memory, which is scarce in many containers.

    Args:
        plan: The plan of the run.
        workers: Number of loader processes, at least 1.
    """
    passes = plan.accumulation if plan.passes is None else plan.passes.most
    return -(-passes // workers) + 1
