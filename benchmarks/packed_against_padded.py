"""The same documents packed and padded: the same loss for each document, the same curve, and what packing saves.

    ftcli fetch quickstart && python benchmarks/packed_against_padded.py [RECIPE] [--documents 24] [--steps 3]

A step takes some documents drawn by chance, once packed into rows and once as padded micro-batches in the recipe's
own micro size, so both curves are trained on the same tokens. (The documents of ready-made bins would not do: best
fit puts many of one length together, and padded batches of those have next to no padding.) Losses of single
documents are compared before training.
Steps of both kinds take turns, each on its own copy of the model, and the first of each is left out of the speed.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch

from ftcli.cache import prepare_rows
from ftcli.loaders import Rows
from ftcli.packing import lengths_of, pack
from ftcli.recipe_file import load_recipe
from ftcli.run import _build_model
from ftcli.tasks import build_task


class Side:
    """One way to lay out the documents, with its own copy of the model."""

    def __init__(self, name: str, recipe: str, given: list[str], micro: int) -> None:
        self.name, self.micro = name, micro
        loaded = load_recipe(recipe, given)
        self.task: Any = build_task(loaded)
        self.prepared = prepare_rows(loaded, self.task)
        self.capacity = loaded.data.max_length
        self.rows = Rows(self.prepared.train, self.task, training=True)
        self.model: Any = _build_model(loaded, self.task, self.prepared, None)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-3)
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def batches(self, documents: list[int]) -> list[Any]:
        """Return (documents, batch) of each micro-batch: one packed row, or `micro` padded rows."""
        groups = [documents[start : start + (self.micro or 1)] for start in range(0, len(documents), self.micro or 1)]
        if not self.micro:
            bins = pack(lengths_of(self.prepared.train)[documents], self.capacity)
            groups = [[documents[number] for number in bins[index]] for index in range(len(bins))]
        return [(group, self.task.collate([self.rows[0, number][0] for number in group])) for group in groups]

    def nll(self, documents: list[int]) -> dict[int, float]:
        """Return document -> the summed loss of its trained tokens."""
        found: dict[int, float] = {}
        with torch.no_grad():
            for group, batch in self.batches(documents):
                parts = self.model(**batch)["nll"].double().numpy()
                ends = np.cumsum([self.prepared.train[number]["items"] for number in group])
                sums = [part.sum() for part in np.split(parts, ends[:-1])]
                found |= dict(zip(group, sums, strict=True))
        return found

    def step(self, documents: list[int]) -> None:
        """Take one optimizer step and note its time and its loss per trained token."""
        started = time.perf_counter()
        batches = [batch for _, batch in self.batches(documents)]
        items, total = sum(self.task.count(batch) for batch in batches), 0.0
        for batch in batches:
            loss = self.task.loss(self.model, batch).sum() / items
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - started)
        self.losses.append(total)


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe", nargs="?", default="quickstart")
    parser.add_argument("--documents", type=int, default=24, help="of one step")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--capacity", type=int, default=512, help="tokens of a packed row")
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    length = [f"data.max_length={arguments.capacity}", *arguments.set]
    packed = Side("packed", arguments.recipe, [*length, "data.packing=true"], micro=0)
    padded = Side("padded", arguments.recipe, length, micro=load_recipe(arguments.recipe, length).batch.micro_size)
    drawn = np.random.default_rng(0).permutation(len(packed.prepared.train))[: arguments.steps * arguments.documents]
    steps = [part.tolist() for part in np.split(drawn, arguments.steps)]
    tokens = [int(lengths_of(packed.prepared.train)[step].sum()) for step in steps]
    slots = [sum(batch["input_ids"].numel() for _, batch in padded.batches(step)) for step in steps]
    ours, theirs = packed.nll(steps[0]), padded.nll(steps[0])
    worst = max(abs(ours[number] / theirs[number] - 1) for number in theirs if theirs[number])
    print(f"{len(theirs)} documents, loss of each, packed against padded: largest relative difference {worst:.1e}")
    for step in steps:
        for side in (packed, padded):
            side.step(step)
    print("step  tokens  padded to  loss packed  loss padded  seconds packed  padded")
    columns = (tokens, slots, packed.losses, padded.losses, packed.seconds, padded.seconds)
    for number, values in enumerate(zip(*columns, strict=True)):
        print("{:4}  {:6}  {:9}  {:11.5f}  {:11.5f}  {:14.2f}  {:6.2f}".format(number + 1, *values))
    speeds = [sum(tokens[1:]) / sum(side.seconds[1:]) for side in (packed, padded)]
    print(f"{speeds[0]:.0f} tokens/s packed, {speeds[1]:.0f} padded: {speeds[0] / speeds[1]:.2f} times", end="; ")
    print(f"{100 * (1 - sum(tokens) / sum(slots)):.0f} % of the padded batches is padding")


if __name__ == "__main__":
    main()
