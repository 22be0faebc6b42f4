"""Options that classification tasks share: labels, the kind of problem, class weights and label smoothing.

Imports neither torch nor datasets.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

SINGLE, MULTI, REGRESSION = "single_label_classification", "multi_label_classification", "regression"
ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
BALANCED = "balanced"
LABELS = (
    "Every label, in order; whole numbers in the data are then indices into the list, unless a label is a number. "
    "Absent: the names of the training rows' ClassLabel feature, else the labels found, sorted."
)


def check_distinct(labels: list[str]) -> list[str]:
    """Return the labels that a recipe lists; raises `ValueError` if a label is listed twice."""
    seen: set[str] = set()
    for label in labels:
        if label in seen:
            raise ValueError(f"'{label}' is listed twice")
        seen.add(label)
    return labels


Labels = Annotated[list[str], Field(min_length=2), AfterValidator(check_distinct)]
ClassWeight = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class LabelOptions(BaseModel):
    """Keys of task_options that classification tasks share."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    labels: Labels | None = Field(None, description=LABELS)
    problem_type: ProblemType = Field(
        "single_label_classification",
        description="transformers' name of the problem. single_label_classification: one label per row, cross-entropy; "
        "multi_label_classification: a list of labels per row, binary cross-entropy; regression: a number per row, "
        "squared error.",
    )
    class_weights: dict[str, ClassWeight] | Literal["balanced"] | None = Field(
        None,
        description="Factor of the loss of a row by its label, for one label per row; a label that is not listed has "
        "1. balanced: training rows / (labels x training rows with the label), as in scikit-learn.",
    )
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=1,
        allow_inf_nan=False,
        description="Share e of a uniform distribution over the labels in each target, for one label per row: the loss "
        "is (1 - e) times the cross-entropy plus e times the mean of -log p. Evaluations report the cross-entropy.",
    )

    @model_validator(mode="after")
    def _check_together(self) -> LabelOptions:
        if self.problem_type != SINGLE:
            for name in ("class_weights", "label_smoothing"):
                if getattr(self, name):
                    raise ValueError(f"{name} is for one label per row, and problem_type is {self.problem_type}")
        if self.problem_type == REGRESSION and self.labels is not None:
            raise ValueError("labels are names of classes, and problem_type is regression")
        if self.labels is not None and isinstance(self.class_weights, dict):
            check_weighted_labels(self.class_weights, self.labels)
        return self


def check_weighted_labels(weights: dict[str, float], labels: list[str]) -> None:
    """Raise `ValueError` if a class weight is for a label that does not exist."""
    if unknown := [name for name in weights if name not in labels]:
        known = ", ".join(labels[:8]) + (", ..." if len(labels) > 8 else "")
        raise ValueError(f"class_weights has a weight for {unknown[0]!r}, which is not one of: {known}")


def option(options: Any, name: str) -> Any:
    """Return an option; its default for options of a task of the user's own, which may lack it."""
    return getattr(options, name, LabelOptions.model_fields[name].default)
