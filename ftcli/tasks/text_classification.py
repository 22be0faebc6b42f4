"""Classify texts: one label, several labels or a number per row. The loss is a mean over rows.

Shapes: B rows, T tokens, C labels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from ftcli.data.chat.text_spans import decode_spans
from ftcli.data.formats import text_of
from ftcli.models.positions import needs_left_padding
from ftcli.runtime.errors import Problem
from ftcli.tasks.protocol import Batch, Row, Span
from ftcli.tasks.shared.batches import attention_mask, pad
from ftcli.tasks.shared.classification import CLASSIFICATION_METRICS, survey_labels
from ftcli.tasks.shared.label_options import LabelOptions, option
from ftcli.tasks.shared.problem_types import (
    UNCOMPARED_METRICS,
    blank_target,
    collate_targets,
    is_real,
    metric_names_of,
    problem_of,
)
from ftcli.tasks.shared.text_pairs import (
    PAIR_COLUMN,
    USUAL_NAMES,
    collate_segments,
    note_other_texts,
    takes_segments,
    tokenize_texts,
)

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from torch import Tensor, nn

    from ftcli.config.recipe import Recipe
    from ftcli.config.yaml_document import Keys
    from ftcli.data.mixture import SourceRows


class Options(LabelOptions):
    """Keys of task_options for text_classification."""


class Task:
    """Text classification and regression."""

    item: Literal["token", "sample"] = "sample"
    columns: tuple[str, ...] = ("text", "label")
    optional_columns: tuple[str, ...] = (PAIR_COLUMN,)
    usual_names = USUAL_NAMES
    text_columns: tuple[str, ...] = ("text", PAIR_COLUMN, "label")  # label_columns.py decides which labels are numbers
    auto_class = "AutoModelForSequenceClassification"
    has_fixed_forward = True
    peft_type: str | None = None
    pipeline_tag = "text-classification"
    adapter_task_type = "SEQ_CLS"
    needs_tokenizer = True
    starting_recipe: Mapping[str, Mapping[str, Any]] = {
        "data": {"max_length": 256},
        "optimizer": {"learning_rate": 5e-5},
    }
    answer_columns: tuple[str, ...] = ("target",)
    metric_names: tuple[str, ...] = CLASSIFICATION_METRICS
    uncompared_metrics: tuple[str, ...] = UNCOMPARED_METRICS
    metric_names_of = staticmethod(metric_names_of)

    def __init__(self, recipe: Recipe, options: Options) -> None:
        from ftcli.models.tokenizer import load_tokenizer

        self.recipe, self.options = recipe, options
        self.problem, self.problem_type = problem_of(options), option(options, "problem_type")
        self.metric_names = self.problem.metric_names
        if self.problem.terms is not None:  # other modules look for this attribute
            self.terms = self.problem.terms
        self.tokenizer = load_tokenizer(recipe.model, fast=True)
        self.segments = True  # whether the model may take them; `finish_model` decides
        self.pads_left = False

    @staticmethod
    def recipe_problems(recipe: Recipe, where: Callable[[Keys], str]) -> Iterator[Problem]:
        """Yield a problem if the recipe splits rows."""
        if recipe.data.truncation == "split":
            reason = "because a part of a text has no label"
            message = f"data.truncation: text_classification does not support split, {reason}"
            yield Problem(message, where(("data", "truncation")), "set it to truncate or drop")

    def fingerprint(self) -> str:
        """Return a digest of the tokenizer."""
        return hashlib.sha256(self.tokenizer.backend_tokenizer.to_str().encode()).hexdigest()

    def survey(self, rows: Dataset) -> dict[str, Any]:
        """Return {"labels": names of the classes} for the rows of one source with one label per row."""
        return {"labels": survey_labels(rows, self.options.labels)}

    def survey_parts(self, parts: list[SourceRows]) -> tuple[list[SourceRows], dict[str, Any]]:
        """Return the rows with labels as class names, and {"labels": names of the classes}."""
        aligned, facts = self.problem.survey(parts)
        return note_other_texts(aligned), facts

    def encode(self, row: Row, facts: dict[str, Any]) -> list[Row]:
        """Return one prepared row, {"input_ids", "target", "items"}, or none if it is too long and dropped.

        A text that is truncated to data.max_length still ends with its special token. A row with two texts also has
        `token_type_ids`, if the tokenizer tells the texts apart.

        Raises:
            RowError: The row has no text, or the label is unknown.
        """
        texts = [_text_of(row, name) for name in ("text", PAIR_COLUMN) if name == "text" or name in row]
        target = self._target(row, facts)
        tokens, is_cut = tokenize_texts(self.tokenizer, texts, self.recipe.data.max_length)
        if is_cut and self.recipe.data.truncation == "drop":
            return []
        prepared = {**tokens, "target": target, "items": 1}
        return [prepared | {"cut": True}] if is_cut else [prepared]

    def _target(self, row: Row, facts: dict[str, Any]) -> Any:
        """Return the index of a row's label, for each class whether the row has it, or a number."""
        return self.problem.target(row, facts)

    def describe_row(self, row: Row, facts: dict[str, Any]) -> tuple[list[Span], dict[str, str]]:
        """Return the spans of the text, and its label."""
        return decode_spans(self.tokenizer, row["input_ids"]), {"label": self.problem.describe(row["target"], facts)}

    def count_answers(self, rows: Dataset, facts: dict[str, Any]) -> dict[str, int]:
        """Return the number of prepared rows of each label."""
        return self.problem.count_answers(rows, facts)

    def facts_of_rows(self, rows: Dataset, facts: dict[str, Any]) -> dict[str, Any]:
        """Return the facts with balanced class weights of the prepared training rows."""
        return self.problem.facts_of_rows(rows, facts)

    def use_facts(self, facts: dict[str, Any]) -> None:
        """Use the class weights of the rows that a finished run was trained on."""
        self.problem.take_facts(facts)

    def load_model(self, facts: dict[str, Any], **kwargs: Any) -> tuple[nn.Module, list[str]]:
        """Return the model with a head of C labels, and the names of its new modules."""
        from ftcli.models.load import load_model

        self.problem.take_facts(facts)
        self.metric_names = self.problem.metric_names
        head = {"new_head": True, "labels": facts["labels"], "problem_type": self.problem_type}
        return load_model(self.auto_class, self.recipe, **head, **kwargs)

    def finish_model(self, model: nn.Module) -> None:
        """Set the padding token in the configuration, because a decoder classifies at the last token before padding.

        Models that do not tell two texts of a row apart get no `token_type_ids`. XLNet gets its padding on the left.
        """
        self.segments, self.pads_left = takes_segments(model), needs_left_padding(model.config)
        model.config.pad_token_id = self.tokenizer.pad_token_id  # type: ignore[union-attr]

    def blank(self, row: Row) -> Row:
        """Return the row as padding, with a target that the loss ignores."""
        return row | {"target": blank_target(row["target"]), "items": 0}

    def collate(self, rows: list[Row]) -> Batch:
        """Return `input_ids`, `attention_mask` and perhaps `token_type_ids` `[B, T]` and `targets` `[B]`, int64."""
        ids, on_left = [list(row["input_ids"]) for row in rows], self.pads_left
        return {
            "input_ids": pad(ids, self.tokenizer.pad_token_id, on_left=on_left),
            "attention_mask": attention_mask([len(row) for row in ids], on_left=on_left),
            **(collate_segments(self.tokenizer, rows, on_left=on_left) if self.segments else {}),
            "targets": collate_targets(rows),
        }

    def count(self, batch: Batch) -> int:
        """Return the number of rows that are not padding."""
        return int(is_real(batch["targets"]).sum())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor | dict[str, Tensor]:
        """Return the loss of each row `[B]` float32, 0 for padding; or both terms of a smoothed one."""
        inputs = {name: value for name, value in batch.items() if name != "targets"}
        return self.problem.loss(model(**inputs).logits, batch["targets"])

    def eval_step(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return loss and items `[B]`, and target and prediction, `[B]` or `[B, C]`."""
        inputs = {name: value for name, value in batch.items() if name != "targets"}
        return self.problem.eval_rows(model(**inputs).logits, batch["targets"])

    def metrics(self, rows: dict[str, np.ndarray]) -> dict[str, float]:
        """Return the metrics of the problem's kind, such as accuracy, F1 or squared error."""
        return self.problem.metrics(rows)

    def save_processor(self, folder: str) -> None:
        """Write the tokenizer."""
        from ftcli.data.tokenizer_files import save_tokenizer

        save_tokenizer(self.tokenizer, folder)

    def probe(self, batch: Batch) -> Batch:
        """Return the arguments with which the plain model computes logits."""
        return {name: value for name, value in batch.items() if name != "targets"}


def _text_of(row: Row, name: str) -> str:
    """Return a text of a row; raise `RowError` if there is none."""
    return text_of(row, name, "has no text" if name == "text" else f"has no {name}, the second of its two texts")
