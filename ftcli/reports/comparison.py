"""Compare the curves of two runs: values that must be identical, and values that may differ by rounding.

This module reads run folders. Profile and number of processes are only labels here. Light: never imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ftcli.checkpoint.weight_distance import distance
from ftcli.runtime.run_folder import RunFolder


@dataclass(frozen=True)
class Tolerance:
    """Differences between two runs of one recipe that rounding may cause.

    Attributes:
        loss: Relative difference of losses, including losses of evaluations.
        grad_norm: Relative difference of gradient norms.
        weights: Root mean square difference of final weights, divided by the sum of all learning rates.
    """

    loss: float
    grad_norm: float
    weights: float


# Differences come from another order of sums, of float32 (24 bits) or of products in bfloat16 (8 bits). The tolerance
# of weights is wide, because AdamW makes a full step for a gradient that consists of rounding errors only. The scales
# of fp8 depend on the micro-batch. A row that is missing from the loss changes it by far more than these tolerances.
TOLERANCES = {
    "fp32": Tolerance(1e-5, 1e-4, 0.05),
    "fp16": Tolerance(2e-3, 2e-2, 0.5),
    "bf16": Tolerance(4e-3, 3e-2, 0.5),
    "bf16_pure": Tolerance(2e-2, 1e-1, 1.0),
    "fp8": Tolerance(1e-2, 1e-1, 1.0),
}


@dataclass(frozen=True)
class Curve:
    """Metrics and weights of one run.

    Attributes:
        label: Name of the run in tables and messages.
        rows: Rows of metrics in the order of time.
        start: Digests of the initial weights, by name.
        final: Folder of the final weights.
        uncompared: Metrics of evaluations that rounding may change by any amount (`TaskProperties`).
    """

    label: str
    rows: list[dict[str, Any]]
    start: dict[str, str]
    final: Path
    uncompared: tuple[str, ...] = ()

    @classmethod
    def of(cls, label: str, folder: RunFolder) -> Curve:
        """Read the curve of a run folder."""
        start = folder.start()
        return cls(label, folder.metrics(), start["weights"], folder.final, tuple(start.get("uncompared_metrics", ())))

    @property
    def training(self) -> list[dict[str, Any]]:
        """Rows of optimizer steps."""
        return [row for row in self.rows if "loss" in row]

    def compares(self, name: str) -> bool:
        """Return whether a key is a metric of an evaluation that is compared. A source or a label may be part of it."""
        if not name.startswith(EVALUATED):
            return False
        metric = name.removeprefix(EVALUATED)
        if metric.endswith("/loss"):  # of a source, which may have the name of a metric
            return metric not in self.uncompared
        return not any(f"/{uncompared}/" in f"/{metric}/" for uncompared in self.uncompared)


@dataclass(frozen=True)
class Departure:
    """A quantity that leaves its tolerance, or that differs although it must be identical."""

    label: str
    quantity: str
    step: int | None
    value: Any = None
    reference: Any = None
    difference: float | None = None  # None: the values must be identical
    most: float | None = None

    def __str__(self) -> str:
        one_sided = self.difference == math.inf and self.value is not None
        outside = "is finite in one run only" if one_sided else "leaves the tolerance"
        text = f"{self.label}: {self.quantity} {'differs' if self.difference is None else outside}"
        text += "" if self.step is None else f" at step {self.step}"
        if self.value is not None:
            text += f": {_format_value(self.value)} against {_format_value(self.reference)}"
        if one_sided:  # other steps that are not finite have no row of metrics
            is_skipped = self.quantity in STEP_QUANTITIES.values()
            return text + (f". Step {self.step} was skipped in one run only" if is_skipped else "")
        return text if self.difference is None else f"{text} ({self.difference:.1e} > {self.most:g})"


@dataclass(frozen=True)
class Comparison:
    """Differences between two runs. They are relative; `drift` is a signed mean; None: there is nothing to compare."""

    label: str
    against: str
    is_held: bool  # False: tolerances are not checked, only identities
    loss: float
    drift: float
    grad_norm: float
    learning_rates: bool
    samples: bool
    items: bool
    start: bool
    weights: float | None
    evaluation: float | None
    further: float | None  # means of terms, notes and sources, and metrics of evaluations
    departure: Departure | None

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as plain values, with a sentence on the first difference outside the tolerance."""
        extra = {"sentence": str(self.departure)} if self.departure else {}
        return asdict(self) | {"departure": {**asdict(self.departure), **extra} if self.departure else None}


def compare(run: Curve, reference: Curve, tolerance: Tolerance, *, is_held: bool = True) -> Comparison:
    """Compare two runs.

    Args:
        run: The run to compare.
        reference: The reference.
        tolerance: The tolerances of the precision.
        is_held: Whether tolerances are checked. Initial weights, rows, items, learning rates and steps are always
            checked, because rounding does not change them.

    Returns:
        The differences, and the first departure in the order of time.
    """
    pairs = list(_common_rows(run, reference))
    training = [(a, b) for a, b in pairs if "loss" in b]
    names = _watched_names(run, reference)
    further = [value for a, b in pairs for _, value in _further(a, b, names) if value is not None]
    evaluations = [relative(a, b, EVALUATION_LOSS) for a, b in pairs if EVALUATION_LOSS in b]
    weights = distance(run.final, reference.final, sum(row["learning_rate"] for row in reference.training))
    drifts = [difference(a["loss"], b["loss"]) for a, b in training]
    return Comparison(
        label=run.label,
        against=reference.label,
        is_held=is_held,
        loss=max((abs(drift) for drift in drifts), default=0.0),
        drift=sum(drifts) / max(len(drifts), 1),
        grad_norm=max((relative(a, b, "grad_norm") for a, b in training), default=0.0),
        learning_rates=all(a["learning_rate"] == b["learning_rate"] for a, b in training),
        samples=all(a["samples"] == b["samples"] for a, b in training),
        items=all(a["items"] == b["items"] for a, b in training),
        start=run.start == reference.start,
        weights=weights,
        evaluation=max(evaluations, default=None),
        further=max(further, default=None),
        departure=next(_find_departures(run, reference, tolerance, weights, is_held=is_held), None),
    )


def difference(value: float, reference: float, *, least: float = 0.0) -> float:
    """Return the relative difference of two values, with its sign.

    Args:
        value: The value.
        reference: The reference.
        least: Smallest absolute reference that the difference is divided by. Below it the result is absolute.

    Returns:
        The difference. 0 if neither value is finite: the gradient of a step that both runs skip may be infinite in one
        and NaN in the other. Infinity if only one is finite. Never NaN, which `max` finds only in some places.
    """
    if math.isfinite(value) and math.isfinite(reference):
        return (value - reference) / (max(abs(reference), least) or 1.0)
    return math.inf if math.isfinite(value) or math.isfinite(reference) else 0.0


def relative(run: dict[str, Any], reference: dict[str, Any], name: str) -> float:
    """Return the relative difference |a - b| / |b| of one value in two rows, as `difference` defines it."""
    return abs(difference(run[name], reference[name]))


def _watched_names(run: Curve, reference: Curve) -> set[str]:
    """Return the keys of terms, notes and sources in rows of training, and of all compared metrics of evaluations."""
    names = {name for curve in (run, reference) for row in curve.training for name in row if name.startswith(FURTHER)}
    twins = {EVALUATED + name.removeprefix(FURTHER) for name in names}
    others = {name for curve in (run, reference) for row in curve.rows for name in row if curve.compares(name)}
    return names | twins | (others - {EVALUATION_LOSS})


def _further(run: dict[str, Any], reference: dict[str, Any], names: set[str]) -> Iterator[tuple[str, float | None]]:
    """Yield (name, difference) of each watched key; None where one run lacks the value.

    The difference is relative for values above 1 and absolute below. A margin or a KL divergence is a small difference
    of large numbers, which no two summations give with the same relative error.
    """
    for name in dict.fromkeys([*reference, *run]):
        if name in names:
            both = name in run and name in reference
            yield name, abs(difference(run[name], reference[name], least=1.0)) if both else None


def _common_rows(run: Curve, reference: Curve) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield pairs of rows for the same step that both runs have, in the order of time."""
    mine = {(row["step"], "loss" in row): row for row in run.rows}
    for row in reference.rows:
        if (key := (row["step"], "loss" in row)) in mine:
            yield mine[key], row


FURTHER = "train/"  # keys of means of terms, notes and sources
EVALUATED = "eval/"  # keys of an evaluation
EVALUATION_LOSS = "eval/loss"
STEP_QUANTITIES = {"loss": "loss", "grad_norm": "gradient norm"}  # key of a step's row -> words
IDENTICAL = (("items", "number of items"), ("samples", "digest of the rows"), ("learning_rate", "learning rate"))


def _find_departures(
    run: Curve, reference: Curve, tolerance: Tolerance, weights: float | None, *, is_held: bool
) -> Iterator[Departure]:
    """Yield every departure in the order of time: initial weights, each step, final weights."""
    label = run.label
    for name in [*reference.start, *(name for name in run.start if name not in reference.start)]:
        mine, other = run.start.get(name, "none"), reference.start.get(name, "none")
        if mine != other:
            yield Departure(label, f"initial weight {name}", None, mine, other)
    limits = [(name, words, getattr(tolerance, name)) for name, words in STEP_QUANTITIES.items()]
    limits.append((EVALUATION_LOSS, "evaluation loss", tolerance.loss))
    names = _watched_names(run, reference)
    for a, b in _common_rows(run, reference):
        for name, words in IDENTICAL:
            if a.get(name) != b.get(name):
                yield Departure(label, words, b["step"], a[name], b[name])
        for name, words, most in limits if is_held else ():
            if name in b and not (apart := relative(a, b, name)) <= most:
                yield Departure(label, words, b["step"], a[name], b[name], apart, most)
        for name, further in _further(a, b, names):
            if further is None:
                yield Departure(label, name, b["step"], a.get(name, "none"), b.get(name, "none"))
            elif is_held and not further <= tolerance.loss:
                yield Departure(label, name, b["step"], a[name], b[name], further, tolerance.loss)
    steps = [[row["step"] for row in curve.training] for curve in (run, reference)]
    if steps[0] != steps[1]:
        yield Departure(label, "number of steps", None, len(steps[0]), len(steps[1]))
    if weights is None:
        yield Departure(label, "list of final weights", None)
    elif is_held and not weights <= tolerance.weights:
        yield Departure(label, "distance of the final weights", None, None, None, weights, tolerance.weights)


def _format_value(value: Any) -> str:
    """Return a number with seven digits, or a shortened digest."""
    if isinstance(value, float):
        return f"{value:.7g}"
    return value[:12] if isinstance(value, str) else str(value)


COLUMNS = (
    "combination",
    "loss",
    "drift",
    "gradient norm",
    "rates",
    "rows",
    "items",
    "initial",
    "final",
    "evaluation",
    "holds",
)
FURTHER_HEADING = "further"  # heading of the differences of the further values, where a run has any


def comparison_table(reference: str, comparisons: Sequence[Comparison]) -> list[str]:
    """Return the comparisons as a table of largest relative differences, mean drift and identities."""
    has_further = any(comparison.further is not None for comparison in comparisons)
    columns = (*COLUMNS[:-1], FURTHER_HEADING, COLUMNS[-1]) if has_further else COLUMNS
    rows = [columns, (reference, *("reference" if name == "loss" else "" for name in columns[1:]))]
    for comparison in comparisons:
        same = (comparison.learning_rates, comparison.samples, comparison.items, comparison.start)
        holds = "no" if comparison.departure else "yes" if comparison.is_held else "not checked"
        rows.append(
            (
                comparison.label,
                f"{comparison.loss:.1e}",
                f"{comparison.drift:+.1e}",
                f"{comparison.grad_norm:.1e}",
                *("same" if item else "DIFFER" for item in same),
                "DIFFER" if comparison.weights is None else f"{comparison.weights:.1e}",
                "none" if comparison.evaluation is None else f"{comparison.evaluation:.1e}",
                *(["none" if comparison.further is None else f"{comparison.further:.1e}"] if has_further else []),
                holds,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(columns))]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
