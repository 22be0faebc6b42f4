"""Measure training rows without the limit `data.max_length`, because prepared rows hold only what is left of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ftcli.reports.survey_types import Prepared


MOST_MEASURED = 2000  # rows of each source: more would repeat a good part of the preparation
NO_LIMIT = 2**31 - 1


@dataclass(frozen=True)
class FullLength:
    """Length of the longest row before truncation.

    Attributes:
        tokens: Number of tokens.
        measured: Number of rows that were measured.
        rows: Number of rows.
    """

    tokens: int
    measured: int
    rows: int

    def as_dict(self) -> dict[str, int]:
        """Return the values by name."""
        return asdict(self)


def measure_full_length(prepared: Prepared) -> FullLength | None:
    """Encode rows of each training source again without a limit, and return the length of the longest.

    Sources with more than `MOST_MEASURED` rows are measured at evenly spaced rows.

    Args:
        prepared: The recipe, its task and its rows.

    Returns:
        The length; None if rows are not one sequence of tokens. The limit applies to each sequence of a pair.
    """
    from ftcli.data.encode import encode_rows
    from ftcli.data.mixture import read_sources, survey_sources
    from ftcli.data.table_nulls import absent_keys
    from ftcli.tasks.build import build_task

    data = prepared.recipe.data.model_copy(update={"max_length": NO_LIMIT, "truncation": "truncate"})
    recipe = prepared.recipe.model_copy(update={"data": data})
    task = build_task(recipe)
    parts, facts = survey_sources(task, read_sources(recipe, task))
    longest = measured = rows = 0
    for part in (part for part in parts if part.split == "train"):
        chosen = np.unique(np.linspace(0, len(part.indices) - 1, MOST_MEASURED).round().astype(np.int64))
        clean = absent_keys(part.rows.features)
        raw = [dict(part.rows[int(index)]) for index in part.indices[chosen]]
        for result in encode_rows(task, raw if clean is None else [clean(row) for row in raw], facts):
            for row in [] if isinstance(result, ValueError) else result:
                if not _is_one_sequence(row):
                    return None
                longest = max(longest, len(row["input_ids"]))
        measured, rows = measured + len(chosen), rows + len(part.indices)
    return FullLength(longest, measured, rows) if longest else None


def _is_one_sequence(row: dict[str, Any]) -> bool:
    """Return whether a prepared row is one sequence of tokens. Rows of several have a column of their lengths."""
    return "input_ids" in row and not any(name.endswith(("length", "lengths")) for name in row)
