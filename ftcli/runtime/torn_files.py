"""Read small files of a run folder that a kill or a power cut may have left empty, truncated or full of zeros."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if it is missing, truncated or no JSON object."""
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def read_rows(path: Path) -> list[tuple[int, bytes, dict[str, Any] | None]]:
    """Return (line number, line, row) of each non-empty line in a file of rows; an empty list without a file.

    The row is None for a line that is not a JSON object with a step: it was truncated, or a power cut left zeros.

    Args:
        path: metrics.jsonl or samples.jsonl of a run folder.
    """
    if not path.exists():
        return []
    rows: list[tuple[int, bytes, dict[str, Any] | None]] = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):  # answers contain other line breaks
        if line:
            rows.append((number, line, _row(line)))
    return rows


def _row(line: bytes) -> dict[str, Any] | None:
    """Return the row of a line; None if the line is not a JSON object with a step."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int | float) else None
