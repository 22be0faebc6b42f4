"""Profile a few steps and return a text: kernels by device time, the gaps between them, and the host meanwhile."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

MOST_KERNELS, MOST_GAPS, LONG_GAP = 60, 15, 20.0  # the last in microseconds
WIDEST = 110  # characters of a kernel's name


def start(steps: int, *, on_gpu: bool) -> profile:
    """Start the profiler one step before the recorded ones: its start takes a different time on each rank."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    profiler = profile(activities=activities, schedule=schedule(wait=0, warmup=1, active=steps, repeat=1))
    profiler.start()
    return profiler


def end_step(profiler: profile, *, on_gpu: bool) -> None:
    """End a step under the profiler. After the last one it stops."""
    if on_gpu:
        torch.cuda.synchronize()
    profiler.step()


def describe(profiler: profile, steps: int, *, on_gpu: bool) -> str:
    """Return the text after the last step. Milliseconds are per step."""
    events = list(profiler.events() or [])
    device = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    kernels = [event for event in events if event.device_type == device and not event.is_user_annotation]
    if not on_gpu:
        return "\n".join(_kernels(kernels, steps, lambda event: event.self_cpu_time_total))
    kernels.sort(key=lambda event: event.time_range.start)
    host = [event for event in events if event.device_type == torch.autograd.DeviceType.CPU]
    gaps = _gaps(kernels)
    return "\n".join(
        [
            *_kernels(kernels, steps, lambda event: event.time_range.elapsed_us()),
            "",
            *_communication(kernels, steps),
            *_describe_gaps(gaps, kernels, steps),
            "",
            *_host_in_gaps(gaps, host, steps),
        ]
    )


def _kernels(events: list[Any], steps: int, microseconds: Any) -> list[str]:
    """Return lines with the kernels that take most device time."""
    spent, calls = Counter[str](), Counter[str]()
    for event in events:
        spent[event.name] += microseconds(event)
        calls[event.name] += 1
    total = sum(spent.values()) or 1
    lines = [
        f"{total / steps / 1000:.2f} ms a step in {sum(calls.values()) / steps:.0f} calls",
        "  share      ms  calls",
    ]
    for name, time in spent.most_common(MOST_KERNELS):
        lines.append(
            f"{100 * time / total:6.1f} % {time / steps / 1000:7.2f} {calls[name] / steps:6.1f}  {name[:WIDEST]}"
        )
    return lines


def _communication(kernels: list[Any], steps: int) -> list[str]:
    """Return a line with the time of NCCL's kernels, and the part of it in which no other kernel ran."""
    others = [kernel for kernel in kernels if "nccl" not in kernel.name.lower()]
    nccl = [kernel for kernel in kernels if "nccl" in kernel.name.lower()]
    exposed = _covered(kernels) - _covered(others)
    line = f"communication took {_covered(nccl) / steps / 1000:.2f} ms a step"
    return [f"{line}, {exposed / steps / 1000:.2f} of them exposed"] * bool(nccl)


def _covered(kernels: list[Any]) -> float:
    """Return the microseconds in which at least one of some kernels ran. They are sorted by their start."""
    covered, end = 0.0, float("-inf")
    for kernel in kernels:
        covered += max(0.0, kernel.time_range.end - max(end, kernel.time_range.start))
        end = max(end, kernel.time_range.end)
    return covered


@dataclass(frozen=True)
class _Gap:
    """A time in which no kernel ran, in microseconds.

    Attributes:
        start: Its start.
        end: Its end.
        before: Name of the kernel before it.
        after: Name of the kernel after it.
    """

    start: float
    end: float
    before: str
    after: str

    @property
    def length(self) -> float:
        """Microseconds."""
        return self.end - self.start


def _gaps(kernels: list[Any]) -> list[_Gap]:
    """Return the gaps between kernels that are sorted by their start."""
    gaps, end, last = [], kernels[0].time_range.end, kernels[0].name
    for kernel in kernels[1:]:
        if kernel.time_range.start > end:
            gaps.append(_Gap(end, kernel.time_range.start, last, kernel.name))
        if kernel.time_range.end > end:
            end, last = kernel.time_range.end, kernel.name
    return gaps


def _describe_gaps(gaps: list[_Gap], kernels: list[Any], steps: int) -> list[str]:
    """Return lines with the idle time between kernels and the longest gaps."""
    idle = sum(gap.length for gap in gaps)
    span = max(kernel.time_range.end for kernel in kernels) - kernels[0].time_range.start
    long = [gap for gap in gaps if gap.length >= LONG_GAP]
    lines = [
        f"the device was idle {100 * idle / span:.2f} % of {span / 1000:.1f} ms ({idle / steps / 1000:.2f} ms a step); "
        f"{len(long) / steps:.1f} gaps a step of {LONG_GAP:.0f} microseconds or more took "
        f"{sum(gap.length for gap in long) / steps / 1000:.2f} ms"
    ]
    for gap in sorted(gaps, key=lambda gap: -gap.length)[:MOST_GAPS]:
        lines.append(f"  {gap.length / 1000:7.3f} ms between {gap.before[:50]} and {gap.after[:50]}")
    return lines


def _host_in_gaps(gaps: list[_Gap], host: list[Any], steps: int) -> list[str]:
    """Return lines with what the host did while the device was idle: time in operators without those they called."""
    spent: Counter[str] = Counter()
    starts = [gap.start for gap in gaps]
    for event in host:
        inside = _inside(event, gaps, starts)
        if inside:
            spent[event.name] += inside - sum(_inside(child, gaps, starts) for child in event.cpu_children)
    lines = ["the host while the device was idle, ms a step (all threads; Python has no line):"]
    for name, time in spent.most_common(MOST_GAPS):
        lines.append(f"  {time / steps / 1000:7.3f}  {name[:WIDEST]}")
    return lines


def _inside(event: Any, gaps: list[_Gap], starts: list[float]) -> float:
    """Return the microseconds of an event that are inside of gaps."""
    start, end, total = event.time_range.start, event.time_range.end, 0.0
    for gap in gaps[max(0, bisect_right(starts, start) - 1) :]:
        if gap.start >= end:
            break
        total += max(0.0, min(end, gap.end) - max(start, gap.start))
    return total
