"""Measure for how long a device waits for the rows of a step.

The host loads rows while the device computes the step before. The device waits only if it finishes earlier.
"""

from __future__ import annotations

import torch

from ftcli.training.batches.moment import Moment


class RowWait:
    """The time from now until `end`, as far as the device had nothing to do.

    On a GPU two events enclose the loading in the queue of the device, which reaches the first one when it has computed
    everything before. The time between them is therefore that in which it was idle.

    Args:
        device: The device of this process.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._before = device, Moment(device)
        self._after = self._before

    def end(self) -> None:
        """Note that the rows are there."""
        self._after = Moment(self._device)

    def seconds(self) -> float:
        """Return the seconds. Waits for what the device had to compute before the rows were there."""
        return min(self._after.host - self._before.host, self._after.seconds_since(self._before))
