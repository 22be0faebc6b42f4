"""Order the rows of an epoch. The order depends only on seed and epoch.

Every process computes the same global order and selects its own micro-batches. The rows of an optimizer step are
therefore the same for any number of processes and any micro size. This module has no state and does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ftcli.runtime.seeds import PADDING, mix, seed_of

GROUPED_STEPS = 50  # steps whose rows are sorted together by group_by_length, as transformers' sampler does

# (epoch, row index), which seed the augmentation of a row; with names_next also the index of the step's next row.
Key = tuple[int, int] | tuple[int, int, int]
Divide = Callable[[Sequence[int]], list[list[int]]]  # the rows of a step -> the rows of its passes, in global order


def epoch_order(rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the permutation of the rows for one epoch.

    Rows are sorted by a hash of (seed, epoch, index). The order does not depend on NumPy's random generators, so it is
    the same with every version of NumPy.

    Args:
        rows: Number of rows.
        seed: Seed of the order.
        epoch: Number of the epoch.

    Returns:
        `[rows]` int64 row indices.
    """
    salt = np.uint64(seed_of(seed, epoch))
    return np.argsort(mix(np.arange(rows, dtype=np.uint64) ^ salt), kind="stable")


def group_by_length(
    order: NDArray[np.int64], lengths: NDArray[np.int64], global_size: int, seed: int, epoch: int
) -> NDArray[np.int64]:
    """Reorder an epoch so that the rows of each step have similar lengths.

    The rows of `GROUPED_STEPS` steps are sorted by length and divided into steps. Then the steps of the epoch are
    shuffled. Rows after the last complete step stay, so the rows that an epoch drops do not depend on lengths.

    Args:
        order: `[rows]` row indices of the epoch.
        lengths: `[rows]` tokens of each row, by row index.
        global_size: Rows of a step.
        seed: Seed of the order.
        epoch: Number of the epoch.

    Returns:
        `[rows]` int64 row indices.
    """
    complete = len(order) // global_size * global_size
    group = GROUPED_STEPS * global_size
    groups = [order[start : min(start + group, complete)] for start in range(0, complete, group)]
    by_length = [rows[np.argsort(-lengths[rows], kind="stable")] for rows in groups]
    steps = np.concatenate([order[:0], *by_length]).reshape(-1, global_size)
    shuffled = steps[epoch_order(len(steps), seed_of(seed, epoch), GROUPED_STEPS)]
    return np.concatenate([shuffled.reshape(-1), order[complete:]])


class TrainOrder:
    """Batch sampler of the training rows: the micro-batches of every step from `first_step` on, in global order.

    Yields lists of `micro_size` keys. The process of rank r takes every `processes`-th list, starting at r. The
    `processes * accumulation` lists of a step contain the `global_size` rows of that step. Rows beyond
    `steps_per_epoch` are dropped. A step with too few rows is padded, so that all processes run the same number of
    forward passes. With `lengths` (tokens of every row) the rows of a step have similar lengths. With `names_next` a
    key has the next row of the step too, which is the first one for the last row. The only row of a step has none.

    With `divide` the lists of a step are formed by tokens: their number and their sizes change from step to step.
    """

    drop_last = True  # each list is full; Accelerate reads both attributes
    batch_size: int | None  # None: lists have different sizes

    def __init__(
        self,
        rows: int,
        *,
        global_size: int,
        micro_size: int,
        seed: int,
        first_step: int,
        steps: int,
        steps_per_epoch: int,
        lengths: NDArray[np.int64] | None = None,
        divide: Divide | None = None,
        names_next: bool = False,
    ):
        self.rows, self.global_size, self.micro_size = rows, global_size, micro_size
        self.seed, self.first_step, self.steps, self.steps_per_epoch = seed, first_step, steps, steps_per_epoch
        self.lengths, self.divide, self.names_next = lengths, divide, names_next
        self.batch_size = micro_size if divide is None else None
        self._epochs: dict[int, NDArray[np.int64]] = {}

    def __len__(self) -> int:
        if self.divide is None:
            return (self.steps - self.first_step) * self.global_size // self.micro_size
        return sum(len(self.lists_of(step)) for step in range(self.first_step, self.steps))

    def __iter__(self) -> Iterator[list[Key]]:
        for step in range(self.first_step, self.steps):
            epoch = step // self.steps_per_epoch
            real = [int(index) for index in self.rows_of(step) if index != PADDING] if self.names_next else []
            following = dict(zip(real, real[1:] + real[:1], strict=True)) if len(real) > 1 else {}
            for rows in self.lists_of(step):
                yield [(epoch, int(i), following[i]) if i in following else (epoch, int(i)) for i in rows]

    def passes_of(self, step: int, processes: int) -> int:
        """Return the number of forward passes that every process makes in a step.

        Args:
            step: Number of steps before it.
            processes: Number of processes.
        """
        return len(self.lists_of(step)) // processes

    def rows_of(self, step: int) -> NDArray[np.int64]:
        """Return the row indices of the step after `step` steps, `[global_size]`, with padding at the end."""
        epoch, position = divmod(step, self.steps_per_epoch)
        return self.rows_of_epoch(epoch)[position]

    def rows_of_epoch(self, epoch: int) -> NDArray[np.int64]:
        """Return the row indices of the steps of an epoch, `[steps_per_epoch, global_size]`, with padding at the end.

        The orders of the newest two epochs are kept, because the loader is ahead of the loop.
        """
        if epoch not in self._epochs:
            used = self._epoch(epoch)[: self.steps_per_epoch * self.global_size]
            padding = self.steps_per_epoch * self.global_size - len(used)
            steps = np.pad(used, (0, padding), constant_values=PADDING).reshape(self.steps_per_epoch, -1)
            self._epochs = {number: kept for number, kept in self._epochs.items() if number == epoch - 1}
            self._epochs[epoch] = steps
        return self._epochs[epoch]

    def lists_of(self, step: int) -> list[list[int]]:
        """Return the row indices of each list of the step after `step` steps, in global order."""
        rows = self.rows_of(step)
        if self.divide is not None:
            return self.divide(rows.tolist())
        return rows.reshape(-1, self.micro_size).tolist()

    def _epoch(self, epoch: int) -> NDArray[np.int64]:
        """Return the row indices of an epoch, `[rows]`."""
        order = epoch_order(self.rows, self.seed, epoch)
        if self.lengths is None:
            return order
        return group_by_length(order, self.lengths, self.global_size, self.seed, epoch)


class EvalOrder:
    """Batch sampler of the evaluation rows: every row once, in file order.

    The last micro-batches are padded, so that all processes run the same number of forward passes.
    """

    drop_last = True

    def __init__(self, rows: int, *, micro_size: int, processes: int) -> None:
        self.rows, self.batch_size, self.processes = rows, micro_size, processes

    def __len__(self) -> int:
        return -(-self.rows // (self.batch_size * self.processes)) * self.processes

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for batch in range(len(self)):
            first = batch * self.batch_size
            yield [(0, i if i < self.rows else PADDING) for i in range(first, first + self.batch_size)]


def hold_out_rows(rows: int, count: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Hold out evaluation rows.

    Args:
        rows: Number of rows.
        count: Number of rows to hold out.
        seed: Seed of the selection.

    Returns:
        (training rows, evaluation rows) as int64 row indices in file order.
    """
    order = epoch_order(rows, seed, -1)
    return np.sort(order[count:]), np.sort(order[:count])


def sample_rows(rows: int, count: int, seed: int, source: int) -> NDArray[np.int64]:
    """Draw rows of a source.

    Args:
        rows: Number of rows of the source.
        count: Number of rows to draw.
        seed: Seed of the recipe.
        source: Number of the source. It is part of the seed.

    Returns:
        `[count]` int64 row indices in file order.
    """
    return np.sort(epoch_order(rows, seed_of(seed, source), -2)[:count])
