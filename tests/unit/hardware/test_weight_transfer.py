"""Weights that threads copy to a device: all bits, each once, and errors of a thread reach the caller."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import Tensor, nn

from ftcli.hardware import weight_transfer

DTYPES = (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.bool)


class HostLane:
    """Copies at once, on the host, and counts the blocks of its thread."""

    made: list[HostLane]

    def __init__(self) -> None:
        self.blocks, self.thread, self.is_finished = 0, threading.current_thread(), False
        self.made.append(self)

    def copy(self, source: Tensor, target: Tensor) -> None:
        assert len(source) <= weight_transfer.BLOCK_BYTES and threading.current_thread() is self.thread
        self.blocks += 1
        target.copy_(source)

    def finish(self) -> None:
        self.is_finished = True


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> list[HostLane]:
    monkeypatch.setattr(weight_transfer, "BLOCK_BYTES", 1000)
    HostLane.made = []
    return HostLane.made


def test_copy_weights_copies_all_bits_of_each_dtype_in_one_lane_a_thread(lanes: list[HostLane]) -> None:
    shapes = ((), (0,), (1000,), (7, 11, 13), (250, 4), (1, 1001))
    sizes = [torch.empty(shape, dtype=dtype) for dtype in DTYPES for shape in shapes]
    sources = [torch.randint(0, 2, (one.nbytes,), dtype=torch.uint8).view(one.dtype).view(one.shape) for one in sizes]
    targets = [torch.zeros_like(source) for source in sources]
    together = threading.Barrier(3)  # each thread makes its lane before any of them copies

    def new_lane() -> HostLane:
        together.wait(timeout=60)
        return HostLane()

    weight_transfer.copy_weights(sources, targets, new_lane, threads=3)
    for source, target in zip(sources, targets, strict=True):
        assert source.reshape(-1).view(torch.uint8).equal(target.reshape(-1).view(torch.uint8))
    assert len(lanes) == len({lane.thread for lane in lanes}) == 3
    assert all(lane.is_finished for lane in lanes)
    assert sum(lane.blocks for lane in lanes) == sum(max(1, -(-source.nbytes // 1000)) for source in sources)


def test_copy_weights_with_a_failing_thread_raises_its_error(lanes: list[HostLane]) -> None:
    class Full(HostLane):
        def copy(self, source: Tensor, target: Tensor) -> None:
            raise RuntimeError("no memory is left")

    weights = [torch.ones(5000)]
    with pytest.raises(RuntimeError, match="no memory is left"):
        weight_transfer.copy_weights(weights, weights, Full, threads=2)


def test_copy_weights_ends_soon_after_a_thread_failed(lanes: list[HostLane]) -> None:
    class First(HostLane):
        def copy(self, source: Tensor, target: Tensor) -> None:
            super().copy(source, target)
            if self is lanes[0]:
                raise RuntimeError("no memory is left")
            time.sleep(0.005)  # a slow disk

    weights = [torch.ones(250_000)]  # a thousand blocks
    with pytest.raises(RuntimeError, match="no memory is left"):
        weight_transfer.copy_weights(weights, [torch.zeros(250_000)], First, threads=2)
    assert sum(lane.blocks for lane in lanes) < 500


def test_large_weights_are_plain_contiguous_parameters_on_the_host_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Packed(nn.Parameter):
        """Stands for a quantised weight."""

    monkeypatch.setattr(weight_transfer, "LEAST_BYTES", 4 * 64)
    model = nn.Module()
    model.first = nn.Parameter(torch.ones(8, 8))
    model.tied = model.first
    model.small = nn.Parameter(torch.ones(7, 9))
    model.across = nn.Parameter(torch.ones(8, 9).T)
    model.empty = nn.Parameter(torch.ones(8, 8, device="meta"))
    model.packed = Packed(torch.ones(8, 8))
    model.frozen = nn.Parameter(torch.ones(8, 8, dtype=torch.float64), requires_grad=False)
    model.register_buffer("buffer", torch.ones(8, 8))
    assert [id(one) for one in weight_transfer.large_weights(model)] == [id(model.first), id(model.frozen)]


def test_move_to_the_host_changes_nothing() -> None:
    model = nn.Linear(600, 600)
    weight, address = model.weight, model.weight.data_ptr()
    assert weight_transfer.move(model, torch.device("cpu")) is model
    assert model.weight is weight and weight.data_ptr() == address
