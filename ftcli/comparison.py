"""Two curves held against each other: what must be identical, what may differ by rounding, where they part.

Reads run folders and nothing else; which profile or process made them is only a label here. Light: never imports
torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .run_folder import RunFolder


@dataclass(frozen=True)
class Tolerance:
    """How far rounding may carry two runs of one recipe apart."""

    loss: float  # relative, also of evaluations
    grad_norm: float  # relative
    weights: float  # root mean square over the way that the learning rates allow


# Sums of float32 (24 bits) or of products in bfloat16 (8 bits) in another order; a gradient norm adds up both passes.
# Weights are held loosely, for AdamW makes a whole step of a gradient that is zero but for rounding. Seen with tiny
# models on 2 CPU processes: up to 1e-6 in fp32, 4e-3 in bf16 and 1e-3 in fp8 (its scales are a micro-batch's); 2e-1
# when one rank dropped a row from its loss.
TOLERANCES = {
    "fp32": Tolerance(1e-5, 1e-4, 0.05),
    "fp16": Tolerance(2e-3, 2e-2, 0.5),
    "bf16": Tolerance(4e-3, 3e-2, 0.5),
    "bf16_pure": Tolerance(2e-2, 1e-1, 1.0),
    "fp8": Tolerance(1e-2, 1e-1, 1.0),
}


@dataclass(frozen=True)
class Curve:
    """What one run left behind: its rows in the order of time, its weights' digests before, its weights after."""

    label: str
    rows: list[dict[str, Any]]
    start: dict[str, str]  # trained weight -> digest
    final: Path

    @classmethod
    def of(cls, label: str, folder: RunFolder) -> Curve:
        """Return what the run in `folder` left behind."""
        return cls(label, folder.metrics(), folder.start()["weights"], folder.final)

    @property
    def training(self) -> list[dict[str, Any]]:
        """Rows of optimizer steps."""
        return [row for row in self.rows if "loss" in row]


@dataclass(frozen=True)
class Departure:
    """The first quantity that leaves its tolerance, or that differs where it must be identical."""

    label: str
    quantity: str
    step: int | None
    found: Any = None
    wanted: Any = None
    difference: float | None = None  # None: identical was asked for
    most: float | None = None

    def __str__(self) -> str:
        verb = "differs" if self.difference is None else "leaves the tolerance"
        text = f"{self.label}: {self.quantity} {verb}" + ("" if self.step is None else f" at step {self.step}")
        if self.found is not None:
            text += f": {_show(self.found)} against {_show(self.wanted)}"
        return text if self.difference is None else f"{text} ({self.difference:.1e} > {self.most:g})"


@dataclass(frozen=True)
class Comparison:
    """How far one run is from another; differences are relative, `drift` is signed, None: nothing to compare."""

    label: str
    against: str
    is_held: bool  # False: differences are shown only, and identities are held
    loss: float
    drift: float
    grad_norm: float
    learning_rates: bool
    samples: bool
    items: bool
    start: bool
    weights: float | None
    evaluation: float | None
    departure: Departure | None

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as plain values, the sentence of its departure included."""
        told = {"sentence": str(self.departure)} if self.departure else {}
        return asdict(self) | {"departure": {**asdict(self.departure), **told} if self.departure else None}


def compare(found: Curve, wanted: Curve, tolerance: Tolerance, *, is_held: bool = True) -> Comparison:
    """Return how far `found` is from `wanted`, and the first departure in the order of time.

    Without `is_held` only what rounding cannot touch is held: initial weights, rows, items, learning rates, steps.
    """
    pairs = list(_pairs(found, wanted))
    training = [(a, b) for a, b in pairs if "loss" in b]
    evaluations = [relative(a, b, "eval/loss") for a, b in pairs if "eval/loss" in b]
    weights = distance(found.final, wanted.final, sum(row["learning_rate"] for row in wanted.training))
    drifts = [(a["loss"] - b["loss"]) / (abs(b["loss"]) or 1.0) for a, b in training]
    return Comparison(
        label=found.label,
        against=wanted.label,
        is_held=is_held,
        loss=max((abs(drift) for drift in drifts), default=0.0),
        drift=sum(drifts) / max(len(drifts), 1),
        grad_norm=max((relative(a, b, "grad_norm") for a, b in training), default=0.0),
        learning_rates=all(a["learning_rate"] == b["learning_rate"] for a, b in training),
        samples=all(a["samples"] == b["samples"] for a, b in training),
        items=all(a["items"] == b["items"] for a, b in training),
        start=found.start == wanted.start,
        weights=weights,
        evaluation=max(evaluations, default=None),
        departure=next(_departures(found, wanted, tolerance, weights, is_held=is_held), None),
    )


def relative(found: dict[str, Any], wanted: dict[str, Any], name: str) -> float:
    """Return |a - b| / |b| of one value of two rows."""
    difference: float = abs(found[name] - wanted[name]) / (abs(wanted[name]) or 1.0)
    return difference


def distance(found: Path, wanted: Path, reach: float) -> float | None:
    """Return the root mean square difference of two folders' weights over `reach`; None: not the same weights.

    `reach` is the sum of the learning rates of all steps, about as far as AdamW moves any one weight: 1 and more is
    what two runs that have nothing in common but their start would give.
    """
    squares, numbers = 0.0, 0
    names = [sorted(path.name for path in folder.glob("*.safetensors")) for folder in (found, wanted)]
    if names[0] != names[1]:
        return None
    for name in names[0]:
        mine, other = (StoredValues(folder / name) for folder in (found, wanted))
        if mine.shapes != other.shapes:
            return None
        for key in sorted(other.shapes):
            squares += float(((mine.read(key) - other.read(key)) ** 2).sum())
            numbers += math.prod(other.shapes[key])
    return (squares / max(numbers, 1)) ** 0.5 / (reach or 1.0)


class StoredValues:
    """The tensors of one safetensors file as numpy arrays, bfloat16 too, which numpy does not know."""

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
        if entry["dtype"] == "BF16":  # the upper half of a float32
            return (content.view("<u2").astype("<u4") << 16).view("<f4").astype("float64")
        return content.view(f"<{entry['dtype'][0].lower()}{int(entry['dtype'][1:]) // 8}").astype("float64")


def _pairs(found: Curve, wanted: Curve) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the rows that both runs wrote, in the order of time."""
    mine = {(row["step"], "loss" in row): row for row in found.rows}
    for row in wanted.rows:
        if (key := (row["step"], "loss" in row)) in mine:
            yield mine[key], row


IDENTICAL = (("items", "number of items"), ("samples", "digest of the rows"), ("learning_rate", "learning rate"))


def _departures(
    found: Curve, wanted: Curve, tolerance: Tolerance, weights: float | None, *, is_held: bool
) -> Iterator[Departure]:
    """Yield every departure in the order of time: before the first step, at each step, after the last."""
    label = found.label
    for name in [*wanted.start, *(name for name in found.start if name not in wanted.start)]:
        mine, other = found.start.get(name, "none"), wanted.start.get(name, "none")
        if mine != other:
            yield Departure(label, f"initial weight {name}", None, mine, other)
    limits = [("loss", "loss", tolerance.loss), ("grad_norm", "gradient norm", tolerance.grad_norm)]
    limits.append(("eval/loss", "evaluation loss", tolerance.loss))
    for a, b in _pairs(found, wanted):
        for name, words in IDENTICAL:
            if a.get(name) != b.get(name):
                yield Departure(label, words, b["step"], a[name], b[name])
        for name, words, most in limits if is_held else ():
            if name in b and not (difference := relative(a, b, name)) <= most:
                yield Departure(label, words, b["step"], a[name], b[name], difference, most)
    steps = [[row["step"] for row in curve.training] for curve in (found, wanted)]
    if steps[0] != steps[1]:
        yield Departure(label, "number of steps", None, len(steps[0]), len(steps[1]))
    if weights is None:
        yield Departure(label, "list of final weights", None)
    elif is_held and not weights <= tolerance.weights:
        yield Departure(label, "distance of the final weights", None, None, None, weights, tolerance.weights)


def _show(value: Any) -> str:
    """Return a number with as many digits as tell two runs apart; a digest shortened."""
    if isinstance(value, float):
        return f"{value:.7g}"
    return value[:12] if isinstance(value, str) else str(value)
