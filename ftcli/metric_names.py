"""Which metrics an evaluation can give, by name, so that one that decides something is known before a run starts.

Knows what tasks declare and what is added to it; nothing is measured here, and torch is never imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from .errors import InputError, nearest
from .recipe import ANSWER_METRICS
from .rows import labels_of

if TYPE_CHECKING:
    from .recipe import Recipe

PREFIX = "eval/"  # what metrics.jsonl writes before a name


def metric_names(recipe: Recipe, task: type, labels: Sequence[str] | None = None) -> list[str] | None:
    """Return the names of all metrics that an evaluation can give; None where the task does not declare its own.

    `labels` are those of the sources that have evaluation rows, where that is known by now: rows that are held out
    may leave a source without any.
    """
    data, names = recipe.data, list[str]()
    if data.eval_sources or data.eval_rows:
        declared = _declared(task)
        if declared is None:
            return None
        known = labels_of(data.eval_sources or data.train_sources) if labels is None else labels
        names += [*declared, *(f"{label}/loss" for label in known if len(known) > 1)]
    return names if recipe.evaluate.generate is None else [*names, *ANSWER_METRICS]


def check_metric(recipe: Recipe, task: type, labels: Sequence[str] | None = None) -> None:
    """Raise `InputError` where `checkpoint.keep_best` goes by a metric that no evaluation of the recipe gives."""
    best, names = recipe.checkpoint.keep_best, metric_names(recipe, task, labels)
    if best is not None and names is not None:
        require_metric(best.metric, names)


def require_metric(metric: str, names: Iterable[str]) -> None:
    """Raise `InputError` naming the metrics that there are when `metric` is none of them."""
    known = list(names)
    if metric not in known:
        meant = nearest(metric.removeprefix(PREFIX), known)
        raise InputError(
            f"checkpoint.keep_best.metric: an evaluation has no metric {metric}",
            hint=f"{meant + ' ' if meant else ''}It has {', '.join(known)}",
        )


def _declared(task: type) -> tuple[str, ...] | None:
    """Return the task's `metric_names`; those of a class above do not count where `metrics` is written anew."""
    for kind in task.__mro__:
        if "metric_names" in vars(kind):
            names: tuple[str, ...] = vars(kind)["metric_names"]
            return names
        if "metrics" in vars(kind):
            return None
    return None
