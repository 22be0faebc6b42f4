"""Write checkpoints in a background thread of each rank while training continues.

The threads of all ranks communicate over a separate process group (`Ranks`), because messages of two threads must not
mix in one group. A checkpoint is complete when the slowest disk has finished. Its error is raised when the main thread
waits for it, at the same place on every rank. The module never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from ftcli.runtime.errors import DiskError
from ftcli.runtime.log import log_line

if TYPE_CHECKING:
    from ftcli.hardware.collectives import Ranks


T = TypeVar("T")
_unfinished: set[Future[object]] = set()  # checkpoints of all runs of this process


def wait_for_unfinished() -> None:
    """Wait for checkpoints that earlier runs of this process are still writing, as after an error in a notebook.

    Otherwise a new run would not find the newest of them, and would delete its unfinished folder. An error of such a
    checkpoint is logged only: the run that wrote it raises it.
    """
    for checkpoint in list(_unfinished):
        if (error := checkpoint.exception()) is not None:
            log_line(f"a checkpoint of an earlier run of this process was not completed: {error}")


class BackgroundSaver:
    """Background thread that saves one checkpoint at a time.

    Use the saver as a context manager around training. The block waits for the last checkpoint at its end and raises
    errors of saving. Without the block, the process waits at its exit and raises no error.

    Attributes:
        has_room: Whether the host of every rank has memory for the copies; None before it is checked.
    """

    def __init__(self) -> None:
        self.has_room: bool | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ftcli-saving")
        self._last: Future[object] | None = None

    def __enter__(self) -> BackgroundSaver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
        elif isinstance(error, Exception) and self._last is not None:  # do not wait after an interrupt
            wait_for([self._last])  # a valid checkpoint becomes complete; `error` is the one to report

    def start(self, work: Callable[[], object]) -> None:
        """Wait until the previous checkpoint is on disk, then start the next one.

        Args:
            work: Writes the checkpoint.

        Raises:
            Exception: The error of the previous checkpoint.
        """
        self.wait()
        self._last = self._thread.submit(work)
        _unfinished.add(self._last)
        self._last.add_done_callback(_unfinished.discard)

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk, and raise its error if writing failed."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    @property
    def pending(self) -> bool:
        """Whether `wait` has not been called since the last checkpoint was started."""
        return self._last is not None

    def failed(self) -> bool:
        """Return whether `wait` would raise an error now. Does not wait."""
        return self._last is not None and self._last.done() and self._last.exception() is not None


def run_on_every_rank(ranks: Ranks, what: str, work: Callable[[], T]) -> list[T]:
    """Call `work` on every rank, and raise an error on all ranks if it fails on any. A collective of saving threads.

    Args:
        ranks: The processes of the run.
        what: The operation, for the message.
        work: The function to call.

    Returns:
        The results of all ranks, in order of rank.

    Raises:
        DiskError: All failures are errors of disks. The message names the ranks.
        RuntimeError: There is another failure.
    """
    value, error = None, None
    try:
        value = work()
    except Exception as caught:
        error = caught
    failure = "" if error is None else f"{type(error).__name__}: {error}"
    results = ranks.collect((value, failure, isinstance(error, OSError)), background=True)
    failures = [f"rank {rank}: {failure}" for rank, (_, failure, _) in enumerate(results) if failure]
    if failures:
        are_of_disks = all(is_of_disk for _, failure, is_of_disk in results if failure)
        raise (DiskError if are_of_disks else RuntimeError)(f"{what}: {'; '.join(failures)}") from error
    return [result for result, *_ in results]
