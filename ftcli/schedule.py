"""The learning rate as a pure function of the step. No scheduler object, so nothing can step it twice."""

from __future__ import annotations

import math


def learning_rate(step: int, *, peak: float, name: str, steps: int, warmup_steps: int, min_ratio: float = 0.0) -> float:
    """Return the learning rate of optimizer step `step` (the first is 0) of a run of `steps`.

    Warm-up is linear and reaches `peak` at step `warmup_steps - 1`; linear and cosine then fall so that the step
    after the last would be at `peak * min_ratio`. Cosine: Loshchilov & Hutter 2017, without restarts.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if name == "constant":
        return peak
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    shape = 1 - done if name == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return peak * (min_ratio + (1 - min_ratio) * shape)


def due(step: int, every: int | None, last: int) -> bool:
    """Say whether something is to be done after `step` steps: every so many (None: never), and after the last."""
    return step == last or (every is not None and step % every == 0)
