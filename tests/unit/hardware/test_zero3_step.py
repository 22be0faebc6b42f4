"""One tensor for neighbouring gradients, and a stream that does not make the host wait."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ftcli.config.profile import LARGEST_PART, LEAST_PART, PARTS
from ftcli.hardware.zero3_step import (
    PARTITIONS,
    OrderedStream,
    _allocate_and_add,
    _step_and_clear,
    _step_and_free,
    adjacent,
    divide_buffer,
    sub_group_size,
)


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


def optimizer_with_gradients() -> tuple[Any, list[float]]:
    """Return an optimizer with two sub-groups of one weight each, and the list to which its step adds all gradients."""
    sums: list[float] = []
    weights = [
        SimpleNamespace(ds_id=number, partition_numel=lambda size=size: size) for number, size in enumerate((4, 2))
    ]
    whole = torch.ones(6)
    zero: Any = SimpleNamespace(fp16_groups=[[weight] for weight in weights], averaged_gradients={0: []})
    setattr(zero, PARTITIONS, dict(enumerate(whole.split([4, 2]))))
    zero.grad_partitions_flat_buffer = whole
    zero.step = lambda: sums.append(sum(float(part.sum()) for part in getattr(zero, PARTITIONS).values()))
    return zero, sums


def test_gradients_of_a_sub_group_are_allocated_with_zeros_at_its_first_gradient_or_in_a_step() -> None:
    zero, sums = optimizer_with_gradients()
    whole = zero.grad_partitions_flat_buffer
    buffers = divide_buffer(zero)

    def sizes() -> list[int]:
        return [part.untyped_storage().size() for part in getattr(zero, PARTITIONS).values()]

    def add(weights: list[Any], shards: list[torch.Tensor]) -> list[torch.Tensor]:
        getattr(zero, PARTITIONS)[weights[0].ds_id][1] += 5
        return shards

    (first,), (second,) = zero.fp16_groups
    assert sizes() == [0, 0] and whole.untyped_storage().size() == 0 and zero.grad_partitions_flat_buffer is None
    _allocate_and_add(buffers, add, [second], [])
    _allocate_and_add(buffers, add, [second], [])
    assert sizes() == [0, 8]
    _allocate_and_add(buffers, add, [first], [])
    _step_and_free(zero, buffers, zero.step)
    assert sizes() == [0, 0] and zero.averaged_gradients == {}
    _step_and_free(zero, buffers, zero.step)  # no weight of this rank had a gradient
    assert sums == [15.0, 0.0]


@pytest.mark.parametrize(
    ("trained", "frozen", "elements"),
    [
        (8, 0, LEAST_PART),
        (PARTS * 2 * LEAST_PART + PARTS * 2 * 7, 0, LEAST_PART + 7),
        (PARTS * 2 * LEAST_PART, PARTS * 2 * LEAST_PART, LEAST_PART),
        (PARTS * 2 * (LARGEST_PART + 7), 0, LARGEST_PART),
    ],
)
def test_sub_groups_are_a_share_of_the_trained_weights_of_a_rank(trained: int, frozen: int, elements: int) -> None:
    model = torch.nn.Module()
    for name, size in (("trained", trained), ("frozen", frozen)):
        weight = torch.nn.Parameter(torch.empty(size, device="meta"), requires_grad=name == "trained")
        model.register_parameter(name, weight)
    assert sub_group_size(model, 2) == elements


def test_step_and_clear_leaves_no_gradient_to_weights_that_the_next_step_does_not_use() -> None:
    zero, sums = optimizer_with_gradients()
    _step_and_clear(zero, zero.step)
    _step_and_clear(zero, zero.step)
    assert sums == [6.0, 0.0]
