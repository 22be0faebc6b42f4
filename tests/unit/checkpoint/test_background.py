"""The thread that saves: a checkpoint waits for the one before, and the caller that waits gets the error."""

from __future__ import annotations

import threading
import time

import pytest

from ftcli.checkpoint.background import BackgroundSaver


def fail() -> None:
    raise RuntimeError("no space")


def wait_for_thread(saving: BackgroundSaver) -> None:
    """Wait until the work under way is done, without learning of its error."""
    deadline = time.monotonic() + 120
    while not saving.failed() and time.monotonic() < deadline:
        time.sleep(0.01)


def test_start_runs_beside_the_caller_until_wait() -> None:
    saving, gate, done = BackgroundSaver(), threading.Event(), []
    saving.start(lambda: (gate.wait(120), done.append(1)))
    assert saving.pending and not saving.failed() and done == []
    gate.set()
    saving.wait()
    assert done == [1] and not saving.pending


def test_saving_start_waits_for_the_previous_work() -> None:
    saving, order = BackgroundSaver(), []
    for number in (1, 2, 3):
        saving.start(lambda number=number: (time.sleep(0.05), order.append(number)))
        assert order == list(range(1, number))
    saving.wait()
    assert order == [1, 2, 3]


def test_wait_after_an_error_raises_it_once() -> None:
    for wait in ("wait", "start"):
        saving = BackgroundSaver()
        saving.start(fail)
        wait_for_thread(saving)
        assert saving.failed()
        with pytest.raises(RuntimeError, match="no space"):
            saving.wait() if wait == "wait" else saving.start(lambda: None)
        assert not saving.failed() and not saving.pending
        saving.wait()


def test_leaving_waits_and_raises_unless_another_error_is_under_way() -> None:
    with pytest.raises(RuntimeError, match="no space"), BackgroundSaver() as saving:
        saving.start(fail)
    done: list[int] = []
    with pytest.raises(ValueError, match="first"), BackgroundSaver() as saving:
        saving.start(lambda: (time.sleep(0.1), done.append(1)))
        raise ValueError("first")
    assert done == [1]
    with pytest.raises(ValueError, match="first"), BackgroundSaver() as saving:
        saving.start(fail)
        raise ValueError("first")


def test_saving_interrupted_does_not_wait_for_the_disk() -> None:
    gate = threading.Event()
    with pytest.raises(KeyboardInterrupt), BackgroundSaver() as saving:
        saving.start(lambda: gate.wait(120))
        raise KeyboardInterrupt
    assert saving.pending
    gate.set()
