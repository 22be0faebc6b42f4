"""Metrics of predicted numbers, in float64 over all evaluation rows. Shape: N rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

REGRESSION_METRICS = ("loss", "mse", "mae", "pearson", "spearman", "r2")


def regression_metrics(rows: dict[str, np.ndarray]) -> dict[str, float]:
    """Return mean squared error (also as loss), mean absolute error, both correlations and R2.

    R2 is 1 - (squared errors) / (squared deviations of the targets from their mean). Correlations and R2 are 0 where a
    variance is 0.

    Args:
        rows: `loss`, `items`, `target` and `prediction` of all evaluation rows, each `[N]`.
    """
    import numpy as np

    target, prediction = rows["target"].astype(np.float64), rows["prediction"].astype(np.float64)
    errors, spread = prediction - target, target - target.mean()
    variance = float(spread @ spread)
    return {
        "loss": float(rows["loss"].sum() / rows["items"].sum()),
        "mse": float(np.mean(errors**2)),
        "mae": float(np.mean(np.abs(errors))),
        "pearson": pearson(target, prediction),
        "spearman": pearson(ranks_of(target), ranks_of(prediction)),
        "r2": 1 - float(errors @ errors) / variance if variance else 0.0,
    }


def pearson(left: NDArray[np.float64], right: NDArray[np.float64]) -> float:
    """Return the correlation of two variables `[N]`; 0 if one of them is constant."""
    import numpy as np

    left, right = left - left.mean(), right - right.mean()
    scale = float(np.sqrt(left @ left) * np.sqrt(right @ right))
    return float(left @ right) / scale if scale else 0.0


def ranks_of(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the ranks of values `[N]` from 0; equal values have the mean of their ranks."""
    import numpy as np

    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    mean: NDArray[np.float64] = (ends - (counts + 1) / 2)[group]
    return mean
