"""Measure how long training pauses for a checkpoint: with blocking and with background saving.

    python benchmarks/checkpoint_pause.py RECIPE --profile fsdp --processes 4 [--saves 4] [--between 10] [--output DIR]

Both ways alternate in one run. A pause is that of the slowest rank, from an idle device until training continues.
`complete` is the time until the file COMPLETE exists. The first background save is reported separately: on GPUs it also
pins the host memory that later saves reuse. Loading may read files from the page cache. DIR (default: a temporary
folder) selects the disk.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from ftcli.testing import run_on_cpu, run_on_processes

WARM = 3
WAYS = ("waited", "background")


def measure(recipe: str, output: str, saves: int, between: int, cpu: bool) -> dict[str, Any]:
    """Return seconds of pauses, of complete saves, of the steps after each and of loading; and the size in bytes."""
    import torch

    from ftcli.checkpoint.folder import folder_size
    from ftcli.config.load import load_recipe
    from ftcli.loop import steps
    from ftcli.training.checkpointing import load, save_checkpoint
    from ftcli.training.setup import prepare

    total = WARM + len(WAYS) * saves * between
    overrides = [f"train.max_steps={total}", "evaluate.at_start=false", "data.eval=null", "checkpoint.keep=1"]
    run = prepare(load_recipe(recipe, overrides), cpu=cpu, output=output)
    ranks = run.hardware.ranks
    result: dict[str, Any] = {way: {"pause": [], "complete": [], "step": []} for way in WAYS}

    def synchronized_time() -> float:
        if not cpu:
            torch.cuda.synchronize()
        ranks.wait_for_slowest()
        return time.perf_counter()

    training = iter(steps(run))
    for _ in range(WARM):
        next(training)
    for number in range(len(WAYS) * saves):
        way, step = WAYS[number % len(WAYS)], WARM + number * between
        before, clock = synchronized_time(), time.time()
        folder = save_checkpoint(run, step, background=way == "background")
        pause = time.perf_counter() - before
        started = synchronized_time()
        for _ in range(between):
            next(training)
        stepped = (synchronized_time() - started) / between
        run.saving.wait()
        assert folder is not None
        result[way]["pause"].append(max(ranks.collect(pause)))
        result[way]["complete"].append((folder / "COMPLETE").stat().st_mtime - clock)
        result[way]["step"].append(stepped)
    before = synchronized_time()
    load(run, folder)
    result["load"] = synchronized_time() - before
    result["bytes"], result["room"] = folder_size(folder), run.saving.has_room
    return result


def main() -> None:
    """Measure, and print one line for each way and one for loading."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--profile", default="ddp")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--saves", type=int, default=4, help="saves of each way")
    parser.add_argument("--between", type=int, default=10, help="steps after each save")
    parser.add_argument("--output", type=Path, help="folder on the disk to measure")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    start = run_on_cpu if options.cpu else run_on_processes
    with tempfile.TemporaryDirectory(dir=options.output) as output:
        arguments = (str(options.recipe), output, options.saves, options.between, options.cpu)
        result = start(measure, *arguments, processes=options.processes, profile=options.profile)[0]
    name, size = f"{options.profile} x{options.processes}", result["bytes"] / 1e9
    if not result["room"]:
        print(f"{name}: host memory is too small for a copy, so both ways block")
    for way in WAYS:
        pauses, complete, step = (result[way][key] for key in ("pause", "complete", "step"))
        later = pauses[1:] or pauses
        print(
            f"{name} {way:<10}  pause {1000 * statistics.median(later):.0f} ms "
            f"({1000 * min(later):.0f} to {1000 * max(later):.0f} of {len(later)}, the first {1000 * pauses[0]:.0f})  "
            f"complete in {1000 * statistics.median(complete):.0f} ms  {size:.3f} GB  "
            f"step afterwards {1000 * statistics.median(step):.1f} ms"
        )
    print(f"{name} load        {1000 * result['load']:.0f} ms  {size:.3f} GB")


if __name__ == "__main__":
    main()
