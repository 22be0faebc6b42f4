"""The micro-batches of the steps to come, on the host, and the message about them that is already on its way.

What all ranks must agree on travels as sums of whole numbers, one window ahead, so that no device waits for it. Names
no task, model or hardware.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .copies import Copies
from .sampling import PADDING, digest

if TYPE_CHECKING:
    from .run import Run
    from .tasks.protocol import Batch


@dataclass
class Window:
    """The micro-batches of one rank for one step, and what all ranks say of theirs."""

    batches: Iterator[Batch]  # on the device, each copied while the one before is computed
    ids: list[np.ndarray]  # of the rows of each micro-batch
    agreed: Callable[[], list[int]]  # waits for the sums over ranks: items, digest, rows, stop requests, and more
    seconds: float


def windows(run: Run) -> Iterator[Window]:
    """Yield the windows of the steps to come; each one's message to the other ranks is already under way."""
    batches, copies = iter(run.train_loader), Copies(run.hardware.accelerator.device)
    sources = len(run.rows.sources)
    for _ in range(run.first_step, run.steps):
        started = time.perf_counter()
        window = list(itertools.islice(batches, run.plan.accumulation))
        parts = [batch.pop("sample_ids").numpy() for batch in window]
        ids = np.concatenate(parts)
        items = sum(run.task.count(batch) for batch in window)
        message = [items, digest(ids), int((ids != PADDING).sum()), int(run.stop.requested() or run.saving.failed())]
        message += count_by_source(window, sources)
        message += run.stream.tally() if run.stream else []
        on_device = copies.ahead(window)
        yield Window(on_device, parts, run.hardware.ranks.sum_later(message), time.perf_counter() - started)


def count_by_source(batches: list[Batch], sources: int) -> list[int]:
    """Return how many items of each source some micro-batches hold; nothing where no source is told apart."""
    if not sources:
        return []
    numbers = np.concatenate([batch["item_sources"].numpy() for batch in batches])
    return np.bincount(numbers[numbers != PADDING], minlength=sources).tolist()
