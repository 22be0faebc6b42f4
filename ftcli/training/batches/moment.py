"""A moment of a run on the clocks of the host and of the device, which works behind the host.

The module never imports torch without a GPU, because `training/run.py` does not either.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Moment:
    """Now on the host, and on a GPU the moment at which it has computed everything that was queued before.

    Args:
        device: The device of this process.

    Attributes:
        host: Seconds of the host's clock.
        event: The moment in the queue of a GPU; None on other devices.
    """

    def __init__(self, device: torch.device) -> None:
        self.host = time.perf_counter()
        self.event: torch.cuda.Event | None = None
        if device.type == "cuda":
            import torch

            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Wait until the device has reached this moment. A CPU has."""
        if self.event is not None:
            self.event.synchronize()

    def seconds_since(self, earlier: Moment) -> float:
        """Return the seconds between two moments, of the device if it is a GPU. Waits until it has reached both."""
        if self.event is None or earlier.event is None:
            return self.host - earlier.host
        self.wait()
        return earlier.event.elapsed_time(self.event) / 1000
