"""Encode the raw rows of one source with a task, on several processes, into Arrow files.

The task and the recipe decide about rows that cannot be used as they are. Such rows are counted here.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.data.table_nulls import absent_keys
from ftcli.data.task_encoders import check_encoders, encode_rows
from ftcli.runtime.log import log_line
from ftcli.runtime.opened_files import OpenedFiles, recording

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event

    import numpy as np
    import pyarrow as pa
    from datasets import Dataset
    from numpy.typing import NDArray

    from ftcli.runtime.errors import RowError
    from ftcli.tasks.protocol import Row, Task


CHUNK = 512  # rows of one file, encoded by one process
BATCH = 256  # rows of one call of the task; also the size of the first chunk, because all processes wait for it
PARALLEL_FROM = 4096  # number of rows from which several processes encode; with fewer, starting them takes longer
QUIET_SECONDS = 30.0  # seconds between log lines about progress without a terminal
_process: dict[str, Any] = {}  # in a process of the pool: the function `work`, the pool's stop flag and a thread


@dataclass
class Counts:
    """Row counts of one source. `rows` counts source rows; `documents` counts prepared rows."""

    rows: int = 0
    documents: int = 0
    tokens: int = 0
    items: int = 0
    cut: int = 0  # rows that were shortened
    dropped: int = 0  # rows without a document
    split: int = 0  # rows that became several documents
    split_documents: int = 0  # documents of the rows that became several
    untrained: int = 0  # rows without trainable tokens
    untrained_cut: int = 0  # rows that lost all trainable tokens when they were shortened
    weightless: int = 0  # rows with weight 0
    bad: list[tuple[int, str]] = field(default_factory=list)  # (row number from 0, error)
    opened: list[OpenedFiles] = field(default_factory=list)  # by a custom task, one for each chunk

    def add(self, other: Counts) -> None:
        """Add the counts of other rows of the source."""
        for count in fields(self):
            setattr(self, count.name, getattr(self, count.name) + getattr(other, count.name))

    def why_none(self, length: int) -> str:
        """Return a hint for a source of which every row was left out.

        Args:
            length: `data.max_length`.
        """
        longer = f"{self.dropped:,} of {self.rows:,} rows are longer than data.max_length {length}: raise it"
        weightless = f"{self.weightless:,} of {self.rows:,} rows have weight 0"
        reasons = [longer] * (self.dropped > 0) + [weightless] * (self.weightless > 0)
        if self.bad:
            row, reason = self.bad[0]
            reasons.append(f"{len(self.bad):,} of {self.rows:,} rows cannot be used; row {row + 1}: {reason}")
        return "; ".join(reasons)


def encode_source(
    task: Task,
    rows: Dataset,
    indices: NDArray[np.int64],
    facts: dict[str, Any],
    folder: Path,
    *,
    title: str,
    most_bad: int,
    processes: int,
    files: OpenedFiles | None = None,
) -> Counts:
    """Encode rows with a task, and write the documents into Arrow files of at most `CHUNK` rows, in order.

    Stops early if more than `most_bad` rows cannot be used.

    Args:
        task: The task.
        rows: All rows of the source.
        indices: `[selected rows]` indices of the rows to encode.
        facts: Result of the task's survey.
        folder: New folder for the files.
        title: Name of the source for the progress display.
        most_bad: Allowed number of unusable rows.
        processes: Number of processes for many rows.
        files: Receives the files that a custom task opens.

    Returns:
        Counts of the encoded rows.

    Raises:
        RuntimeError: A process failed. The message contains its traceback.
    """
    folder.mkdir(parents=True)
    nothing = contextlib.nullcontext()
    if len(indices):
        with nothing if files is None else recording(files):
            check_encoders(task, _rows_at(rows, indices[:1])[0], facts)
    bounds = [0, *range(BATCH, len(indices), CHUNK), len(indices)]
    chunks = len(bounds) - 1

    def work(number: int) -> Counts:
        some, opened = indices[slice(*bounds[number : number + 2])], OpenedFiles()
        with nothing if files is None else recording(opened):
            counts = _encode_chunk(task, rows, some, facts, _path(folder, number))
        counts.opened = [] if files is None else [opened]
        return counts

    total = Counts()
    with _progress(title, len(indices)) as advance, _garbage_collection_frozen():
        in_parallel = len(indices) >= PARALLEL_FROM and processes > 1
        for counts in _in_processes(work, chunks, processes) if in_parallel else map(work, range(chunks)):
            for opened in counts.opened:
                assert files is not None
                files.add(opened)
            counts.opened = []
            total.add(counts)
            advance(counts.rows)
            if len(total.bad) > most_bad:
                break
    total.bad.sort()
    return total


def encoded_files(folder: Path) -> list[Path]:
    """Return the files that `encode_source` wrote, in the order of the rows."""
    return sorted(folder.glob("*.arrow"))


def usable_processors() -> int:
    """Return the number of processors that this process may use; 1 on systems where forking is not safe."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1


def _path(folder: Path, number: int) -> Path:
    """Return the path of the file of a chunk."""
    return folder / f"{number:08d}.arrow"


def _encode_chunk(task: Task, rows: Dataset, indices: NDArray[np.int64], facts: dict[str, Any], path: Path) -> Counts:
    """Encode the rows of a chunk into one file, and return their counts."""
    import pyarrow as pa

    counts, documents, clean = Counts(), [], absent_keys(rows.features)
    for start in range(0, len(indices), BATCH):
        numbers = indices[start : start + BATCH]
        raw = _rows_at(rows, numbers)
        raw = raw if clean is None else [clean(row) for row in raw]
        for number, result in zip(numbers.tolist(), encode_rows(task, raw, facts), strict=True):
            documents += _trainable_documents(number, result, counts)
    if documents:
        names = list(dict.fromkeys(name for row in documents for name in row))
        table = pa.table({name: _column(name, [row.get(name) for row in documents]) for name in names})
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    return counts


@contextlib.contextmanager
def _garbage_collection_frozen() -> Iterator[None]:
    """Exclude all existing objects from garbage collection within this context.

    Each collection would visit the objects of torch and transformers. In a forked process that copies their memory.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _rows_at(rows: Dataset, numbers: NDArray[np.int64]) -> list[Row]:
    """Return the rows with these numbers as mappings."""
    first, last = int(numbers[0]), int(numbers[-1])
    columns = rows[first : last + 1] if last - first + 1 == len(numbers) else rows[numbers.tolist()]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _trainable_documents(number: int, result: list[Row] | RowError, counts: Counts) -> list[Row]:
    """Return the documents of one row that have trainable tokens, with the row's number. Updates the counts."""
    counts.rows += 1
    if isinstance(result, ValueError):
        counts.bad.append((number, str(result)))
        return []
    if any(row.pop("has_no_weight", False) for row in result):  # all rows of one example have it, or none
        counts.weightless += 1
        return []
    documents, was_cut, lost_all, pieces = [], False, False, 0
    for row in result:
        lost_all |= row.get("cut", False) and not row.pop("never_trained", False)
        was_cut |= row.pop("cut", False)
        pieces += row.pop("is_piece", True)
        if items := row.get("items", 1):
            counts.items += items
            counts.tokens += len(row.get("input_ids", ()))
            documents.append({**row, "row": number})
    counts.documents += len(documents)
    counts.dropped += not result
    counts.cut += was_cut
    if pieces > 1:
        counts.split += 1
        counts.split_documents += len(documents)
    if result and not documents:
        counts.untrained += 1
        counts.untrained_cut += lost_all
    return documents


def _column(name: str, values: list[Any]) -> pa.Array:
    """Return the values of a column as an Arrow array."""
    import pyarrow as pa

    known = {
        "input_ids": pa.list_(pa.int32()),
        "trained": pa.list_(pa.bool_()),
        "turn_weights": pa.list_(pa.float32()),
    }
    return pa.array(values, type=known.get(name))


def _in_processes(work: Callable[[int], Counts], chunks: int, processes: int) -> Iterator[Counts]:
    """Yield the counts of every chunk when it is done. Forked processes encode all chunks but the first.

    This process encodes the first chunk, so that forked processes inherit filled caches of tokenizer and template.
    """
    context = multiprocessing.get_context("fork")
    stopped = context.Event()
    pool = ProcessPoolExecutor(min(processes, chunks - 1), context, _start_process, (work, stopped))
    # Each process encodes in one thread. Without the variable the tokenizers library warns about the fork.
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield work(0)
        for future in as_completed([pool.submit(_run_chunk, number) for number in range(1, chunks)]):
            answer = future.result()
            if isinstance(answer, str):
                raise RuntimeError(f"a process that prepares rows failed:\n{answer}")
            yield answer
    except BrokenProcessPool:
        raise RuntimeError("a process that prepares rows died; was it out of memory?") from None
    finally:
        stopped.set()
        pool.shutdown(cancel_futures=True)
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _start_process(work: Callable[[int], Counts], stopped: Event) -> None:
    """Prepare a new process of the pool for `_run_chunk`.

    Tokenizers need a fifth less time in a thread (docs/explanation/performance.md). The likely reason is that the main
    thread's memory is fragmented since the program's start, while glibc gives a new thread memory of its own.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends the signal to the parent process too
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _process.update(work=work, stopped=stopped, thread=ThreadPoolExecutor(1))


def _end_with_parent() -> None:
    """End this process when its parent is killed. Otherwise it would wait for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run_chunk(number: int) -> Counts | str:
    """Return the counts of a chunk, or the traceback as text: an exception may not survive pickling."""
    try:
        if _process["stopped"].is_set():
            return Counts()
        counts: Counts = _process["thread"].submit(_process["work"], number).result()
        return counts
    except Exception:
        return traceback.format_exc()


@contextlib.contextmanager
def _progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show progress: a bar on a terminal, else a log line every `QUIET_SECONDS`."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            yield partial(progress.advance, progress.add_task(f"preparing {title}", total=total))
        return
    done, logged = 0, time.monotonic()

    def advance(more: int) -> None:
        nonlocal done, logged
        done += more
        if time.monotonic() - logged > QUIET_SECONDS:
            logged = time.monotonic()
            log_line(f"preparing {title}: {done:,} of {total:,} rows", every_rank=True)

    yield advance
