r"""Compare packed, concatenated and padded batches of the same documents: losses, curves and speed.

    ftcli fetch quickstart && python benchmarks/packed_against_padded.py [RECIPE] --cpu [--documents 24] [--steps 3]
    python benchmarks/packed_against_padded.py RECIPE --capacity 4096 --documents 96 --steps 8      # on a GPU
    python benchmarks/docstring_pairs.py 96 pairs.jsonl
    python benchmarks/packed_against_padded.py smoke/preference --cpu --set data.train=pairs.jsonl \
        --set data.eval=null --set evaluate.at_start=false

Each step takes randomly drawn documents in three layouts: packed into rows of `--capacity` tokens (`--bins` rows per
micro-batch), concatenated without packing, and padded (both in the recipe's micro size). So all curves train the same
tokens. The documents are not taken from finished packs, because best fit groups documents of similar lengths, which
need little padding. The losses of single documents are compared before training. Steps of all layouts alternate, each
on its own copy of the model. Rows are collated before the clock starts, because the loop does this while the device
works. The first step is not timed. On a CPU seconds are those of the process, whatever else the
machine does. Where flash-attn is installed, it is compared too.

For the task preference a document is a pair; `docstring_pairs.py` writes pairs with real lengths. Prints tables;
`--facts FILE` receives a JSON line. The exit code is 1 if losses differ by more than the tolerance of the recipe's
precision.
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

from ftcli.config.load import load_recipe
from ftcli.config.plan import micro_size_limit
from ftcli.data.packing import lengths_of, pack, row_capacity
from ftcli.tasks.shared.pairs import model_inputs
from ftcli.training.batches.dataloaders import Rows
from ftcli.training.setup import prepare

TOLERANCES = {"fp32": 1e-4, "bf16": 1e-2}  # relative, for the loss of a document and of a step
SIDES: dict[str, list[str]] = {
    "packed": ["data.packing=true"],
    "concatenated": ["data.padding_free=true"],
    "padded": ["data.padding_free=false"],
}
FLASH = {"packed, flash-attn": ["data.packing=true", "model.attn_implementation=flash_attention_2"]}


class Side:
    """One layout of the documents, with its own copy of the model."""

    def __init__(self, name: str, recipe: str, overrides: list[str], bins: int, cpu: bool) -> None:
        self.name, self.run = name, prepare(load_recipe(recipe, overrides), cpu=cpu)
        self.packs, self.bins = self.run.recipe.data.packing, bins
        self.optimizer: Any = self.run.optimizer.optimizer  # type: ignore[attr-defined]  # inside Accelerate's
        data = self.run.rows
        self.rows = Rows(data.train, self.run.task, training=True, columns=data.derived["train"])
        self.trained = [sum(trained[1:]) for trained in data.train["trained"]]  # tokens of each document with a loss
        self.capacity = row_capacity(data.train, self.run.recipe.data.max_length)
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def batches(self, documents: list[int]) -> list[Any]:
        """Return (documents, batch) of each micro-batch: some packed rows, or micro_size rows of one document."""
        data, micro = self.run.rows.train, micro_size_limit(self.run.recipe)
        groups = [documents[start : start + micro] for start in range(0, len(documents), micro)]
        if self.packs:
            packed = pack(lengths_of(data)[documents], self.capacity)
            packs = [[documents[number] for number in packed[index]] for index in range(len(packed))]
            groups = [sum(packs[start : start + self.bins], []) for start in range(0, len(packs), self.bins)]
        collate = self.run.task.collate
        return [(group, collate([self.rows[0, number][0] for number in group])) for group in groups]

    def nll(self, documents: list[int]) -> dict[int, float]:
        """Return document -> the summed loss of its trained tokens."""
        losses: dict[int, float] = {}
        with torch.no_grad():
            for group, batch in self.batches(documents):
                nll = self.run.model(**model_inputs(self.run.to_device(batch)))["nll"].double().cpu().numpy()
                ends = np.cumsum([self.trained[number] for number in group])
                sums = [part.sum() for part in np.split(nll, ends[:-1])]
                losses |= dict(zip(group, sums, strict=True))
        return losses

    def step(self, documents: list[int]) -> None:
        """Take one optimizer step, and record its time and its loss per item: the first term of a task with several."""
        run, batches = self.run, [batch for _, batch in self.batches(documents)]
        counts: list[Any] = [run.task.count(batch) for batch in batches]
        items = sum(count["items"] if isinstance(count, dict) else count for count in counts)
        total = torch.zeros((), dtype=torch.float64)
        total = total.to(run.hardware.accelerator.device)
        clock = time.process_time if total.device.type == "cpu" else time.perf_counter  # other programs use the CPU too
        started = clock()
        for batch in batches:
            result: Any = run.task.loss(run.model, run.to_device(batch))
            loss = (next(iter(result.values())) if isinstance(result, dict) else result).sum() / items
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(float(total))  # waits for the device
        self.seconds.append(clock() - started)


def compare(sides: list[Side], first: list[int]) -> dict[str, float]:
    """Return layout -> largest relative difference of a document's loss from its loss in the padded layout."""
    reference = sides[-1].nll(first)
    differences = {}
    for side in sides[:-1]:
        ours = side.nll(first)
        largest = max(abs(ours[number] / reference[number] - 1) for number in reference if reference[number])
        compared = f"{len(reference)} documents, loss of each, {side.name} and padded"
        print(f"{compared}: largest relative difference {largest:.1e}", flush=True)
        differences[side.name] = largest
    return differences


def report(sides: list[Side], tokens: list[int], slots: list[int]) -> dict[str, Any]:
    """Print and return the curves and the speeds."""
    print(f"step  tokens  padded to  {'  '.join(f'loss {side.name}  seconds' for side in sides)}")
    for number, (count, padded) in enumerate(zip(tokens, slots, strict=True)):
        values = "  ".join(f"{s.losses[number]:{len(s.name) + 5}.5f}  {s.seconds[number]:7.3f}" for s in sides)
        print(f"{number + 1:4}  {count:6}  {padded:9}  {values}")
    speeds = {side.name: sum(tokens[1:]) / sum(side.seconds[1:]) for side in sides}
    padding = 1 - sum(tokens) / sum(slots)
    for name, speed in speeds.items():
        print(f"{name}: {speed:.0f} tokens/s, {speed / speeds['padded']:.2f} times padded")
    medians = {side.name: float(np.median(np.array(tokens[1:]) / side.seconds[1:])) for side in sides}
    print("median of steps:", ", ".join(f"{name} {speed:.0f} tokens/s" for name, speed in medians.items()))
    print(f"{100 * padding:.0f} % of the padded batches is padding", flush=True)
    return {
        "tokens a second": speeds,
        "median of steps": medians,
        "padding": padding,
        "losses": {side.name: side.losses for side in sides},
    }


def main() -> None:
    """Compare the layouts and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="quickstart")
    parser.add_argument("--documents", type=int, default=24, help="documents of one step")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--capacity", type=int, default=512, help="tokens of a packed row")
    parser.add_argument("--bins", type=int, default=1, help="packed rows per micro-batch")
    parser.add_argument("--kinds", nargs="+", choices=SIDES, default=list(SIDES), help="padded is always measured")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--facts", type=Path)
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    overrides = [f"data.max_length={arguments.capacity}", *arguments.set]
    layouts = {name: SIDES[name] for name in SIDES if name in (*arguments.kinds, "padded")}
    if importlib.util.find_spec("flash_attn") is None or arguments.cpu:
        print("flash-attn is left out: it is not installed, or the run is on CPU")
    else:
        layouts = FLASH | layouts
    recipe = arguments.recipe
    sides = [Side(name, recipe, [*overrides, *more], arguments.bins, arguments.cpu) for name, more in layouts.items()]
    lengths = lengths_of(sides[-1].run.rows.train)
    drawn = np.random.default_rng(0).permutation(len(lengths))[: arguments.steps * arguments.documents]
    steps = [part.tolist() for part in np.split(drawn, arguments.steps)]
    tokens = [int(lengths[step].sum()) for step in steps]
    slots = [sum(batch["input_ids"].numel() for _, batch in sides[-1].batches(step)) for step in steps]
    differences = compare(sides, steps[0])
    for step in steps:
        for side in sides:
            side.step(step)
    results = report(sides, tokens, slots)
    apart = [abs(a / b - 1) for side in sides for a, b in zip(side.losses, sides[-1].losses, strict=True)]
    precision = sides[-1].run.recipe.precision
    holds = bool(max(*differences.values(), *apart) <= TOLERANCES[precision])
    print(f"losses of steps: largest relative difference {max(apart):.1e}; {'holds' if holds else 'DOES NOT HOLD'}")
    if arguments.facts is not None:
        settings = {"piece": "packed against padded", "recipe": recipe, "precision": precision, "holds": holds}
        with arguments.facts.open("a") as file:
            file.write(f"{json.dumps(settings | {'documents': differences} | results)}\n")
    sys.exit(not holds)


if __name__ == "__main__":
    main()
