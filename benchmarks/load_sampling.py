"""Measure what sampling the load costs the training loop: one run, with and without the thread in turn.

    python benchmarks/load_sampling.py [--blocks 12] [--seconds 5] [--faster 100] [--cpu]

One loop trains the tiny model of loop_overhead.py with the records of `ftcli train`. Its blocks of about `--seconds`
alternate between `off` (no thread), `on` (a sample every 5 s, as in a run) and `faster` (that many times as often, so
that the cost exceeds the noise of the machine). Each block gives wall time and processor time of the process per step.
Prints one JSON line: the medians, the ratios to neighbouring blocks without the thread, what a step pays in percent
according to `faster` divided by its factor, and the cost of one sample on the thread itself. The limit is 0.5 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from loop_overhead import ours, write_inputs

MODES = ("off", "on", "faster")


def measure_block(loop: Iterator[None], seconds: float) -> tuple[float, float]:
    """Return (wall, processor) milliseconds per step of a block."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    next(loop)  # not timed: the thread has just begun or ended
    wait()
    wall, processor = time.perf_counter(), time.process_time()
    steps = 0
    while time.perf_counter() - wall < seconds:
        next(loop)
        steps += 1
    wait()
    ended, used = time.perf_counter(), time.process_time()
    return 1000 * (ended - wall) / steps, 1000 * (used - processor) / steps


def measure(run: Any, loop: Iterator[None], blocks: int, seconds: float, faster: int) -> dict[str, list[Any]]:
    """Return the blocks of each mode, in turn. The order changes, so that a drift affects all modes alike."""
    from ftcli.runtime import load_findings, load_monitor
    from ftcli.runtime.load_monitor import gpu_uuid

    interval, window = load_monitor.SAMPLE_SECONDS, load_monitor.LONG_SECONDS
    found: dict[str, list[Any]] = {mode: [] for mode in MODES}
    for block in range(blocks):
        for mode in MODES[block % 3 :] + MODES[: block % 3]:
            run.load.stop()
            factor = faster if mode == "faster" else 1
            load_monitor.SAMPLE_SECONDS = interval / factor
            load_monitor.LONG_SECONDS = load_findings.LONG_SECONDS = window / factor  # as many samples are judged
            if mode != "off":
                run.load.begin_training(gpu_uuid(run.hardware.accelerator.device))
            found[mode].append(measure_block(loop, seconds))
    run.load.stop()
    load_monitor.SAMPLE_SECONDS, load_monitor.LONG_SECONDS = interval, window
    return found


def cost_of_sample(device: Any, count: int = 200) -> tuple[float, float]:
    """Return (wall, processor) milliseconds of one sample of this process and its GPU."""
    from ftcli.runtime.load_monitor import gpu_uuid
    from ftcli.runtime.machine.load import LoadSampler

    sampler = LoadSampler(0)
    if (uuid := gpu_uuid(device)) is not None:
        sampler.open_gpu(uuid)
    sampler.sample()
    wall, processor = time.perf_counter(), time.thread_time()
    for _ in range(count):
        sampler.sample()
    wall, processor = time.perf_counter() - wall, time.thread_time() - processor
    sampler.close()
    return 1000 * wall / count, 1000 * processor / count


def main() -> None:
    """Measure and print one JSON line."""
    from ftcli.config.load import load_recipe
    from ftcli.runtime import load_monitor
    from ftcli.runtime.load_monitor import LoadMonitor
    from ftcli.training.setup import prepare

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=12, help="blocks of each mode")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a block")
    parser.add_argument("--faster", type=int, default=100)
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = load_recipe(str(write_inputs(folder, "tiny", 64, 1)), ["train.max_steps=1000000"])
        run = prepare(recipe, cpu=arguments.cpu, output=folder / "run")
        assert run.folder is not None
        run.load = LoadMonitor(run.folder)
        loop = ours(run, [], recorded=True)
        for _ in range(20):
            next(loop)
        found = measure(run, loop, arguments.blocks, arguments.seconds, arguments.faster)
        loop.close()  # type: ignore[attr-defined]
        samples = sum("load/cpu_percent/rank-0" in row for row in run.folder.training_rows())
        medians = {mode: [statistics.median(values) for values in zip(*found[mode], strict=True)] for mode in MODES}
        ratios = {
            mode: [
                statistics.median(a[part] / b[part] for a, b in zip(found[mode], found["off"], strict=True))
                for part in range(2)
            ]
            for mode in MODES[1:]
        }
        wall, processor = cost_of_sample(run.hardware.accelerator.device)
        result = {
            "piece": "load sampling",
            "device": run.hardware.accelerator.device.type,
            "torch": torch.__version__,
            "blocks": arguments.blocks,
            "rows with a load": samples,
            "ms [wall, processor]": medians,
            "ratio [wall, processor]": ratios,
            "percent by faster [wall, processor]": [100 * (r - 1) / arguments.faster for r in ratios["faster"]],
            "ms of a sample [wall, processor]": [wall, processor],
            "percent by sample": 100 * processor / (1000 * load_monitor.SAMPLE_SECONDS),
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
