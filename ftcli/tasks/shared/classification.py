"""Label sets, losses per row, accuracy and macro-F1: pure functions that classification tasks share.

Shapes: B rows, C labels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftcli.data.label_names import INTEGER, name_of
from ftcli.runtime.errors import RowError, nearest
from ftcli.tasks.shared.label_columns import LIST_LABELS_HINT, align_labels, find_label

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from torch import Tensor


CLASSIFICATION_METRICS = ("loss", "accuracy", "macro_f1")  # keys of `classification_metrics`


def survey_labels(rows: Dataset, given: list[str] | None) -> list[str]:
    """Return the names of the classes in one source, in the order of `align_labels`.

    Args:
        rows: Rows of the source, with a column `label`.
        given: The labels that the recipe lists; None if it lists none.
    """
    import numpy as np

    from ftcli.data.mixture import SourceRows

    return align_labels([SourceRows("train", "", "data.train", "", rows, np.arange(len(rows)))], given)[1]


def label_index(label: Any, labels: list[str], *, listed: bool = False) -> int:
    """Return the index of a label among the names of the classes.

    Args:
        label: A name, or a value whose name `name_of` gives.
        labels: Names of all classes.
        listed: Whether the recipe lists the labels (see `find_label`).

    Raises:
        RowError: The row has no label, or its label is not among the names.
    """
    name = name_of(label, keep=labels)
    if name is None:
        raise RowError("has no label")
    index = find_label(name, labels, listed=listed)
    if index is not None:
        return index
    known = ", ".join(labels[:8]) + (", ..." if len(labels) > 8 else "")
    shown = name if INTEGER.fullmatch(name) else repr(name)
    reason = LIST_LABELS_HINT if shown == name else "no training row has it"  # its rows may be held out
    hint = nearest(name, labels) or ("" if listed else f"({reason})")
    separator = "" if not hint else " " if hint.startswith("(") else "; "
    raise RowError(f"label {shown} is not one of: {known}{separator}{hint}")


def count_labels(rows: Dataset, labels: list[str]) -> dict[str, int]:
    """Return the number of prepared rows of each label, in the order of the labels."""
    import numpy as np

    counts = np.bincount(np.asarray(rows.with_format("numpy")["target"][:]), minlength=len(labels))
    return dict(zip(labels, counts.tolist(), strict=True))


def classification_rows(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Return the evaluation values of classified rows.

    Args:
        logits: `[B, C]`.
        targets: `[B]` int64; -100 marks padding.

    Returns:
        `loss` and `items` `[B]` float64, `target` and `prediction` `[B]` int64.
    """
    from ftcli.models.losses import cross_entropy_rows

    return {
        "loss": cross_entropy_rows(logits, targets).double(),
        "items": (targets != -100).double(),
        "target": targets,
        "prediction": logits.argmax(dim=-1),
    }


def classification_metrics(rows: dict[str, np.ndarray]) -> dict[str, float]:
    """Return loss per row, accuracy and macro-F1.

    Macro-F1 is the unweighted mean of F1 over the labels that occur among targets or predictions.

    Args:
        rows: The values of `classification_rows` of all evaluation rows, each `[N]`.
    """
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
