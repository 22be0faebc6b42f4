"""Run Python's garbage collection at the same steps on all ranks.

By default a collection starts when a process has created enough objects. That happens at a different step on every
rank, and all other ranks wait for it. After the first steps of a launch, libraries, model and loaders are frozen, so
that later collections do not search them.
"""

from __future__ import annotations

import atexit
import gc
import inspect
import weakref
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ftcli.runtime.fork_server import imports_are_frozen

if TYPE_CHECKING:
    from ftcli.training.step import Step


WARM_UP_STEPS = 2  # of a launch, until optimizer state, compiled code and communicators exist
STEPS_BETWEEN_COLLECTIONS = 50
_is_off = False  # whether an open loop has switched off automatic collection
_open_loops: weakref.WeakSet[Generator[Any, None, None]] = weakref.WeakSet()


def close_at_exit(steps: Generator[Step, None, None]) -> Iterator[Step]:
    """Close a loop over steps when the interpreter exits, if it is still open.

    Python itself closes it later, when the modules that it needs are already empty.

    Args:
        steps: The generator of the loop.

    Returns:
        The same generator.
    """
    _open_loops.add(steps)
    return steps


@atexit.register
def _close_loops() -> None:
    """Close all open loops."""
    for steps in list(_open_loops):
        if inspect.getgeneratorstate(steps) != inspect.GEN_RUNNING:  # False in a thread that still runs
            steps.close()


def collect_between_steps(steps: Iterator[Step], first_step: int) -> Iterator[Step]:
    """Yield the steps of a loop, and collect garbage after some of them while the device computes.

    The numbers of these steps depend only on the step. Automatic collection is restored when the iterator is closed.

    Args:
        steps: The steps.
        first_step: Number of steps that were done before this loop.

    Yields:
        Each step, unchanged.
    """
    global _is_off
    was_enabled = gc.isenabled() or _is_off  # a loop that was left may still be open
    freezes = not imports_are_frozen()  # `gc.unfreeze` would return a fork server's imports to all later collections
    try:
        for step in steps:
            if step.number == first_step + WARM_UP_STEPS:
                gc.collect()
                if freezes:
                    gc.freeze()
                gc.disable()
                _is_off = was_enabled
            elif step.number % STEPS_BETWEEN_COLLECTIONS == 0 and not gc.isenabled():
                gc.collect()
            yield step
    finally:
        if freezes:
            gc.unfreeze()
        if was_enabled:
            gc.enable()
            _is_off = False


@contextmanager
def automatic_collection() -> Iterator[None]:
    """Use Python's automatic collection inside the block, for an evaluation, which may be long."""
    was_enabled = gc.isenabled()
    gc.enable()
    try:
        yield
    finally:
        if not was_enabled:
            gc.disable()
