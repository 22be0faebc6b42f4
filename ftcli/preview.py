"""What a recipe trains and evaluates on, shown before it is: rows as the model reads them, and the numbers of all rows.

Everything comes from the prepared rows, those that a run reads, in the order that it reads them. Knows no task by
name: a task may say how its rows are shown (`Showing` in tasks/protocol.py). Drawing is the affair of
preview_text.py and preview_page.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .data_survey import (
    Prepared,
    Survey,
    epoch_and_run,
    first_epoch,
    packed_bins,
    prepare_data,
    source_names,
    survey,
)
from .errors import InputError
from .sampling import PADDING
from .spans import Span, decode_spans, shorten

if TYPE_CHECKING:
    from datasets import Dataset

    from .recipe import Recipe
    from .tasks.protocol import Task
    from .terminal import Style

SPLITS = ("train", "eval")
USES = {"train": "trained on", "eval": "evaluated on"}
SHORT = 1600  # characters of a row that are shown unless all are asked for
SHORT_VALUE = 200  # characters of a value of a row that its task does not know how to show


@dataclass(frozen=True)
class ShownRow:
    """One prepared row as the model reads it, a long one without its middle."""

    source: str
    number: int  # in its source, from 1, as errors count
    step: (
        int | None
    )  # the optimizer step of the first epoch that trains on it; None: none does; 0: a stream has it somewhere
    tokens: int
    trained: int  # tokens that the loss is on
    head: list[Span]
    tail: list[Span] = field(default_factory=list)
    left_out: int = 0  # tokens between head and tail
    left_out_trained: int = 0
    facts: dict[str, str] = field(default_factory=dict)  # what is not part of the text: the label
    split: str = "train"  # or eval, where `trained` are the tokens that are measured, and no step has the row


@dataclass(frozen=True)
class Preview(Survey):
    """Some of the rows, and a survey of all; a notebook draws it."""

    rows: list[ShownRow] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return super().as_dict() | {"rows": [asdict(row) for row in self.rows]}

    def lines(self, style: Style | None = None, *, ids: bool = False) -> list[str]:
        """Return what is wrong, the rows, and the statistics as text; with `ids` the tokens follow each row."""
        from .preview_text import draw_findings, draw_rows, draw_statistics
        from .terminal import Style

        chosen = style or Style()
        return [
            *draw_findings(self.findings, chosen),
            *draw_rows(self.rows, chosen, ids=ids),
            *draw_statistics(self.statistics, chosen),
        ]

    def as_page(self) -> str:
        """Return one HTML page that needs nothing else."""
        from .preview_page import draw_page

        return draw_page(self)

    def _repr_html_(self) -> str:
        from .preview_page import draw_part

        return draw_part(self)


def preview_data(
    recipe: Recipe | str | Path,
    *,
    rows: int = 3,
    row: int | None = None,
    split: Literal["train", "eval"] = "train",
    full: bool = False,
    overrides: Sequence[str] = (),
) -> Preview:
    """Return what `recipe` trains on: its first `rows` rows in the order of training, or row number `row`, from 1.

    With `split` eval the rows are those of the evaluation; the numbers are of all rows always. Prepares the rows if
    that was not done before; loads a tokenizer and no model. Long rows are shown without their middle unless `full`.
    Raises `InputError` for rows that cannot be prepared, and for a `row` or `split` that there is not.
    """
    if split not in SPLITS:
        raise InputError(f"no split {split}", hint=f"one of {', '.join(SPLITS)}")
    prepared = prepare_data(recipe, overrides)
    if split == "eval" and prepared.rows.eval is None:
        raise InputError("the recipe has no evaluation rows", hint="set data.eval or data.eval_rows")
    order = _order(prepared, split)
    chosen = list(islice(order, rows)) if row is None else _numbered(prepared, split, row)
    shown = [_show(prepared, split, index, step, full=full) for index, step in chosen]
    found = survey(prepared)
    return Preview(found.recipe, found.findings, found.statistics, shown)


def _order(prepared: Prepared, split: str) -> Iterator[tuple[int, int | None]]:
    """Yield (index of a row, step) in the order of a run: of the first epoch, without a step for rows that it leaves.

    Evaluation rows have no step.
    """
    if split == "eval":
        yield from ((index, None) for index in range(len(_rows(prepared, split))))
        return
    if prepared.rows.streamed:
        yield from ((index, 0) for index in range(len(prepared.rows.train)))
        return
    rows, bins, order = prepared.rows.train, packed_bins(prepared.rows), first_epoch(prepared)
    _, of_run = epoch_and_run(prepared)
    units = len(rows) if bins is None else len(bins)
    left = np.setdiff1d(np.arange(units), order)
    for step, window in enumerate([*order, left], start=1):
        is_trained = step <= min(len(order), of_run)
        for unit in window[window != PADDING]:
            for index in [unit] if bins is None else bins[int(unit)]:
                yield int(index), step if is_trained else None


def _rows(prepared: Prepared, split: str) -> Dataset:
    found = prepared.rows.train if split == "train" else prepared.rows.eval
    assert found is not None
    return found


def _numbered(prepared: Prepared, split: str, number: int) -> list[tuple[int, int | None]]:
    """Return every row of a split that was made of row `number` of a source."""
    rows = _rows(prepared, split)
    numbers = np.asarray(rows.with_format("numpy")["row" if "row" in rows.column_names else "id"][:])
    wanted = set(np.flatnonzero(numbers == number - 1).tolist())
    if not wanted:
        raise InputError(
            f"row {number} is not among the {len(numbers)} rows that are {USES[split]}",
            hint=f"they are numbered from {numbers.min() + 1} to {numbers.max() + 1}; rows that are held out for "
            "evaluation, or left out, are not trained on",
        )
    return sorted((index, step) for index, step in _order(prepared, split) if index in wanted)


def _show(prepared: Prepared, split: str, index: int, step: int | None, *, full: bool) -> ShownRow:
    row = _rows(prepared, split)[index]
    spans, facts = describe(prepared.task, row, prepared.rows.facts)
    short = shorten(spans, None if full else SHORT)
    names, source = source_names(prepared, split), int(row.get("source", 0))
    return ShownRow(
        source=names[source],
        number=int(row.get("row", row["id"])) + 1,
        step=step,
        tokens=len(row.get("input_ids", ())),
        trained=sum(row.get("trained", ())[1:]),
        head=short.head,
        tail=short.tail,
        left_out=short.tokens,
        left_out_trained=short.trained,
        facts=facts,
        split=split,
    )


def describe(task: Task, row: dict[str, Any], facts: dict[str, Any]) -> tuple[list[Span], dict[str, str]]:
    """Return (spans, facts) of a prepared row: as its task shows it, else its tokens, else its columns."""
    if hasattr(task, "describe_row"):
        found: tuple[list[Span], dict[str, str]] = task.describe_row(row, facts)
        return found
    if "input_ids" in row and hasattr(task, "tokenizer"):
        return decode_spans(task.tokenizer, row["input_ids"], row.get("trained")), {}
    return [], {name: _short(json.dumps(value, default=repr, ensure_ascii=False)) for name, value in row.items()}


def _short(text: str) -> str:
    return text if len(text) <= SHORT_VALUE else f"{text[:SHORT_VALUE]}... ({len(text)} characters)"
