"""Count the work of a call in steps of Python. Unlike seconds, the counts are the same on a busy machine."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any


def count_lines(work: Callable[[], object]) -> int:
    """Return how many lines of Python a call runs in this thread, in ftcli and in libraries that are not compiled."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()  # the finalizers of objects of other tests would be counted
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return lines


def count_calls(work: Callable[[], object], function: FunctionType) -> int:
    """Return how often a call runs a function of ours in this thread."""
    calls = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code is function.__code__

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls
