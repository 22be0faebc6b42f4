"""A checkpoint's way to the disk beside training: one thread on each rank, and one outcome on all of them.

The ranks agree from these threads, in a group of their own (`Ranks`), because messages of two threads must not mix in
one. So a checkpoint is complete as soon as the slowest disk is done, whatever the main threads do meanwhile. Waiting
for it is what brings an error to the main thread, at the same place on every rank. Light: never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from .errors import DiskError

if TYPE_CHECKING:
    from .hardware.ranks import Ranks

T = TypeVar("T")


class Saving:
    """What is being saved in the background: one checkpoint at most.

    Use as a context manager around training: leaving it waits for the disk. A process that ends without waits too,
    but then nobody learns of an error.
    """

    def __init__(self) -> None:
        self.has_room: bool | None = None  # for the copies of every rank on its host; None: not looked at yet
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ftcli-saving")
        self._last: Future[object] | None = None

    def __enter__(self) -> Saving:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
        elif isinstance(error, Exception) and self._last is not None:  # an interrupt waits for nothing
            wait_for([self._last])  # let what is good be complete; this error is the one to tell

    def start(self, work: Callable[[], object]) -> None:
        """Begin with a checkpoint when the last one is on the disk; raises the last one's error."""
        self.wait()
        self._last = self._thread.submit(work)

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk, and raise its error if it is not."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    @property
    def pending(self) -> bool:
        """Whether a checkpoint was started that nobody has waited for yet."""
        return self._last is not None

    def failed(self) -> bool:
        """Return whether waiting would raise; returns at once."""
        return self._last is not None and self._last.done() and self._last.exception() is not None


def on_every_rank(ranks: Ranks, what: str, work: Callable[[], T]) -> list[T]:
    """Return what `work()` returned on each rank, in order of rank; a collective in the savers' group.

    When it fails anywhere an error is raised everywhere: `what` failed, on which rank, and how. It is a `DiskError`
    where disks alone are to blame, else a `RuntimeError`.
    """
    value, error = None, None
    try:
        value = work()
    except Exception as caught:
        error = caught
    told = "" if error is None else f"{type(error).__name__}: {error}"
    found = ranks.collect((value, told, isinstance(error, OSError)), background=True)
    failures = [f"rank {rank}: {failure}" for rank, (_, failure, _) in enumerate(found) if failure]
    if failures:
        of_disks = all(is_of_disk for _, failure, is_of_disk in found if failure)
        raise (DiskError if of_disks else RuntimeError)(f"{what}: {'; '.join(failures)}") from error
    return [result for result, *_ in found]
