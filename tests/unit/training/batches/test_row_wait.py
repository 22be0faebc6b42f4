"""The time that a process waits for rows. On GPUs: tests/gpu/test_cuda_graphs_on_gpus.py."""

from __future__ import annotations

import time

import pytest
import torch

from ftcli.training.batches.row_wait import RowWait


def test_row_wait_on_the_cpu_is_the_time_until_the_rows_are_there() -> None:
    wait = RowWait(torch.device("cpu"))
    started = time.perf_counter()
    time.sleep(0.05)
    wait.end()
    assert 0.05 <= wait.seconds() == pytest.approx(time.perf_counter() - started, abs=0.04)
    before = wait.seconds()
    time.sleep(0.05)
    assert wait.seconds() == before
