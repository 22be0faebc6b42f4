"""Tensors that DistributedDataParallel's process group references after a run is deleted."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.futures import Future

from ftcli.hardware.ddp import DDP, PENDING_WORKS


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

    A summed tensor stays referenced until the watchdog has seen the collective end and the next one begins.
    """

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.pending: list[Any] = []  # not seen done
        self.shelves: list[Any] = []  # seen done
        self.references: list[Any] = []  # a weak reference to each tensor of a collective

    def name(self) -> str:
        return "nccl"

    def _wait_for_pending_works(self) -> None:
        self.shelves, self.pending = self.shelves + self.pending, []

    def allreduce(self, tensors: list[Any], options: Any = None) -> Done:
        self.shelves.clear()
        alias = tensors[0].detach()  # the same memory under a reference of its own
        self.pending.append(alias)
        self.references.append(weakref.ref(alias))
        return Done(tensors)

    def broadcast(self, tensors: list[Any], options: Any = None) -> Done:
        return Done(tensors)

    def allgather(self, outputs: list[Any], inputs: list[Any], options: Any = None) -> Done:
        for output, own in zip(outputs, inputs, strict=True):
            output[0].copy_(own)
        return Done(outputs)


def test_release_of_a_ddp_model_leaves_no_gradients_in_the_process_group() -> None:
    group = LikeNccl()
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Linear(30, 30), process_group=group, gradient_as_bucket_view=True
    )
    for _ in range(2):
        model(torch.ones(2, 30)).sum().backward()
        model.zero_grad()
    references = list(group.references)
    assert len(references) >= 2 and all(reference() is not None for reference in references[-1:])
    DDP().release(model)
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)
    assert PENDING_WORKS.missing() is None, "the group of this test has a method that torch's own has not"
