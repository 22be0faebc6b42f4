"""Weights of rows and turns, label smoothing and z-loss of sft and pretrain: which tokens get which factor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ftcli.config.recipe import Recipe
from ftcli.data.cache import PreparedRows, prepare_rows
from ftcli.loop import steps
from ftcli.reports.preview import preview_data
from ftcli.runtime.errors import InputError, RowError
from ftcli.task_contract import CHECKS, TaskCase
from ftcli.tasks.build import build_task
from ftcli.tasks.protocol import Term
from ftcli.tasks.shared.batches import fit
from ftcli.training.setup import prepare

from ...support.cells import cell
from ...support.recipes import minimal_values
from ...support.runner import MakeInputs

HI, YO = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}
TURNS = [HI, YO | {"weight": 0.25}, HI, YO, HI, YO | {"weight": 3}]
OPTIONS = {"label_smoothing": 0.1, "z_loss": 0.01}


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    return make_inputs()


@pytest.fixture(scope="module")
def model(inputs: Path) -> Path:
    return inputs / "tied"


def recipe(model: Path, data: dict[str, Any] | None = None, task: str = "sft", **options: Any) -> Recipe:
    return Recipe.model_validate(
        minimal_values(
            task,
            task_options=options,
            model={"name": str(model), "dropout": 0},
            data={"train": "rows.jsonl"} | (data or {}),
            batch={"global_size": 4, "micro_size": 4},
        )
    )


def encoded(model: Path, row: dict[str, Any], **arguments: Any) -> list[dict[str, Any]]:
    task: Any = build_task(recipe(model, **arguments))
    rows: list[dict[str, Any]] = task.encode(row, {})
    return rows


def weights_of(row: dict[str, Any]) -> list[float]:
    """Return the weights of the trained tokens of a prepared row, consecutive equal ones once."""
    weights = [weight for weight, trained in zip(row["turn_weights"], row["trained"], strict=True) if trained]
    return [weight for place, weight in enumerate(weights) if place == 0 or weights[place - 1] != weight]


@pytest.mark.parametrize(("train_on", "weights"), [("assistant", [0.25, 1, 3]), ("last", [0.25, 3])])
def test_encode_gives_the_tokens_of_a_turn_its_weight(model: Path, train_on: str, weights: list[float]) -> None:
    (row,) = encoded(model, {"messages": TURNS}, train_on=train_on)
    (plain,) = encoded(model, {"messages": [HI, YO] * 3})
    assert row["input_ids"] == plain["input_ids"]
    assert weights_of(row) == weights
    assert sum(row["trained"]) == len(weights) * sum(plain["trained"]) / 3 == row["items"]


def test_encode_with_train_on_all_gives_other_tokens_the_weight_1(model: Path) -> None:
    turns = [HI, YO | {"weight": 0.25}, HI, YO | {"weight": 0}, HI, YO | {"weight": 1}]
    (row,) = encoded(model, {"messages": turns}, train_on="all")
    assert weights_of(row) == [1, 0.25, 1]
    (plain,) = encoded(model, {"messages": [HI, YO | {"train": False}] * 3}, train_on="all")
    answer = plain["trained"].count(False) // 3
    assert row["trained"].count(False) == answer  # of the turn with weight 0
    assert [w for w in row["turn_weights"] if w == 0.25] == [0.25] * answer


def test_rows_without_weights_have_no_further_column(model: Path) -> None:
    for turns in ([HI, YO], [HI, YO | {"weight": 1}, HI, YO | {"weight": 0}]):
        (row,) = encoded(model, {"messages": turns, "weight": None})
        assert set(row) == {"input_ids", "trained", "items"}


@pytest.mark.parametrize("policy", ["truncate", "split"])
def test_fit_cuts_weights_as_it_cuts_tokens(policy: str) -> None:
    ids, weights = list(range(10)), [float(n) for n in range(10)]
    for row in fit(ids, [True] * 10, 4, policy, weights):
        assert row["turn_weights"] == [float(n) for n in row["input_ids"]]
    assert len(fit(ids, [True] * 10, 4, "split", weights)) == 3


def test_weight_of_a_message_that_is_not_the_assistants_is_refused(model: Path) -> None:
    with pytest.raises(RowError, match="message 1 has a weight, which only messages of the assistant can have"):
        encoded(model, {"messages": [HI | {"weight": 0.5}, YO]})


def test_preference_refuses_weights_of_turns(inputs: Path) -> None:
    task: Any = build_task(cell(inputs, "preference"))
    pair = {"prompt": [HI], "chosen": [YO | {"weight": 0.5}], "rejected": [YO | {"content": "No"}]}
    with pytest.raises(RowError, match="has messages with weights other than 0 and 1, which this task does not use"):
        task.encode(pair, {"given": False})


def write(path: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"train": str(path), "max_length": 64}


def prepared(model: Path, data: dict[str, Any], **arguments: Any) -> PreparedRows:
    small_recipe = recipe(model, data, **arguments)
    return prepare_rows(small_recipe, build_task(small_recipe))


def test_prepare_rows_leaves_rows_of_weight_0_out_and_counts_them(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"a {n}", "completion": "b c", "weight": n % 2} for n in range(8)]
    rows_prepared = prepared(model, write(tmp_path / "rows.jsonl", rows))
    assert len(rows_prepared.train) == 4 and rows_prepared.train["weight"][:] == [1.0] * 4
    assert any("4 of 8 rows have weight 0 and were left out" in line for line in rows_prepared.log_lines)


@pytest.mark.parametrize("weight", [-1, "x", float("nan")])
def test_prepare_rows_with_a_bad_weight_names_file_and_row(model: Path, tmp_path: Path, weight: Any) -> None:
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b", "weight": weight}]
    data = write(tmp_path / "rows.jsonl", [*rows, rows[0], rows[0]])
    with pytest.raises(InputError, match=r"row 2 of .*rows\.jsonl: `weight` is .*; it must be a number, 0 or above"):
        prepared(model, data)


def test_weights_do_not_change_prepared_rows_without_them(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"a {n}", "completion": "b c"} for n in range(6)]
    plain = prepared(model, write(tmp_path / "plain.jsonl", rows))
    nulls = prepared(model, write(tmp_path / "nulls.jsonl", [row | {"weight": None} for row in rows]))
    weighted = prepared(model, write(tmp_path / "weighted.jsonl", [row | {"weight": 2} for row in rows]))
    assert plain.fingerprint == nulls.fingerprint != weighted.fingerprint
    assert set(plain.train.column_names) == {"input_ids", "trained", "items", "row", "source", "id"}


def test_pretrain_gives_every_piece_of_a_document_its_weight(model: Path) -> None:
    rows = encoded(model, {"text": "a b c d e f g h " * 5, "weight": 0.5}, data={"max_length": 16}, task="pretrain")
    assert len(rows) > 2 and all(row["weight"] == 0.5 for row in rows)


@pytest.mark.parametrize("is_flat", [True, False])
def test_batch_has_the_product_of_both_weights_for_each_trained_token(model: Path, is_flat: bool) -> None:
    task: Any = build_task(recipe(model, {"padding_free": is_flat}))
    rows = [{"messages": TURNS, "weight": 2}, {"prompt": "Hi", "completion": "Yo"}, {"messages": TURNS}]
    documents = [task.encode(row, {})[0] | {"training": True} for row in rows]
    batch = task.collate(documents)
    one = [w for w, t in zip(documents[0]["turn_weights"], documents[0]["trained"], strict=True) if t]
    expected = [*(2 * w for w in one), *[1.0] * documents[1]["items"], *one]
    assert batch["weights"].tolist() == expected and batch["weights"].dtype == torch.float32
    assert task.count(batch) == len(expected)
    assert "weights" not in task.collate(documents[1:2])


def regularized(inputs: Path, **changes: Any) -> Recipe:
    return cell(inputs, "sft-terms", **changes)


@pytest.fixture(scope="module")
def case(inputs: Path) -> TaskCase:
    return TaskCase(regularized(inputs))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract_with_weights_label_smoothing_and_z_loss(case: TaskCase, check: Any) -> None:
    check(case)


def test_loss_and_gradients_equal_a_transcription_in_float64(case: TaskCase) -> None:
    batch = case.plain_batch(0, 1, 2, 3)
    assert not torch.all(batch["weights"] == 1)
    assert case.terms.terms == {"nll": Term(0.9), "uniform": Term(0.1), "z_loss": Term(0.01)}
    case.total(batch).backward()
    gradients = {name: p.grad.clone() for name, p in case.model.named_parameters() if p.grad is not None}
    parts = [part.detach().double() for part in case.contributions(batch).terms]
    case.model.zero_grad()

    logits = case.model(**case.task.probe(batch)).logits.double().flatten(0, -2)[batch["positions"]]
    p = logits.softmax(-1)
    nll = -p[torch.arange(len(p)), batch["targets"]].log()
    expected = [nll, -p.log().mean(-1), logits.exp().sum(-1).log() ** 2]
    expected = [value * batch["weights"].double() for value in expected]
    for a, b in zip(parts, expected, strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-5, atol=1e-6)
    (0.9 * expected[0] + 0.1 * expected[1] + 0.01 * expected[2]).sum().backward()
    for name, parameter in case.model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-5)
    case.model.zero_grad()


def test_evaluation_reports_the_weighted_likelihood_without_smoothing(case: TaskCase) -> None:
    batch = case.plain_batch(0, 1, 2)
    with torch.no_grad():
        rows = {name: value.numpy() for name, value in case.task.eval_step(case.model, batch).items()}
    metrics = case.task.metrics(rows)
    nll = case.contributions(batch).terms[0].detach()
    assert metrics["loss"] == pytest.approx(float(nll.sum()) / len(nll), rel=1e-6)
    assert metrics["perplexity"] == pytest.approx(np.exp(metrics["loss"]))


@pytest.mark.parametrize("data", [{"streaming": True}, {"packing": True}])
def test_streams_and_packed_rows_carry_weights(inputs: Path, data: dict[str, Any]) -> None:
    source = {"train": str(inputs / "weighted_chats.jsonl"), "max_length": 128}
    run = prepare(regularized(inputs, data=source | data), cpu=True)
    batch = next(iter(run.train_loader))
    assert len(batch["weights"]) == len(batch["targets"]) and len(batch["weights"].unique()) > 2
    first = next(iter(steps(run)))
    assert set(first.term_losses) == {"nll", "uniform", "z_loss"} and first.term_losses["nll"] > 0


def test_options_of_a_run_without_regularizers_declare_no_terms(model: Path) -> None:
    assert not hasattr(build_task(recipe(model)), "terms")
    task: Any = build_task(recipe(model, z_loss=0.5))
    assert task.terms == {"nll": Term(1.0), "z_loss": Term(0.5)}


@pytest.mark.parametrize("options", [{"label_smoothing": 1.0}, {"label_smoothing": -0.1}, {"z_loss": float("nan")}])
def test_options_out_of_their_range_are_refused(model: Path, options: dict[str, float]) -> None:
    with pytest.raises(InputError):
        build_task(recipe(model, **options))


def test_preview_shows_weights(inputs: Path) -> None:
    lines = "\n".join(preview_data(regularized(inputs), row=1).lines())
    assert "weight: " in lines and "weights of turns: " in lines
