"""How long a step waits for its rows: the loader's share of the steps of a packed run, and how long a step takes.

    python benchmarks/data_wait.py RECIPE [--workers 0 2] [--steps 40] [--profile ddp --processes 2] [--set KEY=VALUE]

One run for each number of loader processes (data.workers), all of one launch. The loop asks for the next rows while the
device works, so `data_seconds` is a part of a step only where it is longer than what the device still has to do: the
share is an upper bound of what the device waits. Nothing is read from the device but what the loop itself reads, so a
step's time is that between two steps. The first steps are left out, and the last, in which loader processes end.
Prints a line for each run; `--facts FILE` gets it as JSON.
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


def measure(recipe: str, given: list[str], workers: list[int], cpu: bool) -> list[dict[str, Any]]:
    """Return what each run showed on this rank: seconds of steps and of waits for rows, tokens a second, losses."""
    import numpy as np

    from ftcli.loop import steps
    from ftcli.packing import lengths_of
    from ftcli.recipe_file import load_recipe
    from ftcli.run import prepare

    found = []
    for count in workers:
        run = prepare(load_recipe(recipe, [*given, f"data.workers={count}"]), cpu=cpu)
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
        bins = run.rows.bins
        rows = len(lengths) if bins is None else len(bins)
        slots = int(run.recipe.data.max_length) * rows if bins is not None else int(np.max(lengths)) * rows
        found.append(
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
    return found


def main() -> None:
    """Measure, print, and keep the facts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--profile", default="single")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--facts", type=Path)
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()
    overrides = [f"train.max_steps={given.steps}", "evaluate.at_start=false", "data.eval=null", "data.packing=true"]
    start = run_on_cpu if given.cpu else run_on_processes
    values = (given.recipe, [*overrides, *given.set], given.workers, given.cpu)
    ranks = start(measure, *values, processes=given.processes, profile=given.profile)
    for runs in zip(*ranks, strict=True):
        slowest = max(runs, key=lambda run: run["share"])
        print(
            f"{given.profile} x{given.processes}, {slowest['workers']} loader processes: "
            f"step p50 {1000 * slowest['step p50']:.1f} ms (p95 {1000 * slowest['step p95']:.1f}), "
            f"rows p50 {1000 * slowest['data p50']:.2f} ms (p95 {1000 * slowest['data p95']:.2f}), "
            f"{100 * slowest['share']:.2f} % of a step; {slowest['tokens a second']:.0f} tokens/s, "
            f"fill {100 * slowest['fill']:.1f} %, loss {slowest['losses'][0]:.4f} to {slowest['losses'][-1]:.4f}",
            flush=True,
        )
        if given.facts is not None:
            with given.facts.open("a") as file:
                told = {"piece": "data wait", "recipe": given.recipe, "profile": given.profile}
                file.write(f"{json.dumps(told | slowest)}\n")


if __name__ == "__main__":
    main()
