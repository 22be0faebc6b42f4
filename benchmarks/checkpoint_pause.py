"""How long training stands still for a checkpoint: waiting for the disk, against writing in the background.

    python benchmarks/checkpoint_pause.py RECIPE --profile fsdp --processes 4 [--saves 4] [--between 10] [--output DIR]

Both ways take turns in one run. A pause is that of the slowest rank, from a device that has nothing left to do until
training may go on; `complete` is the time until COMPLETE stands on the disk. The first save in the background is
apart: on GPUs it also pins the memory that the later ones use again. Loading reads files that the system may still
hold in memory. DIR (default: a temporary folder) chooses the disk.
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
    """Return seconds of pauses, of saves until they are complete, of steps after each, and of loading; and bytes."""
    import torch

    from ftcli.checkpoint import load, save
    from ftcli.checkpoint_folder import size_of
    from ftcli.loop import steps
    from ftcli.recipe_file import load_recipe
    from ftcli.run import prepare

    total = WARM + len(WAYS) * saves * between
    given = [f"train.max_steps={total}", "evaluate.at_start=false", "data.eval=null", "checkpoint.keep=1"]
    run = prepare(load_recipe(recipe, given), cpu=cpu, output=output)
    ranks = run.hardware.ranks
    found: dict[str, Any] = {way: {"pause": [], "complete": [], "step": []} for way in WAYS}

    def settled() -> float:
        if not cpu:
            torch.cuda.synchronize()
        ranks.barrier()
        return time.perf_counter()

    training = iter(steps(run))
    for _ in range(WARM):
        next(training)
    for number in range(len(WAYS) * saves):
        way, step = WAYS[number % len(WAYS)], WARM + number * between
        before, clock = settled(), time.time()
        folder = save(run, step, background=way == "background")
        pause = time.perf_counter() - before
        started = settled()
        for _ in range(between):
            next(training)
        stepped = (settled() - started) / between
        run.saving.wait()
        assert folder is not None
        found[way]["pause"].append(max(ranks.collect(pause)))
        found[way]["complete"].append((folder / "COMPLETE").stat().st_mtime - clock)
        found[way]["step"].append(stepped)
    before = settled()
    load(run, folder)
    found["load"], found["bytes"], found["room"] = settled() - before, size_of(folder), run.saving.has_room
    return found


def main() -> None:
    """Print one line for each way, and one for loading."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--profile", default="ddp")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--saves", type=int, default=4, help="of each way")
    parser.add_argument("--between", type=int, default=10, help="steps after each save")
    parser.add_argument("--output", type=Path, help="folder on the disk that is measured")
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()
    start = run_on_cpu if given.cpu else run_on_processes
    with tempfile.TemporaryDirectory(dir=given.output) as output:
        arguments = (str(given.recipe), output, given.saves, given.between, given.cpu)
        found = start(measure, *arguments, processes=given.processes, profile=given.profile)[0]
    name, size = f"{given.profile} x{given.processes}", found["bytes"] / 1e9
    if not found["room"]:
        print(f"{name}: host memory has no room for copies, so both ways wait")
    for way in WAYS:
        pauses, complete, step = (found[way][key] for key in ("pause", "complete", "step"))
        later = pauses[1:] or pauses
        print(
            f"{name} {way:<10}  pause {1000 * statistics.median(later):.0f} ms "
            f"({1000 * min(later):.0f} to {1000 * max(later):.0f} of {len(later)}, the first {1000 * pauses[0]:.0f})  "
            f"complete in {1000 * statistics.median(complete):.0f} ms  {size:.3f} GB  "
            f"a step afterwards {1000 * statistics.median(step):.1f} ms"
        )
    print(f"{name} load        {1000 * found['load']:.0f} ms  {size:.3f} GB")


if __name__ == "__main__":
    main()
