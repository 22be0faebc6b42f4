"""Make the rows of a cell once. ftcli packs them in the order of training, and every peer reads the packed rows.

Documents are random words of a vocabulary as large as the model's. Word frequencies follow Zipf's law, lengths are
log-normal. A classifier's row has one document or image. A pair has two documents: both answers with their prompt.
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

from .cell import CLASSIFIERS, PAIRS, Cell, Inputs

MEDIANS = {"sft": 330, "pretrain": 330, "text_classification": 40}  # tokens of a document
PROMPT_MEDIAN, ANSWER_MEDIAN = 100, 230  # tokens of the prompt and of an answer of a pair
SIGMA = 0.9  # standard deviation of the logarithm of lengths
PROMPT_SHARE = 0.3  # share of a document that is the prompt, which is not trained (sft)
PATCHES = 197  # of an image: 14 x 14 patches of 16 pixels, and the class token
SPECIAL = 2  # tokens other than words: padding and end


@dataclass(frozen=True)
class Documents:
    """Concatenated documents: `ids` and `trained` `[T]`, and their `lengths` in tokens."""

    ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    lengths: NDArray[np.int64]

    @property
    def positions(self) -> NDArray[np.int64]:
        """Position of every token in its document, `[T]`."""
        return np.concatenate([np.arange(length) for length in self.lengths])

    @property
    def labels(self) -> NDArray[np.int64]:
        """Id of each trained token, else -100, `[T]`. The first token of a document is not predicted."""
        return np.where(self.trained & (self.positions > 0), self.ids, -100).astype(np.int64)

    @property
    def items(self) -> int:
        """Number of trained tokens."""
        return int((self.labels >= 0).sum())


class PackedRows:
    """All packed rows of a cell, in the order of training."""

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
        """Return the micro-batches of one rank in a step: every `processes`-th one, starting at `rank`."""
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
        if cell.task in PAIRS:
            texts = draw_pairs(cell, vocabulary)
        else:
            texts = [as_row(words.tolist(), cell.task) for words in draw_documents(cell, vocabulary)]
        rows.write_text("".join(f"{json.dumps(text)}\n" for text in texts))
    data: dict[str, Any] = {"train": str(rows.resolve())}
    if cell.task != "image_classification":
        data["max_length"] = cell.length
    if cell.task not in CLASSIFIERS and cell.median == 0:
        # Concatenated pairs are not padded either, and each step has as many pairs as in other programs.
        data["padding_free" if cell.task in PAIRS else "packing"] = True
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
    question, answer = " ".join(names[:prompt]) + " ", " ".join(names[prompt:])
    return {"text": question + answer} if task == "pretrain" else {"prompt": question, "completion": answer}


def draw_documents(cell: Cell, vocabulary: int) -> list[NDArray[np.int64]]:
    """Return the documents of a cell, and a few more, because packing does not fill rows completely."""
    random = np.random.default_rng(0)
    documents: list[NDArray[np.int64]] = []
    rows = cell.global_size * cell.steps
    by_row = cell.task in CLASSIFIERS or cell.median > 0
    left = rows if by_row else rows * cell.length * 1.03 + 4 * cell.length
    while left > 0:
        drawn = random.lognormal(math.log(cell.median or MEDIANS[cell.task]), SIGMA)
        length = int(np.clip(drawn, min(16, cell.length // 2), cell.length - 1))  # without the end token
        documents.append(np.minimum(random.zipf(1.2, length) - 1 + SPECIAL, vocabulary - 1))
        left -= 1 if by_row else length + 1
    return documents


def draw_pairs(cell: Cell, vocabulary: int) -> list[dict[str, str]]:
    """Return the pairs of a cell in the format of the task preference."""
    random = np.random.default_rng(0)

    def words(median: int, most: int) -> str:
        length = int(np.clip(random.lognormal(math.log(median), SIGMA), min(8, most), most))
        drawn = np.minimum(random.zipf(1.2, length) - 1 + SPECIAL, vocabulary - 1)
        return " ".join(map(str, drawn.tolist()))

    half = cell.length // 2 - 1  # the end token is added
    pairs = []
    for _ in range(cell.global_size * cell.steps):
        prompt = words(PROMPT_MEDIAN, half)
        chosen, rejected = (words(ANSWER_MEDIAN, half) for _ in range(2))
        pairs.append({"prompt": f"{prompt} ", "chosen": chosen, "rejected": rejected})
    return pairs


def write_images(folder: Path, count: int) -> None:
    """Write JPEG images of 256 x 256 pixels with smooth random patterns, in one folder per label."""
    from PIL import Image

    random = np.random.default_rng(0)
    for number in range(count):
        label_folder = folder / ("odd" if number % 2 else "even")
        label_folder.mkdir(parents=True, exist_ok=True)
        small = random.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(small).resize((256, 256)).save(label_folder / f"{number:06}.jpg")


def write_packed(recipe_path: Path, path: Path) -> None:
    """Write all packed rows of a run in the order of training. ftcli's own modules pack and order them."""
    from ftcli.config.load import load_recipe
    from ftcli.config.plan import derive_plan
    from ftcli.data.cache import prepare_rows
    from ftcli.runtime.seeds import digest
    from ftcli.tasks.build import build_task
    from ftcli.tasks.shared.pairs import sides_of
    from ftcli.training.batches.dataloaders import Rows
    from ftcli.training.batches.loaders import build_loaders
    from ftcli.training.prepared_data import PreparedData

    recipe = load_recipe(recipe_path)
    task = build_task(recipe)
    rows = prepare_rows(recipe, task)
    plan = derive_plan(recipe, 1, rows.train_rows)
    loaders = build_loaders(recipe, PreparedData(task, rows, [], plan))
    assert loaders.order is not None
    packed = Rows(rows.train, task, training=True, bins=rows.bins)
    packs = [packed[key] for keys in loaders.order for key in keys]
    if recipe.task in PAIRS:
        packs = [[side | {"id": row["id"]} for side in sides_of([row])] for (row,) in packs]
    documents = [document for pack in packs for document in pack]
    size = plan.global_size
    steps = [sum(packs[first : first + size], []) for first in range(0, len(packs), size)]
    ids = [np.asarray(document.get("input_ids", [0] * PATCHES), dtype=np.int32) for document in documents]
    trained = [document.get("trained", [False] * len(tokens)) for document, tokens in zip(documents, ids, strict=True)]
    partial = path.with_suffix(".part.npz")
    np.savez(
        partial,
        ids=np.concatenate(ids),
        trained=np.concatenate([np.asarray(marks, dtype=bool) for marks in trained]),
        lengths=np.array([len(tokens) for tokens in ids]),
        documents=np.array([len(pack) for pack in packs]),
        digests=np.array(
            [digest(np.array(list(dict.fromkeys(row["id"] for row in step)), dtype=np.int64)) for step in steps],
            dtype=np.uint64,
        ),
        targets=np.array([document.get("target", -1) for document in documents]),
        paths=np.array([str(document.get("path", "")) for document in documents]),
    )
    partial.replace(path)
