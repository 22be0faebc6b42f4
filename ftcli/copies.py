"""The micro-batches of a window on the device: the next one is copied while the device computes this one.

Two of them are there at most, however many a window has. On the CPU they are where they are. Knows no task, no model
and no backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from .padding import Padding, padding_of, told

if TYPE_CHECKING:
    from .tasks.protocol import Batch


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Return a batch's tensors on a device, copied without waiting where they are in pinned memory; numbers stay."""
    return {
        name: value.to(device, non_blocking=True) if hasattr(value, "to") else value for name, value in batch.items()
    }


class Copies:
    """Copies batches to a device, on CUDA through pinned memory and beside what the device computes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def ahead(self, batches: list[Batch]) -> Iterator[Batch]:
        """Return the batches on the device, in order; the first is on its way when this returns.

        While one is the caller's, models are told how it is padded, and the copy of the next is under way.
        """
        return self._each(batches, self._start(batches[0]) if batches else None)

    def _each(self, batches: list[Batch], first: _Copy | None) -> Iterator[Batch]:
        copy = first
        for number in range(len(batches)):
            assert copy is not None
            batch, padding = copy.arrived(), copy.padding
            copy = self._start(batches[number + 1]) if number + 1 < len(batches) else None
            with told(padding, batch.get("attention_mask")):
                yield batch

    def _start(self, batch: Batch) -> _Copy:
        return _Copy(batch, self.device, self._stream)


class _Copy:
    """A batch on its way to the device."""

    def __init__(self, batch: Batch, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self.padding: Padding | None = padding_of(batch)
        self._event: torch.cuda.Event | None = None
        if stream is None:
            self._batch = on_device(batch, device)
            return
        with torch.cuda.stream(stream):
            pinned = {
                name: value.pin_memory() if isinstance(value, torch.Tensor) else value for name, value in batch.items()
            }
            self._batch = on_device(pinned, device)  # PyTorch keeps pinned memory until the copy that reads it is done
            self._event = stream.record_event()

    def arrived(self) -> Batch:
        """Return the batch; what the device computes from now on waits for it, the host does not."""
        if self._event is not None:
            computing = torch.cuda.current_stream()
            computing.wait_event(self._event)
            for value in self._batch.values():
                if isinstance(value, torch.Tensor):
                    value.record_stream(computing)  # its memory may be used anew only after this
        return dict(self._batch)
