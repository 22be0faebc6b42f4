"""The order of the rows: a pure function of (seed, epoch), and of nothing else.

Every process computes the same global order and takes its own micro-batches of it, so the rows of an optimizer
step are the same for any number of processes and any micro size. Nothing here keeps state or knows torch.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

PADDING = -1  # index of a row that fills a micro-batch and weighs nothing
FEW = 32  # numbers that are hashed one by one sooner than as an array
GROUPED_STEPS = 50  # steps whose rows are sorted together by group_by_length, as transformers' sampler does

Key = tuple[int, int]  # (epoch, row index): augmentation is keyed by both


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a well-spread 64-bit hash of each value (SplitMix64's finaliser, Steele et al. 2014)."""
    z = values + np.uint64(0x9E3779B97F4A7C15)  # modulo 2^64
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def seed_of(*parts: int) -> int:
    """Return one 63-bit seed that depends on every part and on their order."""
    state = 0
    for part in parts:
        state = _mix_one(state ^ (part % 2**64))
    return state >> 1


def _mix_one(value: int) -> int:
    """Return `mix` of one number of 64 bits, twenty times as fast: steps ask for few at a time."""
    z = (value + 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def digest(ids: NDArray[np.int64]) -> int:
    """Return the sum mod 2^64 of a hash of each sample id: it depends on the set of rows, not on their order."""
    if len(ids) <= FEW:
        return sum(_mix_one(number) for number in ids.tolist() if number != PADDING) % 2**64
    real = ids[ids != PADDING].astype(np.uint64)
    return int(np.sum(mix(real), dtype=np.uint64))


def epoch_order(rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the permutation of `rows` row indices for one epoch.

    Rows are sorted by a hash of (seed, epoch, index): the order is defined by this file alone and does not change
    with a version of NumPy's generators, so a run resumed years later sees the same rows.
    """
    salt = np.uint64(seed_of(seed, epoch))
    return np.argsort(mix(np.arange(rows, dtype=np.uint64) ^ salt), kind="stable")


def group_by_length(
    order: NDArray[np.int64], lengths: NDArray[np.int64], global_size: int, seed: int, epoch: int
) -> NDArray[np.int64]:
    """Return an epoch's order with rows of similar length in each step; a function of its arguments alone.

    Every `GROUPED_STEPS` steps' rows are sorted by length, longest first, and cut into steps, and then the steps of
    the epoch change places, so that lengths do not follow a pattern. Rows beyond the last whole step stay where they
    are: which ones an epoch drops does not depend on lengths.
    """
    whole = len(order) // global_size * global_size
    window = GROUPED_STEPS * global_size
    parts = [order[start : min(start + window, whole)] for start in range(0, whole, window)]
    by_length = [part[np.argsort(-lengths[part], kind="stable")] for part in parts]
    grouped = np.concatenate([order[:0], *by_length]).reshape(-1, global_size)
    moved = grouped[epoch_order(len(grouped), seed_of(seed, epoch), GROUPED_STEPS)]
    return np.concatenate([moved.reshape(-1), order[whole:]])


class TrainOrder:
    """Micro-batches of every step from `first_step` on, in global order: a batch sampler for one DataLoader.

    Yields lists of `micro_size` keys; the process of rank r takes every `processes`-th list starting at r, so the
    `processes * accumulation` lists of a step cover that step's `global_size` rows. Rows beyond `steps_per_epoch`
    are dropped; a step that lacks rows is filled up with padding: every process runs as many forwards. With `lengths`
    (tokens of every row) the rows of a step are of similar length.
    """

    drop_last = True  # each list is full; Accelerate reads both attributes

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
    ):
        self.rows, self.global_size, self.batch_size = rows, global_size, micro_size
        self.seed, self.first_step, self.steps, self.steps_per_epoch = seed, first_step, steps, steps_per_epoch
        self.lengths = lengths

    def __len__(self) -> int:
        return (self.steps - self.first_step) * self.global_size // self.batch_size

    def __iter__(self) -> Iterator[list[Key]]:
        current = None
        for step in range(self.first_step, self.steps):
            epoch, position = divmod(step, self.steps_per_epoch)
            if epoch != current:
                order, current = self._epoch(epoch), epoch
            window = order[position * self.global_size : (position + 1) * self.global_size]
            window = np.pad(window, (0, self.global_size - len(window)), constant_values=PADDING)
            for start in range(0, self.global_size, self.batch_size):
                yield [(epoch, int(index)) for index in window[start : start + self.batch_size]]

    def _epoch(self, epoch: int) -> NDArray[np.int64]:
        order = epoch_order(self.rows, self.seed, epoch)
        if self.lengths is None:
            return order
        return group_by_length(order, self.lengths, self.global_size, self.seed, epoch)


class EvalOrder:
    """Every row once, in file order, filled up with padding so that each process runs as many forwards."""

    drop_last = True

    def __init__(self, rows: int, *, micro_size: int, processes: int) -> None:
        self.rows, self.batch_size, self.processes = rows, micro_size, processes

    def __len__(self) -> int:
        return -(-self.rows // (self.batch_size * self.processes)) * self.processes

    def __iter__(self) -> Iterator[list[Key]]:
        for batch in range(len(self)):
            first = batch * self.batch_size
            yield [(0, i if i < self.rows else PADDING) for i in range(first, first + self.batch_size)]


def held_out(rows: int, count: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (training, evaluation) row indices, both in file order, with `count` rows held out by the seed."""
    order = epoch_order(rows, seed, -1)
    return np.sort(order[count:]), np.sort(order[:count])


def chosen(rows: int, count: int, seed: int, source: int) -> NDArray[np.int64]:
    """Return `count` of a source's row indices in file order, drawn by (seed, number of the source)."""
    return np.sort(epoch_order(rows, seed_of(seed, source), -2)[:count])
