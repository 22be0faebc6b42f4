"""The lookup of embeddings whose table is on the host."""

from __future__ import annotations

import torch

from ftcli.models.kernels.host_embeddings import HostLookup, remember_on_host


def test_host_lookup_returns_the_rows_of_ids_of_any_shape() -> None:
    table = torch.randn(7, 3, dtype=torch.bfloat16)
    ids = torch.tensor([[6, 0, 2], [2, 2, 1]])
    assert HostLookup(table)(ids).equal(torch.nn.functional.embedding(ids, table))
    assert not HostLookup(table)(ids).requires_grad


def test_host_lookup_uses_the_copy_of_ids_on_the_host() -> None:
    table, ids = torch.randn(7, 3), torch.tensor([1, 2])
    remember_on_host(ids, torch.tensor([5, 6]))  # another value shows which one is read
    assert HostLookup(table)(ids).equal(table[5:])
