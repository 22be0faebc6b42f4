"""Preferences: which terms, notes and columns a recipe has, what is refused, and exact means by hand."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ftcli.config.recipe import Recipe
from ftcli.data import packing
from ftcli.data.cache import prepare_rows
from ftcli.loop import steps, train
from ftcli.runtime.errors import InputError
from ftcli.tasks import preference
from ftcli.tasks.build import build_task
from ftcli.tasks.protocol import Term, derives_columns, has_first_pass
from ftcli.tasks.shared import pair_reports
from ftcli.tasks.shared.preference_losses import PairLogps
from ftcli.training.evaluation import evaluate
from ftcli.training.setup import prepare

from ...support.cells import LORA, cell
from ...support.runner import MakeInputs


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    return make_inputs()


def data(folder: Path, name: str = "pairs", **more: Any) -> dict[str, Any]:
    return {"train": str(folder / f"{name}.jsonl"), "eval_rows": 5, "max_length": 128} | more


def recipe(folder: Path, losses: Any = None, name: str = "preference", **changes: Any) -> Recipe:
    options = {} if losses is None else {"task_options": {"losses": losses}}
    return cell(folder, name, **options | changes)


def rows_of(folder: Path, rows: list[dict[str, Any]], name: str = "preference", **changes: Any) -> Any:
    """Return the prepared rows of some raw rows."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = recipe(folder, name=name, **{"data": {"train": str(file), "max_length": 128}} | changes)
    return prepare_rows(given, build_task(given))


def test_terms_are_the_losses_with_their_weights_and_the_likelihood(inputs: Path) -> None:
    task: Any = build_task(recipe(inputs, {"orpo": {"weight": 0.5}, "simpo": {}}))
    assert task.terms == {"orpo": Term(0.5), "simpo": Term(1.0), "nll": Term(1.0, "chosen_tokens")}
    assert not derives_columns(task) and not has_first_pass(task)
    given = recipe(inputs, None, task_options={"losses": {"sigmoid": {}, "aot": {}}, "likelihood": 0.2})
    task = build_task(given)
    assert task.terms["nll"] == Term(0.2, "chosen_tokens")
    assert derives_columns(task) and has_first_pass(task)
    assert list(build_task(recipe(inputs)).terms) == ["sigmoid"]  # type: ignore[attr-defined]


ORPO = "a loss needs a mapping of its options, such as `losses: {orpo: {beta: 0.1}}`; orpo has beta, weight"


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        ({"sigmoyd": {}}, "no preference loss 'sigmoyd'; did you mean 'sigmoid'?"),
        ({"dpo": {}}, "no preference loss 'dpo'; the loss of dpo is 'sigmoid'"),
        ({"simpo": {"gama": 1.0}}, "the loss simpo has no option gama; did you mean 'gamma'?"),
        ({"sigmoid": {"beta": 0.0}}, "beta of the loss sigmoid is 0; it must be above 0"),
        ({"sigmoid": {"weight": 0.0}}, "the weight of sigmoid is 0; it must be above 0"),
        ({"robust": {"label_smoothing": 0.5}}, "label_smoothing of the loss robust is 0.5"),
        ({"orpo": 1.0}, f"orpo is 1.0; {ORPO}"),
        ({"orpo": None}, f"orpo has no options; {ORPO}"),
        ("orpo", f"task_options.losses: orpo has no options; {ORPO}"),
        (["orpo", "sigmoid"], f"orpo has no options; {ORPO}"),
        ("dpo", "no preference loss 'dpo'; the loss of dpo is 'sigmoid'"),
        ([["orpo"]], "and must be a mapping of names to values, not empty"),
        ({}, "task_options.losses is an empty section, and must be a mapping of names to values, not empty"),
    ],
)
def test_options_of_losses_that_do_not_exist_or_are_out_of_bounds_are_refused(
    losses: Any, message: str, inputs: Path
) -> None:
    with pytest.raises(InputError) as error:
        build_task(recipe(inputs, losses))
    assert message in str(error.value)


@pytest.mark.parametrize(("name", "option"), [("preference", "likelihood"), ("unpaired", "beta"), ("reward", "center")])
def test_options_that_are_infinite_are_refused(name: str, option: str, inputs: Path) -> None:
    with pytest.raises(InputError, match=f"task_options.{option} is inf"):
        build_task(recipe(inputs, None, name, task_options={option: inf}))


@pytest.mark.parametrize("name", ["preference", "unpaired", "reward"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [({"truncation": "split"}, "data.truncation: "), ({"streaming": True}, "data.streaming: ")],
)
def test_split_rows_and_streams_are_refused(name: str, changes: dict[str, Any], message: str, inputs: Path) -> None:
    given = recipe(inputs, name=name)
    # A stream has no rows to hold out.
    values = given.model_dump() | {"data": {"train": given.data.train_sources[0].path, "max_length": 128} | changes}
    with pytest.raises(InputError, match=message):
        build_task(Recipe.model_validate(values | {"train": {"max_steps": 2}}))


PAIR = {"prompt": "p", "chosen": "yes", "rejected": "no"}


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("preference", {"prompt": "p", "completion": "c"}, "contains prompt and completion, which this task does not"),
        ("preference", {"chosen": "p yes"}, "of no known format: no column 'chosen' and 'rejected'"),
        ("preference", PAIR | {"rejected": "yes"}, "row 1 .*are the same answer"),
        ("preference", PAIR | {"rejected": " "}, "row 1 .*`rejected` is empty"),
        ("preference", PAIR | {"margin": float("nan")}, "row 1 .*`margin` is nan; it must be a finite"),
        ("preference", PAIR | {"weight": 0}, "row 1 .*`weight` is 0"),
        ("preference", PAIR | {"ref_chosen_logps": -1.0}, "row 1 .*has only `ref_chosen_logps`"),
        (
            "unpaired",
            {"prompt": "p", "completion": "c", "label": 2},
            "row 1 .*`label` is 2; it must be true for a desirable",
        ),
        ("reward", {"prompt": "p", "responses": ["a", "b"], "ranks": [1, 1]}, "row 1 .*all `ranks` are equal"),
        ("reward", {"prompt": "p", "completion": "c", "score": "good"}, "row 1 of .*: `score` is 'good', not a number"),
    ],
)
def test_preference_rows_without_a_comparison_are_refused_by_number(
    name: str, row: dict[str, Any], message: str, make_inputs: MakeInputs
) -> None:
    other = {key: value if key in ("label", "ranks", "margin") else f"{value} x" for key, value in row.items()}
    rows = [row, *({**row, "prompt": f"{n}"} for n in range(6)), other]
    with pytest.raises(InputError, match=message):
        rows_of(make_inputs(), rows, name)


def test_answers_that_are_equal_after_truncation_are_counted_and_refused(make_inputs: MakeInputs) -> None:
    long = [{"prompt": "p" * 30, "chosen": f"{n} yes", "rejected": f"{n} no"} for n in range(8)]
    with pytest.raises(InputError, match="8 of 8 rows of .* contain no trainable tokens"):
        folder = make_inputs()
        rows_of(folder, long, data={"train": str(folder / "rows.jsonl"), "max_length": 20})


def test_a_margin_that_no_loss_uses_is_refused(inputs: Path) -> None:
    given = recipe(inputs, {"orpo": {}}, data=data(inputs, "weighted"))
    with pytest.raises(InputError, match="has a margin, which the losses orpo do not use; sigmoid does"):
        prepare_rows(given, build_task(given))


def test_given_log_probabilities_replace_the_derived_columns(make_inputs: MakeInputs) -> None:
    folder = make_inputs()
    first = prepare(recipe(folder, data=data(folder, eval_rows=0)), cpu=True)
    curve = [(step.loss, step.notes) for step in steps(first)]
    columns = first.rows.derived["train"]
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        row |= {name: float(column[number]) for name, column in columns.items()}
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    second = prepare(recipe(folder, data=data(folder, eval_rows=0)), cpu=True)
    assert second.derived is None and not second.rows.derived["train"]
    for (loss, notes), step in zip(curve, steps(second), strict=True):
        assert step.loss == pytest.approx(loss, rel=1e-6)
        assert step.notes == pytest.approx(notes, rel=1e-5, abs=1e-6)
    del rows[3]["ref_chosen_logps"], rows[3]["ref_rejected_logps"]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match="row 4 .*has no ref_chosen_logps and ref_rejected_logps, but the data has"):
        prepare(recipe(folder, data=data(folder, eval_rows=0)), cpu=True)


def test_the_reference_of_an_adapter_is_the_model_without_it(inputs: Path) -> None:
    run = prepare(recipe(inputs, name="preference-lora"), cpu=True)
    for name, parameter in run.model.named_parameters():
        if "lora_B" in name:
            parameter.data.add_(1.0)
    task: Any = run.task
    batch = run.any_batch()
    with torch.no_grad():
        again = task.derive(run.model, batch)["ref_chosen_logps"]
        policy = task.eval_step(run.model, batch)["logps/chosen"]
    assert float(again) == pytest.approx(float(run.rows.derived["train"]["ref_chosen_logps"][0]), rel=1e-5)
    assert float(policy) != pytest.approx(float(again), rel=1e-3)


@pytest.mark.parametrize("name", ["preference", "unpaired"])
def test_the_reference_of_a_trained_adapter_is_the_model_with_it(name: str, inputs: Path, tmp_path: Path) -> None:
    first = prepare(recipe(inputs, name=f"{name}-lora", train={"max_steps": 2}), cpu=True, output=tmp_path / "run")
    train(first)
    final = tmp_path / "run" / "final"
    again = prepare(recipe(inputs, name=f"{name}-lora", adapter=LORA | {"path": str(final)}), cpu=True)
    assert again.derived != first.derived
    (step, *_) = steps(again)
    assert step.notes["rewards/chosen"] == pytest.approx(0, abs=2e-5)
    # Another adapter gives another reference.
    weights = load_file(final / "adapter_model.safetensors")
    save_file({key: 2 * value for key, value in weights.items()}, final / "adapter_model.safetensors")
    other = prepare(recipe(inputs, name=f"{name}-lora", adapter=LORA | {"path": str(final)}), cpu=True)
    assert other.derived not in (first.derived, again.derived)


def test_weighted_pairs_are_a_weighted_mean_and_the_metrics_too(inputs: Path) -> None:
    run = prepare(recipe(inputs, data=data(inputs, "weighted")), cpu=True)
    step = next(iter(steps(run)))
    rows = [run.rows.train[int(index)] for index in range(len(run.rows.train))]
    assert {row["weight"] for row in rows} != {1.0} and run.terms.terms["sigmoid"].count_name == "weights"
    # Before the first update a pair's loss depends on its margin alone.
    ids = next(iter(run.order))  # type: ignore[arg-type]
    trained = [rows[index] for _, index in ids]
    losses = [float(np.log1p(np.exp(row["margin"]))) for row in trained[: step.rows]]
    weights = [row["weight"] for row in trained[: step.rows]]
    assert step.means.counts["weights"] > 0 and len(losses) > 0 and sum(weights) > 0
    metrics = evaluate(run)
    values = run.task.metrics(
        {name: np.array([1.0, 3.0]) for name in ("loss", *preference.PAIR_METRICS[1:])}
        | {"items": np.array([0.5, 1.5]), "pair_sources": np.zeros(2)}
    )
    assert values["loss"] == 4.0 / 2.0 and values["rewards/chosen"] == 2.0 and set(values) == set(metrics)


def test_policy_and_reference_that_differ_by_rounding_are_no_accuracy(
    inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task: Any = build_task(recipe(inputs))
    lp, ones = torch.tensor([-100.0]), torch.ones(1)
    logps = PairLogps(lp, lp, ones, ones, ref_chosen=lp - 1e-5, ref_rejected=lp)
    assert task._values(logps)["rewards/accuracies"].tolist() == [0.0]
    clear = PairLogps(lp, lp, ones, ones, ref_chosen=lp - 0.1, ref_rejected=lp)
    assert task._values(clear)["rewards/accuracies"].tolist() == [1.0]
    monkeypatch.setattr(pair_reports, "ROUNDING", 0.0)
    assert task._values(logps)["rewards/accuracies"].tolist() == [1.0]


def test_accuracy_of_means_over_tokens_counts_small_differences_of_long_answers(inputs: Path) -> None:
    task: Any = build_task(recipe(inputs, {"simpo": {}}))
    # Means of -2.00 and -2.01, sums of -2000 and -2010.
    tokens = torch.tensor([1000.0])
    logps = PairLogps(torch.tensor([-2000.0]), torch.tensor([-2010.0]), tokens, tokens)
    assert task._values(logps)["rewards/accuracies"].tolist() == [1.0]


def test_notes_and_metrics_of_several_sources_are_apart(make_inputs: MakeInputs) -> None:
    folder = make_inputs()
    (folder / "others.jsonl").write_text((folder / "pairs.jsonl").read_text().replace("alpha", "gamma"))
    both = [{"path": str(folder / f"{name}.jsonl")} for name in ("pairs", "others")]
    given = recipe(folder, {"aot": {}}, data={"train": both, "eval_rows": 12, "max_length": 128})
    run = prepare(given, cpu=True)
    for step in steps(run):
        counts, notes = step.means.counts, step.notes
        for name in ("rewards/accuracies", "rewards/margins"):
            parts = [notes[f"{label}/{name}"] * counts[f"pairs of {label}"] for label in ("pairs", "others")]
            assert sum(parts) / step.items == pytest.approx(notes[name], rel=1e-5, abs=1e-6)
    metrics = evaluate(run)
    assert {"pairs/rewards/accuracies", "others/rewards/margins"} <= set(metrics)
    assert run.rows.eval is not None
    of_source = np.bincount(run.rows.eval["source"])
    total = sum(metrics[f"{label}/loss"] * rows for label, rows in zip(("pairs", "others"), of_source, strict=True))
    assert total / sum(of_source) == pytest.approx(metrics["loss"], rel=1e-9), "ranks are those of all rows"


def test_a_run_with_another_loss_finds_the_reference(inputs: Path) -> None:
    keys = {prepare(recipe(inputs, losses), cpu=True).derived for losses in (None, {"ipo": {"beta": 0.3}})}
    assert len(keys) == 1 and None not in keys


def test_evaluation_of_aot_compares_ranks_over_all_rows(inputs: Path) -> None:
    task: Any = build_task(recipe(inputs, {"aot": {"beta": 1.0}}))
    names = dict.fromkeys(preference.PAIR_METRICS[1:], np.zeros(2))
    rows = names | {"policy": np.array([3.0, 1.0]), "reference": np.array([0.0, 2.0])}
    rows |= {"loss": np.array([9.0, 9.0]), "items": np.ones(2), "pair_sources": np.zeros(2)}
    # Sorted, 1 meets 0 and 3 meets 2: both differences are 1.
    assert task.metrics(rows)["loss"] == pytest.approx(float(np.log1p(np.exp(-1.0))))


def test_packing_of_pairs_has_room_for_both_answers(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = data(inputs, max_length=int(_longest(inputs)), packing=True)
    given = recipe(inputs, data=short)
    rows = prepare_rows(given, build_task(given))
    assert rows.bins is not None
    lengths = packing.lengths_of(rows.train)
    filled = [int(sum(lengths[number] for number in rows.bins[place])) for place in range(len(rows.bins))]
    assert max(filled) <= 2 * _longest(inputs) and max(lengths) > _longest(inputs)
    monkeypatch.setattr("ftcli.data.cache.row_capacity", lambda rows, max_length: max_length)
    with pytest.raises(ValueError, match="do not fit bins"):
        prepare_rows(given, build_task(given))


def _longest(folder: Path) -> int:
    given = recipe(folder)
    rows = prepare_rows(given, build_task(given))
    return max(int(packing.longest_documents(part).max()) for part in (rows.train, rows.eval) if part is not None)


def test_positions_are_compared_with_the_longer_answer(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ftcli.models import positions

    given = recipe(inputs, data=data(inputs, max_length=512))
    rows = prepare_rows(given, build_task(given))
    longest = _longest(inputs)
    monkeypatch.setattr(positions, "learned_positions", lambda model: longest)
    positions.check_lengths(torch.nn.Identity(), given, rows)
    monkeypatch.setattr(positions, "longest_documents", packing.lengths_of)
    with pytest.raises(InputError, match="the longest row has"):
        positions.check_lengths(torch.nn.Identity(), given, rows)
