"""Resume runs of several tasks again and again, each time on another profile, and compare them with one whole run.

    python benchmarks/resume_chains.py FOLDER [--kinds lora packed] [--precision bf16]

The recipes, models and rows are those of parity_of_tasks.py. For each kind one process trains to the end. Then a chain
of launches trains the same recipe, each for a few steps, from the checkpoint of the launch before. ZeRO refuses 4-bit
weights, so the chain of qlora has FSDP and DDP in its place. Prints the largest relative difference of the losses. The
exit code is 1 if it exceeds the tolerance of `ftcli parity`, or if a launch fails. To try it without GPUs:
`--shape tiny --image-shape tiny-vit --cpu --precision fp32 --kinds lora packed preference images`.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parent
sys.path[:0] = [str(HOME), str(HOME.parent)]

from checkpoint_matrix import TOLERANCES, largest_difference  # noqa: E402
from parity_of_tasks import KINDS, add_recipe_options, write_inputs  # noqa: E402

from ftcli.testing import run_on_cpu, run_on_processes  # noqa: E402

CHAIN = ("fsdp:2", "zero3:2", "ddp:2", "single:1", "zero2:2")
CHAIN_IN_4_BITS = ("fsdp:2", "ddp:2", "single:1", "fsdp:2", "ddp:2")


def train_from(recipe: str, overrides: list[str], output: str, checkpoint: str | None, until: int, cpu: bool) -> Any:
    """Train up to and including step `until`, save it in `output`, and return the losses. A collective."""
    from ftcli.config.load import load_recipe
    from ftcli.loop import steps
    from ftcli.training.checkpointing import load, save_checkpoint
    from ftcli.training.setup import prepare

    run = prepare(load_recipe(recipe, overrides), cpu=cpu, output=output, resume=checkpoint)
    if checkpoint is not None:
        load(run, Path(checkpoint))
    losses = []
    for step in steps(run):
        losses.append(step.loss)
        if step.number == until and until < run.steps:
            save_checkpoint(run, until)
            break
    run.hardware.close()
    return losses


def chain_of(kind: str, parsed: argparse.Namespace) -> tuple[bool, str]:
    """Train a kind in one process and in a chain of launches; return whether the losses agree, and a line."""
    recipe, began = write_inputs(parsed.folder, kind, parsed), time.monotonic()
    overrides = [f"precision={parsed.precision}", "evaluate.at_start=false", "data.eval=null"]
    start = run_on_cpu if parsed.cpu else run_on_processes
    places = CHAIN_IN_4_BITS if "quantization" in KINDS[kind].get("model", {}) else CHAIN

    def launch(place: str, name: str, checkpoint: str | None, until: int) -> list[float]:
        profile, _, processes = place.partition(":")
        output = recipe.parent / f"chain-{name}"
        shutil.rmtree(output, ignore_errors=True)
        arguments = (str(recipe), overrides, str(output), checkpoint, until, parsed.cpu)
        losses: list[float] = start(train_from, *arguments, processes=int(processes), profile=profile)[0]
        return losses

    whole, losses, checkpoint = launch("single:1", "whole", None, parsed.steps), [], None
    for number, place in enumerate(places, 1):
        until = parsed.steps * number // len(places)
        losses += launch(place, str(number), checkpoint, until)
        checkpoint = str(recipe.parent / f"chain-{number}" / "checkpoints" / f"step-{until:06d}")
    difference = largest_difference(losses, whole)
    line = f"{kind}, {parsed.precision}: {' > '.join(places).replace(':', ' x')}: {difference:.1e} of the loss in "
    line += f"{len(whole)} steps, first {whole[0]:.4f}, last {whole[-1]:.4f}; {time.monotonic() - began:.0f} s"
    return difference <= TOLERANCES[parsed.precision], line


def options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--precision", choices=list(TOLERANCES), default="bf16")
    add_recipe_options(parser, steps=15)
    return parser


def main() -> None:
    """Run the chains, and print a line for each."""
    parsed = options().parse_args()
    holds = True
    for kind in parsed.kinds:
        try:
            agrees, line = chain_of(kind, parsed)
        except Exception:  # the other chains still run
            agrees, line = False, f"{kind}, {parsed.precision}: FAILED\n{traceback.format_exc()[-1500:]}"
        holds = holds and agrees
        print(line if agrees else f"{line} DIFFERS", flush=True)
    sys.exit(not holds)


if __name__ == "__main__":
    main()
