"""Compute the learning rate as a pure function of the step, so that there is no scheduler that is stepped twice."""

from __future__ import annotations

import math


def learning_rate(step: int, *, peak: float, name: str, steps: int, warmup_steps: int, min_ratio: float = 0.0) -> float:
    """Return the learning rate of an optimizer step.

    Warm-up is linear and reaches `peak` at step `warmup_steps - 1`. Linear and cosine schedules then fall to
    `peak * min_ratio` at step `steps`. Cosine: Loshchilov & Hutter 2017, without restarts.

    Args:
        step: Number of the step; the first is 0.
        peak: The largest learning rate.
        name: "constant", "linear" or "cosine".
        steps: Length of the run.
        warmup_steps: Length of the warm-up.
        min_ratio: Final learning rate as a fraction of `peak`.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if name == "constant":
        return peak
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    shape = 1 - done if name == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return peak * (min_ratio + (1 - min_ratio) * shape)
