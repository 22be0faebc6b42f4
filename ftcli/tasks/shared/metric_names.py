"""List the names of the metrics that an evaluation reports, so that a wrong name is an error before the run starts.

The module never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ftcli.config.recipe_training import ANSWER_METRICS
from ftcli.data.paths import labels_of
from ftcli.runtime.errors import InputError, nearest

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe


PREFIX = "eval/"  # of the names in metrics.jsonl


def metric_names(recipe: Recipe, task: type, labels: Sequence[str] | None = None) -> list[str] | None:
    """Return the names of all metrics that an evaluation reports.

    Args:
        recipe: The recipe.
        task: The class of its task.
        labels: Labels of the sources with evaluation rows, which are known when rows are prepared; None takes those of
            all sources. Holding out rows may leave a source without any.

    Returns:
        Names without prefix; None if the task does not declare its metrics.
    """
    data, names = recipe.data, list[str]()
    if data.eval_sources or data.eval_rows:
        declared = _declared_metrics(task, recipe.task_options)
        if declared is None:
            return None
        known = labels_of(data.eval_sources or data.train_sources) if labels is None else labels
        names += [*declared, *(f"{label}/loss" for label in known if len(known) > 1)]
    return names if recipe.evaluate.generate is None else [*names, *ANSWER_METRICS]


def check_metric(recipe: Recipe, task: type, labels: Sequence[str] | None = None) -> None:
    """Check that an evaluation of the recipe reports the metric of `checkpoint.keep_best`.

    Args:
        recipe: The recipe.
        task: The class of its task.
        labels: As in `metric_names`.

    Raises:
        InputError: It does not.
    """
    best, names = recipe.checkpoint.keep_best, metric_names(recipe, task, labels)
    if best is not None and names is not None:
        require_metric(best.metric, names)


def require_metric(metric: str, names: Iterable[str]) -> None:
    """Raise `InputError` with all known names if `metric` is not among them."""
    known = list(names)
    if metric not in known:
        suggestion = nearest(metric.removeprefix(PREFIX), known)
        hint = f"{suggestion + ' ' if suggestion else ''}It has {', '.join(known)}"
        if metric.removeprefix(PREFIX).startswith("f1/"):
            hint += "; that of a label is known before the run if task_options.labels lists the labels"
        raise InputError(f"checkpoint.keep_best.metric: an evaluation has no metric {metric}", hint=hint)


def _declared_metrics(task: type, options: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the task's metrics with these options: of `metric_names_of`, or without it `metric_names`.

    Those of a base class are ignored if a subclass overrides `metrics`.
    """
    for kind in task.__mro__:
        if "metric_names_of" in vars(kind):
            from_options: tuple[str, ...] = kind.metric_names_of(options)  # type: ignore[attr-defined]
            return from_options
        if "metric_names" in vars(kind):
            names: tuple[str, ...] = vars(kind)["metric_names"]
            return names
        if "metrics" in vars(kind):
            return None
    return None
