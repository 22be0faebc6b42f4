"""Compare the curves of two runs: values that must be identical, and values that may differ by rounding.

This module reads run folders. Profile and number of processes are only labels here. Light: never imports torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
    """

    label: str
    rows: list[dict[str, Any]]
    start: dict[str, str]
    final: Path

    @classmethod
    def of(cls, label: str, folder: RunFolder) -> Curve:
        """Read the curve of a run folder."""
        return cls(label, folder.metrics(), folder.start()["weights"], folder.final)

    @property
    def training(self) -> list[dict[str, Any]]:
        """Rows of optimizer steps."""
        return [row for row in self.rows if "loss" in row]


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
        verb = "differs" if self.difference is None else "leaves the tolerance"
        text = f"{self.label}: {self.quantity} {verb}" + ("" if self.step is None else f" at step {self.step}")
        if self.value is not None:
            text += f": {_format_value(self.value)} against {_format_value(self.reference)}"
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
    further: float | None  # means of terms, notes and sources, in training and in evaluations
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
    further = [difference for a, b in pairs for _, difference in _further(a, b, names) if difference is not None]
    evaluations = [relative(a, b, "eval/loss") for a, b in pairs if "eval/loss" in b]
    weights = distance(run.final, reference.final, sum(row["learning_rate"] for row in reference.training))
    drifts = [(a["loss"] - b["loss"]) / (abs(b["loss"]) or 1.0) for a, b in training]
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


def relative(run: dict[str, Any], reference: dict[str, Any], name: str) -> float:
    """Return the relative difference |a - b| / |b| of one value in two rows."""
    difference: float = abs(run[name] - reference[name]) / (abs(reference[name]) or 1.0)
    return difference


def _watched_names(run: Curve, reference: Curve) -> set[str]:
    """Return the keys of terms, notes and sources in rows of training, and their keys in rows of evaluations."""
    names = {name for curve in (run, reference) for row in curve.training for name in row if name.startswith(FURTHER)}
    return names | {EVALUATED + name.removeprefix(FURTHER) for name in names}


def _further(run: dict[str, Any], reference: dict[str, Any], names: set[str]) -> Iterator[tuple[str, float | None]]:
    """Yield (name, difference) of each mean of a term, a note or a source; None where one run lacks the value.

    The difference is relative for values above 1 and absolute below. A margin or a KL divergence is a small difference
    of large numbers, which no two summations give with the same relative error.
    """
    for name in dict.fromkeys([*reference, *run]):
        if name in names:
            both = name in run and name in reference
            yield name, abs(run[name] - reference[name]) / max(abs(reference[name]), 1.0) if both else None


def distance(run: Path, reference: Path, reach: float) -> float | None:
    """Return the root mean square difference of the weights in two folders, divided by `reach`.

    Args:
        run: A folder of safetensors files.
        reference: The folder to compare with.
        reach: Sum of the learning rates of all steps, about the largest distance that AdamW moves a weight. Unrelated
            runs with the same start have a result of about 1 or more.

    Returns:
        The distance; None if files, names or shapes differ.
    """
    squares, numbers = 0.0, 0
    names = [sorted(path.name for path in folder.glob("*.safetensors")) for folder in (run, reference)]
    if names[0] != names[1]:
        return None
    for name in names[0]:
        mine, other = (StoredValues(folder / name) for folder in (run, reference))
        if mine.shapes != other.shapes:
            return None
        for key in sorted(other.shapes):
            squares += float(((mine.read(key) - other.read(key)) ** 2).sum())
            numbers += math.prod(other.shapes[key])
    return (squares / max(numbers, 1)) ** 0.5 / (reach or 1.0)


class StoredValues:
    """Reads the tensors of one safetensors file as numpy arrays, including bfloat16, which numpy does not have."""

    def __init__(self, path: Path) -> None:
        import numpy as np

        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        self._entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + length)
        self.shapes = {name: tuple(entry["shape"]) for name, entry in self._entries.items()}

    def read(self, name: str) -> Any:
        """Return one tensor's values, flattened, as float64 `[n]`."""
        entry = self._entries[name]
        first, last = entry["data_offsets"]
        content = self._bytes[first:last]
        if entry["dtype"] == "BF16":  # bfloat16 is the upper half of a float32
            return (content.view("<u2").astype("<u4") << 16).view("<f4").astype("float64")
        return content.view(f"<{entry['dtype'][0].lower()}{int(entry['dtype'][1:]) // 8}").astype("float64")


def _common_rows(run: Curve, reference: Curve) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield pairs of rows for the same step that both runs have, in the order of time."""
    mine = {(row["step"], "loss" in row): row for row in run.rows}
    for row in reference.rows:
        if (key := (row["step"], "loss" in row)) in mine:
            yield mine[key], row


FURTHER = "train/"  # keys of means of terms, notes and sources
EVALUATED = "eval/"  # keys of an evaluation
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
    limits = [("loss", "loss", tolerance.loss), ("grad_norm", "gradient norm", tolerance.grad_norm)]
    limits.append(("eval/loss", "evaluation loss", tolerance.loss))
    names = _watched_names(run, reference)
    for a, b in _common_rows(run, reference):
        for name, words in IDENTICAL:
            if a.get(name) != b.get(name):
                yield Departure(label, words, b["step"], a[name], b[name])
        for name, words, most in limits if is_held else ():
            if name in b and not (difference := relative(a, b, name)) <= most:
                yield Departure(label, words, b["step"], a[name], b[name], difference, most)
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
FURTHER_HEADING = "terms"  # heading of the differences of terms, notes and sources, where a run has any


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
