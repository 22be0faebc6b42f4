"""The training loss of each of several sources: its own sum over its own items, whatever the batch looks like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ftcli.cache import PreparedRows
from ftcli.errors import InputError
from ftcli.evaluation import evaluate
from ftcli.loaders import Collate
from ftcli.loop import steps
from ftcli.losses import sum_by_source
from ftcli.rows import labels_of
from ftcli.run import Run, prepare
from ftcli.sampling import PADDING
from ftcli.windows import count_by_source

from ..multiprocess.cells import cell, write_inputs

NAN = float("nan")


def int16(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int16)


def test_each_source_gets_the_parts_of_its_own_items() -> None:
    parts = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    sources = int16(2, 0, 2, PADDING, 0)
    assert sum_by_source(parts.sum(), parts, sources, 4).tolist() == [31.0, 18.0, 0.0, 5.0, 0.0]
    assert count_by_source([{"item_sources": sources}, {"item_sources": int16(1)}], 4) == [2, 1, 2, 0]


def test_one_source_has_the_loss_and_nothing_besides() -> None:
    assert sum_by_source(torch.tensor(3.0), torch.tensor([1.0, 2.0]), None, 0).tolist() == [3.0]
    assert count_by_source([{}], 0) == []


def test_a_loss_that_is_not_a_number_stays_with_its_source() -> None:
    found = sum_by_source(torch.tensor(NAN), torch.tensor([NAN, 2.0]), int16(1, 0), 2)
    assert found.isnan().tolist() == [True, False, True]
    assert found[1] == 2.0


def test_telling_sources_apart_never_asks_the_device_for_a_value() -> None:
    parts, sources = torch.empty(7, device="meta"), torch.empty(7, dtype=torch.int16, device="meta")
    assert sum_by_source(parts.sum(), parts, sources, 3).shape == (4,)  # a tensor without values has none to wait for


def test_a_task_that_gives_a_sum_cannot_tell_sources_apart() -> None:
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


@pytest.mark.parametrize(("item", "wanted"), [("token", [1, 1, 1, 0, 0]), ("sample", [1, 0, PADDING])])
def test_a_batch_says_of_which_source_each_value_of_the_loss_is(item: str, wanted: list[int]) -> None:
    rows = [{"id": 4, "source": 1, "items": 3}, {"id": 5, "source": 0, "items": 2}]
    blank = {"id": PADDING, "source": 1, "items": 0}
    batch = Collate(Task(item), sources=True)([rows, [blank]])  # type: ignore[arg-type]
    assert batch["item_sources"].tolist() == wanted
    assert "item_sources" not in Collate(Task(item))([rows, [blank]])  # type: ignore[arg-type]


def test_two_sources_of_one_name_are_refused() -> None:
    from ftcli.recipe import Source

    double = [Source(path="a/x.jsonl", label="chats"), Source(path="chats.jsonl")]
    with pytest.raises(InputError, match="two sources of data are called 'chats'"):
        labels_of(double)
    assert labels_of([Source(path="a/x.jsonl"), Source(path="b/x.jsonl")]) == ["a/x.jsonl", "b/x.jsonl"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sources for every task, of unlike sizes and, with text, of unlike length."""
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    for name, long in (("chats", "completion"), ("texts", "text")):
        rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for part, count, letter in (("few", 5, "z"), ("many", 19, "alpha ")):
            kept = [row | {long: row[long] + letter * 12 * (part == "few")} for row in rows[:count]]
            (folder / f"{part}-{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    for part in ("few", "many"):
        for label in ("red", "green"):
            (folder / f"{part}-images" / label).mkdir(parents=True)
            for path in sorted((folder / "images" / label).iterdir())[: 3 if part == "few" else 9]:
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
def test_the_first_step_tells_for_each_source_what_an_evaluation_of_its_rows_tells(name: str, inputs: Path) -> None:
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


def test_with_one_source_nothing_is_counted_summed_or_sent(inputs: Path) -> None:
    run = run_of(inputs, "padded", parts=("many",))
    sent: list[list[int]] = []
    send = run.hardware.ranks.sum_later
    run.hardware.ranks.sum_later = lambda values: [sent.append(values), send(values)][1]  # type: ignore
    (step,) = steps(run)
    assert [len(values) for values in sent] == [4]
    assert step.source_items == {} and step.source_losses == {} and step.source_tensor.shape == (0,)
    assert run.rows.sources == []
    assert "item_sources" not in next(iter(run.train_loader))


def test_the_names_of_sources_are_told_only_where_there_are_several() -> None:
    rows: Any = None
    assert PreparedRows(rows, None, {}).sources == []
    assert PreparedRows(rows, None, {}, labels={"train": ["a"], "eval": ["b", "c"]}).sources == []
    assert PreparedRows(rows, None, {}, labels={"train": ["a", "b"]}).sources == ["a", "b"]
