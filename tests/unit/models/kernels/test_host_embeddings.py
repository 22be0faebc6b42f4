"""The lookup of embeddings whose table is on the host."""

from __future__ import annotations

import pytest
import torch

from ftcli.models.kernels.host_embeddings import HostLookup, movable_bytes, remember_on_host
from ftcli.runtime.errors import InputError

from ..estimates.test_memory_estimate import recipe


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


class Own(torch.nn.Module):
    """A model of a user, whose forward function reads the weight of its embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(10, 4).requires_grad_(False)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embed


class Faulty(Own):
    def get_input_embeddings(self) -> torch.nn.Module:
        raise RuntimeError("no text here")


def test_auto_leaves_the_embeddings_of_models_that_it_does_not_know() -> None:
    adapted = recipe(adapter={"type": "lora"})
    assert movable_bytes(Own(), adapted) == movable_bytes(Faulty(), adapted) == 0
    asked = recipe(adapter={"type": "lora"}, model={"name": "m", "embeddings_on_host": True})
    assert movable_bytes(Own(), asked) == 10 * 4 * 4, "the recipe decides"
    with pytest.raises(InputError, match="the input embeddings of Faulty are no plain table"):
        movable_bytes(Faulty(), asked)
