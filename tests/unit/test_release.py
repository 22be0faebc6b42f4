"""What DistributedDataParallel's process group still holds when a run is thrown away."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.futures import Future

from ftcli.hardware import ddp


class Done(torch.distributed._Work):
    """A collective that is done."""

    def __init__(self, tensors: list[Any]) -> None:
        super().__init__()
        self.future: Any = Future()
        self.future.set_result(tensors)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> Any:
        return self.future


class LikeNccl(ProcessGroup):
    """One rank whose collectives hold their tensors as NCCL's do, when nobody waits for the work itself.

    What is summed is held until the watchdog has seen it done and the next collective begins.
    """

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.pending: list[Any] = []  # not seen done
        self.shelves: list[Any] = []  # seen done
        self.held: list[Any] = []  # a weak reference to each that was ever held

    def name(self) -> str:
        return "nccl"

    def _wait_for_pending_works(self) -> None:
        self.shelves, self.pending = self.shelves + self.pending, []

    def allreduce(self, tensors: list[Any], options: Any = None) -> Done:
        self.shelves.clear()
        held = tensors[0].detach()  # the same memory under a reference of its own
        self.pending.append(held)
        self.held.append(weakref.ref(held))
        return Done(tensors)

    def broadcast(self, tensors: list[Any], options: Any = None) -> Done:
        return Done(tensors)

    def allgather(self, outputs: list[Any], inputs: list[Any], options: Any = None) -> Done:
        for output, own in zip(outputs, inputs, strict=True):
            output[0].copy_(own)
        return Done(outputs)


def test_a_copy_of_the_model_that_is_released_leaves_no_gradients_in_the_process_group() -> None:
    group = LikeNccl()
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Linear(30, 30), process_group=group, gradient_as_bucket_view=True
    )
    for _ in range(2):
        model(torch.ones(2, 30)).sum().backward()
        model.zero_grad()
    held = list(group.held)
    assert len(held) >= 2 and all(reference() is not None for reference in held[-1:])
    ddp.release(model)
    gc.collect()
    assert [reference() for reference in held] == [None] * len(held)
