"""Python's garbage is collected at steps that all ranks know, not whenever one of them has made enough objects.

Everything alive after the first steps of a launch (libraries, model, loaders) is put aside for good, so that no search
goes through it again: a full one takes about half a second, at another step on every rank, and all others wait.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .loop import Step

WARM = 2  # steps of a launch until all that stays is there: optimizer state, compiled code, communicators
EVERY = 50  # steps


def collected(steps: Iterator[Step], first_step: int) -> Iterator[Step]:
    """Yield the steps after `first_step`, collecting garbage after some of them, while the device is at work.

    Which ones depends on their numbers alone. Python's own rule holds again when the iterator is closed.
    """
    automatic = gc.isenabled()
    try:
        for step in steps:
            if step.number == first_step + WARM:
                gc.collect()
                gc.freeze()
                gc.disable()
            elif step.number % EVERY == 0 and not gc.isenabled():
                gc.collect()
            yield step
    finally:
        gc.unfreeze()
        if automatic:
            gc.enable()


@contextmanager
def automatic() -> Iterator[None]:
    """Let Python's own rule hold in this block: an evaluation may be long, and is no step."""
    before = gc.isenabled()
    gc.enable()
    try:
        yield
    finally:
        if not before:
            gc.disable()
