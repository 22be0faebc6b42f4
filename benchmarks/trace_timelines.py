"""Compare the shares of an `ftcli trace` of GPUs with its raw timelines, which are counted in another way.

    python benchmarks/trace_timelines.py FOLDER...

FOLDER is the output of `ftcli trace`. Here each microsecond of the recorded steps is a point of a grid, and a point
belongs to communication if one of NCCL's kernels runs, and to computation if any other kernel runs.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

STEP, ON_DEVICE = "ftcli.step", ("kernel", "gpu_memcpy", "gpu_memset")


def timeline(path: Path) -> dict[str, float]:
    """Return milliseconds of a step: in all, communication beside computation, and communication alone."""
    with gzip.open(path) as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    steps = [event for event in events if event.get("cat") == "user_annotation" and event["name"] == STEP]
    begin = min(event["ts"] for event in steps)
    length = int(max(event["ts"] + event["dur"] for event in steps) - begin)
    kernels = [event for event in events if event.get("cat") in ON_DEVICE]
    nccl = _grid([event for event in kernels if "nccl" in event["name"].lower()], begin, length)
    computes = _grid([event for event in kernels if "nccl" not in event["name"].lower()], begin, length)
    points = {"step": length, "hidden": int((nccl & computes).sum()), "exposed": int((nccl & ~computes).sum())}
    return {name: value / len(steps) / 1000 for name, value in points.items()}


def _grid(kernels: list[dict[str, Any]], begin: float, length: int) -> np.ndarray[Any, Any]:
    """Return for each microsecond whether one of some kernels runs."""
    grid = np.zeros(length, dtype=bool)
    for event in kernels:
        start = max(0, round(event["ts"] - begin))
        grid[start : max(start, round(event["ts"] + event["dur"] - begin))] = True
    return grid


def main() -> None:
    """Print a line for each rank of each folder."""
    for folder in map(Path, sys.argv[1:]):
        report = json.loads((folder / "trace.json").read_text())
        for rank, facts in report["ranks"].items():
            counted = timeline(folder / f"rank-{rank}.trace.json.gz")
            reported = {"step": 1000 * facts["seconds"]}
            reported |= {name: reported["step"] * facts["shares"][name] for name in ("hidden", "exposed")}
            parts = [f"{name} {reported[name]:.2f} ms, counted {counted[name]:.2f}" for name in reported]
            print(f"{folder.name} rank {rank}: {'; '.join(parts)}")


if __name__ == "__main__":
    main()
