"""Exchange small messages between ranks over a host-side process group, so that no device waits for them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor


PATIENCE = timedelta(days=1)  # one rank may read or write files while the others wait
_PATIENT: dict[str, Any] = {}  # the default process group, and the patient group that belongs to it


def patient_group() -> Any:
    """Return a host-side group of all ranks whose collectives wait up to a day. The first call is a collective."""
    if _PATIENT.get("world") is not dist.group.WORLD:
        _PATIENT.update(world=dist.group.WORLD, group=dist.new_group(backend="gloo", timeout=PATIENCE))
    return _PATIENT["group"]


class Ranks:
    """The processes of a run. With one process no method communicates.

    Attributes:
        rank: Index of this process.
        world: Number of processes.
        is_main: Whether this is the main process, which writes files.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.rank, self.world = accelerator.process_index, accelerator.num_processes
        self.is_main = accelerator.is_main_process
        self._group = dist.new_group(backend="gloo") if self.world > 1 else None
        # Threads that save use a separate group, in which they wait for the slowest disk.
        self._savers = dist.new_group(backend="gloo", timeout=PATIENCE) if self.world > 1 else None
        if self.world > 1:
            patient_group()  # created here, by all ranks at the same time

    def sum_later(self, values: list[int]) -> Callable[[], list[int]]:
        """Start an all-reduce of integers over all ranks. A collective.

        Args:
            values: Integers; sums are modulo 2^64. Their number is equal on all ranks.

        Returns:
            A function that waits for the sums and returns them as int64 values.
        """
        message = torch.from_numpy(np.array([value % 2**64 for value in values], dtype=np.uint64).view(np.int64))
        work = dist.all_reduce(message, group=self._group, async_op=True) if self.world > 1 else None

        def sums() -> list[int]:
            if work is not None:
                work.wait()
            return message.tolist()

        return sums

    def any(self, flag: bool) -> bool:
        """Return whether a flag is true on any rank. A collective."""
        return self.sum_later([int(flag)])()[0] > 0

    def gather(self, values: NDArray) -> NDArray:
        """Return the values of all ranks, concatenated in order of rank. A collective.

        Args:
            values: `[n, ...]`, of the same shape on all ranks.

        Returns:
            `[ranks * n, ...]`.
        """
        if self.world == 1:
            return values
        mine = torch.from_numpy(np.ascontiguousarray(values))
        parts = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(parts, mine, group=self._group)
        return torch.cat(parts).numpy()

    def sum_on_device(self, value: Tensor) -> Tensor:
        """Return the sum of a device tensor over all ranks. A collective; the host does not wait for the device."""
        total = value.detach().clone()
        if self.world > 1:
            dist.all_reduce(total)
        return total

    def gather_on_device(self, value: Tensor) -> Tensor:
        """Return a device tensor of all ranks, concatenated in order of rank. A collective without a host sync.

        Args:
            value: `[n, ...]`, of the same shape on all ranks.

        Returns:
            `[ranks * n, ...]`, without gradient.
        """
        mine = value.detach().contiguous()
        if self.world == 1:
            return mine
        every = mine.new_empty((self.world * len(mine), *mine.shape[1:]))
        dist.all_gather_into_tensor(every, mine)
        return every

    def collect(self, value: Any, *, background: bool = False) -> list[Any]:
        """Return the values of all ranks, in order of rank. A collective.

        Args:
            value: Any small object that can be pickled.
            background: Whether the caller is a thread that saves. Its messages must not mix with those of the main
                thread.
        """
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self._savers if background else self._group)
        return values

    def wait_for_slowest(self) -> None:
        """Wait up to a day until every rank calls this method; a collective.

        Call it before a device collective that one rank may reach late because it reads or writes files. The device's
        process group gives up after 10 minutes (NCCL) or 30 minutes (gloo).
        """
        if self.world > 1:
            dist.barrier(group=patient_group())

    def close(self) -> None:
        """Wait until every rank calls this method, then destroy the process group. A collective."""
        if dist.is_initialized():
            self.wait_for_slowest()
            dist.destroy_process_group()
