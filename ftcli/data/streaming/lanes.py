"""Stream the rows of a corpus in an order that does not depend on the number of processes.

    files -> lanes -> blocks of rows, encoded, shuffled (and packed) -> rows of the step, one lane after the other

A *lane* is an independent reader of whole files. Row i of a step comes from lane i % lanes and is trained by
process i % processes, so that a process reads only the lanes it needs. The number of lanes follows from the recipe
and the files. The position of a lane is a `Cursor`, which also has the counts of the rows that were read. A lane
continues from its cursor without reading earlier files. This module uses no device and no model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ftcli.data.label_names import class_names
from ftcli.data.sampler import epoch_order
from ftcli.data.streaming.cursors import Counts, Cursor
from ftcli.data.table_nulls import absent_keys
from ftcli.data.text_files import EmptyLine
from ftcli.runtime.errors import InputError, RowError, RunError
from ftcli.runtime.seeds import seed_of

if TYPE_CHECKING:
    from datasets import IterableDataset

    from ftcli.tasks.protocol import Row


MOST_LANES = 64  # each lane has a block of rows in memory
UNEVEN = 1.1  # largest size of a lane, as a multiple of the mean
DOCUMENTS_PER_ROW = 2**11  # prepared rows that one row of a file may become
ROWS_PER_FILE = 2**32  # rows that one file may have
ROWS_ENCODED_AT_ONCE = 256  # rows of one call of `encode`
BAD_ROW_HINT = "fix or delete that row, or raise data.max_bad_rows to skip invalid rows"

Bin = list["Row"]  # a row of the sampler: one document, or several with packing
Read = Callable[[int, int], Iterator["Row | RowError"]]  # (file, rows to skip) -> its rows; an error for a bad row


class BadRow(NamedTuple):
    """A row that cannot be used."""

    file: int
    row: int  # counted from 0
    reason: str


class LaneItem(NamedTuple):
    """The next bin of a lane, the cursor after it, and the unusable rows that were read before it."""

    after: Cursor
    bin: Bin
    bad: list[BadRow]


@dataclass(frozen=True)
class Corpus:
    """The files of one source, each readable from any row on."""

    sizes: tuple[int, ...]  # of the files, in any unit
    read: Read
    names: tuple[str, ...] = ()  # names of the files, if known

    def name(self, file: int) -> str:
        """Return the name of a file for messages."""
        return self.names[file] if self.names else f"file {file + 1} of data.train"

    def describe(self, bad: BadRow) -> str:
        """Return the file, number and error of a bad row as text for a message."""
        return f"row {bad.row + 1} of {self.name(bad.file)}: {bad.reason}"


class _Shards:
    """Reads the shards of a streamed data set. It is a class so that it can be pickled for loader processes."""

    def __init__(self, rows: IterableDataset) -> None:
        self.rows, self.count = rows, rows.num_shards
        self.names = class_names(rows.features or {})

    def __call__(self, file: int, skip: int) -> Iterator[Row]:
        clean = absent_keys(self.rows.features)
        for row in self.rows.shard(num_shards=self.count, index=file, contiguous=False).skip(skip):
            row = row if clean is None else clean(row)
            yield row | {name: _named(row[name], names) for name, names in self.names.items()} if self.names else row


def _named(index: int | None, names: list[str]) -> str | None:
    """Return the name of a class; None for -1, which means no class."""
    return None if index is None or index < 0 else names[index]


def open_corpus(rows: IterableDataset) -> Corpus:
    """Return the shards of a streamed data set of `datasets` as the files of a corpus. All count as equally large.

    Args:
        rows: The streamed data set.
    """
    return Corpus((1,) * rows.num_shards, _Shards(rows))


class _OpenFile:
    """The open file of a lane, so that the next block continues without reading earlier rows again."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        self.position: tuple[int, int] | None = None  # (file, row)
        self.rows: Iterator[Row | RowError] = iter(())

    def take(self, file: int, row: int, most: int) -> list[Row | RowError]:
        """Return up to `most` rows of a file from `row` on. Fewer rows mean the end of the file."""
        if self.position != (file, row):
            self.rows = self.corpus.read(file, row)
        rows = list(itertools.islice(self.rows, most))
        self.position = (file, row + len(rows))
        return rows


def assign_files(sizes: Sequence[int], global_size: int) -> list[list[int]]:
    """Assign files to lanes of about equal size. The number of lanes divides `global_size`.

    Each lane gives the same number of rows to a step, so the files of a small lane would be repeated more often.

    Args:
        sizes: Size of each file, in any unit.
        global_size: Rows of a step.

    Returns:
        The files of each lane, as indices into `sizes`.
    """
    filled = sum(size > 0 for size in sizes)
    most = min(global_size, filled, MOST_LANES)
    for count in (n for n in range(most, 0, -1) if global_size % n == 0):
        lanes: list[list[int]] = [[] for _ in range(count)]
        totals = [0] * count
        for file in sorted(range(len(sizes)), key=lambda file: (-sizes[file], file)):
            lane = totals.index(min(totals))
            lanes[lane].append(file)
            totals[lane] += sizes[file]
        if max(totals) <= UNEVEN * sum(totals) / count:
            return [sorted(lane) for lane in lanes]
    return [list(range(len(sizes)))]


def lanes_of(rank: int, processes: int, lanes: int) -> list[int]:
    """Return the lanes that a process reads: the lanes of its rows i of a step, with i % processes == rank.

    Args:
        rank: Rank of the process.
        processes: Number of processes.
        lanes: Number of lanes.
    """
    common = math.gcd(lanes, processes)
    return [lane for lane in range(lanes) if lane % common == rank % common]


@dataclass(frozen=True)
class Lane:
    """A reader with an endless sequence of bins, which depends only on seed, lane, files and options."""

    number: int
    lanes: int
    files: list[int]
    corpus: Corpus
    encode: Callable[[list[Row]], list[list[Row] | RowError]]  # each row of a file -> its documents, with "items"
    pack: Callable[[list[Row]], list[Bin]]
    seed: int
    block: int  # rows read, encoded and shuffled together
    most_bad: int = 0  # allowed number of rows that cannot be used

    def bins(self, start: Cursor) -> Iterator[LaneItem]:
        """Yield bins without end.

        Args:
            start: Cursor of the first bin.

        Raises:
            RunError: A pass over all files has nothing to train.
            InputError: This lane alone has more than `most_bad` rows that cannot be used.
        """
        cursor, is_filled, open_file = start, False, _OpenFile(self.corpus)
        unreported: list[BadRow] = []
        while True:
            block, after, counts, bad = self._block(cursor, open_file)
            if not cursor.taken:  # the rows of a block that was begun before are counted and reported already
                cursor = cursor._replace(counts=cursor.counts.plus(counts))
                unreported += bad
                if bad and cursor.counts.bad > self.most_bad:
                    raise bad_rows_error(self.corpus, bad, cursor.counts.bad, self.most_bad)
            for taken in range(cursor.taken, len(block)):
                is_filled = True
                yield LaneItem(cursor._replace(taken=taken + 1), block[taken], unreported)
                unreported = []
            after = after._replace(counts=cursor.counts)
            if after.epoch > cursor.epoch:
                if not is_filled and (cursor.epoch > start.epoch or start[1:4] == (0, 0, 0)):
                    files = f"{len(self.files)} of its {len(self.corpus.sizes)} files"
                    raise RunError(f"data.train: no trainable row in {files}")
                is_filled = False
            cursor = after

    def progress(self, cursor: Cursor) -> float:
        """Return the number of passes over the files until a cursor. Only completely read files count."""
        return cursor.epoch + cursor.file / len(self.files)

    def _block(self, cursor: Cursor, open_file: _OpenFile) -> tuple[list[Bin], Cursor, Counts, list[BadRow]]:
        """Return (shuffled bins of the block at a cursor, cursor of the next block, counts, bad rows)."""
        files = self._files(cursor.epoch)
        # The first block has a different size in each lane, so that lanes do not all encode in the same step.
        is_first = cursor[:3] == (0, 0, 0)
        size = max(1, self.block * (self.number + 1) // self.lanes) if is_first else self.block
        documents: list[Row] = []
        counts, bad = Counts(), list[BadRow]()
        file, row, read = cursor.file, cursor.row, 0
        while file < len(files) and read < size:
            most = min(size - read, ROWS_ENCODED_AT_ONCE)
            raw = open_file.take(files[file], row, most)
            encoded, chunk_counts, unusable = self._documents(raw, files[file], row, cursor.epoch)
            documents += encoded
            counts, bad = counts.plus(chunk_counts), bad + unusable
            row, read = row + len(raw), read + len(raw)
            if len(raw) < most:
                file, row = file + 1, 0
        after = Cursor(cursor.epoch, file, row, 0) if file < len(files) else Cursor(cursor.epoch + 1, 0, 0, 0)
        bins = self.pack(documents)
        order = epoch_order(len(bins), seed_of(self.seed, self.number, cursor.file, cursor.row), cursor.epoch)
        return [bins[i] for i in order], after, counts, bad

    def _files(self, epoch: int) -> list[int]:
        """Return the files of this lane in the order of an epoch."""
        order = epoch_order(len(self.files), seed_of(self.seed, self.number), epoch)
        return [self.files[i] for i in order]

    def _documents(
        self, raw: list[Row | RowError], file: int, first: int, epoch: int
    ) -> tuple[list[Row], Counts, list[BadRow]]:
        """Return (documents, counts, bad rows) of the rows of a file from row `first` on."""
        documents: list[Row] = []
        bad: list[BadRow] = []
        cut = dropped = untrained = 0
        encoded = iter(self.encode([row for row in raw if not isinstance(row, RowError)]))
        for row, content in enumerate(raw, start=first):
            if isinstance(content, EmptyLine):
                continue
            result = content if isinstance(content, RowError) else next(encoded)
            if isinstance(result, RowError):
                bad.append(BadRow(file, row, str(result)))
                continue
            if len(result) > DOCUMENTS_PER_ROW or row >= ROWS_PER_FILE:
                raise RunError(
                    f"{self.corpus.name(file)}: row {row + 1} becomes {len(result)} rows; the limits are "
                    f"{DOCUMENTS_PER_ROW} for a row and {ROWS_PER_FILE} rows for a file"
                )
            number = (file * ROWS_PER_FILE + row) * DOCUMENTS_PER_ROW
            trained = [d | {"id": number + n, "epoch": epoch} for n, d in enumerate(result) if d["items"]]
            documents += trained
            cut += any(d.get("cut", False) for d in result)
            dropped += not result
            untrained += bool(result) and not trained
        bad = bad if epoch == 0 else []
        return documents, Counts(len(raw), cut, dropped, untrained, len(bad)), bad


def bad_rows_error(corpus: Corpus, newest: Sequence[BadRow], count: int, most_bad: int) -> InputError:
    """Return the error for too many unusable rows. It names the first row above the limit.

    Args:
        corpus: The corpus of the rows.
        newest: The latest of the unusable rows.
        count: Number of all unusable rows.
        most_bad: The limit.
    """
    first = newest[max(len(newest) - (count - most_bad), 0)]
    more = f" (more than data.max_bad_rows {most_bad} rows cannot be used)" if most_bad else ""
    return InputError(corpus.describe(first) + more, hint=BAD_ROW_HINT)


class StreamBatch(NamedTuple):
    """A micro-batch of one process, and the cursor of each of its lanes after the step."""

    rows: list[Bin]
    cursors: list[tuple[int, Cursor]]  # (lane, cursor)
    bad: list[BadRow]  # bad rows of this step that this process reports; only in its first micro-batch


class StreamOrder:
    """An endless sequence of the micro-batches of one process."""

    def __init__(self, lanes: Sequence[Lane], *, rank: int, processes: int, global_size: int, micro_size: int) -> None:
        self.lanes, self.rank, self.processes = lanes, rank, processes
        self.global_size, self.micro_size = global_size, micro_size
        self.cursors = [Cursor(0, 0, 0, 0)] * len(lanes)  # start of each lane
        # Several processes may read the same lane. The first of them reports its bad rows.
        self.reports_bad_rows = rank < math.gcd(len(lanes), processes)

    def __iter__(self) -> Iterator[StreamBatch]:
        cursors = list(self.cursors)
        streams = {n: self.lanes[n].bins(cursors[n]) for n in lanes_of(self.rank, self.processes, len(self.lanes))}
        while True:
            rows: list[Bin] = []
            bad: list[BadRow] = []
            for i in range(self.global_size):
                lane = i % len(self.lanes)
                if lane in streams:
                    cursors[lane], row, bad_rows = next(streams[lane])
                    bad += bad_rows if self.reports_bad_rows else []
                    if i % self.processes == self.rank:
                        rows.append(row)
            after = [(lane, cursors[lane]) for lane in streams]
            for first in range(0, len(rows), self.micro_size):
                yield StreamBatch(rows[first : first + self.micro_size], after, [] if first else bad)
