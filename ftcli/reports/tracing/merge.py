"""Merge the traces of all ranks into one file, for Perfetto and chrome://tracing. Light: never imports torch."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ftcli.launch.trace_files import STEP, trace_name

STRIDE = 1_000_000_000  # between the process numbers of two ranks, above every process number of a system


def merge_traces(folder: Path, ranks: Sequence[int], target: Path) -> None:
    """Write the events of several ranks into one trace. Each rank is a process of its own.

    The clocks of ranks are aligned at the start of the first recorded step.

    Args:
        folder: The folder with the traces of the ranks.
        ranks: The ranks.
        target: The file to write.
    """
    merged: list[dict[str, Any]] = []
    for rank in ranks:
        with gzip.open(folder / trace_name(rank), "rt", encoding="utf-8", errors="replace") as file:
            merged += of_rank(json.load(file)["traceEvents"], rank)
    with gzip.open(target, "wt", encoding="utf-8", compresslevel=3) as file:
        json.dump({"traceEvents": merged}, file)


def of_rank(events: list[dict[str, Any]], rank: int) -> list[dict[str, Any]]:
    """Return the events of a rank with times from the start of its first step, and with numbers of their own.

    Args:
        events: All events of the trace.
        rank: The rank.
    """
    start = min((float(event["ts"]) for event in events if event.get("name") == STEP), default=0.0)
    changed = []
    for event in events:
        pid = event.get("pid")
        number = pid if isinstance(pid, int) else 0  # the profiler's own summary has a name instead
        new = event | {"pid": rank * STRIDE + number}
        if event.get("ph") == "M":
            if event["name"] == "process_name":
                new["args"] = {"name": f"rank {rank}: {event['args'].get('name', '')}"}
        elif "ts" in event:
            new["ts"] = float(event["ts"]) - start
        if "id" in event:
            new["id"] = f"{rank}/{event['id']}"
        changed.append(new)
    return changed
