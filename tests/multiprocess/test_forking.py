"""Ranks of `run_on_cpu` fork from one process that has imported everything, and know nothing of each other's calls."""

from __future__ import annotations

import multiprocessing
import os
import sys

import pytest

from ftcli.testing import run_on_cpu


def look() -> tuple[str | None, str | None, bool, int, str | None]:
    """Return of a rank: two variables of its environment, what was imported, its parent, how its processes start."""
    is_ready = "transformers" in sys.modules
    return (
        os.environ.get("SAID"),
        os.environ.get("RANK"),
        is_ready,
        os.getppid(),
        multiprocessing.get_start_method(True),
    )


def test_a_rank_has_the_environment_of_its_own_call_and_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAID", "first")
    first = run_on_cpu(look, processes=2)
    monkeypatch.setenv("SAID", "second")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    second = run_on_cpu(look, processes=1, profile="single")
    monkeypatch.delenv("SAID")
    server = first[0][3]
    assert first == [("first", "0", True, server, None), ("first", "1", True, server, None)]
    assert second == [("second", None, True, server, None)]
    assert run_on_cpu(look, processes=1, profile="single") == [(None, None, True, server, None)]
    assert server != os.getpid() and os.environ["CUDA_VISIBLE_DEVICES"] == "7"
