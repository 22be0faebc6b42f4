"""Measure optional patches that do not act in a step: memory of a discarded run, and reading 8-bit moments.

    python benchmarks/patch_effects.py discarded FOLDER --profile zero3 --without deepspeed-release
    python benchmarks/patch_effects.py discarded FOLDER --profile ddp --without nccl-pending-works
    python benchmarks/patch_effects.py moments FOLDER --without tensor-versions

FOLDER is one of `random_model.py`. Each way runs in new processes, in turns (`--times`): with all patches, and without
the named one. Prints a line for each. `discarded` tries micro-batch sizes as `batch.micro_size: auto` does, and prints
the memory that the discarded run still holds when the next one begins, and the peak of that one. `moments` trains two
steps of adamw_8bit on one GPU, and prints how long a pass over the state takes, as for a checkpoint, and how long
training waits for a checkpoint that is saved in the background. With `--cpu`, memory is 0.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from ftcli.testing import run_on_cpu, run_on_processes

STEPS, PASSES, SAVES = 2, 7, 4


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


def discarded(recipe: str, without: str, cpu: bool, output: str) -> dict[str, float]:
    """Return GiB of this rank: held by a discarded run, held by the next one when it is ready, and its peak."""
    os.environ["FTCLI_WITHOUT_PATCHES"] = without
    import torch

    from ftcli.config.load import load_recipe
    from ftcli.loop import steps
    from ftcli.training.memory import DeviceMeter, find_micro_batch_size, with_micro_size
    from ftcli.training.setup import prepare

    def held() -> float:
        return torch.cuda.memory_allocated() / 2**30

    changes = [f"train.max_steps={STEPS}", "data.eval=null", "evaluate.at_start=false", "batch.micro_size=auto"]
    changes.append("schedule.warmup_steps=0")
    auto = load_recipe(recipe, changes)
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


def moments(recipe: str, without: str, cpu: bool, output: str) -> dict[str, float]:
    """Return milliseconds: the median pass over weights and 8-bit moments, and the median wait for a checkpoint."""
    os.environ["FTCLI_WITHOUT_PATCHES"] = without
    import torch

    from ftcli.config.load import load_recipe
    from ftcli.loop import steps
    from ftcli.training.checkpointing import save_checkpoint
    from ftcli.training.setup import prepare

    changes = [f"train.max_steps={STEPS + SAVES}", "data.eval=null", "evaluate.at_start=false", "checkpoint.keep=1"]
    run = prepare(load_recipe(recipe, [*changes, "optimizer.name=adamw_8bit"]), cpu=cpu, output=output)

    def wait() -> float:
        if not cpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    training = iter(steps(run))
    for _ in range(STEPS):
        next(training)
    passes, pauses = [], []
    for _ in range(PASSES):
        gc.collect()
        began = wait()
        for _shard in run.hardware.state_shards(run.model, run.optimizer):
            pass
        passes.append(wait() - began)
    for number in range(SAVES):
        began = wait()
        save_checkpoint(run, STEPS + number, background=True)
        pauses.append(wait() - began)
        run.saving.wait()
        next(training)
    run.hardware.release(run.model)
    return {
        "a pass, ms": 1000 * statistics.median(passes[1:]),
        "a checkpoint, ms": 1000 * statistics.median(pauses[1:]),
    }


MEASUREMENTS: dict[str, Any] = {"discarded": discarded, "moments": moments}


def main() -> None:
    """Measure each way as often as asked, in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurement", choices=MEASUREMENTS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--profile", help="of `discarded`, which has two processes")
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
            with tempfile.TemporaryDirectory(dir=arguments.folder) as output:
                values = start(MEASUREMENTS[arguments.measurement], recipe, without, arguments.cpu, output, **place)
            texts = [f"{key} {max(each[key] for each in values):.2f}" for key in values[0]]
            print(f"{f'without {without}' if without else 'with all patches'}: {', '.join(texts)}", flush=True)


if __name__ == "__main__":
    main()
