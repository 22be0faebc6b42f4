"""Measure for how long a device waits for the rows of a step.

The host loads rows while the device computes the step before. The device waits only if it finishes earlier.
"""

from __future__ import annotations

import time

import torch


class RowWait:
    """The time from now until `end`, as far as the device had nothing to do.

    On a GPU two events enclose the loading in the queue of the device, which reaches the first one when it has computed
    everything before. The time between them is therefore that in which it was idle.

    Args:
        device: The device of this process.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._started, self._seconds = device, time.perf_counter(), 0.0
        self._before = _event_now(device)
        self._after: torch.cuda.Event | None = None

    def end(self) -> None:
        """Note that the rows are there."""
        self._seconds = time.perf_counter() - self._started
        self._after = _event_now(self._device)

    def seconds(self) -> float:
        """Return the seconds. Waits for what the device had to compute before the rows were there."""
        if self._before is None or self._after is None:
            return self._seconds
        self._after.synchronize()
        return min(self._seconds, self._before.elapsed_time(self._after) / 1000)


def _event_now(device: torch.device) -> torch.cuda.Event | None:
    """Return an event in the queue of the device; None on the CPU, which computes nothing while rows are loaded."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
