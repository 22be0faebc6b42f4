"""Select the rows of each source for an epoch: limits, held-out rows and weights.

The selection depends only on the recipe and its seed, so that the rows are the same on any hardware. This module does
not encode rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ftcli.data.formats import (
    described,
    described_columns,
    recognise,
    text_columns,
    unused_columns,
    with_usual_names,
)
from ftcli.data.image_folders import list_images
from ftcli.data.label_names import check_class_names, decode_class_names, joined_groups, similar_names
from ftcli.data.paths import labels_of, local_path
from ftcli.data.row_counts import no_training_rows_error
from ftcli.data.sampler import hold_out_rows, sample_rows
from ftcli.data.sources import is_table, read_rows
from ftcli.data.streaming.corpus import first_rows
from ftcli.data.task_encoders import uses_variant
from ftcli.runtime.errors import InputError, Problem
from ftcli.runtime.redaction import redact
from ftcli.tasks.protocol import properties_of

if TYPE_CHECKING:
    from datasets import Dataset
    from numpy.typing import NDArray

    from ftcli.config.recipe import Recipe
    from ftcli.config.recipe_data import Data
    from ftcli.data.encode import Counts
    from ftcli.tasks.protocol import Task


Note = tuple[str, str]  # (what was found, what to do)


@dataclass(frozen=True)
class SourceRows:
    """The rows of one source in one split."""

    split: str
    label: str
    path: str
    format: str  # detected format of the rows, for a task without fixed columns, and columns that are not used
    rows: Dataset
    indices: NDArray[np.int64]  # `[selected rows]`
    passes: int = 1  # passes over the selected rows in an epoch
    last: NDArray[np.int64] | None = None  # indices of the rows in the last pass; None for all
    is_table: bool = False  # the rows come from files whose fields have no type
    notes: tuple[Note, ...] = ()  # what a user should know about the labels of the rows
    columns: Mapping[str, str] = field(default_factory=dict)  # name the task expects -> name in the source

    def times_of_rows(self) -> NDArray[np.int64]:
        """Return how often an epoch has each of `rows`, `[len(rows)]`; 0 for rows that are not selected."""
        passes = [self.indices] * self.passes
        if self.last is not None:
            passes[-1] = self.last
        return np.bincount(np.concatenate(passes), minlength=len(self.rows))

    def in_its_words(self, reason: str) -> str:
        """Return why a row cannot be used, with the source's own names of the columns that the reason names."""
        renamed = [
            f"{name} is its column {stored}"
            for name, stored in sorted(self.columns.items())
            if name != stored and re.search(rf"\b{re.escape(name)}\b", reason)
        ]
        return f"{reason} ({', '.join(renamed)})" if renamed else reason


def read_sources(recipe: Recipe, task: Task) -> list[SourceRows]:
    """Return the rows of each training source, followed by those of each evaluation source.

    Args:
        recipe: The recipe, with resolved commits.
        task: The recipe's task.

    Raises:
        InputError: A source is missing or unreadable, lacks a column, or has no rows left to train on.
    """
    data = recipe.data
    train = _read(data, "train", task, recipe.seed)
    if data.eval_sources:
        evaluation = _read(data, "eval", task, recipe.seed)
    else:
        train, evaluation = _hold_out(train, data, recipe.seed)
    pairs = enumerate(zip(train, data.train_sources, strict=True))
    return [_weigh(part, source.weight, recipe.seed, number) for number, (part, source) in pairs] + evaluation


def _read(data: Data, split: Literal["train", "eval"], task: Task, seed: int) -> list[SourceRows]:
    """Return the rows of the sources of one split, at most `max_rows` of each."""
    parts = []
    sources = data.named_sources(split)
    labels = labels_of([source for _, source in sources])
    for number, ((key, source), label) in enumerate(zip(sources, labels, strict=True)):
        column_map = data.columns_of(source)
        columns = {name: column_map.get(name, name) for name in task.columns} | column_map
        streams = split == "train" and data.streaming
        found = dict(columns)
        if streams:
            rows = first_rows(source, columns, most_bad=data.max_bad_rows)
        else:
            complete = partial(_complete, task, redact(source.path), found)
            rows = read_rows(source, columns, text_columns(task), complete, key=key)
        label = f"{label} (the first rows of the stream)" if streams else label
        description = described_columns(task, rows.column_names) if unused_columns(task, rows.column_names) else ""
        path = local_path(source.path)
        if path is not None and path.is_dir() and not streams:
            description = list_images(path).describe()
        if kinds := properties_of(task).formats:
            with _explain_inherited_formats(type(task)):
                row_format = recognise(rows.column_names, kinds, f"{key}: {source.path}")
            description = described(row_format, rows.column_names, kinds)
            rows = decode_class_names(rows, [*row_format.required, *row_format.optional], source.path)
        most = len(rows) if source.max_rows is None else min(source.max_rows, len(rows))
        indices = np.arange(len(rows)) if most == len(rows) else sample_rows(len(rows), most, seed, number)
        parts.append(
            SourceRows(
                *(split, label, redact(source.path), description, rows, indices),
                is_table=is_table(source),
                columns=found,
            )
        )
    return parts


def _complete(
    task: Task, where: str, found: dict[str, str], columns: Mapping[str, str], present: list[str]
) -> dict[str, str]:
    """Return `columns` with the usual names that a source has, and put them into `found`."""
    found.update(with_usual_names(task, columns, present, where=where))
    return found


def survey_sources(task: Task, parts: list[SourceRows]) -> tuple[list[SourceRows], dict[str, Any]]:
    """Return the sources as the task encodes them, and the result of the task's survey of all training rows.

    A task may survey all sources itself (`survey_parts` in tasks/protocol.py). Otherwise `survey` is called with the
    task's columns of all sources together, or with each source if the task has no columns.

    Args:
        task: The task.
        parts: The rows of all sources.

    Returns:
        (sources, facts). Facts are values that the model needs, such as label names.

    Raises:
        InputError: Columns have different types or class names in two sources.
    """
    from datasets import concatenate_datasets

    if uses_variant(type(task), "survey_parts", "survey"):
        parts, found = task.survey_parts(parts)  # type: ignore[attr-defined]
        return _with_similar_names(parts, found), found
    check_class_names([(f"data.{part.split} {part.path}", part.rows) for part in parts], task.columns)
    training = [part.rows.select(part.indices) for part in parts if part.split == "train"]
    if task.columns and len(training) > 1:
        try:
            training = [concatenate_datasets([rows.select_columns(list(task.columns)) for rows in training])]
        except ValueError as error:  # columns of different types
            message = f"the sources of data.train have columns of different types: {error}"
            raise InputError(message, hint="write the columns of all sources with the same types") from error
    facts: dict[str, Any] = {}
    for rows in training:
        facts |= task.survey(rows)
    return _with_similar_names(parts, facts), facts


def _with_similar_names(parts: list[SourceRows], facts: dict[str, Any]) -> list[SourceRows]:
    """Add notes about names in the facts, such as labels, that may be meant to be one name."""
    notes = []
    for name, values in facts.items():
        are_names = isinstance(values, list) and all(isinstance(value, str) for value in values)
        if are_names and (groups := similar_names(values)):
            what = f"{name} that differ only in case, white space or form of a number: {joined_groups(groups)}"
            notes.append((what, "if they mean the same, write them in one way"))
    return [replace(part, notes=(*part.notes, *notes)) if not number else part for number, part in enumerate(parts)]


@contextmanager
def _explain_inherited_formats(task: type) -> Iterator[None]:
    """Add a problem to an error about columns if the task overrides `encode` but inherits `formats`."""
    try:
        yield
    except InputError as error:
        encoder = next((known for known in task.__mro__ if "encode" in vars(known)), task)
        formats = next((known for known in task.__mro__ if "formats" in vars(known)), task)
        if encoder is formats or not issubclass(encoder, formats):
            raise
        message = (
            f"{encoder.__module__}.{encoder.__qualname__} overrides `encode`, but inherits `formats` from "
            f"{formats.__module__}.{formats.__qualname__}: rows of other formats are refused before `encode` is called"
        )
        hint = "set `formats = ()` in the class, and `columns` to the names of the columns that its `encode` reads"
        raise InputError([*error.problems, Problem(message, hint=hint)]) from error


def _hold_out(parts: list[SourceRows], data: Data, seed: int) -> tuple[list[SourceRows], list[SourceRows]]:
    """Return (training sources, evaluation sources) after holding out `data.eval_rows` of all rows."""
    count = data.eval_rows
    if count == 0:
        return parts, []
    total = sum(len(part.indices) for part in parts)
    if count >= total:
        raise no_training_rows_error(data, [part.path for part in parts])
    is_held_out = np.zeros(total, dtype=bool)
    is_held_out[hold_out_rows(total, count, seed)[1]] = True
    train: list[SourceRows] = []
    evaluation: list[SourceRows] = []
    bounds = np.cumsum([len(part.indices) for part in parts])[:-1]
    for part, mask in zip(parts, np.split(is_held_out, bounds), strict=True):
        for split, selected, sources in (("train", ~mask, train), ("eval", mask, evaluation)):
            if selected.any():
                sources.append(replace(part, split=split, indices=part.indices[selected]))
            elif split == "train":
                raise no_training_rows_error(data, [part.path])
    return train, evaluation


def _weigh(part: SourceRows, weight: float, seed: int, number: int) -> SourceRows:
    """Return a source with round(weight x rows) rows per epoch. Each pass but the last has all of its rows."""
    rows = len(part.indices)
    full_passes, rest = divmod(round(weight * rows), rows)
    if not full_passes and not rest:
        raise InputError(f"weight {weight} leaves none of the {rows} rows of {part.path}", hint="raise the weight")
    last = part.indices[sample_rows(rows, rest, seed, number)]
    if not full_passes:
        return replace(part, indices=last)
    return replace(part, passes=full_passes + bool(rest), last=last if rest else None)


def describe_source(part: SourceRows, counts: Counts, data: Data) -> list[str]:
    """Return log lines about the rows of a source: how many were used, shortened and left out.

    Args:
        part: The source.
        counts: Counts of its encoded rows.
        data: The section `data` of the recipe.
    """
    prefix = f"data.{part.split} {part.label}: "
    rows = f"of {counts.rows:,} rows"
    used = "trained" if part.split == "train" else "measured"
    tokens = f", {counts.tokens:,} tokens, {counts.items:,} {used}" if counts.tokens else ""
    lines = [f"{prefix}{part.format + ', ' if part.format else ''}{counts.rows:,} rows{tokens}"]
    lines += [f"{prefix}{what}: {hint}" for what, hint in part.notes]
    if part.passes > 1 or part.last is not None:
        last = "all rows" if part.last is None else f"{len(part.last):,} of them"
        lines.append(f"{prefix}{part.passes} times in an epoch, the last time {last}")
    longer = f"longer than {data.max_length} tokens and were"
    if counts.cut:
        lines.append(f"{prefix}{counts.cut:,} {rows} were {longer} cut")
    if counts.dropped:
        lines.append(f"{prefix}{counts.dropped:,} {rows} were {longer} left out")
    if counts.split:
        lines.append(f"{prefix}{counts.split:,} {rows} were {longer} split into {counts.split_documents:,} rows")
    if counts.weightless:
        lines.append(f"{prefix}{counts.weightless:,} {rows} have weight 0 and were left out")
    if counts.untrained:
        lines.append(f"{prefix}{counts.untrained:,} {rows} contain no trainable tokens and were left out")
    if counts.bad:
        numbers = ", ".join(str(number + 1) for number, _ in counts.bad[:20]) + (", ..." if counts.bad[20:] else "")
        reason = counts.bad[0][1]
        lines.append(f"{prefix}{len(counts.bad):,} {rows} cannot be used and were left out: {numbers}; {reason}")
    return lines
