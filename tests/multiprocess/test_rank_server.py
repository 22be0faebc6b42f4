"""Ranks of `run_on_cpu` fork from one process that has imported everything. Calls do not affect each other."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from typing import Any

import pytest

from ftcli.runtime.threads import CHOSEN, POLICY
from ftcli.testing import BEFORE_CUDA, fork_context, forks_may_start, run_on_cpu, run_on_processes

STARTS_CUDA = {"deepspeed", "peft", "transformers.modeling_utils"}  # the last two where torchao, bitsandbytes are


def look() -> tuple[str | None, str | None, bool, int, str | None]:
    """Return facts of a rank: two environment variables, imported modules, its parent, and its start method."""
    is_ready = "transformers" in sys.modules
    return (
        os.environ.get("SAID"),
        os.environ.get("RANK"),
        is_ready,
        os.getppid(),
        multiprocessing.get_start_method(True),
    )


def test_run_on_cpu_rank_has_the_callers_environment_and_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
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


def policy_of_waiting() -> str | None:
    """Return the rank's variable for how threads wait."""
    return os.environ.get(POLICY)


@pytest.mark.parametrize(("chosen", "expected"), [("", "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_run_on_cpu_rank_waits_passively_unless_the_user_chose(
    chosen: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in CHOSEN:
        monkeypatch.delenv(name, raising=False)
    if chosen:
        monkeypatch.setenv(POLICY, chosen)
    assert run_on_cpu(policy_of_waiting, processes=1, profile="single") == [expected]


def frozen_around_a_loop() -> tuple[int, int, bool]:
    """Return a rank's number of frozen objects before and after a loop, and whether collections run again."""
    import gc
    from types import SimpleNamespace
    from typing import cast

    from ftcli.training.garbage_collection import collect_between_steps
    from ftcli.training.step import Step

    before = gc.get_freeze_count()
    for _ in collect_between_steps((cast(Step, SimpleNamespace(number=number)) for number in range(1, 5)), 0):
        pass
    return before, gc.get_freeze_count(), gc.isenabled()


def test_run_on_cpu_rank_never_collects_what_its_server_imported() -> None:
    before, after, is_enabled = run_on_cpu(frozen_around_a_loop, processes=1, profile="single")[0]
    assert before == after > 100_000 and is_enabled


QUERIES_NO_DEVICE = """
import importlib, sys, torch
def refuse(*args): raise SystemExit("a device was queried")
for name in ("is_available", "device_count", "get_device_capability", "get_device_properties", "_lazy_init"):
    setattr(torch.cuda, name, refuse)
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


@pytest.mark.slow
def test_modules_imported_before_fork_start_no_cuda() -> None:
    needed = [name for name in BEFORE_CUDA if not name.startswith("sklearn")]  # is not installed everywhere
    done = subprocess.run([sys.executable, "-c", QUERIES_NO_DEVICE, *needed], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def nothing() -> None: ...


def refuses() -> None:
    raise RuntimeError("Cannot re-initialize CUDA in forked subprocess.")


def dies() -> None:
    os._exit(3)


@pytest.mark.slow
def test_forks_may_start_is_false_after_a_failed_or_dead_trial(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert describe_fork(["json"])[:2] == (False, False)
    assert forks_may_start(nothing)
    has_torch, has_models, server = describe_fork(BEFORE_CUDA)
    assert has_torch and not has_models and server != os.getpid(), "the server of before is gone"
    assert not forks_may_start(refuses) and not forks_may_start(dies)
    printed = capfd.readouterr().err
    assert (
        "could not start: RuntimeError: Cannot re-initialize CUDA" in printed and "could not start: it died" in printed
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # nobody can start it
    assert run_on_processes(look, processes=1, profile="single")[0][3] == os.getpid()


def describe_fork(preloaded: list[str]) -> tuple[bool, bool, int]:
    """Return facts of a forking process: whether it has imported torch and the CUDA start-up, and its parent."""
    context = fork_context(preloaded)
    queue = context.SimpleQueue()
    child = context.Process(target=tell, args=(queue,))
    child.start()
    facts: tuple[bool, bool, int] = queue.get()
    child.join()
    return facts


def tell(queue: Any) -> None:
    queue.put(("torch" in sys.modules, not sys.modules.keys().isdisjoint(STARTS_CUDA), os.getppid()))
