"""The first pass over a step: the rows of the global batch without padding, and the same dropout in both passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ftcli.loop import steps
from ftcli.runtime.seeds import PADDING
from ftcli.task_contract import check_task
from ftcli.training.first_pass import joined, values_of
from ftcli.training.setup import prepare

from ...support.cells import write_inputs
from ...support.two_terms import FIRST_PASS, two_terms
from .test_steady_loop import STEPS, reads_of


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


def test_first_pass_values_are_in_order_of_ids_without_padding() -> None:
    values = {"margin": torch.tensor([[7.0], [0.0], [2.0], [5.0]])}
    ids = np.array([7, PADDING, 2, 5])
    step = values_of(values, ids)
    assert step.ids.tolist() == [2, 5, 7] and step.values["margin"].tolist() == [[2.0], [5.0], [7.0]]
    seen = step.seen_by(ids)
    assert seen.positions[[0, 2, 3]].tolist() == [2, 0, 1] and 0 <= int(seen.positions[1]) < 3


def test_micro_batches_are_joined_without_padding() -> None:
    parts = [{"x": torch.tensor([1.0, 0.0], requires_grad=True)}, {"x": torch.tensor([3.0, 4.0])}]
    values, ids = joined(parts, [np.array([9, PADDING]), np.array([4, 6])])
    assert values["x"].tolist() == [1.0, 3.0, 4.0] and ids.tolist() == [9, 4, 6]
    assert not values["x"].requires_grad


def curve(inputs: Path, micro: int, **changes: Any) -> list[tuple[float, float, dict[str, float], dict[str, float]]]:
    recipe = two_terms(inputs, FIRST_PASS, batch={"global_size": 12, "micro_size": micro}, **changes)
    return [(s.loss, s.grad_norm, s.term_losses, s.notes) for s in steps(prepare(recipe, cpu=True))]


def test_the_loss_of_all_rows_does_not_depend_on_the_micro_size(inputs: Path) -> None:
    expected = curve(inputs, 12)
    for micro in (1, 4):
        for actual, goal in zip(curve(inputs, micro), expected, strict=True):
            assert actual[0] == pytest.approx(goal[0], rel=1e-6) and actual[1] == pytest.approx(goal[1], rel=1e-5)
            assert actual[2] == pytest.approx(goal[2], rel=1e-5)
            assert actual[3] == pytest.approx(goal[3], rel=1e-5, abs=1e-6)
    for _, _, terms, notes in expected:
        assert terms["spread"] > 0 and notes["moved"] < 1e-6
        assert terms["spread"] == pytest.approx(notes["seen"] - notes["row_nll"], rel=1e-5)
        assert 2.4 < terms["spread"] < 2.6  # the logarithm of 12 rows, whose values differ little


def test_both_passes_draw_the_same_dropout(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"model": {"name": str(inputs / "tied"), "dropout": 0.3}}
    assert all(notes["moved"] == 0.0 for *_, notes in curve(inputs, 3, **changes))
    from ftcli.training.run import Run

    monkeypatch.setattr(Run, "reseed", lambda self, step, micro_batch=None: None)
    assert all(notes["moved"] > 1e-5 for *_, notes in curve(inputs, 3, **changes))


def test_first_pass_of_an_incomplete_step_has_only_real_rows(inputs: Path) -> None:
    data = {"train": str(inputs / "chats.jsonl"), "eval_rows": 5, "max_length": 128, "drop_last": False}
    changes: dict[str, Any] = {"data": data, "train": {"max_steps": 4}}
    recipe = two_terms(inputs, FIRST_PASS, batch={"global_size": 12, "micro_size": 4}, **changes)
    rows = [(step.rows, step.term_losses["spread"], step.notes) for step in steps(prepare(recipe, cpu=True))]
    assert [count for count, *_ in rows] == [12, 12, 12, 1]
    assert rows[-1][1] == pytest.approx(0.0, abs=1e-6) and rows[-1][2]["moved"] < 1e-6


@pytest.mark.parametrize("layout", [{"packing": True}, {"padding_free": True}])
def test_rows_laid_end_to_end_are_seen_one_by_one(layout: dict[str, Any], inputs: Path) -> None:
    data = {"train": str(inputs / "chats.jsonl"), "max_length": 256} | layout
    recipe = two_terms(inputs, FIRST_PASS, data=data, batch={"global_size": 4, "micro_size": 2})
    for step in steps(prepare(recipe, cpu=True)):
        assert step.notes["moved"] < 1e-6 and step.rows >= 4


def test_no_step_with_a_first_pass_reads_a_value(inputs: Path) -> None:
    assert reads_of(prepare(two_terms(inputs, FIRST_PASS, train={"max_steps": STEPS}), cpu=True)) == []


def test_a_task_with_a_first_pass_passes_the_contract_of_tasks(inputs: Path) -> None:
    check_task(two_terms(inputs, FIRST_PASS))


def test_loss_of_a_single_batch_runs_its_first_pass(inputs: Path) -> None:
    run = prepare(two_terms(inputs, FIRST_PASS), cpu=True)
    loss = run.loss_of(run.any_batch())
    assert loss.requires_grad and bool(torch.isfinite(loss))
