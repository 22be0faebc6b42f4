"""The training loss of each of several sources: its own sum over its own items, whatever the batch looks like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ftcli.data.cache import PreparedRows
from ftcli.data.paths import labels_of
from ftcli.loop import steps
from ftcli.runtime.errors import InputError
from ftcli.runtime.seeds import PADDING
from ftcli.training.batches.dataloaders import Collate
from ftcli.training.batches.window import count_by_source, sum_by_source
from ftcli.training.evaluation import evaluate
from ftcli.training.run import Run
from ftcli.training.setup import prepare

from ....support.cells import cell
from ....support.runner import MakeInputs

NAN = float("nan")


def int16(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int16)


def test_sum_by_source_adds_up_the_items_of_each_source() -> None:
    parts = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    sources = int16(2, 0, 2, PADDING, 0)
    assert sum_by_source(parts.sum(), parts, sources, 4).tolist() == [31.0, 18.0, 0.0, 5.0, 0.0]
    assert count_by_source([{"item_sources": sources}, {"item_sources": int16(1)}], 4) == [2, 1, 2, 0]


def test_sum_by_source_of_one_source_is_empty() -> None:
    assert sum_by_source(torch.tensor(3.0), torch.tensor([1.0, 2.0]), None, 0).tolist() == [3.0]
    assert count_by_source([{}], 0) == []


def test_sum_by_source_with_a_nan_leaves_other_sources_finite() -> None:
    actual = sum_by_source(torch.tensor(NAN), torch.tensor([NAN, 2.0]), int16(1, 0), 2)
    assert actual.isnan().tolist() == [True, False, True]
    assert actual[1] == 2.0


def test_sum_by_source_does_not_synchronise() -> None:
    parts, sources = torch.empty(7, device="meta"), torch.empty(7, dtype=torch.int16, device="meta")
    assert sum_by_source(parts.sum(), parts, sources, 3).shape == (4,)  # a tensor without values has none to wait for


def test_sum_by_source_of_a_scalar_loss_raises() -> None:
    with pytest.raises(InputError, match="the task's `loss` gave a scalar, not values \\[2\\]"):
        sum_by_source(torch.tensor(3.0), torch.tensor(3.0), int16(1, 0), 2)
    with pytest.raises(InputError, match="gave values \\[3\\], not values \\[2\\]"):
        sum_by_source(torch.tensor(3.0), torch.ones(3), int16(1, 0), 2)


class Task:
    """A task whose batch is nothing."""

    def __init__(self, item: str) -> None:
        self.item = item

    @staticmethod
    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(("item", "expected"), [("token", [1, 1, 1, 0, 0]), ("sample", [1, 0, PADDING])])
def test_collate_adds_the_source_of_each_loss_value(item: str, expected: list[int]) -> None:
    rows = [{"id": 4, "source": 1, "items": 3}, {"id": 5, "source": 0, "items": 2}]
    blank = {"id": PADDING, "source": 1, "items": 0}
    batch = Collate(Task(item), sources=True)([rows, [blank]])  # type: ignore[arg-type]
    assert batch["item_sources"].tolist() == expected
    assert "item_sources" not in Collate(Task(item))([rows, [blank]])  # type: ignore[arg-type]


def test_labels_of_two_sources_of_one_name_are_refused() -> None:
    from ftcli.config.recipe_data import Source

    double = [Source(path="a/x.jsonl", label="chats"), Source(path="chats.jsonl")]
    with pytest.raises(InputError, match="two sources of data have the name 'chats'"):
        labels_of(double)
    assert labels_of([Source(path="a/x.jsonl"), Source(path="b/x.jsonl")]) == ["a/x.jsonl", "b/x.jsonl"]


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    """Two sources for every task, of unlike sizes and, with text, of unlike length; with images, of unlike labels."""
    folder = make_inputs()
    for name, long in (("chats", "completion"), ("texts", "text")):
        rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for part, count, letter in (("few", 5, "z"), ("many", 19, "alpha ")):
            written = [row | {long: row[long] + letter * 12 * (part == "few")} for row in rows[:count]]
            (folder / f"{part}-{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    for part in ("few", "many"):
        for label in ("red", "green"):
            (folder / f"{part}-images" / label).mkdir(parents=True)
            count = 9 if part == "many" else {"red": 1, "green": 5}[label]
            for path in sorted((folder / "images" / label).iterdir())[:count]:
                (folder / f"{part}-images" / label / path.name).write_bytes(path.read_bytes())
    return folder


LAYOUTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "padded": ("sft-tied", "chats.jsonl", {}),
    "packed": ("sft-tied", "chats.jsonl", {"packing": True}),
    "padding-free": ("sft-tied", "chats.jsonl", {"padding_free": True}),
    "pretrain": ("pretrain", "texts.jsonl", {}),
    "text": ("text", "texts.jsonl", {}),
    "images": ("vit", "images", {}),
}


def run_of(folder: Path, name: str, *, parts: tuple[str, ...] = ("few", "many")) -> Run:
    """Return a run whose first step sees each training row once; the same rows are evaluated."""
    kind, file, layout = LAYOUTS[name]
    paths: Any = [str(folder / f"{part}-{file}") for part in parts]
    train = paths if len(paths) > 1 else paths[0]
    data = {"train": train, "eval": train, "max_length": 256, "drop_last": False} | layout
    options = {"task_options": {"flip": 0.0}} if name == "images" else {}
    batch = {"global_size": 28, "micro_size": 4}
    once = {"train": {"max_steps": 1}, "schedule": {"name": "constant"}}
    return prepare(cell(folder, kind, data=data, batch=batch, **options, **once), cpu=True)


@pytest.mark.parametrize("name", LAYOUTS)
def test_source_losses_of_the_first_step_equal_an_evaluation_of_the_rows(name: str, inputs: Path) -> None:
    run = run_of(inputs, name)
    metrics = evaluate(run)
    run.model.train()
    (step,) = steps(run)
    labels = run.rows.sources
    assert len(labels) == 2 and abs(metrics[f"{labels[0]}/loss"] - metrics[f"{labels[1]}/loss"]) > 1e-3
    assert step.source_losses == pytest.approx({label: metrics[f"{label}/loss"] for label in labels}, rel=1e-5)
    assert sum(step.source_items.values()) == step.items
    assert len(set(step.source_items.values())) == 2  # so that the items of one divide the other's sum nowhere unseen
    mean = sum(step.source_losses[label] * step.source_items[label] for label in labels) / step.items
    assert step.loss == pytest.approx(mean, rel=1e-5)


def test_source_losses_of_one_source_are_not_computed(inputs: Path) -> None:
    run = run_of(inputs, "padded", parts=("many",))
    sent: list[list[int]] = []
    send = run.hardware.ranks.sum_later
    run.hardware.ranks.sum_later = lambda values: [sent.append(values), send(values)][1]  # type: ignore
    (step,) = steps(run)
    assert [len(values) for values in sent] == [4]
    assert step.source_items == {} and step.source_losses == {} and step.source_tensor.shape == (0,)
    assert run.rows.sources == []
    assert "item_sources" not in next(iter(run.train_loader))


def test_prepared_rows_sources_are_given_only_for_several_sources() -> None:
    rows: Any = None
    assert PreparedRows(rows, None, {}).sources == []
    assert PreparedRows(rows, None, {}, labels={"train": ["a"], "eval": ["b", "c"]}).sources == []
    assert PreparedRows(rows, None, {}, labels={"train": ["a", "b"]}).sources == ["a", "b"]
