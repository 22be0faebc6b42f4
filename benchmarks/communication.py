"""Compare communication settings of a profile: steps with each setting, alternating in one launch.

    python benchmarks/communication.py RECIPE --profile ddp --processes 4 [--steps 15] [--rounds 2] [--set KEY=VALUE]
    python benchmarks/communication.py RECIPE --profile fsdp --processes 2 --cpu        # without GPUs

The settings are constants of hardware/ddp.py, fsdp.py and deepspeed.py. The first one of each profile is the shipped
value. The model is prepared again for each setting, in `rounds` alternating rounds. `--only` selects settings whose
name contains a text. NCCL reads the environment at its start, so `--env NCCL_MAX_CTAS=8` starts the ranks again and
measures the shipped settings with this variable. Prints a JSON line for each setting: milliseconds of a step (median,
95th percentile), peak memory of the device, and losses and gradient norms, which must agree up to rounding. `--facts
FILE` receives the same lines. For the speed of one GPU, run `--profile single --processes 1`.
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
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {  # profile -> setting -> values of the module or backend class
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
        "one sum a window": {"sync_every_micro_batch": False},
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
BACKENDS = {  # profile -> module and class of its backend
    "single": ("ddp", "DDP"),
    "ddp": ("ddp", "DDP"),
    "fsdp": ("fsdp", "FSDP2"),
    "zero3": ("deepspeed", "DeepSpeed"),
}


def measure(recipe: str, profile: str, overrides: list[str], rounds: int, cpu: bool, only: str) -> list[dict[str, Any]]:
    """Return the results of each setting on this rank."""
    import importlib

    module_name, class_name = BACKENDS[profile]
    module = importlib.import_module(f"ftcli.hardware.{module_name}")
    settings = {name: values for name, values in SETTINGS[profile].items() if only in name}
    names = {name for values in settings.values() for name in values}
    owners = {name: module if hasattr(module, name) else getattr(module, class_name) for name in names}
    shipped = {name: getattr(owner, name) for name, owner in owners.items()}
    laps: dict[str, list[float]] = {name: [] for name in settings}
    results: dict[str, dict[str, Any]] = {}
    for _ in range(rounds):
        for name, values in settings.items():
            for key, value in {**shipped, **values}.items():
                setattr(owners[key], key, value)
            times, results[name] = _train(recipe, overrides, cpu)
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
            **results[name],
        }
        for name in settings
    ]


def _train(recipe: str, overrides: list[str], cpu: bool) -> tuple[list[float], dict[str, Any]]:
    """Return the seconds of each step after warm-up, and the results of the run.

    No extra synchronisation is added. The loop waits for the previous step, so a step's time is that between two
    yields.
    """
    import torch

    from ftcli.config.load import load_recipe
    from ftcli.loop import steps
    from ftcli.training.setup import prepare

    on_gpu = torch.cuda.is_available() and not cpu
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    run = prepare(load_recipe(recipe, overrides), cpu=cpu)
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
    outside = (whole - free - torch.cuda.memory_reserved()) / 2**30 if on_gpu else None  # memory of the driver and NCCL
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
    """Measure the settings, and print and append their lines."""
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
    arguments = parser.parse_args()
    if not any(arguments.only in name for name in SETTINGS[arguments.profile]):
        parser.error(f"--only {arguments.only}: {arguments.profile} has {', '.join(SETTINGS[arguments.profile])}")
    overrides = [f"train.max_steps={WARM + arguments.steps}", "evaluate.at_start=false", "data.eval=null"]
    start = run_on_cpu if arguments.cpu else run_on_processes
    values = (arguments.recipe, arguments.profile, [*overrides, *arguments.set], arguments.rounds, arguments.cpu)
    for variable in ["", *arguments.env]:
        only = "as shipped" if variable else arguments.only
        with environment(**dict([variable.split("=", 1)] if variable else [])):
            measured = start(measure, *values, only, processes=arguments.processes, profile=arguments.profile)[0]
        for facts in measured:
            print(json.dumps(facts), flush=True)
            if arguments.facts is not None:
                with arguments.facts.open("a") as file:
                    file.write(f"{json.dumps(facts)}\n")


if __name__ == "__main__":
    main()
