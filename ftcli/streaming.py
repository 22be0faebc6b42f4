"""Rows of a corpus that does not fit a disk: read as it comes, in an order that no number of processes changes.

    files -> lanes -> blocks of rows, encoded, shuffled (and packed) -> rows of the step, one lane after the other

A *lane* owns whole files and reads them by itself. Row i of a step comes from lane i % lanes and is trained by
process i % processes, so that a process reads only the lanes it needs. How many lanes there are follows from the
recipe and the files. Where a lane stands is a `Cursor`: four numbers, from which it goes on without reading what
lies before it. This module knows no device, no model, and of a task only how it encodes a row.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .errors import RunError
from .sampling import epoch_order, seed_of

if TYPE_CHECKING:
    from datasets import IterableDataset

    from .tasks.protocol import Row, RowError

MOST_LANES = 64  # each has a block of rows in memory
UNEVEN = 1.1  # the fullest lane may hold so many times the mean
PIECES = 2**11  # prepared rows that one row of a file may become
ROWS = 2**32  # rows that one file may have
BATCH = 256  # rows that are encoded in one call, and raw in memory

Bin = list["Row"]  # what the sampler orders: one document, or with packing several


class Cursor(NamedTuple):
    """Where a lane goes on: in its `epoch`-th pass, at a block that begins at `row` of its `file`-th file."""

    epoch: int
    file: int  # in the order of this epoch
    row: int
    taken: int  # bins of the block that were trained already


@dataclass(frozen=True)
class Corpus:
    """The files of one source, each readable from any row on."""

    sizes: tuple[int, ...]  # of the files, in any unit
    read: Callable[[int, int], Iterator[Row]]  # (file, rows to skip) -> its rows from there on
    names: tuple[str, ...] = ()  # of the files, where they have some

    def name(self, file: int) -> str:
        """Return what messages call a file."""
        return self.names[file] if self.names else f"file {file + 1} of data.train"


class _Shards:
    """Reads the shards of a streamed data set; a class: loader processes can be handed it."""

    def __init__(self, rows: IterableDataset) -> None:
        self.rows, self.count = rows, rows.num_shards

    def __call__(self, file: int, skip: int) -> Iterator[Row]:
        yield from self.rows.shard(num_shards=self.count, index=file, contiguous=False).skip(skip)


def open_corpus(rows: IterableDataset, sizes: Sequence[int] | None = None, names: Sequence[str] = ()) -> Corpus:
    """Return the files behind a streamed data set of `datasets`, which calls them shards.

    Without `sizes` they are taken to be equally large, as shards of a data set on the hub are.
    """
    count = rows.num_shards
    known = tuple(names) if len(names) == count else ()
    return Corpus((1,) * count if sizes is None or len(sizes) != count else tuple(sizes), _Shards(rows), known)


class _Reading:
    """The file that a lane has open, so that the next block goes on in it without skipping what was read."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        self.place: tuple[int, int] | None = None
        self.rows: Iterator[Row] = iter(())

    def take(self, file: int, row: int, most: int) -> list[Row]:
        """Return at most so many rows of a file from `row` on; fewer: there are no more."""
        if self.place != (file, row):
            self.rows = self.corpus.read(file, row)
        found = list(itertools.islice(self.rows, most))
        self.place = (file, row + len(found))
        return found


def share_out(sizes: Sequence[int], global_size: int) -> list[list[int]]:
    """Return the files of each lane: as many lanes as divide `global_size` and hold about as much.

    Lanes give equally many rows to every step, so that the files of a small one would be repeated more often.
    """
    filled = sum(size > 0 for size in sizes)
    most = min(global_size, filled, MOST_LANES)
    for count in (n for n in range(most, 0, -1) if global_size % n == 0):
        lanes: list[list[int]] = [[] for _ in range(count)]
        held = [0] * count
        for file in sorted(range(len(sizes)), key=lambda file: (-sizes[file], file)):
            lane = held.index(min(held))
            lanes[lane].append(file)
            held[lane] += sizes[file]
        if max(held) <= UNEVEN * sum(held) / count:
            return [sorted(lane) for lane in lanes]
    return [list(range(len(sizes)))]


def lanes_of(rank: int, processes: int, lanes: int) -> list[int]:
    """Return the lanes that a process reads: those with a row i of the step, i % processes being its rank."""
    common = math.gcd(lanes, processes)
    return [lane for lane in range(lanes) if lane % common == rank % common]


@dataclass(frozen=True)
class Lane:
    """One of the readers: an endless sequence of bins, a pure function of (seed, lane, files, options)."""

    number: int
    lanes: int
    files: list[int]
    corpus: Corpus
    encode: Callable[[list[Row]], list[list[Row] | RowError]]  # each row of a file -> its documents, with "items"
    pack: Callable[[list[Row]], list[Bin]]
    seed: int
    block: int  # rows read, encoded and shuffled together
    refuse: Callable[[str], None]  # told of a row that cannot be encoded; raises when it may not be left out

    def bins(self, start: Cursor) -> Iterator[tuple[Cursor, Bin]]:
        """Yield (where to go on after it, bin) without end, from a cursor on.

        Raises `RunError` when a whole pass has nothing to train.
        """
        cursor, found, reading = start, False, _Reading(self.corpus)
        while True:
            block, after = self._block(cursor, reading)
            for taken in range(cursor.taken, len(block)):
                found = True
                yield cursor._replace(taken=taken + 1), block[taken]
            if after.epoch > cursor.epoch:
                if not found and (cursor.epoch > start.epoch or start[1:] == (0, 0, 0)):
                    some = f"{len(self.files)} of its {len(self.corpus.sizes)} files"
                    raise RunError(f"data.train: no row to train on in {some}")
                found = False
            cursor = after

    def _block(self, cursor: Cursor, reading: _Reading) -> tuple[list[Bin], Cursor]:
        """Return the shuffled bins of the block at a cursor, and where the next block begins."""
        files = self._files(cursor.epoch)
        # The first block is shorter in one lane than in the next, so that they do not all encode at the same step.
        is_first = cursor[:3] == (0, 0, 0)
        wanted = max(1, self.block * (self.number + 1) // self.lanes) if is_first else self.block
        documents: list[Row] = []
        file, row, read = cursor.file, cursor.row, 0
        while file < len(files) and read < wanted:
            most = min(wanted - read, BATCH)
            raw = reading.take(files[file], row, most)
            documents += self._documents(raw, files[file], row, cursor.epoch)
            row, read = row + len(raw), read + len(raw)
            if len(raw) < most:
                file, row = file + 1, 0
        after = Cursor(cursor.epoch, file, row, 0) if file < len(files) else Cursor(cursor.epoch + 1, 0, 0, 0)
        bins = self.pack(documents)
        order = epoch_order(len(bins), seed_of(self.seed, self.number, cursor.file, cursor.row), cursor.epoch)
        return [bins[i] for i in order], after

    def _files(self, epoch: int) -> list[int]:
        """Return the files of this lane in the order of an epoch."""
        order = epoch_order(len(self.files), seed_of(self.seed, self.number), epoch)
        return [self.files[i] for i in order]

    def _documents(self, raw: list[Row], file: int, first: int, epoch: int) -> list[Row]:
        """Return the documents of some rows of a file, the first of which is row `first`."""
        kept: list[Row] = []
        for row, found in enumerate(self.encode(raw), start=first):
            where = f"row {row + 1} of {self.corpus.name(file)}"
            if isinstance(found, ValueError):
                self.refuse(f"{where}: {found}")
                continue
            if len(found) > PIECES or row >= ROWS:
                raise RunError(f"{where} makes {len(found)} rows, too many")
            number = (file * ROWS + row) * PIECES
            kept += [d | {"id": number + n, "epoch": epoch} for n, d in enumerate(found) if d["items"]]
        return kept


class StreamOrder:
    """Micro-batches of one process without end, each with where every lane of its stands after its step."""

    def __init__(self, lanes: Sequence[Lane], *, rank: int, processes: int, global_size: int, micro_size: int) -> None:
        self.lanes, self.rank, self.processes = lanes, rank, processes
        self.global_size, self.micro_size = global_size, micro_size
        self.cursors = [Cursor(0, 0, 0, 0)] * len(lanes)  # where to begin

    def __iter__(self) -> Iterator[tuple[list[Bin], list[tuple[int, Cursor]]]]:
        cursors = list(self.cursors)
        streams = {n: self.lanes[n].bins(cursors[n]) for n in lanes_of(self.rank, self.processes, len(self.lanes))}
        while True:
            mine: list[Bin] = []
            for i in range(self.global_size):
                lane = i % len(self.lanes)
                if lane in streams:
                    cursors[lane], row = next(streams[lane])
                    if i % self.processes == self.rank:
                        mine.append(row)
            after = [(lane, cursors[lane]) for lane in streams]
            for first in range(0, len(mine), self.micro_size):
                yield mine[first : first + self.micro_size], after


def as_table(cursors: Sequence[tuple[int, Cursor]]) -> np.ndarray:
    """Return cursors as `[lanes, 5]` int64: lane, epoch, file, row, taken."""
    return np.array([(lane, *cursor) for lane, cursor in cursors], dtype=np.int64).reshape(-1, 5)


def from_table(table: np.ndarray, lanes: int) -> list[Cursor]:
    """Return the cursors of all lanes; a lane may stand in several rows of the table, which are then equal."""
    found = {int(row[0]): Cursor(*map(int, row[1:])) for row in table}
    assert len(found) == lanes
    return [found[lane] for lane in range(lanes)]
