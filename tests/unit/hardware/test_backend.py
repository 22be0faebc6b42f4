"""The backends: which methods cost a forward pass, and what each of them changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator

from ftcli.hardware.ddp import DDP
from ftcli.hardware.deepspeed import DeepSpeed
from ftcli.hardware.fsdp import FSDP2


class CountedLoss:
    """The loss of a small model, which counts its forward passes."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(3, 2)
        self.calls = 0

    def __call__(self) -> torch.Tensor:
        self.calls += 1
        return self.model(torch.ones(1, 3)).sum()


@pytest.mark.parametrize("backend", [FSDP2(), DeepSpeed()], ids=["fsdp", "deepspeed"])
def test_rebuild_ddp_buckets_of_a_backend_without_buckets_runs_no_forward_pass(backend: Any) -> None:
    loss = CountedLoss()
    backend.rebuild_ddp_buckets(Accelerator(cpu=True), loss.model, loss)
    assert loss.calls == 0 and loss.model.weight.grad is None


def test_rebuild_ddp_buckets_of_ddp_runs_one_forward_pass_and_drops_its_gradients() -> None:
    loss = CountedLoss()
    DDP().rebuild_ddp_buckets(Accelerator(cpu=True), loss.model, loss)
    assert loss.calls == 1 and loss.model.weight.grad is None
