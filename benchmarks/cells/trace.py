"""Profile a few steps and return a text: kernels by device time, and the gaps between them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

MOST_KERNELS, MOST_GAPS, LONG_GAP = 30, 10, 20.0  # the last in microseconds
WIDEST = 110  # characters of a kernel's name


def start(*, on_gpu: bool) -> profile:
    """Start the profiler."""
    if on_gpu:
        torch.cuda.synchronize()
    profiler = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])])
    profiler.start()
    return profiler


def stop(profiler: profile, steps: int, *, on_gpu: bool) -> str:
    """Stop the profiler and return the text. Milliseconds are per step."""
    if on_gpu:
        torch.cuda.synchronize()
    profiler.stop()
    events = list(profiler.events() or [])
    device = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    kernels = [event for event in events if event.device_type == device and not event.is_user_annotation]
    if not on_gpu:
        return "\n".join(_kernels(kernels, steps, lambda event: event.self_cpu_time_total))
    kernels.sort(key=lambda event: event.time_range.start)
    return "\n".join(
        [*_kernels(kernels, steps, lambda event: event.time_range.elapsed_us()), "", *_gaps(kernels, steps)]
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


def _gaps(kernels: list[Any], steps: int) -> list[str]:
    """Return lines with the idle time between kernels and the longest gaps."""
    idle, gaps, end, last = 0.0, [], kernels[0].time_range.end, kernels[0].name
    for kernel in kernels[1:]:
        gap = kernel.time_range.start - end
        if gap > 0:
            idle += gap
            gaps.append((gap, last, kernel.name))
        if kernel.time_range.end > end:
            end, last = kernel.time_range.end, kernel.name
    span = end - kernels[0].time_range.start
    long = [gap for gap in gaps if gap[0] >= LONG_GAP]
    lines = [
        f"the device was idle {100 * idle / span:.2f} % of {span / 1000:.1f} ms ({idle / steps / 1000:.2f} ms a step); "
        f"{len(long) / steps:.1f} gaps a step of {LONG_GAP:.0f} microseconds or more took "
        f"{sum(gap[0] for gap in long) / steps / 1000:.2f} ms"
    ]
    for gap, before, after in sorted(gaps, reverse=True)[:MOST_GAPS]:
        lines.append(f"  {gap / 1000:7.3f} ms between {before[:50]} and {after[:50]}")
    return lines
