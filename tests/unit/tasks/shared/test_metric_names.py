"""A metric that no evaluation gives is refused before a model loads, by `check`, by a launch and by `prepare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from ftcli import testing
from ftcli.config.recipe import Recipe
from ftcli.config.task_registry import find_task, list_tasks
from ftcli.launch.preflight import check_inputs
from ftcli.runtime.errors import InputError
from ftcli.tasks.protocol import properties_of
from ftcli.tasks.shared.label_options import ProblemType
from ftcli.tasks.shared.metric_names import check_metric, metric_names
from ftcli.training.checkpointing import save_checkpoint
from ftcli.training.evaluation import evaluate
from ftcli.training.setup import prepare

from ....support.recipes import minimal_values

BEST = {"direction": "min"}
OWN = """\
from ftcli.tasks import sft
from ftcli.tasks.sft import Options
class Task(sft.Task):
    def metrics(self, rows):
        return super().metrics(rows) | {"bits": 1.0}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with rows, and a model that cannot be loaded: it has no weights."""
    testing.save_tiny_causal(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(testing.NO_WEIGHTS)
    for name in ("a", "b", "c"):
        rows = ({"prompt": f"{name}{n}", "completion": "x"} for n in range(8))
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recipe(metric: str, data: dict[str, Any] | None = None, **changes: Any) -> Recipe:
    values: dict[str, Any] = minimal_values(
        model={"name": "model"},
        data={"train": "a.jsonl"} | (data or {"eval": "b.jsonl"}),
        batch={"global_size": 2},
        checkpoint={"keep_best": BEST | {"metric": metric}},
    )
    return Recipe.model_validate(values | changes)


ASKS = {"generate": {"prompts": ["a"]}}
TWO = ["b.jsonl", "c.jsonl"]


@pytest.mark.parametrize(
    ("metric", "data", "evaluate", "message"),
    [
        ("los", None, {}, r"no metric los\n    did you mean 'loss'\? It has loss, perplexity$"),
        ("eval/loss", None, {}, r"no metric eval/loss\n    did you mean 'loss'\? It has loss, perplexity$"),
        ("b/loss", None, {}, "no metric b/loss"),
        ("a/loss", {"eval": TWO}, {}, r"no metric a/loss\n.*It has loss, perplexity, b/loss, c/loss$"),
        ("d/loss", {"train": TWO, "eval_rows": 2}, {}, "It has loss, perplexity, b/loss, c/loss$"),
        ("answers_endet", None, ASKS, "'answers_ended'. It has loss, perplexity, answer_tokens, answers_ended$"),
    ],
)
def test_check_metric_with_an_unknown_name_lists_the_known_ones(
    folder: Path, metric: str, data: dict[str, Any] | None, evaluate: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        check_inputs(recipe(metric, data, evaluate=evaluate))
    with pytest.raises(InputError, match=message):  # a bare launch, a notebook: the model cannot even be loaded
        prepare(recipe(metric, data, evaluate=evaluate), cpu=True)


@pytest.mark.parametrize(
    ("metric", "data", "evaluate"),
    [
        ("perplexity", None, {}),
        ("c/loss", {"eval": TWO}, {}),
        ("b/loss", {"train": TWO, "eval_rows": 2}, {}),
        ("answer_tokens", {"eval_rows": 0}, ASKS),
    ],
)
def test_check_metric_with_a_known_name_passes(
    folder: Path, metric: str, data: dict[str, Any] | None, evaluate: dict[str, Any]
) -> None:
    check_inputs(recipe(metric, data, evaluate=evaluate))


def test_check_metric_of_a_source_without_held_out_rows_is_refused(folder: Path) -> None:
    (folder / "b.jsonl").write_text((folder / "b.jsonl").read_text() * 50)
    path = recipe("c/loss", {"train": TWO, "eval_rows": 1})
    check_inputs(path)  # which rows are held out is known when they are read
    with pytest.raises(InputError, match="no metric c/loss\n"):
        prepare(path, cpu=True)


def test_check_metric_of_a_derived_task_uses_its_own_names(folder: Path) -> None:
    (folder / "mine.py").write_text(OWN)
    kind = find_task("./mine.py").Task
    assert metric_names(recipe("bits", task="./mine.py"), kind) is None
    check_metric(recipe("bits", task="./mine.py"), kind)
    (folder / "declared.py").write_text(OWN + '    metric_names = ("loss", "perplexity", "bits")\n')
    task = find_task("./declared.py").Task
    assert metric_names(recipe("bits", task="./declared.py"), task) == ["loss", "perplexity", "bits"]
    (folder / "plain.py").write_text("from ftcli.tasks import sft\nfrom ftcli.tasks.sft import Options, Task\n")
    with pytest.raises(InputError, match="no metric bits"):
        prepare(recipe("bits", task="./plain.py"), cpu=True)


def test_own_task_without_metric_names_is_refused_at_the_first_evaluation(folder: Path) -> None:
    testing.save_tiny_causal(folder / "model")
    (folder / "mine.py").write_text(OWN)
    run = prepare(recipe("bytes", task="./mine.py"), output=folder / "run", cpu=True)
    with pytest.raises(InputError, match=r"no metric bytes\n.*It has loss, perplexity, bits$"):
        save_checkpoint(run, 0, evaluate(run))


def test_weights_that_are_only_measured_need_no_metric_of_answers(folder: Path) -> None:
    testing.save_tiny_causal(folder / "model")
    path = recipe("answer_tokens")  # as `ftcli evaluate` prepares it: prompts are not asked
    with pytest.raises(InputError, match="no metric answer_tokens"):
        prepare(path, cpu=True)
    run = prepare(path, cpu=True, weights=folder / "model")
    assert set(evaluate(run)) == {"loss", "perplexity"}


@pytest.mark.parametrize("name", list_tasks())
def test_uncompared_metrics_of_a_shipped_task_are_metrics_that_it_reports(name: str) -> None:
    task = find_task(name).Task
    kinds = [{"problem_type": kind, "labels": ["a"]} for kind in get_args(ProblemType)]
    of_kinds = [task.metric_names_of(options) for options in kinds] if hasattr(task, "metric_names_of") else []
    reported = {metric for names in (task.metric_names, *of_kinds) for metric in names}
    uncompared = set(properties_of(task).uncompared_metrics)
    assert uncompared <= reported | {metric.partition("/")[0] for metric in reported}
    assert "loss" not in uncompared and uncompared >= reported & {"perplexity", "macro_f1", "spearman"}
