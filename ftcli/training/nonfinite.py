"""Detect steps whose loss or gradient is not finite, and stop the run, skip the update or roll back.

Loss and norm of a step are sums over all ranks, so every rank decides the same without communication. Both are copied
to the host while the device computes the next step, and are read one step later, so the loop does not wait for them.
An evaluation and a save call `check_newest_step` first, so that a bad step never reaches a checkpoint. A run that was
stopped by a bad step stays stopped: each later check raises the same error. This module is independent of the backend.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ftcli.runtime.errors import RunError
from ftcli.runtime.log import log_line
from ftcli.runtime.seeds import PADDING
from ftcli.training.step import HostCopy

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from ftcli.config.recipe_training import Faults
    from ftcli.data.provenance import NameRows
    from ftcli.hardware.interface import Hardware
    from ftcli.training.run import Run


MAX_ROWS_NAMED = 32  # rows of one rank in a message
REMEDY = "lower optimizer.learning_rate, lengthen schedule.warmup_steps, or look at these rows"


@dataclass
class _PendingStep:
    """A step that was not checked yet."""

    step: int
    ids: list[NDArray[np.int64]]  # of the rows of each micro-batch of this rank
    values: HostCopy  # `[2 + micro-batches]`: norm, loss, and the loss sum of each micro-batch of this rank


class NonFiniteGuard:
    """Checks the newest step and records the steps that were not finite. Its state is equal on every rank.

    Attributes:
        must_roll_back: Whether the loop must return to a checkpoint.
        excluded: Ids of training rows that the loader leaves out from now on.
        name_rows: Returns names of rows, such as file and line, for messages.
        record: One entry for each bad step that did not stop the run. It is stored in state.json.
    """

    def __init__(self, section: Faults, hardware: Hardware, excluded: set[int]) -> None:
        self.section, self.ranks = section, hardware.ranks
        self.must_roll_back = False
        self.excluded = excluded
        self.name_rows: NameRows = lambda ids: [f"sample {number}" for number in ids]
        self.record: list[dict[str, Any]] = []
        self._overflows = hardware.loss_scale is not None
        self._pending: _PendingStep | None = None
        self._error: RunError | None = None  # why the weights must not be used any more

    def restore(self, record: list[dict[str, Any]]) -> None:
        """Restore the record of a checkpoint."""
        self.record = record
        self.excluded.update(i for entry in record if entry["policy"] == "rollback" for i in entry["samples"])

    def watch(
        self, step: int, ids: list[NDArray[np.int64]], losses: list[Tensor], *, loss: Tensor, norm: Tensor
    ) -> None:
        """Start to copy the values of a step to the host.

        Args:
            step: Number of the step.
            ids: Sample ids of each micro-batch of this rank.
            losses: Loss sum of each micro-batch of this rank.
            loss: Loss of the step, summed over all ranks.
            norm: Gradient norm of the step over all ranks.
        """
        self._pending = _PendingStep(step, ids, HostCopy(torch.stack([norm.detach().to(loss), loss, *losses])))

    def is_good(self, loss: float, norm: float) -> bool:
        """Return whether loss and gradient norm are finite. Under fp16 the norm may overflow."""
        return math.isfinite(loss) and (self._overflows or math.isfinite(norm))

    def check_previous_step(self) -> bool:
        """Check the newest step. A collective if the step is bad. Waits until the device has computed it.

        Returns:
            Whether the weights may be used. False: the loop must roll back to a checkpoint.

        Raises:
            RunError: The step is bad and the policy is stop, or more steps were bad than the policy allows. Each later
                call raises it again.
        """
        if self._error is not None:
            raise self._error
        pending, self._pending = self._pending, None
        if pending is None:
            return not self.must_roll_back
        norm, loss, *losses = pending.values.wait().tolist()
        if self.is_good(loss, norm):
            return True
        try:
            self._act(pending, f"step {pending.step}: loss {loss}, gradient norm {norm}", losses)
        except RunError as error:
            self._error = error
            raise
        return not self.must_roll_back

    def _act(self, pending: _PendingStep, what: str, losses: list[float]) -> None:
        """Apply the policy to a bad step. A collective."""
        suspect_ids = [
            int(i) for ids, loss in zip(pending.ids, losses, strict=True) if not math.isfinite(loss) for i in _real(ids)
        ]
        everything = self.ranks.collect((suspect_ids, [int(i) for ids in pending.ids for i in _real(ids)]))
        samples = sorted(i for _, all_of_rank in everything for i in all_of_rank)
        description = f"{what}; {_describe_suspects([self.name_rows(suspects) for suspects, _ in everything])}"
        if not any(suspects for suspects, _ in everything):
            description += f"; rows of the step: {_shorten_list(self.name_rows(samples))}"
        policy, step = self.section.non_finite, pending.step
        if policy == "stop":
            hint = "to continue without such a step set faults.non_finite to skip or rollback"
            raise RunError(f"{description}. The step was not saved; {REMEDY}; {hint}")
        self.record.append({"step": step, "policy": policy, "samples": samples})
        bad_steps, in_all = {entry["step"] for entry in self.record}, len(self.record)
        in_a_row = next(count for count in range(1, in_all + 2) if step - count not in bad_steps)
        for count, key in ((in_a_row, "max_in_a_row"), (in_all, "max_in_all")):
            limit = getattr(self.section, key)
            if count > limit:
                raise RunError(f"{description}. faults.{key} is {limit}, and this is number {count}; {REMEDY}")
        if self.ranks.is_main:
            outcome = "its update is skipped" if policy == "skip" else "rolling back to the newest checkpoint"
            log_line(f"{description}; {outcome} ({in_a_row} in a row, {in_all} in all)")
        if policy == "rollback":
            self.excluded.update(samples)
            self.must_roll_back = True


def check_newest_step(run: Run) -> bool:
    """Check the newest step before its weights are used, and record an error in the status of a user's loop.

    A collective if the step is bad.

    Args:
        run: The run.

    Returns:
        Whether the weights may be used. False: the loop will roll back to a checkpoint.

    Raises:
        RunError: The run was stopped by a bad step.
    """
    try:
        return run.guard.check_previous_step()
    except RunError as error:
        if run.record is not None:
            run.record.fail(error)
        raise


def _real(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the ids without padding."""
    return ids[ids != PADDING]


def _describe_suspects(by_rank: list[list[str]]) -> str:
    """Return the ranks and rows whose loss is not finite, from the names of such rows on each rank."""
    ranks = [f"rank {rank}, rows {_shorten_list(names)}" for rank, names in enumerate(by_rank) if names]
    return "not finite on " + "; ".join(ranks) if ranks else "the loss is finite on every rank, the gradient is not"


def _shorten_list(names: list[str]) -> str:
    """Return names with commas, at most `MAX_ROWS_NAMED` of them."""
    more = f" and {len(names) - MAX_ROWS_NAMED} more" if len(names) > MAX_ROWS_NAMED else ""
    return ", ".join(names[:MAX_ROWS_NAMED]) + more
