"""One tensor for neighbouring gradients, and a stream that does not make the host wait."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ftcli.hardware.zero3_step import OrderedStream, _allocate_and_add, _step_and_clear, _step_and_free, adjacent


def test_adjacent_of_neighbours_in_one_buffer_is_a_view_of_all() -> None:
    buffer = torch.arange(12.0)
    view = adjacent([buffer[2:5], buffer[5:6], buffer[6:10]])
    assert view is not None and view.tolist() == list(range(2, 10)) and view.data_ptr() == buffer[2:].data_ptr()


@pytest.mark.parametrize(
    "tensors",
    [
        lambda buffer: [],
        lambda buffer: [buffer[0:3], buffer[4:6]],  # a gap
        lambda buffer: [buffer[3:6], buffer[0:3]],  # another order
        lambda buffer: [buffer[0:3], buffer[3:6].clone()],  # another buffer
        lambda buffer: [buffer[0:3], buffer.view(torch.int32)[3:6]],  # another dtype
        lambda buffer: [buffer.view(4, 3)[:, :1], buffer[1:3]],  # not contiguous
    ],
)
def test_adjacent_of_other_tensors_is_none(tensors: object) -> None:
    assert callable(tensors) and adjacent(tensors(torch.arange(12.0))) is None


def test_ordered_stream_makes_the_current_stream_wait_and_not_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[object] = []

    class Current:
        wait_stream = waited.append

    monkeypatch.setattr(torch.cuda, "current_stream", Current)
    stream: object = object()
    OrderedStream.synchronize(stream)  # type: ignore[arg-type]
    assert waited == [stream]


def buffer_of_gradients() -> tuple[Any, list[float]]:
    """Return an optimizer with a buffer of gradients, and the list to which its step adds their sum."""
    sums: list[float] = []
    zero: Any = SimpleNamespace(grad_partitions_flat_buffer=torch.ones(4), averaged_gradients={0: []})
    zero.step = lambda: sums.append(float(zero.grad_partitions_flat_buffer.sum()))
    return zero, sums


def test_a_freed_buffer_is_allocated_with_zeros_for_gradients_and_for_a_step_without_any() -> None:
    zero, sums = buffer_of_gradients()

    def add(weights: list[Any], shards: list[torch.Tensor]) -> list[torch.Tensor]:
        zero.grad_partitions_flat_buffer[1] += 5
        return shards

    _step_and_free(zero, zero.step)
    assert zero.grad_partitions_flat_buffer.untyped_storage().size() == 0 and zero.averaged_gradients == {}
    _allocate_and_add(zero, add, [], [])
    _allocate_and_add(zero, add, [], [])
    _step_and_free(zero, zero.step)
    _step_and_free(zero, zero.step)  # no weight of this rank had a gradient
    assert sums == [4.0, 10.0, 0.0]


def test_step_and_clear_leaves_no_gradient_to_weights_that_the_next_step_does_not_use() -> None:
    zero, sums = buffer_of_gradients()
    _step_and_clear(zero, zero.step)
    _step_and_clear(zero, zero.step)
    assert sums == [4.0, 0.0]
