"""What every task must keep: sums that add up, counts that are the mask, padding that changes nothing."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

from ftcli import tasks
from ftcli.cache import prepare_rows
from ftcli.loaders import Collate, Rows
from ftcli.losses import sum_by_source
from ftcli.sampling import PADDING
from ftcli.tasks.tokens import ALIGNED

from ..multiprocess.cells import cell, write_inputs

NAMES = {"sft": "sft-tied", "pretrain": "pretrain", "text_classification": "text", "image_classification": "vit"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


def test_every_task_that_ships_is_held_to_this_contract() -> None:
    assert set(NAMES) == set(tasks.list_tasks())


def test_a_task_imports_torch_only_inside_functions() -> None:
    for name in tasks.list_tasks():
        tree = ast.parse((Path(tasks.__file__).parent / f"{name}.py").read_text())
        top = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not any(word in line for line in top for word in ("torch", "transformers", "datasets", "peft"))


class Setup:
    """One task with its rows and its model in evaluation mode, so that dropout draws nothing."""

    def __init__(self, inputs: Path, name: str) -> None:
        recipe = cell(inputs, NAMES[name])
        self.task = tasks.build_task(recipe)
        prepared = prepare_rows(recipe, self.task)
        self.rows = Rows(prepared.train, self.task, training=False)
        self.model: Any = self.task.load_model(prepared.facts, dtype=torch.float32)[0]
        self.task.finish_model(self.model)
        self.model.eval()

    def batch(self, *indices: int) -> dict[str, Any]:
        return self.task.collate([document for index in indices for document in self.rows[0, index]])

    def loss(self, *indices: int) -> float:
        return float(self.task.loss(self.model, self.batch(*indices)).detach().sum())


@pytest.fixture(scope="module", params=sorted(NAMES))
def setup(request: pytest.FixtureRequest, inputs: Path) -> Setup:
    return Setup(inputs, request.param)


def test_the_loss_of_two_parts_is_the_sum_of_their_losses(setup: Setup) -> None:
    together = setup.loss(0, 1, 2, 3, 4)
    assert together == pytest.approx(setup.loss(0, 1) + setup.loss(2, 3, 4), rel=1e-5)
    assert together > setup.loss(0, 1) > 0


def test_the_count_is_additive_and_what_the_rows_say(setup: Setup) -> None:
    count = setup.task.count
    assert count(setup.batch(0, 1, 2)) == count(setup.batch(0)) + count(setup.batch(1)) + count(setup.batch(2))
    assert count(setup.batch(0, 1)) == sum(int(setup.rows[0, index][0]["items"]) for index in (0, 1))


def test_padding_rows_change_neither_loss_nor_count(setup: Setup) -> None:
    with_padding, alone = setup.batch(0, 1, PADDING, PADDING), setup.batch(0, 1)
    assert setup.task.count(with_padding) == setup.task.count(alone)
    loss = float(setup.task.loss(setup.model, with_padding).detach().sum())
    assert loss == pytest.approx(float(setup.task.loss(setup.model, alone).detach().sum()), rel=1e-5)
    assert [row["id"] for row in setup.rows[0, PADDING]] == [PADDING]


def test_the_parts_of_a_loss_stand_in_the_order_of_the_rows(setup: Setup) -> None:
    indices = (3, PADDING, 0, 2, 4)
    rows = [[row | {"source": place} for row in setup.rows[0, index]] for place, index in enumerate(indices)]
    batch = Collate(setup.task, sources=True)(rows)
    batch.pop("sample_ids")
    sources = batch.pop("item_sources")
    parts = setup.task.loss(setup.model, batch).detach()
    by_row = sum_by_source(parts.sum(), parts, sources, len(indices))[1:].tolist()
    assert by_row == pytest.approx([0.0 if index == PADDING else setup.loss(index) for index in indices], rel=1e-4)


def test_a_batch_of_padding_gives_zero_and_a_gradient_that_is_zero(setup: Setup) -> None:
    loss = setup.task.loss(setup.model, setup.batch(PADDING, PADDING)).sum()
    assert float(loss.detach()) == 0.0
    loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in setup.model.parameters())
    setup.model.zero_grad()


def test_rows_laid_end_to_end_give_the_loss_and_gradient_of_padded_ones(setup: Setup) -> None:
    if not getattr(setup.task, "packs", False):
        pytest.skip("its rows are not documents")
    recipe = setup.task.recipe
    data = recipe.data.model_copy(update={"padding_free": True})
    flat = type(setup.task)(recipe.model_copy(update={"data": data}), setup.task.options)
    rows = [setup.rows[0, index][0] | {"training": True} for index in range(5)]
    model: Any = flat.load_model({}, dtype=torch.float32)[0]
    flat.finish_model(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    batch, padded = flat.collate(rows), setup.batch(*range(5))
    total = sum(len(row["input_ids"]) for row in rows)
    assert batch["input_ids"].shape == (1, total + -total % ALIGNED)
    assert flat.count(batch) == setup.task.count(padded)
    parts, wanted_parts = flat.loss(model, batch), setup.task.loss(setup.model, padded)
    torch.testing.assert_close(parts, wanted_parts, atol=1e-4, rtol=1e-4)
    found, wanted = parts.sum(), wanted_parts.sum()
    assert float(found.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)
    found.backward()
    wanted.backward()
    for (name, ours), theirs in zip(model.named_parameters(), setup.model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-4, rtol=1e-4, msg=name)
    setup.model.zero_grad()
    assert reaches_the_next_document(model, rows, flat, [0, -1]), "boundaries that are ignored must show"
    assert not reaches_the_next_document(model, rows, flat, slice(None))


def reaches_the_next_document(model: Any, rows: list[Any], task: Any, bounds: Any) -> bool:
    """Say whether other tokens in the first document change what is said of those after it, in the last bit even."""
    other = rows[0] | {"input_ids": [5] * len(rows[0]["input_ids"])}
    found = []
    for documents in (rows, [other, *rows[1:]]):
        batch = task.collate(documents)
        batch["attention_mask"] = batch["attention_mask"][..., bounds]
        with torch.no_grad():
            found.append(model(**batch)["nll"][batch["positions"] >= len(rows[0]["input_ids"])])
    return not torch.equal(*found)


def test_every_trained_parameter_gets_a_gradient(setup: Setup) -> None:
    setup.task.loss(setup.model, setup.batch(0, 1, 2, 3)).sum().backward()
    without = [name for name, p in setup.model.named_parameters() if p.requires_grad and p.grad is None]
    setup.model.zero_grad()
    assert without == []


def test_evaluation_rows_add_up_to_the_loss(setup: Setup) -> None:
    with torch.no_grad():
        rows = setup.task.eval_step(setup.model, setup.batch(0, 1, 2))
    assert {name: tuple(value.shape) for name, value in rows.items()} == dict.fromkeys(rows, (3,))
    assert float(rows["loss"].sum()) == pytest.approx(setup.loss(0, 1, 2), rel=1e-5)
    assert int(rows["items"].sum()) == setup.task.count(setup.batch(0, 1, 2))


def test_metrics_are_pure_and_weigh_rows_by_their_items(setup: Setup) -> None:
    with torch.no_grad():
        parts = setup.task.eval_step(setup.model, setup.batch(0, 1, 2, 3))
    rows = {name: value.numpy() for name, value in parts.items()}
    metrics = setup.task.metrics(rows)
    assert metrics["loss"] == pytest.approx(float(rows["loss"].sum() / rows["items"].sum()))
    assert setup.task.metrics(rows) == metrics
    assert all(isinstance(value, float) for value in metrics.values())
    assert getattr(setup.task, "metric_names", None) == tuple(metrics)


def test_the_probe_gives_plain_logits(setup: Setup) -> None:
    with torch.no_grad():
        logits = setup.model(**setup.task.probe(setup.batch(0, 1))).logits
    assert logits.shape[0] == 2
    assert torch.isfinite(logits).all()
