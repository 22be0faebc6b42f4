"""Class weights, several labels and regression: targets, losses against float64 and by hand, metrics, refused rows."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, List, Value

from ftcli import testing
from ftcli.config.recipe import Recipe
from ftcli.data.cache import PreparedRows, prepare_rows
from ftcli.runtime.errors import InputError
from ftcli.task_contract import CHECKS, TaskCase
from ftcli.tasks.build import build_task
from ftcli.tasks.protocol import Term
from ftcli.tasks.shared.metric_names import check_metric
from ftcli.tasks.shared.problem_types import MultiLabel, Regression, SingleLabel, collate_targets, is_real
from ftcli.tasks.text_classification import Options, Task

from ....support.cells import cell
from ....support.recipes import minimal_values
from ....support.runner import MakeInputs

MULTI = {"problem_type": "multi_label_classification"}
NUMBERS = {"problem_type": "regression"}
CELLS = ("class-weights", "multi-label", "regression", "image-weights")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return testing.save_tiny_encoder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def prepared(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that prepares rows with these labels, from a file of this folder."""
    monkeypatch.chdir(tmp_path)

    def prepare(labels: Any, options: dict[str, Any], **data: Any) -> PreparedRows:
        if isinstance(labels, list):
            lines = [json.dumps({"text": f"text {n}", "label": label}) + "\n" for n, label in enumerate(labels)]
            Path("t.jsonl").write_text("".join(lines))
        recipe = recipe_of(model, options, {"train": "t.jsonl" if isinstance(labels, list) else labels} | data)
        return prepare_rows(recipe, build_task(recipe))

    return prepare


def recipe_of(model: Path, options: dict[str, Any], data: dict[str, Any], **sections: Any) -> Recipe:
    values = minimal_values(
        "text_classification",
        model={"name": str(model)},
        data={"max_length": 64} | data,
        task_options=options,
        **sections,
    )
    return Recipe.model_validate(values)


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    return make_inputs()


@pytest.fixture(scope="module", params=CELLS)
def case(request: pytest.FixtureRequest, inputs: Path) -> TaskCase:
    return TaskCase(cell(inputs, request.param))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract_of_every_kind(case: TaskCase, check: Any) -> None:
    check(case)


def test_model_has_the_problem_type_of_plain_transformers(case: TaskCase) -> None:
    """Transformers' own loss of the exported configuration is the mean of ours, where it has no weights."""
    kind = case.task.options.problem_type  # type: ignore[attr-defined]
    assert case.model.config.problem_type == kind
    batch = case.plain_batch(0, 1, 2, 3)
    if kind != "single_label_classification":
        labels = batch["targets"]
        theirs = case.model(**case.task.probe(batch), labels=labels).loss
        torch.testing.assert_close(case.contributions(batch).terms[0].mean(), theirs)


LOGITS = torch.tensor([[0.0, math.log(3.0)], [math.log(4.0), 0.0], [1.0, 2.0]])  # p: 1/4 3/4, 4/5 1/5


def single(weights: list[float] | None = None, **options: Any) -> SingleLabel:
    problem = SingleLabel(Options(**options))
    problem.take_facts({"labels": ["a", "b"]} | ({} if weights is None else {"class_weights": weights}))
    return problem


def test_class_weights_multiply_the_cross_entropy_of_a_row_by_hand() -> None:
    targets = torch.tensor([1, 0, -100])
    actual: Any = single([2.0, 0.5]).loss(LOGITS, targets)
    assert actual.tolist() == pytest.approx([0.5 * math.log(4 / 3), 2 * math.log(5 / 4), 0.0])
    both: Any = single([2.0, 0.5], label_smoothing=0.1).loss(LOGITS, targets)
    assert both["nll"].tolist() == actual.tolist()
    mean = [(math.log(4) + math.log(4 / 3)) / 2, (math.log(5 / 4) + math.log(5)) / 2]
    assert both["uniform"].tolist() == pytest.approx([0.5 * mean[0], 2 * mean[1], 0.0])
    assert single(label_smoothing=0.1).terms == {"nll": Term(0.9), "uniform": Term(0.1)}


def test_class_weights_and_label_smoothing_equal_torch_in_value_and_gradient() -> None:
    logits = torch.randn(6, 4, requires_grad=True)
    targets, weights = torch.tensor([0, 3, 1, 2, 3, 0]), [0.5, 1.0, 2.0, 4.0]
    weighted: Any = single(weights).loss(logits, targets)
    smoothed: Any = single(label_smoothing=0.2).loss(logits, targets)
    ours = [weighted, 0.8 * smoothed["nll"] + 0.2 * smoothed["uniform"]]
    exact = logits.detach().double().requires_grad_()
    entropy = torch.nn.functional.cross_entropy
    theirs = [
        entropy(exact, targets, weight=torch.tensor(weights).double(), reduction="none"),
        entropy(exact, targets, label_smoothing=0.2, reduction="none"),
    ]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=1e-6)
        (left,), (right,) = torch.autograd.grad(a.sum(), logits), torch.autograd.grad(b.sum(), exact)
        torch.testing.assert_close(left.double(), right, rtol=1e-5, atol=1e-6)


def test_binary_cross_entropy_and_squared_error_equal_float64_and_ignore_padding() -> None:
    logits = torch.randn(4, 3, requires_grad=True)
    exact = logits.detach().double().requires_grad_()
    rows: list[dict[str, Any]] = [{"target": [True, False, True]}, {"target": [False] * 3}, {"target": [math.nan] * 3}]
    targets = collate_targets([*rows, {"target": [True] * 3}])
    actual = MultiLabel(Options(**MULTI)).loss(logits, targets)
    p, t = exact.sigmoid(), targets.double().nan_to_num()
    reference = -(t * p.log() + (1 - t) * (1 - p).log()).mean(-1) * torch.tensor([1.0, 1, 0, 1]).double()
    numbers = collate_targets([{"target": n} for n in (0.5, -2.0, math.nan, 1e4)])
    assert is_real(targets).tolist() == is_real(numbers).tolist() == [True, True, False, True]
    squares = Regression(None).loss(logits[:, :1], numbers)
    expected = (exact[:, 0] - numbers.double().nan_to_num()) ** 2 * torch.tensor([1.0, 1, 0, 1]).double()
    for a, b in ((actual, reference), (squares, expected)):
        torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=1e-6)
        (left,), (right,) = torch.autograd.grad(a.sum(), logits), torch.autograd.grad(b.sum(), exact)
        torch.testing.assert_close(left.double(), right, rtol=1e-5, atol=1e-6)


def test_balanced_weights_are_those_of_scikit_learn(prepared: Any) -> None:
    labels = ["x"] * 6 + ["y"] * 3 + ["z"]
    expected = pytest.approx([10 / 18, 10 / 9, 10 / 3])
    assert prepared(labels, {"class_weights": "balanced"}).facts["class_weights"] == expected
    twice = prepared(labels, {"class_weights": "balanced"}, train={"path": "t.jsonl", "weight": 2.0})
    assert twice.facts["class_weights"] == expected
    assert prepared(labels, {"class_weights": {"z": 2.0}}).facts["class_weights"] == [1.0, 1.0, 2.0]
    assert "class_weights" not in prepared(labels, {}).facts


@pytest.mark.parametrize("data", [{"truncation": "drop"}, {"max_bad_rows": 8}])
def test_balanced_weights_count_no_rows_that_are_left_out(model: Path, tmp_path: Path, data: dict[str, Any]) -> None:
    left_out = "text " * 40 if "truncation" in data else ""
    texts = [("text", "x")] * 6 + [("text", "y")] * 3 + [("text", "z")] + [(left_out, "z")] * 8
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in texts))
    recipe = recipe_of(model, {"class_weights": "balanced"}, {"train": str(path)} | data)
    rows = prepare_rows(recipe, build_task(recipe))
    assert len(rows.train) == 10
    assert rows.facts["class_weights"] == pytest.approx([10 / 18, 10 / 9, 10 / 3])


def test_derived_task_keeps_its_own_class_weights_and_may_have_rows_without_classes(
    model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps({"text": "text", "label": label}) + "\n" for label in "xxxy"))

    class OwnWeights(Task):
        def survey_parts(self, parts: Any) -> Any:
            parts, facts = super().survey_parts(parts)
            return parts, facts | {"class_weights": [math.sqrt(weight) for weight in facts["class_weights"]]}

    class SoftTargets(Task):
        def encode(self, row: Any, facts: dict[str, Any]) -> list[Any]:
            return [one | {"target": [0.5, 0.5]} for one in super().encode(row, facts)]

    class OtherColumn(Task):
        def encode(self, row: Any, facts: dict[str, Any]) -> list[Any]:
            return [one | {"class": one.pop("target")} for one in super().encode(row, facts)]

    recipe = recipe_of(model, {"class_weights": "balanced"}, {"train": str(path)})
    balanced = [4 / 6, 4 / 2]
    kinds = {OwnWeights: [math.sqrt(weight) for weight in balanced], SoftTargets: balanced, OtherColumn: balanced}
    for seed, (kind, expected) in enumerate(kinds.items()):
        changed = recipe.model_copy(update={"seed": seed})  # other rows in the cache
        facts = prepare_rows(changed, kind(changed, Options(class_weights="balanced"))).facts
        assert facts["class_weights"] == pytest.approx(expected)


def test_lists_of_labels_become_truth_values_of_sorted_names(prepared: Any) -> None:
    rows = prepared([["b", "a"], [], ["c"], [1], ["a", "a"]], MULTI)
    assert rows.facts == {"labels": ["1", "a", "b", "c"]}
    assert rows.train["target"][0] == [False, True, True, False]
    assert [sum(target) for target in rows.train["target"]] == [2, 0, 1, 1, 1]
    listed = prepared([["b", "a"], [], [1], ["c"], [0]], MULTI | {"labels": ["c", "b", "a"]})
    assert listed.train["target"][2] == [False, True, False], "whole numbers are indices into the list"


def test_lists_of_labels_may_be_json_in_a_table_of_texts(prepared: Any) -> None:
    lists = prepared([["b", "a"], [], ["a"], ["b"]], MULTI).train["target"]
    assert prepared(['["b", "a"]', "[]", ' ["a"]', '["b"]'], MULTI).train["target"] == lists


def test_lists_of_class_indices_have_the_names_of_their_feature(prepared: Any) -> None:
    rows = {"text": ["a", "b", "c", "d"], "label": [[1, 2], [], [0], [2]]}
    features = Features({"text": Value("string"), "label": List(ClassLabel(names=["z", "y", "x"]))})
    Dataset.from_dict(rows, features).to_parquet("t.parquet")
    actual = prepared("t.parquet", MULTI)
    assert actual.facts["labels"] == ["z", "y", "x"]
    assert actual.train["target"][0] == [False, True, True]


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        (["a", ["b"], "a", "b"], MULTI, "row 1 of t.jsonl: label 'a' is not a list"),
        (["[a]", "[]"], MULTI, "row 1 of t.jsonl: `label`: not JSON"),
        ([["a"], ["b"], None, []], MULTI, "row 3 of t.jsonl: has no list of labels"),
        ([["a"], ["b", None], []], MULTI, "row 2 of t.jsonl: has the label None in its list"),
        ([["a"], ["b", 0.5], []], MULTI, "row 2 of t.jsonl: has the label 0.5 in its list"),
        ([["a"], ["n"]], MULTI | {"labels": ["a", "b"]}, "row 2 of t.jsonl: label 'n' is not one of: a, b"),
        ([["a"], []], MULTI, "have 1 different labels, but two are needed"),
        ([0.5, "high"], NUMBERS, "row 2 of t.jsonl: label is 'high', not a number"),
        ([0.5, [1.0]], NUMBERS, "row 2 of t.jsonl: has several labels"),
        ([0.5, None], NUMBERS, "row 2 of t.jsonl: has no label"),
        ([0.5, math.nan], NUMBERS, "row 2 of t.jsonl: label is nan; it must be a finite float32"),
        ([0.5, True], NUMBERS, "row 2 of t.jsonl: label is True, not a number"),
        ([0.5, 1.5], {}, "set task_options.problem_type to regression"),
        ([["a"], ["b"]], {}, "set task_options.problem_type to multi_label_classification"),
        (["a", "b"], {"class_weights": {"c": 2.0}}, "class_weights has a weight for 'c', which is not one of: a, b"),
        (
            ["a", "b"],
            {"class_weights": "balanced", "labels": ["a", "b", "c"]},
            "balanced: no training row has the label 'c'",
        ),
    ],
)
def test_labels_of_another_kind_are_refused_with_file_and_row(
    prepared: Any, labels: list[Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as error:
        prepared(labels, options)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (MULTI | {"class_weights": "balanced"}, "class_weights is for one label per row"),
        (NUMBERS | {"label_smoothing": 0.1}, "label_smoothing is for one label per row"),
        (NUMBERS | {"labels": ["a", "b"]}, "labels are names of classes"),
        ({"labels": ["a", "b"], "class_weights": {"c": 1.0}}, "a weight for 'c', which is not one of: a, b"),
        ({"class_weights": {"a": 0.0}}, "class_weights"),
        ({"class_weights": {"a": math.inf}}, "class_weights"),
        ({"problem_type": "several"}, "problem_type"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(model: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_task(recipe_of(model, options, {"train": "t.jsonl"}))


def test_multi_label_metrics_by_hand() -> None:
    problem = MultiLabel(Options(**MULTI))
    problem.take_facts({"labels": ["a", "b", "c"]})
    rows = {
        "loss": np.array([1.0, 2.0]),
        "items": np.ones(2),
        "target": np.array([[1, 1, 0], [0, 1, 0]]),
        "prediction": np.array([[1, 0, 0], [0, 1, 0]]),
    }
    metrics = problem.metrics(rows)
    assert (
        tuple(metrics)
        == problem.metric_names
        == ("loss", "micro_f1", "macro_f1", "subset_accuracy", "f1/a", "f1/b", "f1/c")
    )
    assert metrics["f1/a"] == 1 and metrics["f1/b"] == pytest.approx(2 / 3) and metrics["f1/c"] == 0
    assert metrics["macro_f1"] == pytest.approx(5 / 9) and metrics["micro_f1"] == pytest.approx(4 / 5)
    assert (metrics["subset_accuracy"], metrics["loss"]) == (0.5, 1.5)


def test_regression_metrics_by_hand() -> None:
    target, prediction = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 3.0, 3.0, 9.0])
    squares = (prediction - target) ** 2
    metrics = Regression(None).metrics(
        {"loss": squares, "items": np.ones(4), "target": target, "prediction": prediction}
    )
    assert metrics["loss"] == metrics["mse"] == 26 / 4 and metrics["mae"] == 6 / 4
    assert metrics["r2"] == pytest.approx(1 - 26 / 5)
    assert metrics["pearson"] == pytest.approx(np.corrcoef(target, prediction)[0, 1])
    assert metrics["spearman"] == pytest.approx(4.5 / math.sqrt(5 * 4.5))  # ranks 0, 1.5, 1.5, 3
    constant = Regression(None).metrics(
        {"loss": squares, "items": np.ones(4), "target": target, "prediction": np.ones(4)}
    )
    assert constant["pearson"] == constant["spearman"] == 0


def test_keep_best_knows_the_metrics_of_the_problem(model: Path) -> None:
    def check(options: dict[str, Any], metric: str) -> None:
        best = {"keep_best": {"metric": metric, "direction": "max"}}
        data = {"train": "t.jsonl", "eval_rows": 2}
        recipe = recipe_of(model, options, data, checkpoint={"every_steps": 1} | best, evaluate={"every_steps": 1})
        check_metric(recipe, type(build_task(recipe)))

    check(NUMBERS, "r2")
    check(MULTI | {"labels": ["a", "b"]}, "f1/a")
    with pytest.raises(InputError, match="an evaluation has no metric accuracy"):
        check(NUMBERS, "accuracy")
    with pytest.raises(InputError, match="known before the run if task_options.labels lists the labels"):
        check(MULTI, "f1/a")
