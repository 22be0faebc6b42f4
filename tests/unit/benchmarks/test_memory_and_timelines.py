"""The scripts that divide a GPU's memory by places of the source, and that count a raw timeline."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = str(Path(__file__).resolve().parents[3] / "benchmarks")


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", ["pytest"])


def event(action: str, addr: int, size: int, *places: str) -> dict[str, Any]:
    frames = [dict(zip(("filename", "line", "name"), place.split(":"), strict=True)) for place in places]
    return {"action": action, "addr": addr, "size": size, "frames": frames}


def test_table_has_the_blocks_that_live_at_the_peak() -> None:
    from memory_parts import table

    own, other = "/x/ftcli/models/losses.py:7:nll", "/y/site-packages/torch/functional.py:3:pad"
    events = [
        event("alloc", 1, 2**30, own),
        event("alloc", 2, 2**30, other, own),
        event("free_requested", 2, 2**30),
        event("free_completed", 2, 2**30),
        event("alloc", 2, 2**31, other, own),
        event("alloc", 3, 2**29),
        event("free_requested", 2, 2**31),
        event("alloc", 4, 2**30, own),
    ]
    assert table(events) == [
        "3.50 GiB at the peak (event 6 of 8)",
        "    GiB  blocks  place",
        "  2.000       1  torch/functional.py:3 pad  <-  models/losses.py:7 nll",
        "  1.000       1  models/losses.py:7 nll",
        "  0.500       1  without a Python stack",
    ]


def test_timeline_counts_communication_alone_and_beside_computation(tmp_path: Path) -> None:
    from trace_timelines import timeline

    def span(name: str, category: str, start: float, length: float) -> dict[str, Any]:
        return {"ph": "X", "name": name, "cat": category, "ts": start, "dur": length}

    events = [
        span("ftcli.step", "user_annotation", 1000, 5000),
        span("ftcli.step", "user_annotation", 6000, 5000),
        span("nccl_before_the_steps", "kernel", 0, 500),
        span("ncclDevKernel_AllReduce", "kernel", 2000, 3000),
        span("gemm", "kernel", 4000, 4000),
        span("ncclDevKernel_AllGather", "kernel", 7000, 2000),
        span("ncclDevKernel_AllGather", "cpu_op", 9000, 2000),
    ]
    path = tmp_path / "rank-0.trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    assert timeline(path) == {"step": 5.0, "hidden": 1.0, "exposed": 1.5}
