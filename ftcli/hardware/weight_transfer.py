"""Copy the weights of a model from the host to a GPU with several threads, with the same values as `Module.to`.

transformers leaves weights where they are in the mapped files of a model. `Module.to` copies them one after the other
in one thread, which waits for each page of a file, and the driver copies each page once more into its own buffer. Here
each thread fills one pinned buffer while the GPU reads the other one. Python's lock is free while bytes are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from threading import Event, Lock
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ftcli.runtime.log import log_line

if TYPE_CHECKING:
    from torch.cuda import Event as CudaEvent


THREADS = 8  # at most; each has two pinned buffers, which PyTorch keeps for later
BLOCK_BYTES = 8 << 20  # of a buffer
LEAST_BYTES = 1 << 20  # of a weight; `Module.to` copies smaller ones, such as those of adapters


class Lane(Protocol):
    """Copies blocks of bytes to the device, in one thread."""

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Begin to copy a block `[bytes]` on the host to a block on the device."""

    def finish(self) -> None:
        """Wait until all blocks are copied."""


class PinnedLane:
    """Two pinned buffers and a stream: one buffer is filled while the GPU reads the other."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.set_device(device)  # a new thread has the first GPU, and a pinned buffer would start CUDA there
        self._stream = torch.cuda.Stream(device)
        self._buffers = [torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._events: list[CudaEvent] = [torch.cuda.Event() for _ in range(2)]
        self._turn = 0

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Begin to copy a block `[bytes]` on the host to a block on the device."""
        self._turn = 1 - self._turn
        buffer, event = self._buffers[self._turn][: len(source)], self._events[self._turn]
        event.synchronize()  # device synchronisation: the GPU has read this buffer
        np.copyto(buffer.numpy(), source.numpy())  # PyTorch's copy would start its threads for each of ours
        with torch.cuda.stream(self._stream):
            target.copy_(buffer, non_blocking=True)
        event.record(self._stream)

    def finish(self) -> None:
        """Wait until all blocks are copied."""
        self._stream.synchronize()  # device synchronisation


def move(model: nn.Module, device: torch.device) -> nn.Module:
    """Return the model on a device, as `model.to(device)` does. The weights of a GPU are copied by several threads.

    Where pinned memory or threads are scarce, one thread copies them.

    Args:
        model: The model. Weights that are on a device already stay there.
        device: The device.
    """
    if device.type == "cuda" and (weights := large_weights(model)):
        index = torch.cuda.current_device() if device.index is None else device.index
        device = torch.device("cuda", index)
        targets = [torch.empty_like(weight.detach(), device=device) for weight in weights]
        torch.cuda.synchronize(device)  # device synchronisation: the memory of targets may still be in use
        threads = min(THREADS, max(2, torch.get_num_threads()))
        try:
            copy_weights([weight.detach() for weight in weights], targets, lambda: PinnedLane(device), threads)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            del targets
            log_line(f"weights: copied to the GPU by one thread, because several failed ({error})")
        else:
            for weight, target in zip(weights, targets, strict=True):
                weight.data = target
    return model.to(device)


def large_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a model that threads can copy: large ones on the host, each once."""
    return [
        parameter
        for parameter in model.parameters()
        if type(parameter) is nn.Parameter  # a quantised weight has more than one tensor
        and type(parameter.data) is Tensor
        and parameter.device.type == "cpu"
        and parameter.layout == torch.strided
        and parameter.is_contiguous()
        and parameter.nbytes >= LEAST_BYTES
    ]


def copy_weights(
    sources: Sequence[Tensor], targets: Sequence[Tensor], new_lane: Callable[[], Lane], threads: int
) -> None:
    """Copy the bytes of tensors to other tensors of the same shapes and dtypes, block by block.

    Args:
        sources: Contiguous tensors on the host.
        targets: Contiguous tensors, on the device of the lanes.
        new_lane: Makes the lane of a thread; it is called in that thread.
        threads: Number of threads.

    Raises:
        RuntimeError: A thread could not be started, or had no pinned memory, or the device failed.
    """
    blocks, lock, stop = _blocks(sources, targets), Lock(), Event()

    def work() -> None:
        lane = new_lane()
        while not stop.is_set():
            with lock:  # a generator cannot be resumed by two threads
                block = next(blocks, None)
            if block is None:
                break
            lane.copy(*block)
        lane.finish()

    with ThreadPoolExecutor(threads, thread_name_prefix="weights") as pool:
        try:
            for future in as_completed([pool.submit(work) for _ in range(threads)]):
                future.result()
        finally:  # after an error, or an interrupt, the others end with their block
            stop.set()


def _blocks(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the blocks of bytes of each tensor, in the order of the tensors, and so of their files."""
    for source, target in zip(sources, targets, strict=True):
        pair = (source.reshape(-1).view(torch.uint8), target.reshape(-1).view(torch.uint8))
        yield from zip(*(flat.split(BLOCK_BYTES) for flat in pair), strict=True)
