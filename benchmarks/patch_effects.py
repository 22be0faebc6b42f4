"""Measure optional patches that do not act in a step: memory of a discarded run, and reading 8-bit moments.

    python benchmarks/patch_effects.py discarded FOLDER --profile zero3 --without deepspeed-release
    python benchmarks/patch_effects.py discarded FOLDER --profile ddp --without nccl-pending-works
    python benchmarks/patch_effects.py moments FOLDER --without tensor-versions

FOLDER is one of `random_model.py`. Each way runs in new processes, in turns (`--times`): with all patches, and without
the named one. Prints a line for each. `discarded` tries micro-batch sizes as `batch.micro_size: auto` does, and prints
the memory that the discarded run still holds when the next one begins, and the peak of that one. `moments` trains two
steps of adamw_8bit on one GPU, and prints how long a pass over weights and moments takes, as for a checkpoint. With
`--cpu`, memory is 0.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

from ftcli.testing import run_on_cpu, run_on_processes

STEPS, PASSES = 2, 7
CHANGES = [f"train.max_steps={STEPS}", "schedule.warmup_steps=0", "data.eval=null", "evaluate.at_start=false"]


class NoMeter:
    """A meter of a device that needs no memory, to try `discarded` without a GPU."""

    limit = 1

    def start(self) -> None:
        """Do nothing."""

    def held(self) -> int:
        """Return no bytes."""
        return 0

    def peak(self) -> int:
        """Return no bytes."""
        return 0


def discarded(recipe: str, without: str, cpu: bool) -> dict[str, float]:
    """Return GiB of this rank: held by a discarded run, held by the next one when it is ready, and its peak."""
    os.environ["FTCLI_WITHOUT_PATCHES"] = without
    import torch

    from ftcli.config.load import load_recipe
    from ftcli.loop import steps
    from ftcli.training.memory import DeviceMeter, find_micro_batch_size, with_micro_size
    from ftcli.training.setup import prepare

    def held() -> float:
        return torch.cuda.memory_allocated() / 2**30

    auto = load_recipe(recipe, [*CHANGES, "batch.micro_size=auto"])
    size, saving, _ = find_micro_batch_size(auto, NoMeter if cpu else DeviceMeter, partial(prepare, cpu=cpu))
    result = {"held after it": held()}
    if not cpu:
        torch.cuda.reset_peak_memory_stats()
    run = prepare(with_micro_size(auto, size, saving), cpu=cpu)
    result["held by the next run, ready"] = held()
    for _ in steps(run):
        pass
    result["peak of the next run"] = 0.0 if cpu else torch.cuda.max_memory_allocated() / 2**30
    run.hardware.release(run.model)
    return result | {"rows": float(size)}


def moments(recipe: str, without: str, cpu: bool) -> dict[str, float]:
    """Return the median milliseconds of a pass over weights and 8-bit moments."""
    os.environ["FTCLI_WITHOUT_PATCHES"] = without
    import torch

    from ftcli.config.load import load_recipe
    from ftcli.loop import steps
    from ftcli.training.setup import prepare

    run = prepare(load_recipe(recipe, [*CHANGES, "optimizer.name=adamw_8bit"]), cpu=cpu)
    for _ in steps(run):
        pass

    def seconds() -> float:
        if not cpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    passes = []
    for _ in range(PASSES):
        gc.collect()
        began = seconds()
        for _shard in run.hardware.state_shards(run.model, run.optimizer):
            pass
        passes.append(seconds() - began)
    run.hardware.release(run.model)
    return {"a pass, ms": 1000 * statistics.median(passes[1:])}


MEASUREMENTS: dict[str, Any] = {"discarded": discarded, "moments": moments}


def main() -> None:
    """Measure each way as often as asked, in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurement", choices=MEASUREMENTS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--profile", default="zero3", help="of `discarded`, which has two processes")
    parser.add_argument("--without", required=True, metavar="PATCH")
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    start = run_on_cpu if arguments.cpu else run_on_processes
    place = {"processes": 1, "profile": "single"}
    if arguments.measurement == "discarded":
        place = {"processes": 2, "profile": arguments.profile}
    recipe = str(arguments.folder / "recipe.yaml")
    for _ in range(arguments.times):
        for without in ("", arguments.without):
            values = start(MEASUREMENTS[arguments.measurement], recipe, without, arguments.cpu, **place)
            texts = [f"{key} {max(each[key] for each in values):.2f}" for key in values[0]]
            print(f"{f'without {without}' if without else 'with all patches'}: {', '.join(texts)}", flush=True)


if __name__ == "__main__":
    main()
