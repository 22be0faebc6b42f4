"""Show rows as the model reads them, with statistics of all rows: `ftcli preview`.

The rows are the prepared rows that a run reads, in the same order. A task may define how its rows are shown (`Showing`
in tasks/protocol.py). preview_text.py and preview_html.py draw them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ftcli.data.chat.text_spans import decode_spans, shorten
from ftcli.reports.survey import (
    Survey,
    epoch_and_run,
    first_epoch,
    packed_bins,
    prepare_data,
    source_names,
    survey,
)
from ftcli.reports.survey_types import Prepared, ShownAnswer, ShownRow
from ftcli.runtime.errors import InputError
from ftcli.runtime.seeds import PADDING
from ftcli.tasks.protocol import Span

if TYPE_CHECKING:
    from datasets import Dataset

    from ftcli.config.recipe import Recipe
    from ftcli.runtime.terminal import Style
    from ftcli.tasks.protocol import Task


USES = {"train": "trained on", "eval": "evaluated on"}
MAX_CHARACTERS = 1600  # of a row, unless it is shown in full
MAX_VALUE_CHARACTERS = 200  # of a value, for tasks without `describe_row`


@dataclass(frozen=True)
class Preview(Survey):
    """Some rows, and a survey of all rows. Notebooks display it.

    Attributes:
        rows: The rows that are shown.
    """

    rows: list[ShownRow] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return rows and survey as plain values."""
        return super().as_dict() | {"rows": [asdict(row) for row in self.rows]}

    def lines(self, style: Style | None = None, *, ids: bool = False) -> list[str]:
        """Return findings, rows and statistics as text, with token ids below each row if `ids` is set."""
        from ftcli.reports.preview_text import draw_findings, draw_rows, draw_statistics
        from ftcli.runtime.terminal import Style

        style = style or Style()
        return [
            *draw_findings(self.findings, style),
            *draw_rows(self.rows, style, ids=ids),
            *draw_statistics(self.statistics, style),
        ]

    def as_page(self) -> str:
        """Return a self-contained HTML page."""
        from ftcli.reports.preview_html import draw_page

        return draw_page(self)

    def _repr_html_(self) -> str:
        from ftcli.reports.preview_html import draw_part

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
    """Show rows as the model reads them, and survey all rows. It loads a tokenizer and no model.

    Rows are prepared if the cache does not have them.

    Args:
        recipe: A recipe file, the name of a shipped recipe, or a `Recipe`.
        rows: Number of rows to show, in the order of training.
        row: Show what was made of this row of a source instead, counted from 1.
        split: "train" or "eval".
        full: Show long rows completely. Otherwise their middle is left out.
        overrides: Changes of the recipe such as "data.max_length=512", applied in order.

    Returns:
        The rows and the survey. `lines()` is their text, `as_page()` an HTML page.

    Raises:
        InputError: Rows cannot be prepared, or there is no such row or split.

    Example:
        >>> preview = ftcli.preview_data("recipe.yaml", rows=1)
        >>> for line in preview.lines():
        ...     print(line)
    """
    if split not in USES:
        raise InputError(f"no split {split}", hint=f"one of {', '.join(USES)}")
    prepared = prepare_data(recipe, overrides)
    if split == "eval" and prepared.rows.eval is None:
        raise InputError("the recipe has no evaluation rows", hint="set data.eval or data.eval_rows")
    order = _rows_in_order(prepared, split)
    indices = list(islice(order, rows)) if row is None else _rows_from_source_row(prepared, split, row)
    shown = [_shown_row(prepared, split, index, step, full=full) for index, step in indices]
    surveyed = survey(prepared)
    return Preview(surveyed.recipe, surveyed.findings, surveyed.statistics, shown)


def _rows_in_order(prepared: Prepared, split: str) -> Iterator[tuple[int, int | None]]:
    """Yield (index of a row, step) in the order of a run's first epoch.

    The step is None for evaluation rows and for rows that the first epoch does not train.
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
    """Return the rows of a split."""
    rows = prepared.rows.train if split == "train" else prepared.rows.eval
    assert rows is not None
    return rows


def _rows_from_source_row(prepared: Prepared, split: str, number: int) -> list[tuple[int, int | None]]:
    """Return (index, step) of every prepared row of a split that was made from row `number` of a source."""
    rows = _rows(prepared, split)
    numbers = np.asarray(rows.with_format("numpy")["row" if "row" in rows.column_names else "id"][:])
    indices = set(np.flatnonzero(numbers == number - 1).tolist())
    if not indices:
        raise InputError(
            f"row {number} is not among the {len(numbers)} rows that are {USES[split]}",
            hint=f"they are numbered from {numbers.min() + 1} to {numbers.max() + 1}; rows that are held out for "
            "evaluation, or left out, are not trained on",
        )
    return sorted((index, step) for index, step in _rows_in_order(prepared, split) if index in indices)


def _shown_row(prepared: Prepared, split: str, index: int, step: int | None, *, full: bool) -> ShownRow:
    row = _rows(prepared, split)[index]
    spans, facts = describe(prepared.task, row, prepared.rows.facts)
    short = shorten([span for span in spans if not span.part], None if full else MAX_CHARACTERS)
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
        answers=_answers(spans, full=full),
    )


def _answers(spans: Sequence[Span], *, full: bool) -> list[ShownAnswer]:
    """Return the answers that the spans of a row belong to, in order."""
    answers = []
    for name in dict.fromkeys(span.part for span in spans if span.part):
        short = shorten([span for span in spans if span.part == name], None if full else MAX_CHARACTERS)
        gap = [Span(f"\n... {short.tokens} tokens left out here (--full) ...\n")] if short.tokens else []
        answers.append(ShownAnswer(name, [*short.head, *gap, *short.tail]))
    return answers


def describe(task: Task, row: dict[str, Any], facts: dict[str, Any]) -> tuple[list[Span], dict[str, str]]:
    """Return spans of text and further facts of a prepared row.

    They come from the task's `describe_row`. Without it spans are decoded tokens. Rows without tokens have facts only.
    """
    if hasattr(task, "describe_row"):
        described: tuple[list[Span], dict[str, str]] = task.describe_row(row, facts)
        return described
    if "input_ids" in row and hasattr(task, "tokenizer"):
        return decode_spans(task.tokenizer, row["input_ids"], row.get("trained")), {}
    return [], {name: _short(json.dumps(value, default=repr, ensure_ascii=False)) for name, value in row.items()}


def _short(text: str) -> str:
    return text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[:MAX_VALUE_CHARACTERS]}... ({len(text)} characters)"
