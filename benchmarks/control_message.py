"""Measure the cost of the control message of a step: no message, ftcli's message on the host, one on the device.

    python benchmarks/control_message.py RECIPE --processes 2 --profile ddp [--steps 60] [--cpu]

The three variants alternate in blocks in one process group, so that noise of the machine affects all of them. `ours` is
sent one accumulation window ahead. `device` is an all-reduce on the device, whose result the host reads before the next
step, as in most programs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from ftcli.testing import run_on_cpu, run_on_processes

BLOCK, WARM = 10, 3


def measure(recipe: str, steps: int, cpu: bool) -> dict[str, list[float]]:
    """Return the milliseconds per step of each block, by kind of message, without the first steps of a block."""
    import torch.distributed as dist

    from ftcli.config.load import load_recipe
    from ftcli.hardware.collectives import Ranks
    from ftcli.loop import steps as train_steps
    from ftcli.training.setup import prepare

    ours, kinds = Ranks.sum_later, ("none", "ours", "device")

    def none(ranks: Ranks, values: list[int]) -> Any:
        return lambda: [value * ranks.world for value in values]

    def on_device(ranks: Ranks, values: list[int]) -> Any:
        message = torch.tensor([float(value % 2**20) for value in values], device=run.hardware.accelerator.device)
        dist.all_reduce(message)
        sums = message.tolist()
        return lambda: [int(value) for value in sums]

    senders = dict(zip(kinds, (none, ours, on_device), strict=True))
    overrides = [f"train.max_steps={steps * len(kinds)}", "evaluate.at_start=false", "data.eval=null"]
    run = prepare(load_recipe(recipe, overrides), cpu=cpu)
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    Ranks.sum_later = senders[kinds[0]]  # type: ignore[method-assign]
    wait = (lambda: None) if cpu else torch.cuda.synchronize
    wait()
    last = time.perf_counter()
    for step in train_steps(run):
        block, position = divmod(step.number - 1, BLOCK)
        if position == BLOCK - 1:
            wait()
            times[kinds[block % len(kinds)]].append(1000 * (time.perf_counter() - last) / (BLOCK - WARM))
            Ranks.sum_later = senders[kinds[(block + 1) % len(kinds)]]  # type: ignore[method-assign]
        if position == WARM - 1:
            wait()
            last = time.perf_counter()
    Ranks.sum_later = ours  # type: ignore[method-assign]
    return times


def main() -> None:
    """Measure, and print the median and range over the blocks of each kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--profile", default="ddp")
    parser.add_argument("--steps", type=int, default=60, help="steps of each kind, in blocks of 10")
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    start = run_on_cpu if arguments.cpu else run_on_processes
    results = start(
        measure,
        str(arguments.recipe),
        arguments.steps,
        arguments.cpu,
        processes=arguments.processes,
        profile=arguments.profile,
    )[0]
    for kind, times in results.items():
        spread = f"{min(times):.2f} to {max(times):.2f}"
        print(f"{kind:<7} {statistics.median(times):.2f} ms per step ({spread} over {len(times)} blocks)")


if __name__ == "__main__":
    main()
