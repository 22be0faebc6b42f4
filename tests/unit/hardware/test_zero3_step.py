"""One tensor for neighbouring gradients, and a stream that does not make the host wait."""

from __future__ import annotations

import pytest
import torch

from ftcli.hardware.zero3_step import OrderedStream, adjacent


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
