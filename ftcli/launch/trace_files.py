"""Names of the files and of the ranges that `ftcli trace` writes. Light: imports nothing."""

from __future__ import annotations

WARM_UP = 6  # steps before the recorded ones: caches, compiled layers, autotuning, clocks
SLOW_STEPS = 3  # the first of them, which are slower than the others
COOL_DOWN = 2  # steps after the recorded ones, so that the last recorded step loads the rows of another one
STEP, PHASE = "ftcli.step", "ftcli.phase: "  # ranges in the trace


def trace_name(rank: int) -> str:
    """Return the file name of the Chrome trace of a rank."""
    return f"rank-{rank}.trace.json.gz"


def facts_name(rank: int) -> str:
    """Return the file name of the facts about a rank."""
    return f"rank-{rank}.json"
