"""The micro-batches of the steps to come, on the host, and the message about them that is already on its way.

What all ranks must agree on travels as sums of whole numbers, one window ahead, so that no device waits for it. Names
no task, model or hardware.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ftcli.runtime.errors import InputError
from ftcli.runtime.seeds import PADDING, digest
from ftcli.tasks.protocol import has_first_pass
from ftcli.training.batches.prefetch import DevicePrefetcher
from ftcli.training.batches.row_wait import RowWait

if TYPE_CHECKING:
    from ftcli.tasks.protocol import Batch
    from ftcli.training.run import Run


class ControlMessage(NamedTuple):
    """Sums over all ranks for the rows of one step."""

    items: int  # that the loss is summed over
    digest: int  # of the ids of the rows, modulo 2^64, as int64
    rows: int  # padding not counted
    stop_requests: int  # ranks with a stop request or a failed background save
    further_counts: list[int]  # of `LossTerms.further_counts`, in units of `COUNT_UNIT`; empty where `items` are all
    source_items: list[int]  # of each source; empty if losses are not reported by source
    rows_by_rank: list[int]  # rows of each rank; empty for tasks without a first pass
    stream_counts: list[int]  # see `StreamLoader.tally`; empty unless rows are streamed

    @classmethod
    def from_sums(cls, sums: list[int], lengths: MessageLengths) -> ControlMessage:
        """Return the message of which `sums` are the numbers, in the order of the fields."""
        items, digest_sum, rows, stop_requests, *rest = sums
        numbers = iter(rest)
        further, by_source, by_rank = (list(itertools.islice(numbers, length)) for length in lengths)
        return cls(items, digest_sum, rows, stop_requests, further, by_source, by_rank, list(numbers))


class MessageLengths(NamedTuple):
    """Lengths of the lists of a control message, in the order of its fields."""

    further_counts: int
    source_items: int
    rows_by_rank: int

    @classmethod
    def of(cls, run: Run) -> MessageLengths:
        """Return the lengths in a run."""
        ranks = run.hardware.ranks.world if has_first_pass(run.task) else 0
        return cls(len(run.terms.further_counts), len(run.terms.sources), ranks)


@dataclass
class AccumulationWindow:
    """The micro-batches of one rank for one step, and the sums over the messages of all ranks."""

    batches: Iterator[Batch]  # on the device, each copied while the one before is computed
    ids: list[np.ndarray]  # of the rows of each micro-batch
    sums: Callable[[], list[int]]  # waits for the sums over ranks, in the order of `ControlMessage`
    lengths: MessageLengths
    wait: RowWait
    first_batches: Iterator[Batch] = field(default_factory=lambda: iter(()))  # the same batches, for a first pass

    def message(self) -> ControlMessage:
        """Return the sums over all ranks for this step. Waits for the message of the slowest rank."""
        return ControlMessage.from_sums(self.sums(), self.lengths)


def is_stop_requested(run: Run, window: AccumulationWindow | None, number: int) -> bool:
    """Return whether a rank asks for the end of the run, by the newest message. Waits for that of the slowest rank.

    Args:
        run: The run.
        window: The next window; None after the last step.
        number: Number of steps before this one, for the heartbeat.
    """
    if window is None:
        return False
    run.heartbeat.beat("waiting for ranks", number)  # `ftcli trace` counts it as communication
    requests = window.message().stop_requests
    run.heartbeat.beat("waiting for the device", number)
    return requests > 0


def windows(run: Run) -> Iterator[AccumulationWindow]:
    """Yield the windows of the steps to come; each one's message to the other ranks is already under way."""
    batches, prefetcher = iter(run.train_loader), DevicePrefetcher(run.hardware.accelerator.device)
    lengths, rank = MessageLengths.of(run), run.hardware.ranks.rank
    for step in range(run.first_step, run.steps):
        wait = RowWait(prefetcher.device)
        window = list(itertools.islice(batches, run.passes_of(step)))
        parts = [batch.pop("sample_ids").numpy() for batch in window]
        ids = np.concatenate(parts)
        items, *further = run.terms.count(run.task, window)
        rows = int((ids != PADDING).sum())
        message = [items, digest(ids), rows, int(run.stop.requested() or run.saving.failed())]
        message += further
        message += count_by_source(window, lengths.source_items)
        message += [rows if number == rank else 0 for number in range(lengths.rows_by_rank)]
        message += run.stream.tally() if run.stream else []
        on_device = prefetcher.ahead(window)
        sums = run.hardware.ranks.sum_later(message)
        wait.end()
        accumulation = AccumulationWindow(on_device, parts, sums, lengths, wait)
        if lengths.rows_by_rank:
            accumulation.first_batches, accumulation.batches = on_device, _again(prefetcher, window)
        yield accumulation


def _again(prefetcher: DevicePrefetcher, window: list[Batch]) -> Iterator[Batch]:
    """Yield the batches of a window once more. The first copy starts when the first batch is taken."""
    yield from prefetcher.ahead(window)


def count_by_source(batches: list[Batch], sources: int) -> list[int]:
    """Return the number of items of each source in some micro-batches; empty if losses are not reported by source."""
    if not sources:
        return []
    numbers = np.concatenate([batch["item_sources"].numpy() for batch in batches])
    return np.bincount(numbers[numbers != PADDING], minlength=sources).tolist()


def sum_by_source(loss: Tensor, parts: Tensor, sources: Tensor | None, count: int) -> Tensor:
    """Return the loss of a micro-batch and the contribution of each of S sources to it, without waiting for the device.

    Args:
        loss: The loss, a scalar.
        parts: Contributions of N items, `[N]`, whose sum is the loss.
        sources: Number of the source of each item, `[N]`, -1 for padding; None if losses are not reported by source.
        count: Number of sources.

    Returns:
        `[1 + S]` float32. A contribution that is not finite affects its own source only.

    Raises:
        InputError: `parts` and `sources` have different shapes, for instance because the task returned a sum.
    """
    if sources is None:
        return loss[None]
    if parts.shape != sources.shape:
        problem = f"data.train has several sources, and the task's `loss` gave {_shape(parts)}, not {_shape(sources)}"
        hint = "return the loss of every item in the order of the rows, not a sum, so that sources can be separated"
        raise InputError(problem, hint=hint)
    numbers = torch.arange(count, dtype=sources.dtype, device=sources.device)
    by_source = torch.where(sources == numbers[:, None], parts, 0.0)  # [S, N]; added up in the same order each time
    return torch.cat([loss[None], by_source.sum(dim=1)])


def _shape(tensor: Tensor) -> str:
    return "a scalar" if tensor.dim() == 0 else f"values {list(tensor.shape)}"
