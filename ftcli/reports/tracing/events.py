"""Read the Chrome trace of one rank, and divide its steps into compute, communication, waiting and the rest.

Names of events are those of PyTorch 2.11 and 2.13: NCCL's kernels have `nccl` in their name. The threads of gloo have
ranges such as `gloo:all_reduce`, which last from the start of a collective to its end, so they include the time of
waiting for other ranks. ftcli's phases are ranges of the main thread (trace_rank.py). Light: never imports torch.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftcli.launch.trace_files import PHASE, STEP
from ftcli.reports.tracing.intervals import Interval, difference, intersection, total, union

PARTS = ("compute", "hidden", "exposed", "data", "optimizer", "idle")
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
COLLECTIVES = ("c10d::", "_c10d_functional::", "c10d_functional::")  # calls of the main thread
NOT_WORK = (*COLLECTIVES, "autograd::engine")  # ranges of other calls; they may contain waiting


@dataclass(frozen=True)
class Breakdown:
    """Where the time of the recorded steps of one rank went.

    Attributes:
        seconds: Mean length of a step.
        shares: Share of each of `PARTS`. The sum is 1.
        gather: Share of the time of collectives that gathers weights; the rest sums gradients and small values.
        top: Name, seconds per step and calls per step of the longest kernels, or of the operators on a CPU.
        on_gpu: Whether the trace has kernels of a GPU.
    """

    seconds: float
    shares: dict[str, float]
    gather: float
    top: list[tuple[str, float, float]]
    on_gpu: bool


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the complete events (`ph` is X) of a trace file.

    Raises:
        ValueError: The file is not a trace, or is incomplete.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
            events = json.load(file)["traceEvents"]
        found = [event for event in events if event.get("ph") == "X"]
        for event in found:
            event["ts"], event["dur"] = float(event["ts"]), float(event["dur"])
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path.name} is not a complete trace ({type(error).__name__})") from None
    return found


def break_down(events: list[dict[str, Any]], most: int = 15, *, is_alone: bool = False) -> Breakdown:
    """Divide the recorded steps of one rank.

    Args:
        events: Complete events of the trace; times are in microseconds.
        most: Number of kernels or operators to list.
        is_alone: Whether the run has one process. Nothing is a wait for other ranks then.

    Returns:
        The shares and the longest kernels.

    Raises:
        ValueError: The trace has no complete step.
    """
    annotations = [event for event in events if event.get("cat") == "user_annotation"]
    steps = [span(event) for event in annotations if event["name"] == STEP]
    if not steps:
        raise ValueError("the trace has no complete step")
    kernels = [event for event in events if event.get("cat") in ON_DEVICE]
    phases: dict[str, list[Interval]] = defaultdict(list)
    for event in annotations:
        if event["name"].startswith(PHASE):
            phases[event["name"].removeprefix(PHASE)].append(span(event))
    optimizer = union(phases["optimizer"], _spans(annotations, "Optimizer.step#"))
    window = union(steps)
    if kernels:
        window = [(window[0][0], window[-1][1])]  # the device is synchronised at both ends
        work, collectives, updates = _device_work(events, kernels, optimizer)
        calls = kernels
    else:
        work, collectives = _host_work(events, phases["loading rows"], window[0][0])
        updates = optimizer
        own = _self_times([event for event in events if event.get("cat") == "cpu_op"])
        calls = [event for event in own if not event["name"].startswith(NOT_WORK)] + collectives
    # A GPU computes on while its host waits.
    waiting = [] if is_alone else difference(union(phases["waiting for ranks"]), work)
    communication = union(map(span, collectives), waiting)
    shares = divide(window, work, communication, updates, union(phases["loading rows"]))
    times = total(map(span, collectives))
    gathers = total(span(event) for event in collectives if "gather" in event["name"].lower())
    return Breakdown(
        seconds=total(window) / len(steps) / 1e6,
        shares=shares,
        gather=gathers / times if times else 0.0,
        top=_longest(calls, window, len(steps), most),
        on_gpu=bool(kernels),
    )


def divide(
    window: list[Interval],
    work: list[Interval],
    communication: list[Interval],
    optimizer: list[Interval],
    data: list[Interval],
) -> dict[str, float]:
    """Give every moment of a window to one part. Communication goes first, then the optimizer, compute and data.

    Args:
        window: The steps.
        work: Times in which the device computes, the optimizer included.
        communication: Times in which a collective is under way.
        optimizer: Times of the optimizer.
        data: Times in which the host waits for rows.

    Returns:
        Shares of the window by the names of `PARTS`. The sum is 1.
    """
    parts: dict[str, list[Interval]] = {}
    inside = intersection(communication, window)
    parts["hidden"] = intersection(inside, work)
    parts["exposed"] = difference(inside, work)
    rest = difference(window, inside)
    for name, intervals in (("optimizer", optimizer), ("compute", work), ("data", data)):
        parts[name] = intersection(rest, intervals)
        rest = difference(rest, intervals)
    parts["idle"] = rest
    return {name: total(parts[name]) / total(window) for name in PARTS}


def span(event: dict[str, Any]) -> Interval:
    """Return the start and the end of an event."""
    return event["ts"], event["ts"] + event["dur"]


def _spans(events: Iterable[dict[str, Any]], prefix: str) -> list[Interval]:
    return [span(event) for event in events if event["name"].startswith(prefix)]


def _device_work(
    events: list[dict[str, Any]], kernels: list[dict[str, Any]], optimizer: list[Interval]
) -> tuple[list[Interval], list[dict[str, Any]], list[Interval]]:
    """Return the times of kernels that compute, the kernels of collectives, and the times of the optimizer's kernels.

    A kernel belongs to the phase in which the host started it. Both have the same correlation number.
    """
    collectives = [event for event in kernels if "nccl" in event["name"].lower()]
    others = [event for event in kernels if "nccl" not in event["name"].lower()]
    starts = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    updates = []
    at = 0
    known = [event for event in others if event.get("args", {}).get("correlation") in starts]
    for event in sorted(known, key=lambda event: starts[event["args"]["correlation"]]):
        begun = starts[event["args"]["correlation"]]
        while at < len(optimizer) and optimizer[at][1] <= begun:
            at += 1
        if at < len(optimizer) and optimizer[at][0] <= begun:
            updates.append(span(event))
    return union(map(span, others)), collectives, union(updates)


def _host_work(
    events: list[dict[str, Any]], loading: list[Interval], begin: float
) -> tuple[list[Interval], list[dict[str, Any]]]:
    """Return the times in which operators compute on the CPU, and the collectives of gloo.

    The counts of the next step travel during the whole step. They are sent in the phase of loading rows. Nothing waits
    for them there, so their collectives are left out, also that from before `begin`, the start of the first step. The
    phase "waiting for ranks" has the waiting.
    """
    ranges = [event for event in events if event.get("cat") == "user_annotation"]
    gloo = [event for event in ranges if event["name"].startswith("gloo:")]
    threads = {event["tid"] for event in gloo}
    gloo = sorted((event for event in gloo if event["ts"] >= begin), key=lambda event: event["ts"])
    calls = [event for event in events if event.get("cat") == "cpu_op" and event["tid"] not in threads]
    sent = [event for event in calls if event["name"].startswith("c10d::")]
    for event in sorted(sent, key=lambda event: event["ts"]):
        if any(start <= event["ts"] < end for start, end in loading):
            own = next((item for item in gloo if item["ts"] >= event["ts"]), None)
            if own is not None:
                gloo.remove(own)
    work = union(
        (span(event) for event in calls if event["name"].startswith("aten::")),
        (span(event) for event in _leaves(calls) if not event["name"].startswith(NOT_WORK)),
    )
    return difference(work, union(loading)), gloo


def _leaves(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the calls in which no other call of the same thread begins."""
    leaves = []
    last: dict[Any, dict[str, Any]] = {}
    for event in sorted(calls, key=lambda event: (event["ts"], -event["dur"])):
        before = last.get(event["tid"])
        if before is not None and before["ts"] + before["dur"] <= event["ts"]:
            leaves.append(before)
        last[event["tid"]] = event
    return leaves + list(last.values())


def _self_times(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return calls with their own time as `dur`, without that of the calls inside them."""
    own = [dict(event) for event in sorted(calls, key=lambda event: (event["ts"], -event["dur"]))]
    open_calls: dict[Any, list[tuple[float, dict[str, Any]]]] = defaultdict(list)
    for event in own:
        stack, length = open_calls[event["tid"]], event["dur"]
        while stack and stack[-1][0] <= event["ts"]:
            stack.pop()
        if stack:
            stack[-1][1]["dur"] -= length
        stack.append((event["ts"] + length, event))
    return own


def _longest(
    calls: list[dict[str, Any]], window: list[Interval], steps: int, most: int
) -> list[tuple[str, float, float]]:
    """Return (name, seconds per step, calls per step) of the names with the most time, inside the window."""
    times: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    start, end = window[0][0], window[-1][1]
    for event in calls:
        if start <= event["ts"] < end:
            times[event["name"]][0] += event["dur"]
            times[event["name"]][1] += 1
    ordered = sorted(times.items(), key=lambda item: -item[1][0])[:most]
    return [(name, seconds / 1e6 / steps, count / steps) for name, (seconds, count) in ordered]
