"""The rows of a cell, made once: packed by ftcli in the order it trains them, and read from there by every peer.

Documents are random words of a vocabulary as large as the model's, their frequencies like those of a language
(Zipf), their lengths log-normal as chats have them. Knows nothing of peers.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from .cell import MEDIAN, SIGMA, Cell, Inputs

PROMPT_SHARE = 0.3  # of a document, where prompts are not trained (sft)
SPECIAL = 2  # tokens that are no words: padding and end


@dataclass(frozen=True)
class Documents:
    """Some documents laid end to end: `ids` and `trained` `[T]`, their `lengths` in tokens."""

    ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    lengths: NDArray[np.int64]

    @property
    def positions(self) -> NDArray[np.int64]:
        """Position of every token in its document, `[T]`."""
        return np.concatenate([np.arange(length) for length in self.lengths])

    @property
    def labels(self) -> NDArray[np.int64]:
        """Each trained token's id, else -100, `[T]`; a document's first token is predicted by nothing."""
        return np.where(self.trained & (self.positions > 0), self.ids, -100).astype(np.int64)

    @property
    def items(self) -> int:
        """Trained tokens."""
        return int((self.labels >= 0).sum())


class PackedRows:
    """All packed rows of a cell, in the order of training; step by step, then row by row."""

    def __init__(self, path: Path, global_size: int) -> None:
        with np.load(path) as file:
            self.ids, self.trained, self.lengths = file["ids"], file["trained"], file["lengths"]
            self.digests = [int(value) for value in file["digests"]]
            self._first = np.concatenate([[0], np.cumsum(file["documents"])])  # first document of every row
        self._starts = np.concatenate([[0], np.cumsum(self.lengths)])  # first token of every document
        self.global_size = global_size

    def __len__(self) -> int:
        return len(self._first) - 1

    def span(self, first: int, last: int) -> Documents:
        """Return the documents of packed rows `first` to `last` (not included)."""
        begin, end = int(self._first[first]), int(self._first[last])
        tokens = slice(int(self._starts[begin]), int(self._starts[end]))
        return Documents(self.ids[tokens], self.trained[tokens], self.lengths[begin:end])

    def step(self, number: int) -> Documents:
        """Return all documents of an optimizer step, counted from 0."""
        return self.span(number * self.global_size, (number + 1) * self.global_size)

    def micro_batches(self, number: int, *, micro_size: int, rank: int, processes: int) -> list[Documents]:
        """Return what one rank trains in a step: every `processes`-th micro-batch from its own on."""
        first = number * self.global_size
        starts = range(first, first + self.global_size, micro_size)
        return [self.span(start, start + micro_size) for start in starts[rank::processes]]


def write_recipe(cell: Cell, inputs: Inputs) -> None:
    """Write texts for all steps of a cell, and the recipe that trains them."""
    sizes = json.loads((inputs.model / "config.json").read_text())
    texts = inputs.rows.with_suffix(".jsonl")
    with texts.open("w") as file:
        for words in draw_documents(cell.global_size * cell.steps * cell.length, sizes["vocab_size"], cell.length):
            names = [str(word) for word in words.tolist()]
            prompt = math.ceil(len(names) * PROMPT_SHARE)
            asked, answered = " ".join(names[:prompt]) + " ", " ".join(names[prompt:])
            row = {"text": asked + answered} if cell.task == "pretrain" else {"prompt": asked, "completion": answered}
            file.write(f"{json.dumps(row)}\n")
    recipe: dict[str, Any] = {
        "task": cell.task,
        "precision": cell.precision,
        "model": {"name": str(inputs.model.resolve()), "dropout": 0.0},
        "data": {"train": str(texts.resolve()), "max_length": cell.length, "packing": True},
        "batch": {"global_size": cell.global_size, "micro_size": cell.micro_size},
        "train": {"max_steps": cell.steps},
        "optimizer": {"learning_rate": cell.learning_rate, "max_grad_norm": 1.0},
        "schedule": {"name": "constant"},
        "log": {"every_steps": 10},  # TRL's default too
    }
    inputs.recipe.write_text(yaml.safe_dump(recipe, sort_keys=False))


def draw_documents(tokens: int, vocabulary: int, longest: int) -> list[NDArray[np.int64]]:
    """Return documents of `tokens` tokens in all and a few more: packing leaves a little room in each row."""
    random = np.random.default_rng(0)
    found: list[NDArray[np.int64]] = []
    left = tokens * 1.03 + 4 * longest
    while left > 0:
        length = int(np.clip(random.lognormal(math.log(MEDIAN), SIGMA), 16, longest - 1))  # and the end token
        found.append(np.minimum(random.zipf(1.2, length) - 1 + SPECIAL, vocabulary - 1))
        left -= length + 1
    return found


def write_packed(recipe_path: Path, path: Path) -> None:
    """Write all packed rows that a run of a recipe trains, in its order; ftcli's own parts make them."""
    from ftcli.cache import prepare_rows
    from ftcli.loaders import Rows, build_loaders
    from ftcli.planning import derive_plan
    from ftcli.recipe_file import load_recipe
    from ftcli.sampling import digest
    from ftcli.tasks import build_task

    recipe = load_recipe(recipe_path)
    task = build_task(recipe)
    rows = prepare_rows(recipe, task)
    plan = derive_plan(recipe, 1, rows.train_rows)
    loader, _ = build_loaders(recipe, plan, task, rows, first_step=0)
    assert loader is not None
    packed = Rows(rows.train, task, training=True, bins=rows.bins)
    bins = [packed[key] for keys in loader.batch_sampler for key in keys]
    documents = [document for held in bins for document in held]
    size = plan.global_size
    steps = [sum(bins[first : first + size], []) for first in range(0, len(bins), size)]
    partial = path.with_suffix(".part.npz")
    np.savez(
        partial,
        ids=np.concatenate([np.asarray(document["input_ids"], dtype=np.int32) for document in documents]),
        trained=np.concatenate([np.asarray(document["trained"], dtype=bool) for document in documents]),
        lengths=np.array([len(document["input_ids"]) for document in documents]),
        documents=np.array([len(held) for held in bins]),
        digests=np.array(
            [digest(np.array([row["id"] for row in held], dtype=np.int64)) for held in steps], dtype=np.uint64
        ),
    )
    partial.replace(path)
