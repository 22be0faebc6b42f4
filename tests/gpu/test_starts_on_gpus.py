"""Ranks on GPUs fork from one process that has imported most modules. Each rank starts CUDA itself."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from ftcli.testing import run_on_processes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def look() -> tuple[bool, int, float]:
    """Return facts of a rank: whether it forked with imports, its parent, and a sum from its GPU."""
    is_ready = "datasets" in sys.modules
    return is_ready, os.getppid(), float(torch.ones(1000, device="cuda").sum())


def test_run_on_processes_forks_ranks_that_start_cuda_themselves() -> None:
    first, second = (run_on_processes(look, processes=1, profile="single")[0] for _ in range(2))
    assert first == second == (True, first[1], 1000.0)
    assert first[1] != os.getpid(), "what was said on stderr tells why they do not fork"
