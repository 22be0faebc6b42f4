"""Sums by row: values by hand, gradients, and the operations that they are made of."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ftcli.tasks.shared.row_sums import row_index, sum_by_row

ATOMIC = ("index_add", "scatter_add", "scatter_reduce", "index_put", "index_put_", "_index_put_impl_", "bincount")


def test_row_index_of_rows_of_unequal_length_is_filled_up() -> None:
    actual = row_index([2, 0, 3])
    assert actual["row_index"].tolist() == [[0, 1, 5], [5, 5, 5], [2, 3, 4]]
    assert actual["row_of_item"].tolist() == [0, 0, 2, 2, 2]


def test_sum_by_row_gives_the_sums_and_each_value_the_gradient_of_its_row() -> None:
    values = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0], requires_grad=True)
    sums = sum_by_row(values, **row_index([2, 0, 3]))
    assert sums.tolist() == [3.0, 0.0, 28.0]
    (sums * torch.tensor([1.0, 5.0, -2.0])).sum().backward()
    assert values.grad is not None and values.grad.tolist() == [1.0, 1.0, -2.0, -2.0, -2.0]


def test_sum_by_row_of_padding_alone_is_zero() -> None:
    values = torch.zeros(0, requires_grad=True)
    sums = sum_by_row(values, **row_index([0, 0]))
    assert sums.tolist() == [0.0, 0.0]
    sums.sum().backward()
    assert values.grad is not None and values.grad.shape == (0,)


def test_sum_by_row_of_random_rows_equals_the_sums_of_slices() -> None:
    draw = random.Random(0)
    for _ in range(50):
        counts = [draw.randint(0, 9) for _ in range(draw.randint(1, 12))]
        values = torch.rand(sum(counts), dtype=torch.float64, requires_grad=True)
        expected = torch.stack([part.sum() for part in values.split(counts)])
        torch.testing.assert_close(sum_by_row(values, **row_index(counts)), expected)
        assert torch.autograd.gradcheck(lambda v, c=counts: sum_by_row(v, **row_index(c)), (values,)) or not counts


class Names(TorchDispatchMode):
    """Collects the names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_sum_by_row_adds_nothing_in_an_order_that_may_change() -> None:
    values, index = torch.rand(9, requires_grad=True), row_index([4, 5])
    with Names() as names:
        sum_by_row(values, **index).sum().backward()
    assert names.seen and names.seen.isdisjoint(ATOMIC)
    with Names() as names:
        torch.zeros(2).index_add(0, index["row_of_item"], values.detach())
    assert not names.seen.isdisjoint(ATOMIC)
