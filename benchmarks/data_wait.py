"""Measure how long a step of a packed run waits for its rows, and how long the step takes.

    python benchmarks/data_wait.py RECIPE [--workers 0 2] [--steps 40] [--profile ddp --processes 2] [--set KEY=VALUE]

One launch trains one run for each number of loader processes (data.workers). The loop requests the next rows while the
device works. So `data_seconds` delays a step only if it exceeds the remaining work of the device, and the measured
share is an upper bound. No extra synchronisation is added: a step's time is that between two yields. The first steps
and the last one, in which loader processes end, are left out. Prints a line for each run; `--facts FILE` receives it as
JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from ftcli.testing import run_on_cpu, run_on_processes

WARM = 5


def measure(recipe: str, overrides: list[str], workers: list[int], cpu: bool) -> list[dict[str, Any]]:
    """Return the results of each run on this rank: times of steps and waits, tokens per second, losses."""
    import numpy as np

    from ftcli.config.load import load_recipe
    from ftcli.data.packing import lengths_of
    from ftcli.loop import steps
    from ftcli.training.setup import prepare

    results = []
    for count in workers:
        run = prepare(load_recipe(recipe, [*overrides, f"data.workers={count}"]), cpu=cpu)
        waits, laps, losses, last = [], [], [], time.perf_counter()
        for step in steps(run):
            now = time.perf_counter()
            if WARM < step.number < run.steps:
                waits.append(step.data_seconds)
                laps.append(now - last)
            if step.number in (1, run.steps):
                losses.append(step.loss)
            last = time.perf_counter()
        lengths = lengths_of(run.rows.train)
        packs = run.rows.bins
        rows = len(lengths) if packs is None else len(packs)
        slots = int(run.recipe.data.max_length) * rows if packs is not None else int(np.max(lengths)) * rows
        results.append(
            {
                "workers": count,
                "processes": run.plan.processes,
                "rows of a step": run.plan.global_size,
                "fill": int(lengths.sum()) / slots,
                "step p50": statistics.median(laps),
                "step p95": float(np.quantile(laps, 0.95)),
                "data p50": statistics.median(waits),
                "data p95": float(np.quantile(waits, 0.95)),
                "share": sum(waits) / sum(laps),
                "tokens a second": int(lengths.sum()) / rows * run.plan.global_size * len(laps) / sum(laps),
                "losses": losses,
            }
        )
        del run
    return results


def main() -> None:
    """Measure the runs, and print and append their lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--profile", default="single")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--facts", type=Path)
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    overrides = [f"train.max_steps={arguments.steps}", "evaluate.at_start=false", "data.eval=null", "data.packing=true"]
    start = run_on_cpu if arguments.cpu else run_on_processes
    values = (arguments.recipe, [*overrides, *arguments.set], arguments.workers, arguments.cpu)
    ranks = start(measure, *values, processes=arguments.processes, profile=arguments.profile)
    for runs in zip(*ranks, strict=True):
        slowest = max(runs, key=lambda run: run["share"])
        print(
            f"{arguments.profile} x{arguments.processes}, {slowest['workers']} loader processes: "
            f"step p50 {1000 * slowest['step p50']:.1f} ms (p95 {1000 * slowest['step p95']:.1f}), "
            f"rows p50 {1000 * slowest['data p50']:.2f} ms (p95 {1000 * slowest['data p95']:.2f}), "
            f"{100 * slowest['share']:.2f} % of step time; {slowest['tokens a second']:.0f} tokens/s, "
            f"fill {100 * slowest['fill']:.1f} %, loss {slowest['losses'][0]:.4f} to {slowest['losses'][-1]:.4f}",
            flush=True,
        )
        if arguments.facts is not None:
            with arguments.facts.open("a") as file:
                run = {"piece": "data wait", "recipe": arguments.recipe, "profile": arguments.profile}
                file.write(f"{json.dumps(run | slowest)}\n")


if __name__ == "__main__":
    main()
