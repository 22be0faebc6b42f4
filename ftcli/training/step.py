"""One optimizer step, as the loop yields it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from ftcli.training.batches.moment import Moment

if TYPE_CHECKING:
    from ftcli.training.terms import StepMeans


class HostCopy:
    """Values on their way from the device to the host.

    The copy begins when the object is made. `wait` waits for the work that was queued before it, not for later work.

    Args:
        values: `[N]`, on any device.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values.to("cpu", non_blocking=True)
        self._arrival = Moment(values.device)

    def wait(self) -> torch.Tensor:
        """Return the values on the host, after they have arrived."""
        self._arrival.wait()
        return self._values


@dataclass
class Step:
    """One optimizer step that is done. Reading `loss` or `grad_norm` waits for the device; the rest is on the host."""

    number: int  # steps done, this one included
    learning_rate: float
    items: int  # what the loss is a mean over: items of the whole global batch
    samples: int  # digest of the ids of the rows that were really delivered, over all ranks
    rows: int
    data_seconds: float  # time this process, or its GPU, waited for its rows
    end: Moment  # before the rows of the next step are loaded
    stop: bool  # a stop is requested, by a time limit or a file (in commands by signals too): this step is the last
    loss_tensor: torch.Tensor
    norm_tensor: torch.Tensor
    means: StepMeans  # sums and counts of the loss, its terms, its sources and the notes

    def begin_reading(self) -> HostCopy:
        """Start to copy all values to the host, and return the copy for `finish_reading`."""
        scalars = [self.loss_tensor.reshape(1), self.norm_tensor.detach().to(self.loss_tensor).reshape(1)]
        return HostCopy(torch.cat([*scalars, self.means.sums]))

    def finish_reading(self, copy: HostCopy) -> None:
        """Wait for the copy of `begin_reading`, but not for the step that the device computes meanwhile.

        Args:
            copy: The copy. The properties of this step then read it instead of the device.
        """
        values = copy.wait()
        self.loss_tensor, self.norm_tensor = values[0], values[1]
        self.means = replace(self.means, sums=values[2:])

    @cached_property
    def loss(self) -> float:
        """Loss per item, before the step's update."""
        return float(self.loss_tensor)

    @cached_property
    def grad_norm(self) -> float:
        """Global 2-norm of the gradient, before clipping; not finite when fp16 skipped the step."""
        return float(self.norm_tensor)

    @property
    def source_items(self) -> dict[str, int]:
        """Items of the whole global batch by source; empty when there is but one source."""
        return self.means.source_items

    @property
    def source_tensor(self) -> torch.Tensor:
        """Summed losses of the sources, on the device."""
        return self.means.source_sums

    @cached_property
    def source_losses(self) -> dict[str, float]:
        """Loss per item of each of several sources, before the step's update; a source without items has none."""
        return self.means.source_losses()

    @cached_property
    def term_losses(self) -> dict[str, float]:
        """Mean of each term that the task declares, before its weight and before the step's update."""
        return self.means.term_losses()

    @cached_property
    def notes(self) -> dict[str, float]:
        """Mean of each note over the whole global batch, before the step's update."""
        return self.means.notes()
