"""The lookup of embeddings whose table is on the host."""

from __future__ import annotations

import torch

from ftcli.models.kernels.host_embeddings import HostLookup, remember_on_host


def test_host_lookup_returns_the_rows_of_ids_of_any_shape() -> None:
    table = torch.randn(7, 3, dtype=torch.bfloat16)
    ids = torch.tensor([[6, 0, 2], [2, 2, 1]])
    lookup = HostLookup(table, torch.device("cpu"))
    for each in (ids, ids[0], ids[:0], ids.int()):
        assert lookup(each).equal(torch.nn.functional.embedding(each, table))
    rows = lookup(ids)
    rows[0, 0] = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))  # as models write trained vectors
    assert rows.requires_grad and not lookup(ids).requires_grad


def test_host_lookup_uses_the_copy_of_ids_on_the_host() -> None:
    table, ids = torch.randn(7, 3), torch.tensor([1, 2])
    remember_on_host(ids, torch.tensor([5, 6]))  # another value shows which one is read
    lookup = HostLookup(table, torch.device("cpu"))
    assert lookup(ids).equal(table[5:])
    ids[0] = 3  # then the copy is of other ids
    assert lookup(ids).equal(table[[3, 2]])
