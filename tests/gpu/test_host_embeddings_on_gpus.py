"""Embeddings in host memory: the same rows, less memory, and no waiting for the device in training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ftcli.loop import steps
from ftcli.models.kernels.host_embeddings import HostLookup
from ftcli.training.batches.prefetch import DevicePrefetcher
from ftcli.training.setup import prepare

from ..support.cells import cell

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_rows_arrive_on_the_device_with_the_bits_of_the_table() -> None:
    table = torch.randn(1000, 64, dtype=torch.bfloat16)
    lookup, ids = HostLookup(table, torch.device("cuda")), torch.randint(1000, (3, 500))
    (batch,) = DevicePrefetcher(torch.device("cuda")).ahead([{"input_ids": ids}])
    assert batch["input_ids"].on_host[0].equal(ids)
    for given in (batch["input_ids"], ids.cuda()):  # with a copy of the ids on the host, and without
        rows = lookup(given)
        assert rows.is_cuda and rows.cpu().equal(torch.nn.functional.embedding(ids, table))


def test_lookup_of_a_training_batch_does_not_wait_for_the_device() -> None:
    table = torch.randn(1000, 64)
    (batch,) = DevicePrefetcher(torch.device("cuda")).ahead([{"input_ids": torch.randint(1000, (2, 50))}])
    torch.cuda.set_sync_debug_mode("error")
    try:
        HostLookup(table, torch.device("cuda"))(batch["input_ids"])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_training_with_embeddings_on_the_host_has_the_same_losses(inputs: Path) -> None:
    losses = []
    for on_host in (False, True):
        recipe = cell(inputs, "sft-dora", precision="bf16")
        recipe = recipe.model_copy(
            update={"model": recipe.model.model_copy(update={"embeddings_on_host": on_host, "torch_compile": False})}
        )
        run = prepare(recipe)
        losses.append([step.loss for step in steps(run)])
        run.hardware.release(run.model)
    assert losses[0] == losses[1]
