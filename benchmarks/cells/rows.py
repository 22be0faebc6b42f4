"""The rows of a cell, made once: packed by ftcli in the order it trains them, and read from there by every peer.

Documents are random words of a vocabulary as large as the model's, their frequencies like those of a language
(Zipf), their lengths log-normal. A classifier's rows hold one document or image each. Knows nothing of peers.
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

from .cell import CLASSIFIERS, Cell, Inputs

MEDIANS = {"sft": 330, "pretrain": 330, "text_classification": 40}  # tokens of a document: chats; sentences
SIGMA = 0.9  # of their logarithm
PROMPT_SHARE = 0.3  # of a document, where prompts are not trained (sft)
PATCHES = 197  # of an image: 14 x 14 of 16 pixels, and the class token
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
            self.targets, self.paths = file["targets"].tolist(), file["paths"].tolist()  # of classifiers
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
    """Write rows for all steps of a cell, and the recipe that trains them."""
    rows = inputs.rows.with_suffix("" if cell.task == "image_classification" else ".jsonl")
    if cell.task == "image_classification":
        write_images(rows, cell.global_size * cell.steps)
    else:
        vocabulary = json.loads((inputs.model / "config.json").read_text())["vocab_size"]
        documents = draw_documents(cell, vocabulary)
        rows.write_text("".join(f"{json.dumps(as_row(words.tolist(), cell.task))}\n" for words in documents))
    data: dict[str, Any] = {"train": str(rows.resolve())}
    if cell.task != "image_classification":
        data["max_length"] = cell.length
    if cell.task not in CLASSIFIERS:
        data["packing"] = True
    recipe: dict[str, Any] = {
        "task": cell.task,
        "precision": cell.precision,
        "model": {"name": str(inputs.model.resolve()), "dropout": 0.0},
        "data": data,
        "batch": {"global_size": cell.global_size, "micro_size": cell.micro_size},
        "train": {"max_steps": cell.steps},
        "optimizer": {"learning_rate": cell.learning_rate, "max_grad_norm": 1.0},
        "schedule": {"name": "constant"},
        "log": {"every_steps": 10},  # TRL's default too
    }
    inputs.recipe.write_text(yaml.safe_dump(recipe, sort_keys=False))


def as_row(words: list[int], task: str) -> dict[str, str]:
    """Return a document as a row of its task's format."""
    names = [str(word) for word in words]
    if task == "text_classification":
        return {"text": " ".join(names), "label": "odd" if words[0] % 2 else "even"}
    prompt = math.ceil(len(names) * PROMPT_SHARE)
    asked, answered = " ".join(names[:prompt]) + " ", " ".join(names[prompt:])
    return {"text": asked + answered} if task == "pretrain" else {"prompt": asked, "completion": answered}


def draw_documents(cell: Cell, vocabulary: int) -> list[NDArray[np.int64]]:
    """Return as many documents as a cell trains, and a few more where packing leaves a little room in each row."""
    random = np.random.default_rng(0)
    found: list[NDArray[np.int64]] = []
    rows = cell.global_size * cell.steps
    left = rows if cell.task in CLASSIFIERS else rows * cell.length * 1.03 + 4 * cell.length
    while left > 0:
        drawn = random.lognormal(math.log(MEDIANS[cell.task]), SIGMA)
        length = int(np.clip(drawn, min(16, cell.length // 2), cell.length - 1))  # and the end token
        found.append(np.minimum(random.zipf(1.2, length) - 1 + SPECIAL, vocabulary - 1))
        left -= 1 if cell.task in CLASSIFIERS else length + 1
    return found


def write_images(folder: Path, count: int) -> None:
    """Write JPEG images of 256 x 256 pixels, smooth random patterns, into one folder for each label."""
    from PIL import Image

    random = np.random.default_rng(0)
    for number in range(count):
        place = folder / ("odd" if number % 2 else "even")
        place.mkdir(parents=True, exist_ok=True)
        small = random.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(small).resize((256, 256)).save(place / f"{number:06}.jpg")


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
    ids = [np.asarray(document.get("input_ids", [0] * PATCHES), dtype=np.int32) for document in documents]
    trained = [document.get("trained", [False] * len(held)) for document, held in zip(documents, ids, strict=True)]
    partial = path.with_suffix(".part.npz")
    np.savez(
        partial,
        ids=np.concatenate(ids),
        trained=np.concatenate([np.asarray(marks, dtype=bool) for marks in trained]),
        lengths=np.array([len(held) for held in ids]),
        documents=np.array([len(held) for held in bins]),
        digests=np.array(
            [digest(np.array([row["id"] for row in held], dtype=np.int64)) for held in steps], dtype=np.uint64
        ),
        targets=np.array([document.get("target", -1) for document in documents]),
        paths=np.array([str(document.get("path", "")) for document in documents]),
    )
    partial.replace(path)
