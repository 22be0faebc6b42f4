"""Copy the next micro-batch of an accumulation window to the device while the device computes the current one.

At most two micro-batches are on the device. On the CPU nothing is copied. This module is independent of task, model and
backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from ftcli.models.kernels.host_embeddings import remember_on_host
from ftcli.models.kernels.padding_masks import Padding, padding_of, use_padding

if TYPE_CHECKING:
    from ftcli.tasks.protocol import Batch


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Return a batch with its tensors on a device. Copies from pinned memory do not block the host."""
    return {
        name: value.to(device, non_blocking=True) if hasattr(value, "to") else value for name, value in batch.items()
    }


class DevicePrefetcher:
    """Copies batches to a device, on CUDA through pinned memory and in a separate stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def ahead(self, batches: list[Batch]) -> Iterator[Batch]:
        """Copy batches to the device one ahead. The first copy has started when this method returns.

        Until the caller takes the next batch, its attention layers use the padding of the current one.

        Args:
            batches: Batches on the host.

        Returns:
            The batches on the device, in the same order.
        """
        return self._yield_batches(batches, self._start(batches[0]) if batches else None)

    def _yield_batches(self, batches: list[Batch], first: _Copy | None) -> Iterator[Batch]:
        copy = first
        for number in range(len(batches)):
            assert copy is not None
            batch, padding = copy.arrived(), copy.padding
            copy = self._start(batches[number + 1]) if number + 1 < len(batches) else None
            with use_padding(padding, batch.get("attention_mask")):
                yield batch

    def _start(self, batch: Batch) -> _Copy:
        return _Copy(batch, self.device, self._stream)


class _Copy:
    """A batch whose copy to the device has started."""

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
            if isinstance(self._batch.get("input_ids"), torch.Tensor):
                remember_on_host(self._batch["input_ids"], pinned["input_ids"])
            self._event = stream.record_event()

    def arrived(self) -> Batch:
        """Return the batch. The device waits for the copy before it computes, the host does not wait."""
        if self._event is not None:
            computing = torch.cuda.current_stream()
            computing.wait_event(self._event)
            for value in self._batch.values():
                if isinstance(value, torch.Tensor):
                    value.record_stream(computing)  # the allocator must not reuse its memory before
        return dict(self._batch)
