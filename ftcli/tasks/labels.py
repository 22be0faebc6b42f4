"""Pure functions that the classification tasks share: label sets, loss per row, accuracy and macro-F1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import InputError, nearest
from .protocol import RowError

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from torch import Tensor

CLASSIFICATION_METRICS = ("loss", "accuracy", "macro_f1")  # keys of `classification_metrics`


def survey_labels(rows: Dataset, given: list[str] | None) -> list[str]:
    """Return the label names: those given, else those of the data set's own feature, else the values found, sorted."""
    if given is not None:
        return given
    names = getattr(rows.features["label"], "names", None)
    if names is not None:
        return list(names)
    if isinstance(rows[0]["label"], list | dict):
        raise InputError("row 1 of data.train has several labels", hint="a row has one label: text or a number")
    found = rows.unique("label")
    if None in found:
        raise InputError(f"row {list(rows['label']).index(None) + 1} of data.train has no label")
    labels = [
        str(value) for value in (sorted(found) if len({type(v) for v in found}) == 1 else sorted(map(str, found)))
    ]
    if len(labels) < 2:
        raise InputError(f"data.train has one label only: {labels[0]}", hint="a classifier needs two or more")
    return labels


def label_index(label: Any, labels: list[str]) -> int:
    """Return the index of a label; raises `RowError` for a label outside the set."""
    are_names = not any(name.lstrip("-").isdigit() for name in labels)  # where names are numbers, 0 is no index
    if type(label) is int and are_names and 0 <= label < len(labels):
        return label  # a data set whose label column holds indices into its names
    if str(label) not in labels:
        known = ", ".join(labels[:8]) + (", ..." if len(labels) > 8 else "")
        raise RowError(f"label {label!r} is not one of: {known} {nearest(str(label), labels)}".rstrip())
    return labels.index(str(label))


def count_labels(rows: Dataset, labels: list[str]) -> dict[str, int]:
    """Return how many prepared rows have each label, in the order of the labels."""
    import numpy as np

    counts = np.bincount(np.asarray(rows.with_format("numpy")["target"][:]), minlength=len(labels))
    return dict(zip(labels, counts.tolist(), strict=True))


def classification_rows(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Return loss, items, target, prediction `[B]` of `logits [B, C]`."""
    from ..losses import cross_entropy_rows

    return {
        "loss": cross_entropy_rows(logits, targets).double(),
        "items": (targets != -100).double(),
        "target": targets,
        "prediction": logits.argmax(dim=-1),
    }


def classification_metrics(rows: dict[str, np.ndarray]) -> dict[str, float]:
    """Return loss per row, accuracy, and macro-F1: the unweighted mean of F1 over labels that occur in either."""
    import numpy as np

    target, prediction = rows["target"], rows["prediction"]
    scores = []
    for label in np.union1d(target, prediction):
        hits = np.sum((target == label) & (prediction == label))
        scores.append(2 * hits / (np.sum(target == label) + np.sum(prediction == label)))
    return {
        "loss": float(rows["loss"].sum() / rows["items"].sum()),
        "accuracy": float(np.mean(target == prediction)),
        "macro_f1": float(np.mean(scores)),
    }
