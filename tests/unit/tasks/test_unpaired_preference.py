"""KTO: mismatched answers of the data set, a baseline of the step, and the balance of both kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ftcli.checkpoint.folder import read_state
from ftcli.config.recipe import Recipe
from ftcli.data.cache import prepare_rows
from ftcli.loop import steps, train
from ftcli.runtime.checkpoint_names import checkpoints_of
from ftcli.runtime.errors import InputError
from ftcli.tasks.build import build_task
from ftcli.tasks.protocol import has_first_pass
from ftcli.tasks.shared.unpaired_losses import describe_balance
from ftcli.training.evaluation import evaluate
from ftcli.training.setup import prepare

from ...support.cells import cell
from ...support.runner import MakeInputs


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    return make_inputs()


def rows(given: Recipe) -> Any:
    return prepare_rows(given, build_task(given))


def test_every_row_has_the_answer_of_a_row_with_another_prompt(inputs: Path) -> None:
    given = cell(inputs, "unpaired")
    task: Any = build_task(given)
    raw = [json.loads(line) for line in (inputs / "labelled.jsonl").read_text().splitlines()]
    answers = {row["completion"] for row in raw}
    prepared = rows(given).train
    for row in prepared:
        ids, start = row["input_ids"], row["own_length"]
        shown = task.tokenizer.decode(
            [ids[start:][n] for n, is_answer in enumerate(row["mismatched_answer"]) if is_answer]
        )
        assert shown.removesuffix("<|im_end|>") in answers
        assert not any(row["trained"][start:]) and sum(row["mismatched_answer"]) > 0
    again = rows(cell(inputs, "unpaired", seed=1)).train
    assert [row["input_ids"] for row in again] != [row["input_ids"] for row in prepared]


def test_pairs_become_two_rows_that_are_no_pieces(inputs: Path) -> None:
    data = {"train": str(inputs / "pairs.jsonl"), "max_length": 128}
    prepared = rows(cell(inputs, "unpaired", data=data))
    assert len(prepared.train) == 84 and sum(prepared.train["label"]) == 42
    assert not [line for line in prepared.log_lines if "split" in line]


def test_the_loss_without_a_baseline_needs_no_mismatched_answers(inputs: Path) -> None:
    given = cell(inputs, "unpaired", task_options={"loss": "apo_zero_unpaired"})
    assert not has_first_pass(build_task(given))
    assert "mismatched_answer" not in rows(given).train.column_names


def test_one_prompt_for_all_rows_is_refused_where_a_baseline_is_needed(make_inputs: MakeInputs) -> None:
    folder = make_inputs()
    one = [{"prompt": "p", "completion": f"c {n}", "label": n % 2 == 0} for n in range(8)]
    (folder / "labelled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in one))
    data = {"train": str(folder / "labelled.jsonl"), "max_length": 128}
    with pytest.raises(InputError, match="one prompt has 8 of the 8 answers of data.train"):
        rows(cell(folder, "unpaired", data=data))
    rows(cell(folder, "unpaired", data=data, task_options={"loss": "apo_zero_unpaired"}))
    several = {"train": str(folder / "pairs.jsonl"), "eval": str(folder / "labelled.jsonl"), "max_length": 128}
    with pytest.raises(InputError, match="one prompt has 8 of the 8 answers of data.eval"):
        rows(cell(folder, "unpaired", data=several))


def test_an_invalid_row_is_reported_by_its_number(make_inputs: MakeInputs) -> None:
    folder = make_inputs()
    lines = (folder / "labelled.jsonl").read_text().splitlines()
    lines[4] = json.dumps({"prompt": "p", "completion": " ", "label": True})
    (folder / "labelled.jsonl").write_text("\n".join(lines))
    with pytest.raises(InputError, match="row 5 of .*`completion` is empty"):
        rows(cell(folder, "unpaired"))


def test_balance_is_logged_with_weights_that_reach_it(inputs: Path) -> None:
    run = prepare(cell(inputs, "unpaired", task_options={"undesirable_weight": 3.0}), cpu=True)
    (line,) = [line for line in run.log_lines if "undesirable answers" in line]
    assert "bring it into 1 to 4/3" in line
    assert describe_balance(30, 10, 1.0, 2.5).endswith("the ratio of weight times rows is 1.2")
    assert describe_balance(30, 10, 1.0, 1.0).endswith(
        "ratio of weight times rows is 3; desirable_weight 1 and undesirable_weight 2.25 bring it into 1 to 4/3"
    )
    assert "only one kind" in describe_balance(3, 0, 1.0, 1.0)


def test_balance_counts_the_rows_of_a_repeated_source_each_time(make_inputs: MakeInputs) -> None:
    folder = make_inputs()
    for name, label in (("liked", True), ("others", False)):
        made = [{"prompt": f"p {n} {name}", "completion": f"c {n}", "label": label} for n in range(15)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    sources = [{"path": str(folder / "liked.jsonl"), "weight": 3.4}, str(folder / "others.jsonl")]
    run = prepare(cell(folder, "unpaired", data={"train": sources, "max_length": 128}), cpu=True)
    (line,) = [line for line in run.log_lines if "undesirable answers" in line]
    assert line.startswith("51 desirable and 15 undesirable answers: the ratio of weight times rows is 3.4;")
    assert sum(run.rows.train["label"]) == 51 and len(run.rows.train) == 66


def test_balance_counts_no_rows_that_are_left_out(make_inputs: MakeInputs) -> None:
    folder = make_inputs()
    long, path = "word " * 200, folder / "labelled.jsonl"
    made = [(f"p {n}", f"c {n}", n < 4) for n in range(8)] + [(f"q {n}", long, True) for n in range(12)]
    made_rows = [dict(zip(("prompt", "completion", "label"), row, strict=True)) for row in made]
    path.write_text("".join(json.dumps(row) + "\n" for row in made_rows))
    data = {"train": str(path), "max_length": 128, "truncation": "drop"}
    run = prepare(cell(folder, "unpaired", data=data, batch={"global_size": 4, "micro_size": 2}), cpu=True)
    (line,) = [line for line in run.log_lines if "undesirable answers" in line]
    assert line.startswith("4 desirable and 4 undesirable answers"), run.log_lines


def test_losses_of_sources_have_the_baseline_of_all_rows(make_inputs: MakeInputs) -> None:
    folder = make_inputs()
    (folder / "others.jsonl").write_text((folder / "labelled.jsonl").read_text().replace("alpha", "gamma"))
    both = [str(folder / f"{name}.jsonl") for name in ("labelled", "others")]
    data = {"train": both, "eval": both, "max_length": 128}
    options = {"undesirable_weight": 0.1}
    fast = {"learning_rate": 0.02, "max_grad_norm": None}
    run = prepare(cell(folder, "unpaired", data=data, task_options=options, optimizer=fast), cpu=True)
    notes = [step.notes for step in steps(run)]
    assert notes[-1]["kl"] > 0.01, "without a baseline this test shows nothing"
    metrics, rows_of_source = evaluate(run), np.bincount(run.rows.eval["source"])  # type: ignore[index]
    losses = [metrics[f"{label}/loss"] for label in ("labelled", "others")]
    assert sum(losses * rows_of_source) / sum(rows_of_source) == pytest.approx(metrics["loss"], rel=1e-9)


OWN = """
from ftcli.tasks.unpaired_preference import Options, Task as Base


class Task(Base):
    def eval_step(self, model, batch):
        values = super().eval_step(model, batch)
        return {"loss": values["items"] * 3, "items": values["items"]}

    def metrics(self, rows):
        return {"loss": float(rows["loss"].sum() / rows["items"].sum())}
"""


def test_task_with_its_own_evaluation_has_its_own_losses_of_sources(make_inputs: MakeInputs) -> None:
    folder = make_inputs({"own.py": OWN})
    (folder / "others.jsonl").write_text((folder / "labelled.jsonl").read_text().replace("alpha", "gamma"))
    both = [str(folder / f"{name}.jsonl") for name in ("labelled", "others")]
    data = {"train": both, "eval": both, "max_length": 128}
    run = prepare(cell(folder, "unpaired", task=str(folder / "own.py"), data=data), cpu=True)
    assert evaluate(run) == {"loss": 3.0, "labelled/loss": 3.0, "others/loss": 3.0}


def test_weights_of_both_kinds_scale_their_losses(inputs: Path) -> None:
    curves = {
        weight: next(
            iter(steps(prepare(cell(inputs, "unpaired", task_options={"desirable_weight": weight}), cpu=True)))
        )
        for weight in (1.0, 3.0)
    }
    counts = curves[1.0].means.counts
    # Before the first update every value is 1/2, up to the rounding of the baseline.
    expected = (3.0 * counts["desirable"] + counts["undesirable"]) / 2 / curves[1.0].items
    assert curves[3.0].loss == pytest.approx(expected, rel=1e-5)
    assert curves[1.0].loss == pytest.approx(0.5, rel=1e-5)


def test_metrics_take_the_baseline_of_all_rows(inputs: Path) -> None:
    task: Any = build_task(cell(inputs, "unpaired", task_options={"beta": 1.0}))
    metrics = task.metrics(
        {
            "loss": np.full(2, 9.0),
            "items": np.ones(2),
            "ratios": np.array([2.0, 1.0]),
            "logps": np.array([-5.0, -6.0]),
            "is_desirable": np.array([1.0, 0.0]),
            "mismatched": np.array([3.0, -1.0]),
        }
    )
    # The baseline is 1: 1 - s(2 - 1) and 1 - s(1 - 1).
    assert metrics["loss"] == pytest.approx((1 / (1 + np.e) + 0.5) / 2)
    assert (metrics["rewards/chosen"], metrics["rewards/rejected"], metrics["rewards/margins"]) == (2.0, 1.0, 1.0)


def test_the_accuracy_is_that_of_pairs_of_which_both_answers_are_there(inputs: Path) -> None:
    data = {"train": str(inputs / "pairs.jsonl"), "eval": str(inputs / "pairs.jsonl"), "max_length": 128}
    task: Any = build_task(cell(inputs, "unpaired", data=data, task_options={"loss": "apo_zero_unpaired"}))
    task._declare({"weighted": False, "pairs": True})
    metrics = task.metrics(
        {
            "loss": np.zeros(8),
            "items": np.ones(8),
            # Right; wrong; two answers without their partners; equal up to rounding.
            "ratios": np.array([2.0, 1.0, -3.0, 0.0, 9.0, 0.0, 1e-6, 0.0]),
            "logps": np.full(8, -5.0),
            "is_desirable": np.array([1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0]),
            "row_sources": np.array([0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0]),
            "row_numbers": np.array([3.0, 3.0, 4.0, 4.0, 5.0, 5.0, 6.0, 6.0]),
        }
    )
    assert tuple(metrics) == task.metric_names and metrics["rewards/accuracies"] == pytest.approx(1 / 3)


def test_metrics_of_one_kind_of_answers_leave_the_other_kind_out(inputs: Path) -> None:
    task: Any = build_task(cell(inputs, "unpaired", task_options={"loss": "apo_zero_unpaired"}))
    values = {"loss": 0.0, "items": 1.0, "ratios": 2.0, "logps": -5.0, "is_desirable": 1.0}
    metrics = task.metrics({name: np.full(2, value) for name, value in values.items()})
    assert set(metrics) == {"loss", "rewards/chosen", "logps/chosen"}


def test_held_out_pairs_have_an_accuracy_and_single_answers_have_none(inputs: Path) -> None:
    for name in ("pairs", "labelled"):
        data = {"train": str(inputs / "labelled.jsonl"), "eval": str(inputs / f"{name}.jsonl"), "max_length": 128}
        run = prepare(cell(inputs, "unpaired", data=data), cpu=True)
        assert run.rows.facts["pairs"] == (name == "pairs")
        assert run.rows.eval is not None and len(run.rows.eval) == (84 if name == "pairs" else 42)
        assert ("rewards/accuracies" in evaluate(run)) == (name == "pairs")


def test_the_accuracy_cannot_choose_checkpoints_without_pairs(inputs: Path, tmp_path: Path) -> None:
    changes = {
        "evaluate": {"every_steps": 1},
        "checkpoint": {"every_steps": 1, "keep_best": {"metric": "rewards/accuracies", "direction": "max"}},
    }
    run = prepare(cell(inputs, "unpaired", **changes), cpu=True, output=tmp_path / "run")
    with pytest.raises(InputError, match="an evaluation has no metric rewards/accuracies"):
        train(run)
    (saved,) = checkpoints_of(tmp_path / "run")
    assert read_state(saved)["metrics"] == {}, "the step is not lost"


def test_check_does_not_count_a_pair_as_one_row(inputs: Path, tmp_path: Path) -> None:
    from ftcli.launch.preflight import check_inputs

    data = {"train": str(inputs / "pairs.jsonl"), "max_length": 128}
    few = {"data": data, "batch": {"global_size": 60}}  # 42 pairs are 84 rows
    check_inputs(cell(inputs, "unpaired", **few), cpu=True)
    with pytest.raises(InputError, match="42 rows, fewer than batch.global_size 60"):
        check_inputs(cell(inputs, "preference", **few), cpu=True)
