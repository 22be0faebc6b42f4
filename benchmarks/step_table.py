"""Print where the milliseconds of ftcli's steps go: on the host by phase, and on the device.

    python benchmarks/step_table.py RECIPE [--set KEY=VALUE] [--warm 6] [--steps 10] [--cpu]

First table: the host's time by phase, without a profiler; the phases add up to the step. Second table: the
same number of steps under the profiler, divided into Python, operators, launches, waits, allocations of the host,
and kernels and idle time of the device. A profiled step is slower; its shares are what counts. Also the number of
forward passes, tokens and allocations of the device in a step.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ftcli.loop import steps
from ftcli.runtime.heartbeat import Heartbeat
from ftcli.training.reporter import Reporter
from ftcli.training.setup import prepare

LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync", "cudaGraphLaunch")
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy")
ALLOCATIONS = ("cudaMalloc", "cudaFree", "cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cudaHostAlloc")
COUNTERS = ("num_device_alloc", "num_device_free", "num_alloc_retries", "num_sync_all_streams")


class Phases(Heartbeat):
    """Adds up the host's time by phase."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: Counter[str] = Counter()
        self._phase, self._since = "", time.perf_counter()

    def enter(self, phase: str) -> None:
        """End the current phase and begin another."""
        now = time.perf_counter()
        self.seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def beat(self, phase: str, step: int) -> None:
        """Record a phase of the loop."""
        super().beat(phase, step)
        self.enter(phase)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--warm", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    warm, count = arguments.warm, arguments.steps
    length = [f"train.max_steps={warm + 2 * count}", "evaluate.at_start=false"]
    on_gpu = torch.cuda.is_available() and not arguments.cpu
    with tempfile.TemporaryDirectory() as folder:
        run = prepare(arguments.recipe, overrides=[*arguments.settings, *length], output=folder, cpu=arguments.cpu)
        print("\n".join(run.log_lines), flush=True)
        run.heartbeat = phases = Phases()
        profiler = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])])
        began, before = 0.0, {}
        with Reporter(run, quiet=True) as report:
            for step in steps(run):
                phases.enter("record")
                report.step(step)
                if step.number == warm:
                    synchronise(on_gpu)
                    phases.seconds.clear()
                    began, before = time.perf_counter(), allocations(on_gpu)
                if step.number == warm + count:
                    phases.enter("the loop itself")
                    synchronise(on_gpu)
                    print_phases(phases, time.perf_counter() - began, count)
                    changes = {name: (value - before[name]) / count for name, value in allocations(on_gpu).items()}
                    passes = sum(run.passes_of(number) for number in range(warm, warm + count)) / count
                    print(f"{passes:.1f} forward passes a step; of the allocator, a step: {changes}")
                    profiler.start()
                    began = time.perf_counter()
                if step.number == warm + 2 * count:
                    synchronise(on_gpu)
                    elapsed = time.perf_counter() - began
                    profiler.stop()
                    print_profile(profiler, elapsed, count, on_gpu=on_gpu)
                phases.enter("the loop itself")


def synchronise(on_gpu: bool) -> None:
    """Wait for the device."""
    if on_gpu:
        torch.cuda.synchronize()


def allocations(on_gpu: bool) -> dict[str, int]:
    """Return counters of the device's allocator."""
    stats = torch.cuda.memory_stats() if on_gpu else {}
    return {name: stats.get(name, 0) for name in COUNTERS}


def print_phases(phases: Phases, elapsed: float, count: int) -> None:
    """Print the host's time by phase."""
    print(f"\n{1000 * elapsed / count:9.2f} ms a step, on the host by phase (no profiler)")
    for name, seconds in phases.seconds.most_common():
        print(f"{1000 * seconds / count:9.2f}  {name}")
    print(f"{1000 * (elapsed - sum(phases.seconds.values())) / count:9.2f}  the device ends after the host")


def print_profile(profiler: Any, elapsed: float, count: int, *, on_gpu: bool) -> None:
    """Print what the host and the device did in profiled steps."""
    events = [event for event in profiler.events() or [] if not event.is_user_annotation]
    host = [event for event in events if event.device_type == torch.autograd.DeviceType.CPU]
    kernels = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    spent, calls = Counter[str](), Counter[str]()
    for event in host:
        kind = kind_of(event.name)
        spent[kind] += event.self_cpu_time_total
        calls[kind] += 1
    scale = 1000 * count  # microseconds of all steps -> milliseconds of one
    print(f"\n{1000 * elapsed / count:9.2f} ms a profiled step; threads of the host together")
    for kind, time_spent in spent.most_common():
        print(f"{time_spent / scale:9.2f}  {kind}: {calls[kind] / count:.0f} calls")
    print(f"{1000 * elapsed / count - sum(spent.values()) / scale:9.2f}  Python and everything else")
    print("most expensive operators of the host:")
    by_name, number = Counter[str](), Counter[str]()
    for event in host:
        by_name[event.name] += event.self_cpu_time_total
        number[event.name] += 1
    for name, time_spent in by_name.most_common(15):
        print(f"{time_spent / scale:9.2f}  {number[name] / count:7.1f}  {name[:90]}")
    if on_gpu:
        print_device(kernels, count)


def kind_of(name: str) -> str:
    """Return what an event of the host is."""
    for kind, starts in (("launches", LAUNCHES), ("waits", WAITS), ("allocations of the device", ALLOCATIONS)):
        if name.startswith(starts):
            return kind
    if "Backward" in name or name.startswith("autograd::"):
        return "nodes of the backward pass"
    return "operators (without launches)" if "::" in name else "other events"


def print_device(kernels: list[Any], count: int) -> None:
    """Print the device's busy and idle time, and its most expensive kernels."""
    spans = sorted((event.time_range.start, event.time_range.end) for event in kernels)
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    whole = end - spans[0][0]
    print(f"\n{busy / count / 1000:9.2f} ms a step: the device computes, {len(kernels) / count:.0f} kernels")
    print(f"{(whole - busy) / count / 1000:9.2f} ms a step: the device is idle ({100 * (1 - busy / whole):.0f} %)")
    spent, calls = Counter[str](), Counter[str]()
    for event in kernels:
        spent[event.name] += event.time_range.elapsed_us()
        calls[event.name] += 1
    for name, time_spent in spent.most_common(20):
        print(f"{time_spent / count / 1000:9.2f}  {calls[name] / count:7.1f}  {name[:90]}")


if __name__ == "__main__":
    main()
