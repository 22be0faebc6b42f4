"""Draw curves as text, in ASCII, so that every terminal and log file shows them."""

from __future__ import annotations

import math
from collections.abc import Sequence

WIDTH, HEIGHT = 64, 10
LETTERS = "ABCDEFGHIJ"
ONE, BOTH = "*", "#"  # marks of a single curve, and of a place that several curves share


def draw_text_chart(curves: Sequence[tuple[Sequence[int], Sequence[float]]]) -> list[str]:
    """Draw curves over steps. Each column shows the mean of the values that fall into it.

    Args:
        curves: (steps, values) of each curve. Values that are not finite are left out.

    Returns:
        The lines; an empty list unless a curve has two finite values at different steps.
    """
    finite = [
        [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
        for steps, values in curves
    ]
    steps = [step for curve in finite for step, _ in curve]
    if len(set(steps)) < 2:
        return []
    first, last = min(steps), max(steps)
    means = [_column_means(curve, first, last) for curve in finite]
    values = [mean for columns in means for mean in columns.values()]
    low, high = min(values), max(values)
    grid = [[" "] * WIDTH for _ in range(HEIGHT)]
    for number, columns in enumerate(means):
        mark = ONE if len(curves) == 1 else LETTERS[number % len(LETTERS)]
        for column, mean in columns.items():
            row = 0 if high == low else round((high - mean) / (high - low) * (HEIGHT - 1))
            grid[row][column] = mark if grid[row][column] in (" ", mark) else BOTH
    labels = {0: f"{high:.4g}", HEIGHT - 1: f"{low:.4g}"} if high > low else {0: f"{high:.4g}"}
    margin = max(map(len, labels.values()))
    lines = [f"{labels.get(row, ''):>{margin}} |{''.join(cells).rstrip()}" for row, cells in enumerate(grid)]
    ends = f"step {first}", str(last)
    return [*lines, f"{'':>{margin}} +{'-' * WIDTH}", f"{'':>{margin}}  {ends[0]}{ends[1]:>{WIDTH - len(ends[0])}}"]


def _column_means(curve: Sequence[tuple[int, float]], first: int, last: int) -> dict[int, float]:
    """Return column -> mean of its values."""
    columns: dict[int, list[float]] = {}
    for step, value in curve:
        columns.setdefault((step - first) * (WIDTH - 1) // (last - first), []).append(value)
    return {column: math.fsum(values) / len(values) for column, values in columns.items()}
