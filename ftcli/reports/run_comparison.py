"""Compare runs in the terminal: `ftcli compare`. The report of several runs shows the same tables.

Tables have one row per fact and one column per run. Light: never imports torch.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftcli.config.plan import pluralise
from ftcli.reports.run_events import KINDS
from ftcli.reports.run_record import RunRecord, number, read_runs
from ftcli.reports.run_series import points
from ftcli.reports.text_chart import draw_text_chart
from ftcli.runtime.errors import InputError, shortened

NOT_SET, UNKNOWN = "not set", "unknown"
MOST_CELL = 120  # characters of a value in a table
Table = list[tuple[str, list[str]]]  # (name of a fact, its value in each run)


@dataclass(frozen=True)
class RunComparison:
    """Several runs side by side.

    Attributes:
        labels: Names of the runs.
        summary: State, task, hardware and last values of each run.
        differences: Heading -> what differs: recipe, profile, versions, machine.
        curves: How far the curves of later runs are from the first one.
        notes: What is missing or not comparable.
        losses: (steps, losses) of each run.
    """

    labels: list[str]
    summary: Table
    differences: dict[str, Table]
    curves: Table
    notes: list[str] = field(default_factory=list)
    losses: list[tuple[list[int], list[float]]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as plain values, for `--json`."""
        return {
            "runs": self.labels,
            "summary": dict(self.summary),
            "differences": {heading: dict(rows) for heading, rows in self.differences.items()},
            "curves": dict(self.curves),
            "notes": self.notes,
        }

    def lines(self) -> list[str]:
        """Return the comparison as text."""
        lines = [*_text_table("run", self.labels, self.summary), ""]
        for heading, rows in self.differences.items():
            lines += _text_table(f"{heading}:", self.labels, rows) if rows else [f"{heading}: no difference"]
            lines.append("")
        if self.curves:
            lines += [*_text_table("curves:", self.labels, self.curves), ""]
        chart = draw_text_chart(self.losses)
        if chart:
            legend = ", ".join(f"{letter} {label}" for letter, label in zip("ABCDEFGHIJ", self.labels, strict=False))
            lines += [f"loss: {legend}" if len(self.labels) > 1 else "loss", *chart, ""]
        return [*lines, *(f"note: {note}" for note in self.notes)]


def compare_runs(*runs: str | Path) -> RunComparison:
    """Compare the recipes, profiles, versions and curves of two or more runs.

    Args:
        runs: The run folders.

    Returns:
        The comparison. `lines()` is its text, `as_dict()` its values.

    Raises:
        InputError: Fewer than two runs were given, a folder has no run, or a run was given twice.

    Example:
        >>> comparison = ftcli.compare_runs("runs/a", "runs/b")
        >>> for line in comparison.lines():
        ...     print(line)
        >>> comparison.differences["recipe"]
        [('optimizer.learning_rate', ['0.0002', '0.0001'])]
    """
    if len(runs) < 2:
        raise InputError("a comparison needs two runs or more", hint="ftcli compare runs/a runs/b")
    return compare_records(read_runs(runs))


def compare_records(runs: Sequence[RunRecord]) -> RunComparison:
    """Compare runs that are read already.

    Args:
        runs: The runs. The first is the reference of the curves. One run has a summary only.
    """
    notes = [note for run in runs for note in run.notes]
    tasks = {str(run.recipe["task"]) for run in runs if "task" in run.recipe}
    if len(tasks) > 1:
        notes.append(f"the runs train different tasks ({', '.join(sorted(tasks))}): their losses are not comparable")
    return RunComparison(
        labels=[run.label for run in runs],
        summary=_summary(runs),
        differences=_differences(runs) if len(runs) > 1 else {},
        curves=_curves(runs) if len(runs) > 1 else [],
        notes=notes,
        losses=[points(run, "loss") for run in runs],
    )


def _summary(runs: Sequence[RunRecord]) -> Table:
    """Return state, task, hardware and last values of each run. Facts that no run has are left out."""
    facts: dict[str, Callable[[RunRecord], str]] = {
        "state": lambda run: f"{run.status.get('state', UNKNOWN)} at step {run.status.get('step', UNKNOWN)}",
        "task": lambda run: _value(run.recipe.get("task", UNKNOWN)),
        "model": lambda run: _value(_get(run.recipe, "model", "name")),
        "adapter": lambda run: _value(_get(run.recipe, "adapter", "type")),
        "precision": lambda run: _value(run.recipe.get("precision", UNKNOWN)),
        "profile": lambda run: run.profile_name,
        "processes": lambda run: (
            f"{run.environment.get('processes', UNKNOWN)} on {run.environment.get('device', UNKNOWN)}"
        ),
        "first loss": lambda run: _training_value(run, 0),
        "last loss": lambda run: _training_value(run, -1),
    }
    table = [(name, [shortened(fact(run), MOST_CELL) for run in runs]) for name, fact in facts.items()]
    metrics = dict.fromkeys(key for run in runs for row in run.evaluations for key in row if key.startswith("eval/"))
    table += [(f"last {key}", [_last_metric(run, key) for run in runs]) for key in metrics]
    speeds = dict.fromkeys(key for run in runs for row in run.training for key in row if key.endswith("s_per_second"))
    table += [(f"median {key}", [_median(run, key) for run in runs]) for key in speeds]
    table.append(("peak_memory_gb", [_largest_metric(run, "peak_memory_gb") for run in runs]))
    for kind in KINDS[1:-1]:
        table.append((f"{kind} events", [str(sum(event.kind == kind for event in run.events)) for run in runs]))
    empty = {"", "none", UNKNOWN, "0"}
    return [(name, values) for name, values in table if not set(values) <= empty]


def _get(values: dict[str, Any], section: str, key: str) -> Any:
    """Return a key of a section; UNKNOWN without it."""
    inner = values.get(section)
    return inner.get(key, UNKNOWN) if isinstance(inner, dict) else UNKNOWN


def _training_value(run: RunRecord, place: int) -> str:
    """Return the first or the last loss with its step."""
    steps, values = points(run, "loss")
    return f"{values[place]:.4f} at step {steps[place]}" if values else "none"


def _last_metric(run: RunRecord, key: str) -> str:
    steps, values = points(run, key)
    return f"{values[-1]:.4g}" + (f" at step {steps[-1]}" if key.startswith("eval/") else "") if values else "none"


def _largest_metric(run: RunRecord, key: str) -> str:
    """Return the largest value of a metric in all launches."""
    values = points(run, key)[1]
    return f"{max(values):.4g}" if values else "none"


def _median(run: RunRecord, key: str) -> str:
    """Return the median of a rate without the first row, which includes warm-up."""
    values = [value for value in points(run, key)[1] if math.isfinite(value)]
    return f"{statistics.median(values[1:] or values):.4g}" if values else "none"


def _differences(runs: Sequence[RunRecord]) -> dict[str, Table]:
    """Return what differs by heading. A file that one run lacks is not compared; a note says so."""
    packages = [run.environment.get("packages") for run in runs]
    versions = [
        (installed if isinstance(installed, dict) else {}) | {"python": run.environment.get("python")}
        if run.environment
        else {}
        for run, installed in zip(runs, packages, strict=True)
    ]
    machine = ("platform", "device", "processes", "launched", "git_commit")
    places = [{key: run.environment[key] for key in machine if key in run.environment} for run in runs]
    names = [{"profile": run.profile_name} if run.profile_name != UNKNOWN else {} for run in runs]
    profiles = [name | run.profile if name else {} for name, run in zip(names, runs, strict=True)]
    parts: dict[str, list[dict[str, Any]]] = {
        "recipe": [run.recipe for run in runs],
        "profile": profiles,
        "versions": versions,
        "machine": places,
    }
    return {heading: list(_changed(values)) for heading, values in parts.items() if all(values)}


def _changed(values: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    """Yield (key, its value in each run) of keys that are not equal in all runs. A null is a key that is not set."""
    flat = [dict(_flatten(each)) for each in values]
    for key in dict.fromkeys(key for each in flat for key in each):
        stated = [each.get(key) for each in flat]
        different = len({"" if value in (None, {}) else _json(value) for value in stated})
        texts = [NOT_SET if value in (None, {}) else _value(value) for value in stated]
        if len(set(texts)) < different:  # for instance, a list and a text that look the same
            texts = [NOT_SET if value in (None, {}) else _json(value) for value in stated]
        if different > 1:
            yield key, [shortened(text, MOST_CELL) for text in texts]


def _flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key with dots, value) of nested sections. A list is one value."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _value(value: Any) -> str:
    """Return a value as a recipe would have it, on one line."""
    if isinstance(value, list) and value and all(_is_word(item) for item in value):
        return " ".join(value)
    if isinstance(value, str) and value.isprintable():
        return value
    return _json(value)


def _is_word(value: Any) -> bool:
    """Return whether a value is a text without spaces and line breaks."""
    return isinstance(value, str) and value.isprintable() and " " not in value


def _json(value: Any) -> str:
    """Return a value as JSON on one line, equal for equal values."""
    try:
        return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)
    except TypeError:  # keys of several types have no order
        return json.dumps(value, ensure_ascii=False, default=str)


def _curves(runs: Sequence[RunRecord]) -> Table:
    """Compare each curve with that of the first run, at the steps that both have."""
    first = {row["step"]: row for row in runs[0].training}
    pairs = [[(first[row["step"]], row) for row in run.training if row["step"] in first] for run in runs]
    if not any(pairs[1:]):
        return []
    table = [("steps in common", ["", *(str(len(common)) for common in pairs[1:])])]
    for key in ("loss", "grad_norm", "learning_rate"):
        table.append((f"largest difference of {key}", ["reference", *(_largest(common, key) for common in pairs[1:])]))
    same = ["reference"]
    for common in pairs[1:]:
        other = [row["step"] for mine, row in common if mine.get("samples") != row.get("samples")]
        same.append(f"differ from step {other[0]}" if other else "the same" if common else "none")
    return [*table, ("ids of trained rows", same)]


def _largest(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]], key: str) -> str:
    """Return the largest relative difference of one value, and its step; finite in one run only is the largest."""
    differences: list[tuple[float, int]] = []
    neither = 0
    for mine, other in pairs:
        a, b = number(mine.get(key)), number(other.get(key))
        if a is None or b is None:
            continue
        if math.isfinite(a) != math.isfinite(b):
            return f"finite in one run only at step {other['step']}"
        if math.isfinite(a):
            differences.append((abs(a - b) / (abs(a) or 1.0), other["step"]))
        else:
            neither += 1
    unless = f", {pluralise(neither, 'step')} not finite in both" if neither else ""
    if not differences:
        return f"none{unless}"
    most, step = max(differences, key=lambda pair: pair[0])
    return (f"{most:.1e} at step {step}" if most else "identical") + unless


def _text_table(heading: str, labels: Sequence[str], rows: Table) -> list[str]:
    """Return a table as text, with the runs as columns."""
    table = [[heading, *labels], *([name, *values] for name, values in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(labels) + 1)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
