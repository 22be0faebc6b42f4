"""Ranks of `run_on_cpu` fork from one process that has imported everything, and know nothing of each other's calls."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from typing import Any

import pytest

from ftcli.testing import BEFORE_CUDA, forking, forks_may_start, run_on_cpu, run_on_processes

STARTS_CUDA = {"deepspeed", "peft", "transformers.modeling_utils"}  # the last two where torchao, bitsandbytes are


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


ASKS_NOTHING = """
import importlib, sys, torch
def asked(*args): raise SystemExit("a device was asked for")
for name in ("is_available", "device_count", "get_device_capability", "get_device_properties", "_lazy_init"):
    setattr(torch.cuda, name, asked)
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


@pytest.mark.slow
def test_what_ranks_on_gpus_fork_with_asks_for_no_device() -> None:
    needed = [name for name in BEFORE_CUDA if not name.startswith("sklearn")]  # is not installed everywhere
    done = subprocess.run([sys.executable, "-c", ASKS_NOTHING, *needed], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def nothing() -> None: ...


def refuses() -> None:
    raise RuntimeError("Cannot re-initialize CUDA in forked subprocess.")


def dies() -> None:
    os._exit(3)


@pytest.mark.slow
def test_ranks_on_gpus_fork_where_that_leaves_cuda_to_them(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert told_by_one_of(["json"])[:2] == (False, False)
    assert forks_may_start(nothing)
    has_torch, has_models, server = told_by_one_of(BEFORE_CUDA)
    assert has_torch and not has_models and server != os.getpid(), "the server of before is gone"
    assert not forks_may_start(refuses) and not forks_may_start(dies)
    told = capfd.readouterr().err
    assert "could not start: RuntimeError: Cannot re-initialize CUDA" in told and "could not start: it died" in told
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # nobody can start it
    assert run_on_processes(look, processes=1, profile="single")[0][3] == os.getpid()


def told_by_one_of(preloaded: list[str]) -> tuple[bool, bool, int]:
    """Return of a process that forks: whether it has torch, and what starts CUDA, and its parent."""
    context = forking(preloaded)
    queue = context.SimpleQueue()
    child = context.Process(target=tell, args=(queue,))
    child.start()
    found: tuple[bool, bool, int] = queue.get()
    child.join()
    return found


def tell(queue: Any) -> None:
    queue.put(("torch" in sys.modules, not sys.modules.keys().isdisjoint(STARTS_CUDA), os.getppid()))
