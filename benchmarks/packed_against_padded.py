"""The same documents packed, laid end to end and padded: the same loss for each, the same curve, and the speed of each.

    ftcli fetch quickstart && python benchmarks/packed_against_padded.py [RECIPE] --cpu [--documents 24] [--steps 3]
    python benchmarks/packed_against_padded.py RECIPE --capacity 4096 --documents 96 --steps 8      # on a GPU

A step takes some documents drawn by chance: packed into rows of `--capacity` tokens (`--bins` of them a micro-batch),
laid end to end without packing, and padded, both in the recipe's own micro size. So all curves are trained on the same
tokens. (The documents of ready-made bins would not do: best fit puts many of one length together, and padded batches
of those have next to no padding.) Losses of single documents are compared before training. Steps of all kinds take
turns, each on its own copy of the model; rows are collated before the clock starts, as the loop does it while the
device works, and the first step is left out of the speed. Where flash-attn is installed it packs too. Prints tables;
`--facts FILE` gets a JSON line; the exit code is 1 where losses differ by more than the recipe's precision explains.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ftcli.loaders import Rows
from ftcli.packing import lengths_of, pack
from ftcli.recipe_file import load_recipe
from ftcli.run import prepare

TOLERANCES = {"fp32": 1e-4, "bf16": 1e-2}  # of the loss of a document and of a step, relative
SIDES: dict[str, list[str]] = {
    "packed": ["data.packing=true"],
    "end to end": ["data.padding_free=true"],
    "padded": ["data.padding_free=false"],
}
FLASH = {"packed, flash-attn": ["data.packing=true", "model.attn_implementation=flash_attention_2"]}


class Side:
    """One way to lay out the documents, with its own copy of the model."""

    def __init__(self, name: str, recipe: str, given: list[str], bins: int, cpu: bool) -> None:
        self.name, self.run = name, prepare(load_recipe(recipe, given), cpu=cpu)
        self.packs, self.bins = self.run.recipe.data.packing, bins
        self.optimizer: Any = self.run.optimizer.optimizer  # type: ignore[attr-defined]  # inside Accelerate's
        self.rows = Rows(self.run.rows.train, self.run.task, training=True)
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def batches(self, documents: list[int]) -> list[Any]:
        """Return (documents, batch) of each micro-batch: some packed rows, or micro_size rows of one document."""
        data, micro = self.run.rows.train, self.run.recipe.batch.micro_size
        groups = [documents[start : start + micro] for start in range(0, len(documents), micro)]
        if self.packs:
            packed = pack(lengths_of(data)[documents], self.run.recipe.data.max_length)
            held = [[documents[number] for number in packed[index]] for index in range(len(packed))]
            groups = [sum(held[start : start + self.bins], []) for start in range(0, len(held), self.bins)]
        collate = self.run.task.collate
        return [(group, collate([self.rows[0, number][0] for number in group])) for group in groups]

    def nll(self, documents: list[int]) -> dict[int, float]:
        """Return document -> the summed loss of its trained tokens."""
        found: dict[int, float] = {}
        with torch.no_grad():
            for group, batch in self.batches(documents):
                parts = self.run.model(**self.run.to_device(batch))["nll"].double().cpu().numpy()
                ends = np.cumsum([self.run.rows.train[number]["items"] for number in group])
                sums = [part.sum() for part in np.split(parts, ends[:-1])]
                found |= dict(zip(group, sums, strict=True))
        return found

    def step(self, documents: list[int]) -> None:
        """Take one optimizer step and note its time and its loss per trained token."""
        run, batches = self.run, [batch for _, batch in self.batches(documents)]
        items, total = sum(run.task.count(batch) for batch in batches), torch.zeros((), dtype=torch.float64)
        total = total.to(run.hardware.accelerator.device)
        started = time.perf_counter()
        for batch in batches:
            loss = run.task.loss(run.model, run.to_device(batch)).sum() / items
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(float(total))  # waits for the device
        self.seconds.append(time.perf_counter() - started)


def compare(sides: list[Side], first: list[int]) -> dict[str, float]:
    """Return side -> largest relative difference of a document's loss from that of the padded one."""
    wanted = sides[-1].nll(first)
    found = {}
    for side in sides[:-1]:
        ours = side.nll(first)
        found[side.name] = max(abs(ours[number] / wanted[number] - 1) for number in wanted if wanted[number])
        told = f"{len(wanted)} documents, loss of each, {side.name} against padded: largest relative difference"
        print(f"{told} {found[side.name]:.1e}", flush=True)
    return found


def report(sides: list[Side], tokens: list[int], slots: list[int]) -> dict[str, Any]:
    """Print the curves and the speeds; return them."""
    print(f"step  tokens  padded to  {'  '.join(f'loss {side.name}  seconds' for side in sides)}")
    for number, (held, taken) in enumerate(zip(tokens, slots, strict=True)):
        values = "  ".join(f"{s.losses[number]:{len(s.name) + 5}.5f}  {s.seconds[number]:7.3f}" for s in sides)
        print(f"{number + 1:4}  {held:6}  {taken:9}  {values}")
    speeds = {side.name: sum(tokens[1:]) / sum(side.seconds[1:]) for side in sides}
    padding = 1 - sum(tokens) / sum(slots)
    for name, speed in speeds.items():
        print(f"{name}: {speed:.0f} tokens/s, {speed / speeds['padded']:.2f} times padded")
    print(f"{100 * padding:.0f} % of the padded batches is padding", flush=True)
    return {"tokens a second": speeds, "padding": padding, "losses": {side.name: side.losses for side in sides}}


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="quickstart")
    parser.add_argument("--documents", type=int, default=24, help="of one step")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--capacity", type=int, default=512, help="tokens of a packed row")
    parser.add_argument("--bins", type=int, default=1, help="packed rows of a micro-batch")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--facts", type=Path)
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    given = [f"data.max_length={arguments.capacity}", *arguments.set]
    ways = SIDES
    if importlib.util.find_spec("flash_attn") is None or arguments.cpu:
        print("flash-attn: not installed, or no GPU is used; left out")
    else:
        ways = FLASH | SIDES
    recipe = arguments.recipe
    sides = [Side(name, recipe, [*given, *more], arguments.bins, arguments.cpu) for name, more in ways.items()]
    lengths = lengths_of(sides[-1].run.rows.train)
    drawn = np.random.default_rng(0).permutation(len(lengths))[: arguments.steps * arguments.documents]
    steps = [part.tolist() for part in np.split(drawn, arguments.steps)]
    tokens = [int(lengths[step].sum()) for step in steps]
    slots = [sum(batch["input_ids"].numel() for _, batch in sides[-1].batches(step)) for step in steps]
    differences = compare(sides, steps[0])
    for step in steps:
        for side in sides:
            side.step(step)
    found = report(sides, tokens, slots)
    apart = [abs(a / b - 1) for side in sides for a, b in zip(side.losses, sides[-1].losses, strict=True)]
    precision = sides[-1].run.recipe.precision
    holds = bool(max(*differences.values(), *apart) <= TOLERANCES[precision])
    print(f"losses of steps: largest relative difference {max(apart):.1e}; {'holds' if holds else 'DOES NOT HOLD'}")
    if arguments.facts is not None:
        told = {"piece": "packed against padded", "recipe": recipe, "precision": precision, "holds": holds}
        with arguments.facts.open("a") as file:
            file.write(f"{json.dumps(told | {'documents': differences} | found)}\n")
    sys.exit(not holds)


if __name__ == "__main__":
    main()
