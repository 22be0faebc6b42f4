"""The three kinds of classification problems: how a label becomes a target, and the loss and metrics of its rows.

    single_label_classification   a class index      cross-entropy
    multi_label_classification    a truth value for each class   binary cross-entropy, a mean over classes
    regression                    a number           squared error

Shapes: B rows, C labels, N evaluation rows. Targets of padding are -100, or NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from typing import TYPE_CHECKING, Any

from ftcli.data.chat.weights import number_of
from ftcli.data.preference_formats import SCORE
from ftcli.runtime.errors import InputError, RowError
from ftcli.tasks.protocol import Row, Term
from ftcli.tasks.shared.classification import (
    CLASSIFICATION_METRICS,
    classification_metrics,
    classification_rows,
    count_labels,
    label_index,
)
from ftcli.tasks.shared.label_columns import COLUMN, align_labels
from ftcli.tasks.shared.label_options import BALANCED, MULTI, REGRESSION, SINGLE, check_weighted_labels, option
from ftcli.tasks.shared.multi_labels import align_label_lists, truth_values
from ftcli.tasks.shared.regression_metrics import REGRESSION_METRICS, regression_metrics
from ftcli.tasks.shared.reward_losses import regression
from ftcli.tasks.shared.token_weights import NLL, UNIFORM

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from torch import Tensor

    from ftcli.data.mixture import SourceRows

Parts = list["SourceRows"]
MULTI_LABEL_METRICS = ("loss", "micro_f1", "macro_f1", "subset_accuracy")
# Counts of rows and ranks jump, and a correlation of nearly equal predictions is a quotient of rounding errors.
UNCOMPARED_METRICS = ("accuracy", "macro_f1", "micro_f1", "subset_accuracy", "f1", "pearson", "spearman")


class SingleLabel:
    """One label per row."""

    def __init__(self, options: Any) -> None:
        self.labels, self.given = options.labels, option(options, "class_weights")
        self.smoothing: float = option(options, "label_smoothing")
        self.weights: Tensor | None = None
        self.surveyed: list[float] | None = None  # balanced weights of all rows, also of those that are left out
        self.metric_names: tuple[str, ...] = CLASSIFICATION_METRICS
        self.terms = {NLL: Term(1 - self.smoothing), UNIFORM: Term(self.smoothing)} if self.smoothing else None

    def survey(self, parts: Parts) -> tuple[Parts, dict[str, Any]]:
        """Return the rows with labels as class names, and {"labels", "class_weights"}: names, and their weights."""
        aligned, labels = align_labels(parts, self.labels)
        if self.given is None:
            return aligned, {"labels": labels}
        if self.given == BALANCED:
            self.surveyed = _balanced(_count_names(aligned, labels))
            return aligned, {"labels": labels, "class_weights": self.surveyed}
        try:
            check_weighted_labels(self.given, labels)
        except ValueError as error:
            raise InputError(f"task_options.{error}") from None
        return aligned, {"labels": labels, "class_weights": [self.given.get(label, 1.0) for label in labels]}

    def facts_of_rows(self, rows: Dataset, facts: dict[str, Any]) -> dict[str, Any]:
        """Return the facts with balanced class weights of the prepared training rows, which may be fewer.

        A derived task retains class weights of its own, and those of `survey` if its rows have no class as a target.
        """
        target = rows.features.get("target")
        is_class = str(getattr(target, "dtype", "")).startswith("int")
        if self.surveyed is None or facts.get("class_weights") != self.surveyed or not is_class:
            return facts
        return facts | {"class_weights": _balanced(count_labels(rows, facts["labels"]))}

    def take_facts(self, facts: dict[str, Any]) -> None:
        """Set the class weights of the training rows."""
        import torch

        self.weights = torch.tensor(facts["class_weights"], dtype=torch.float32) if "class_weights" in facts else None

    def target(self, row: Row, facts: dict[str, Any]) -> int:
        """Return the index of a row's label."""
        return label_index(row[COLUMN], facts["labels"], listed=self.labels is not None)

    def describe(self, target: Any, facts: dict[str, Any]) -> str:
        """Return the label of a prepared row."""
        return str(facts["labels"][target])

    def count_answers(self, rows: Dataset, facts: dict[str, Any]) -> dict[str, int]:
        """Return the number of prepared rows of each label."""
        return count_labels(rows, facts["labels"])

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor | dict[str, Tensor]:
        """Return the weighted cross-entropy of each row `[B]` float32, or both terms of a smoothed one; 0 for padding.

        Label smoothing: Szegedy et al. 2016 (arXiv 1512.00567), section 7.
        """
        from ftcli.models.losses import cross_entropy_rows

        nll = self._weigh(cross_entropy_rows(logits, targets), targets)
        if not self.smoothing:
            return nll
        uniform = -logits.float().log_softmax(-1).mean(-1)
        return {NLL: nll, UNIFORM: self._weigh(uniform.where(targets != -100, 0.0), targets)}

    def _weigh(self, values: Tensor, targets: Tensor) -> Tensor:
        """Return values of rows `[B]` times the weights of their classes."""
        if self.weights is None:
            return values
        self.weights = self.weights.to(values.device)  # copies once
        return values * self.weights[targets.clamp(min=0)]

    def eval_rows(self, logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return loss, items, target and prediction of each row, each `[B]`."""
        rows = classification_rows(logits, targets)
        return rows | {"loss": self._weigh(rows["loss"], targets)}

    def metrics(self, rows: dict[str, np.ndarray]) -> dict[str, float]:
        """Return loss, accuracy and macro-F1."""
        return classification_metrics(rows)


class MultiLabel:
    """Any number of labels per row."""

    terms: dict[str, Term] | None = None

    def __init__(self, options: Any) -> None:
        self.labels = options.labels
        self._name(options.labels or [])

    def _name(self, labels: list[str]) -> None:
        self.names = labels
        self.metric_names = (*MULTI_LABEL_METRICS, *(f"f1/{label}" for label in labels))

    def survey(self, parts: Parts) -> tuple[Parts, dict[str, Any]]:
        """Return the rows with names in place of class indices, and {"labels": names of the classes}."""
        aligned, labels = align_label_lists(parts, self.labels)
        return aligned, {"labels": labels}

    def facts_of_rows(self, rows: Dataset, facts: dict[str, Any]) -> dict[str, Any]:
        """Return the facts unchanged."""
        return facts

    def take_facts(self, facts: dict[str, Any]) -> None:
        """Set the names of metrics by label."""
        self._name(facts["labels"])

    def target(self, row: Row, facts: dict[str, Any]) -> list[bool]:
        """Return for each class whether the row has it."""
        return truth_values(row[COLUMN], facts["labels"], listed=self.labels is not None)

    def describe(self, target: Any, facts: dict[str, Any]) -> str:
        """Return the labels of a prepared row."""
        return ", ".join(name for name, is_there in zip(facts["labels"], target, strict=True) if is_there) or "none"

    def count_answers(self, rows: Dataset, facts: dict[str, Any]) -> dict[str, int]:
        """Return the number of prepared rows that have each label."""
        import numpy as np

        truths = np.array(rows["target"][:], dtype=bool).reshape(len(rows), -1)
        return dict(zip(facts["labels"], truths.sum(0).tolist(), strict=True))

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the binary cross-entropy of each row `[B]` float32, a mean over its classes; 0 for padding.

        The mean over rows is that of torch's `BCEWithLogitsLoss`, which transformers uses.
        """
        from torch.nn.functional import binary_cross_entropy_with_logits

        wide = logits.float()
        known = ~targets.isnan()
        values = binary_cross_entropy_with_logits(wide, targets.nan_to_num(), reduction="none")
        return values.where(known, 0.0).mean(-1)

    def eval_rows(self, logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return loss and items `[B]` float64, and target and prediction `[B, C]` bool."""
        return {
            "loss": self.loss(logits, targets).double(),
            "items": is_real(targets).double(),
            "target": targets > 0.5,
            "prediction": logits > 0,  # a probability above one half
        }

    def metrics(self, rows: dict[str, np.ndarray]) -> dict[str, float]:
        """Return loss, micro-F1 over all classes, their macro-F1, subset accuracy, and F1 of each class.

        The F1 of a class that is neither expected nor predicted is 0, and counts in macro-F1, as in scikit-learn.
        """
        import numpy as np

        target, prediction = rows["target"].astype(bool), rows["prediction"].astype(bool)
        hits = (target & prediction).sum(0)
        total = target.sum(0) + prediction.sum(0)
        by_label = np.where(total > 0, 2 * hits / np.maximum(total, 1), 0.0)
        return {
            "loss": float(rows["loss"].sum() / rows["items"].sum()),
            "micro_f1": float(2 * hits.sum() / max(1, total.sum())),
            "macro_f1": float(by_label.mean()),
            "subset_accuracy": float((target == prediction).all(1).mean()),
            **{f"f1/{label}": float(value) for label, value in zip(self.names, by_label, strict=True)},
        }


class Regression:
    """One number per row."""

    terms: dict[str, Term] | None = None
    metric_names: tuple[str, ...] = REGRESSION_METRICS

    def __init__(self, options: Any) -> None:
        pass

    def survey(self, parts: Parts) -> tuple[Parts, dict[str, Any]]:
        """Return the parts unchanged, and {"labels": name of the output}.

        Raises:
            InputError: Labels of a source are indices of class names.
        """
        from datasets import ClassLabel

        for part in parts:
            if isinstance(part.rows.features[COLUMN], ClassLabel):
                raise InputError(
                    f"data.{part.split} {part.path} has labels with class names, but {REGRESSION} needs numbers",
                    hint="remove task_options.problem_type, or name a column of numbers in data.columns",
                )
        return parts, {"labels": [SCORE]}

    def facts_of_rows(self, rows: Dataset, facts: dict[str, Any]) -> dict[str, Any]:
        """Return the facts unchanged."""
        return facts

    def take_facts(self, facts: dict[str, Any]) -> None:
        """Do nothing: no fact changes the loss."""

    def target(self, row: Row, facts: dict[str, Any]) -> float:
        """Return the number of a row; raises `RowError` for anything else."""
        value = row[COLUMN]
        if value is None or (isinstance(value, str) and not value.strip()):
            raise RowError("has no label")
        if isinstance(value, list | dict):
            raise RowError(
                f"has several labels, but task_options.problem_type is {REGRESSION}: give the row one number"
            )
        return number_of(value, "label")

    def describe(self, target: Any, facts: dict[str, Any]) -> str:
        """Return the number of a prepared row."""
        return f"{target:g}"

    def count_answers(self, rows: Dataset, facts: dict[str, Any]) -> dict[str, int]:
        """Return no counts, because numbers are not classes."""
        return {}

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the squared error of each row `[B]` float32; 0 for padding."""
        return regression(logits[:, 0], targets)

    def eval_rows(self, logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return loss, items, target and prediction of each row, each `[B]` float64."""
        values = {"loss": self.loss(logits, targets), "items": is_real(targets)}
        values |= {"target": targets, "prediction": logits[:, 0].float()}
        return {name: value.double() for name, value in values.items()}

    def metrics(self, rows: dict[str, np.ndarray]) -> dict[str, float]:
        """Return mean squared and absolute error, both correlations and R2."""
        return regression_metrics(rows)


Problem = SingleLabel | MultiLabel | Regression
PROBLEMS: dict[str, type[Problem]] = {SINGLE: SingleLabel, MULTI: MultiLabel, REGRESSION: Regression}


def problem_of(options: Any) -> Problem:
    """Return the kind of problem that a task's options name."""
    return PROBLEMS[option(options, "problem_type")](options)


def metric_names_of(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of metrics with these task_options, those by label only if the options list the labels."""
    kind = options.get("problem_type", SINGLE)
    if kind == SINGLE:
        return CLASSIFICATION_METRICS
    if kind == REGRESSION:
        return REGRESSION_METRICS
    return (*MULTI_LABEL_METRICS, *(f"f1/{label}" for label in options.get("labels") or []))


def blank_target(target: Any) -> Any:
    """Return the target of padding with the shape of a prepared row's target."""
    if isinstance(target, list):
        return [nan] * len(target)
    return nan if isinstance(target, float) else -100


def collate_targets(rows: list[Row]) -> Tensor:
    """Return the targets of prepared rows: `[B]` int64, `[B, C]` float32 of several labels, or `[B]` float32."""
    import torch

    targets = [row["target"] for row in rows]
    if isinstance(targets[0], list | float):
        return torch.tensor(targets, dtype=torch.float32)
    return torch.tensor([int(target) for target in targets])


def is_real(targets: Tensor) -> Tensor:
    """Return which rows are not padding, `[B]` bool."""
    if not targets.is_floating_point():
        return targets != -100
    missing = targets.isnan()
    return ~(missing if missing.ndim == 1 else missing.all(-1))


def _count_names(parts: Parts, labels: list[str]) -> dict[str, int]:
    """Return the number of training rows of an epoch by label. Rows that are repeated count each time."""
    counts = dict.fromkeys(labels, 0)
    for part in (part for part in parts if part.split == "train"):
        names = part.rows.select_columns([COLUMN])[:][COLUMN]
        for name, times in zip(names, part.times_of_rows().tolist(), strict=True):
            if name in counts:
                counts[name] += times
    return counts


def _balanced(counts: dict[str, int]) -> list[float]:
    """Return rows / (labels x rows of the label) for each label, of the training rows of an epoch by label.

    scikit-learn's `compute_class_weight("balanced")`, after King and Zeng 2001. Rows that are repeated count each time.

    Raises:
        InputError: A label has no training row.
    """
    if missing := [label for label, count in counts.items() if not count]:
        raise InputError(
            f"task_options.class_weights: balanced: no training row has the label {missing[0]!r}",
            hint="give weights by label, or remove the label; rows that are held out, dropped or invalid do not count",
        )
    total = sum(counts.values())
    return [total / (len(counts) * count) for count in counts.values()]
