"""Compare the memory estimate with the measured peak of random recipes on one GPU.

    python benchmarks/peaks_of_recipes.py WORK [--count 20] [--shapes qwen3-0.6b llama-3.2-1b] [--seconds 480]

Each recipe draws a shape, rows with log-normal lengths, the batch, the micro size (mostly auto), adapter, precision,
recomputation and whether documents are padded. It trains all steps that its estimate is about. WORK receives the random
weights of each shape once. Prints two lines for each recipe; the exit code is 1 if a peak is above its estimate. The
second line has the bytes at the start of each phase of a step and the peak in it, so that an error of the estimate can
be assigned. Without a GPU only the estimates are printed: `--shapes tiny` tries the command.
"""

from __future__ import annotations

import argparse
import gc
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch  # noqa: E402
from random_model import SHAPES, write_model, write_rows  # noqa: E402

from ftcli.config.recipe import Recipe
from ftcli.loop import steps
from ftcli.runtime.heartbeat import Heartbeat
from ftcli.training.setup import prepare

STEPS = 5


def draw_recipe(draw: random.Random, work: Path, shape: str, rows: Path) -> dict[str, Any]:
    """Return a random recipe."""
    recipe: dict[str, Any] = {
        "task": "sft",
        "precision": draw.choice(["bf16", "bf16", "bf16_pure"]),
        "model": {"name": str(work / shape), "dropout": 0.0, "torch_compile": draw.random() < 0.2},
        "data": {"train": str(rows), "max_length": draw.choice([512, 1024, 2048, 4096])},
        "batch": {
            "global_size": draw.choice([4, 8, 16, 32]),
            "micro_size": draw.choice(["auto", "auto", "auto", 2, 4]),
        },
        "train": {"max_steps": STEPS},
        "optimizer": {"learning_rate": 1e-5},
    }
    recipe["model"]["gradient_checkpointing"] = draw.choice(["auto", "auto", "auto", "full"])
    if draw.random() < 0.5:
        recipe["adapter"] = {"type": "lora", "r": draw.choice([8, 16, 64])}
        recipe["precision"] = "bf16"
    recipe["data"] |= draw.choice([{}, {"padding_free": False}, {"packing": True}])
    return recipe


class Phases(Heartbeat):
    """Keeps the bytes on the device at the start of each phase of a step, and the peak in it, as maxima over steps."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "start"
        self.held: dict[str, float] = {}
        self.peaks: dict[str, float] = {}
        self.padding = 0.0  # largest difference of allocated bytes and of those that were asked for

    def beat(self, phase: str, step: int) -> None:
        """Record a phase of the loop."""
        super().beat(phase, step)
        self.enter(phase)

    def enter(self, phase: str) -> None:
        """End the current phase and begin another."""
        if torch.cuda.is_available():
            seen = torch.cuda.memory_stats()
            peak, held = seen["allocated_bytes.all.peak"] / 1e9, seen["allocated_bytes.all.current"] / 1e9
            self.padding = max(self.padding, peak - seen["requested_bytes.all.peak"] / 1e9)
            self.peaks[self.phase] = max(self.peaks.get(self.phase, 0.0), peak)
            self.held[phase] = max(self.held.get(phase, 0.0), held)
            torch.cuda.reset_peak_memory_stats()
        self.phase = phase

    def __str__(self) -> str:
        at = [f"{name} {held:.3f} to {self.peaks.get(name, 0.0):.3f}" for name, held in self.held.items()]
        return f"{', '.join(at)}; rounding of the allocator {self.padding:.3f}"


def measure(recipe: dict[str, Any]) -> tuple[float, float, str, str]:
    """Return the estimate and the peak in GB, what the log says about memory, and the bytes by phase."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    run = prepare(Recipe.model_validate(recipe))
    run.heartbeat = phases = Phases()
    line = next(line for line in run.log_lines if line.startswith("memory about"))
    for _ in steps(run):
        pass
    phases.enter("end")
    found = re.search(r"about ([\d.]+)", line)
    assert found is not None
    peak = max(phases.peaks.values(), default=0.0)
    return float(found[1]), peak, f"{run.plan.batch_layout}; {line}", str(phases)


def main() -> None:
    """Measure the recipes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--numbers", type=int, nargs="+", help="only these, in this order")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen3-0.6b", "llama-3.2-1b"])
    parser.add_argument("--seconds", type=float, default=480)
    arguments = parser.parse_args()
    draw, began, above = random.Random(0), time.monotonic(), 0
    arguments.work.mkdir(parents=True, exist_ok=True)
    drawn = []
    for number in range(arguments.count):
        shape, rows = draw.choice(arguments.shapes), arguments.work / f"rows-{number}.jsonl"
        median = draw.choice([60, 250, 330, 900])
        drawn.append((shape, rows, median, draw_recipe(draw, arguments.work, shape, rows)))
    for number in range(arguments.count) if arguments.numbers is None else arguments.numbers:
        shape, rows, median, recipe = drawn[number]
        if not (arguments.work / shape).exists():
            write_model(shape, arguments.work / shape)
        write_rows(rows, 2600, seed=number, median=median)
        if time.monotonic() - began > arguments.seconds:
            print(f"{number} of {arguments.count} recipes; no time left")
            break
        estimate, peak, what, phases = measure(recipe)
        above += peak > estimate
        kind = f"{shape} {recipe['precision']} {recipe.get('adapter', {}).get('type', 'all weights')} median {median}"
        verdict = "ABOVE" if peak > estimate else "below"
        print(f"{estimate:7.2f} GB estimated, peak {peak:7.2f} GB, {verdict}: {kind}; {what}")
        print(f"    recipe {number}, {time.monotonic() - began:.0f} s; GB: {phases}", flush=True)
    sys.exit(above > 0)


if __name__ == "__main__":
    main()
