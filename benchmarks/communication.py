"""What the settings of a profile's communication are worth: steps with each of them, in turns, in one launch.

    python benchmarks/communication.py RECIPE --profile ddp --processes 4 [--steps 15] [--rounds 2] [--set KEY=VALUE]
    python benchmarks/communication.py RECIPE --profile fsdp --processes 2 --cpu        # a rehearsal

The settings are those that hardware/ddp.py, fsdp.py and deepspeed.py name, and the first of each list is what ships.
Each is prepared anew, `rounds` times in turns; `--only` measures those whose name holds these words. What NCCL reads
from the environment takes another start of the ranks: `--env NCCL_MAX_CTAS=8` measures what ships once more with it.
Prints a JSON line for each: milliseconds of a step (median, 95th percentile), the most memory on the device, and losses
and gradient norms, which must agree but for rounding; `--facts FILE` gets the lines too. For DDP's share of one GPU's
rate run `--profile single --processes 1` beside it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from ftcli.testing import environment, run_on_cpu, run_on_processes

WARM = 5
ZERO = {"reduce_bucket_size": 200_000_000}
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {  # profile -> what it is called -> names of its module
    "single": {"as shipped": {}},
    "ddp": {
        "as shipped": {},
        "buckets of 25 MB": {"BUCKET_MB": 25},
        "buckets of 64 MB": {"BUCKET_MB": 64},
        "buckets of 256 MB": {"BUCKET_MB": 256},
    },
    "fsdp": {
        "as shipped": {},
        "no forward prefetch": {"PREFETCH": False},
        "last block freed": {"KEEP_LAST": False},
        "neither": {"PREFETCH": False, "KEEP_LAST": False},
        "one sum a window": {"SYNC_EACH": False},
        "gradients in 32 bits": {"send_gradients_in_16_bits": lambda model: False},
    },
    "zero3": {
        "as shipped": {},
        "DeepSpeed's own": {"STAGE_3": {}, "leaves_of": lambda model: []},
        "module by module": {"leaves_of": lambda model: []},
        "prefetch of 5e7": {"STAGE_3": ZERO | {"stage3_prefetch_bucket_size": 50_000_000}},
        "all weights live": {"STAGE_3": ZERO | {"stage3_max_live_parameters": 4_000_000_000}},
        "buckets of 5e7": {"STAGE_3": ZERO | {"reduce_bucket_size": 50_000_000}},
    },
}
MODULES = {"single": "ddp", "ddp": "ddp", "fsdp": "fsdp", "zero3": "deepspeed"}


def measure(recipe: str, profile: str, given: list[str], rounds: int, cpu: bool, only: str) -> list[dict[str, Any]]:
    """Return what each setting showed on this rank."""
    import importlib

    module = importlib.import_module(f"ftcli.hardware.{MODULES[profile]}")
    settings = {name: values for name, values in SETTINGS[profile].items() if only in name}
    names = {name for values in settings.values() for name in values}
    shipped = {name: getattr(module, name) for name in names}
    laps: dict[str, list[float]] = {name: [] for name in settings}
    found: dict[str, dict[str, Any]] = {}
    for _ in range(rounds):
        for name, values in settings.items():
            for key, value in {**shipped, **values}.items():
                setattr(module, key, value)
            times, found[name] = _train(recipe, given, cpu)
            laps[name] += times
    return [
        {
            "piece": "communication",
            "profile": profile,
            "setting": name,
            "recipe": recipe,
            "step_ms_p50": 1000 * statistics.median(laps[name]),
            "step_ms_p95": 1000 * sorted(laps[name])[int(0.95 * len(laps[name]))],
            "nccl": {key: value for key, value in os.environ.items() if key.startswith("NCCL_")},
            **found[name],
        }
        for name in settings
    ]


def _train(recipe: str, given: list[str], cpu: bool) -> tuple[list[float], dict[str, Any]]:
    """Return seconds of each step but the first ones, and what the run showed.

    Nothing is waited for but what the loop waits for: the step before, so that a step's time is that between two.
    """
    import torch

    from ftcli.loop import steps
    from ftcli.recipe_file import load_recipe
    from ftcli.run import prepare

    on_gpu = torch.cuda.is_available() and not cpu
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    run = prepare(load_recipe(recipe, given), cpu=cpu)
    laps, losses, norms, last = [], [], [], 0.0
    for step in steps(run):
        now = time.perf_counter()
        if step.number > WARM:
            laps.append(now - last)
        last = now
        if step.number in (1, run.steps):
            losses.append(step.loss)
            norms.append(step.grad_norm)
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
    free, whole = torch.cuda.mem_get_info() if on_gpu else (0, 0)
    outside = (whole - free - torch.cuda.memory_reserved()) / 2**30 if on_gpu else None  # the driver's and NCCL's
    facts = {
        "processes": run.plan.processes,
        "accumulation": run.plan.accumulation,
        "micro_size": run.plan.micro_size,
        "peak_gib": peak,
        "outside_gib": outside,
        "losses": losses,
        "grad_norms": norms,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
    }
    return laps, facts


def main() -> None:
    """Measure, print, and keep the facts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--profile", choices=SETTINGS, default="ddp")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default="")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--facts", type=Path)
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()
    if not any(given.only in name for name in SETTINGS[given.profile]):
        parser.error(f"--only {given.only}: {given.profile} has {', '.join(SETTINGS[given.profile])}")
    overrides = [f"train.max_steps={WARM + given.steps}", "evaluate.at_start=false", "data.eval=null"]
    start = run_on_cpu if given.cpu else run_on_processes
    values = (given.recipe, given.profile, [*overrides, *given.set], given.rounds, given.cpu)
    for variable in ["", *given.env]:
        only = "as shipped" if variable else given.only
        with environment(**dict([variable.split("=", 1)] if variable else [])):
            measured = start(measure, *values, only, processes=given.processes, profile=given.profile)[0]
        for facts in measured:
            print(json.dumps(facts), flush=True)
            if given.facts is not None:
                with given.facts.open("a") as file:
                    file.write(f"{json.dumps(facts)}\n")


if __name__ == "__main__":
    main()
