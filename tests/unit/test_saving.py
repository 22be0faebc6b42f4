"""One thread that saves: the next checkpoint waits for the last, and an error comes out where it is waited for."""

from __future__ import annotations

import threading
import time

import pytest

from ftcli.saving import Saving


def fail() -> None:
    raise RuntimeError("no space")


def settle(saving: Saving) -> None:
    """Wait until the work under way is done, without learning of its error."""
    deadline = time.monotonic() + 10
    while not saving.failed() and time.monotonic() < deadline:
        time.sleep(0.01)


def test_work_goes_on_beside_the_caller_until_it_is_waited_for() -> None:
    saving, gate, done = Saving(), threading.Event(), []
    saving.start(lambda: (gate.wait(10), done.append(1)))
    assert saving.pending and not saving.failed() and done == []
    gate.set()
    saving.wait()
    assert done == [1] and not saving.pending


def test_the_next_work_begins_when_the_last_is_done() -> None:
    saving, order = Saving(), []
    for number in (1, 2, 3):
        saving.start(lambda number=number: (time.sleep(0.05), order.append(number)))
        assert order == list(range(1, number))
    saving.wait()
    assert order == [1, 2, 3]


def test_an_error_is_raised_once_by_whoever_waits_first() -> None:
    for wait in ("wait", "start"):
        saving = Saving()
        saving.start(fail)
        settle(saving)
        assert saving.failed()
        with pytest.raises(RuntimeError, match="no space"):
            saving.wait() if wait == "wait" else saving.start(lambda: None)
        assert not saving.failed() and not saving.pending
        saving.wait()


def test_leaving_waits_and_raises_unless_another_error_is_under_way() -> None:
    with pytest.raises(RuntimeError, match="no space"), Saving() as saving:
        saving.start(fail)
    done: list[int] = []
    with pytest.raises(ValueError, match="first"), Saving() as saving:
        saving.start(lambda: (time.sleep(0.1), done.append(1)))
        raise ValueError("first")
    assert done == [1]
    with pytest.raises(ValueError, match="first"), Saving() as saving:
        saving.start(fail)
        raise ValueError("first")


def test_an_interrupt_does_not_wait_for_the_disk() -> None:
    gate = threading.Event()
    with pytest.raises(KeyboardInterrupt), Saving() as saving:
        saving.start(lambda: gate.wait(10))
        raise KeyboardInterrupt
    assert saving.pending
    gate.set()
