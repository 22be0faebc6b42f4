"""The first pass over the rows of a step, for losses that depend on all rows of the global batch.

A task with `first_pass` is called under `no_grad` for every micro-batch of a step before the first gradient. Its values
are gathered over the ranks, without padding, in ascending order of row ids. This order does not depend on the number of
processes or the micro size. No host waits for the device: the number of rows of each rank is in the control message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ftcli.runtime.seeds import PADDING
from ftcli.tasks.protocol import Seen, has_first_pass

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ftcli.tasks.protocol import Batch
    from ftcli.training.batches.window import AccumulationWindow, ControlMessage
    from ftcli.training.run import Run


@dataclass(frozen=True)
class StepValues:
    """Values of all rows of a step.

    Attributes:
        values: `[R, ...]` by name, rows in ascending order of ids.
        ids: Ids of the rows, `[R]` int64 on the device.
    """

    values: dict[str, Tensor]
    ids: Tensor

    def seen_by(self, ids: NDArray[np.int64]) -> Seen:
        """Return what the loss of a micro-batch is given.

        Args:
            ids: Ids of the micro-batch's rows, `[B]`.
        """
        places = torch.searchsorted(self.ids, _on(self.ids.device, ids))
        return Seen(self.values, places.clamp(max=len(self.ids) - 1))


def losses_of(
    run: Run, window: AccumulationWindow, message: ControlMessage, number: int
) -> Callable[[int, Batch], Any]:
    """Return a function of (number of the micro-batch, batch) that returns what the task's `loss` returns.

    For a task with a first pass this runs the first pass of the step, a collective. Both passes over a micro-batch are
    then seeded alike, so that dropout draws the same elements.
    """
    task: Any = run.task
    if not has_first_pass(task) or not message.rows:
        return lambda micro, batch: task.loss(run.model, batch)
    step = _first_pass(run, window, message, number)

    def loss(micro: int, batch: Batch) -> Any:
        run.reseed(number, micro)
        return task.loss(run.model, batch, step.seen_by(window.ids[micro]))

    return loss


@torch.no_grad()
def _first_pass(run: Run, window: AccumulationWindow, message: ControlMessage, number: int) -> StepValues:
    """Return the values of all rows of a step. A collective."""
    task: Any = run.task
    parts: list[dict[str, Tensor]] = []
    # A region of its own: casts of weights that autocast keeps from this pass have no gradient.
    for micro, batch in enumerate(run.hardware.micro_batches(window.first_batches)):
        run.heartbeat.beat("first pass", number)
        batch.pop("item_sources", None)
        run.reseed(number, micro)
        parts.append(task.first_pass(run.model, batch))
    mine, ids = joined(parts, window.ids)
    most, ranks = max(message.rows_by_rank), run.hardware.ranks
    every_id = ranks.gather_on_device(
        _filled(_on(run.hardware.accelerator.device, ids), most, torch.iinfo(torch.int64).max)
    )
    ordered, order = every_id.sort(stable=True)
    order = order[: message.rows]  # the filling stands at the end
    values = {
        name: ranks.gather_on_device(_filled(value, most, 0)).index_select(0, order) for name, value in mine.items()
    }
    return StepValues(values, ordered[: message.rows])


def values_of(values: dict[str, Tensor], ids: NDArray[np.int64]) -> StepValues:
    """Return the values of one batch alone, as if the batch were a whole step.

    Args:
        values: What the task's `first_pass` returned for the batch.
        ids: Ids of the batch's rows, `[B]`.
    """
    mine, real = joined([values], [ids])
    order = np.argsort(real, kind="stable")
    device = next(iter(mine.values())).device
    places = _on(device, order)
    return StepValues({name: value.index_select(0, places) for name, value in mine.items()}, _on(device, real[order]))


def joined(
    parts: Sequence[dict[str, Tensor]], ids: Sequence[NDArray[np.int64]]
) -> tuple[dict[str, Tensor], NDArray[np.int64]]:
    """Return (values, ids) of the rows of some micro-batches, without padding.

    Args:
        parts: Values of each micro-batch, `[B, ...]` by name.
        ids: Ids of the rows of each micro-batch, `[B]`.
    """
    every = np.concatenate(ids)
    real = np.flatnonzero(every != PADDING)
    values = {name: torch.cat([part[name] for part in parts]).detach() for name in parts[0]}
    device = next(iter(values.values())).device
    return {name: value.index_select(0, _on(device, real)) for name, value in values.items()}, every[real]


def _filled(values: Tensor, length: int, filling: int) -> Tensor:
    """Return `[length, ...]`: the values `[n, ...]` and behind them the filling."""
    return torch.cat([values, values.new_full((length - len(values), *values.shape[1:]), filling)])


def _on(device: torch.device, numbers: NDArray[np.int64]) -> Tensor:
    """Return numbers of the host on the device, without waiting for the device."""
    tensor = torch.from_numpy(np.ascontiguousarray(numbers))
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
