"""Find failed and killed ranks from the parent process.

A rank that fails records its error before it ends. A rank whose process ended without a record and without the run's
result was killed, for instance by the system for lack of host memory, or it crashed outside of Python. The other ranks
report only a broken connection. torchrun reports half a minute later, because it waits for them.

The parent finds the ranks of its machine as processes below the launcher. So it also notices the death of a rank that
has not imported anything yet. Ranks write heartbeats after they have started. A rank that ends normally removes its
heartbeat. Light: never imports torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ftcli.runtime.errors import EXIT_INPUT
from ftcli.runtime.failures import failure_records
from ftcli.runtime.run_folder import FLIGHT_RECORDER, HEARTBEATS, RunFolder, has_checkpoints
from ftcli.runtime.torn_files import read_object

if TYPE_CHECKING:
    from pathlib import Path

    import psutil


STARTING_SECONDS = 5.0  # all ranks of a machine are started within this time


TIMED_OUT = (
    "ended because a collective timed out: another rank did not take part in it, or the network failed; see the output "
    "above"
)


class RankMonitor:
    """Failures of the ranks of one launch. Only the first ones are kept; later ones may be their consequences.

    Args:
        folder: The run folder.
        launch: The launch's token, as in FTCLI_LAUNCHED.
        has_result: Returns whether the launch has written its result. A rank that ends afterwards was not killed.
    """

    def __init__(self, folder: RunFolder, launch: str, has_result: Callable[[], bool] = lambda: False) -> None:
        self.failed_at: float | None = None  # time of the first failure on the monotonic clock, in seconds
        self.lost: list[int] = []  # ranks that had ended without a record by then
        self.is_input = False  # whether a rank recorded an error in the user's input
        self._folder, self._launch, self._has_result = folder, launch, has_result
        self._earlier_records = failure_records(folder)
        self._heartbeat_processes: dict[
            str, int | None
        ] = {}  # file name of a heartbeat -> process id; None: another launch
        self._ranks = _Ranks(launch)

    def check(self, launcher: int | None = None) -> None:
        """Check for failed and killed ranks, until the first failure is found.

        Args:
            launcher: Process id of the running launcher. Ranks are searched among its descendants. None: the launcher
                and its ranks have ended, so that heartbeats alone show which ranks were killed.
        """
        if self.failed_at is not None:
            return
        vanished = self._find_vanished(launcher)  # before records are read, because a rank may record and end between
        records = self.records()
        recorded = {record["rank"] for record in records}
        lost = [rank for rank in vanished if rank not in recorded]
        if recorded or lost:
            self.failed_at, self.lost = time.monotonic(), lost
            self.is_input = any(record["exit_code"] == EXIT_INPUT for record in records)

    @property
    def has_seen_all_ranks(self) -> bool:
        """Whether all ranks of this machine have been seen as processes."""
        return self._ranks.are_complete

    def records(self) -> list[dict[str, Any]]:
        """Return the failures that ranks of this run have recorded, the earliest first."""
        return [record for record in failure_records(self._folder) if record not in self._earlier_records]

    def describe_lost_ranks(self) -> str:
        """Return one line that names the ranks that ended without a record; empty if there are none."""
        if not self.lost:
            return ""
        names = f"rank {self.lost[0]}" if len(self.lost) == 1 else f"ranks {', '.join(map(str, self.lost))}"
        if not _takes_files(self._folder):
            advice = "Existing checkpoints are complete; when files can be written again, --resume auto continues"
            if not has_checkpoints(self._folder.path):
                advice = "No checkpoint was saved yet; when files can be written again, start the run again"
            return (
                f"{names} failed and could not record the reason, because no file can be written to "
                f"{self._folder.path}; see their output above. {advice}"
            )
        if flight_records(self._folder):
            return f"{names} {TIMED_OUT}"
        return (
            f"{names} died without recording an error, as when the system kills a process for lack of host memory; "
            "see the output above, if there is any"
        )

    def _find_vanished(self, launcher: int | None) -> list[int]:
        """Return the ranks whose process ended although the launch has no result and the rank did not finish."""
        missing = [] if launcher is None else self._ranks.missing(launcher)
        dead = self._dead_heartbeats()
        # A heartbeat that was seen before and is missing now was removed by a rank that ended normally.
        missing = [rank for rank in missing if self._heartbeat_processes.get(_heartbeat(rank)) is None]
        if missing and self._has_result():
            missing = []
        return sorted({*dead, *missing})

    def _dead_heartbeats(self) -> list[int]:
        """Return the ranks whose heartbeat file exists although their process has ended. Each file is read once."""
        dead = []
        ours = {_heartbeat(rank) for rank in self._ranks.processes}  # a file of an earlier run may exist at first
        for path in (self._folder.path / HEARTBEATS).glob("rank-*.json"):
            is_foreign = path.name in self._heartbeat_processes and path.name not in ours
            if (
                self._heartbeat_processes.get(path.name) is None
                and not is_foreign
                and (beat := read_object(path)) is not None
            ):
                self._heartbeat_processes[path.name] = beat["process"] if beat["launch"] == self._launch else None
            process = self._heartbeat_processes.get(path.name)
            if process is not None and _is_dead(process) and path.exists():
                dead.append(int(path.stem.removeprefix("rank-")))
        return dead


class _Ranks:
    """The rank processes of one launch on this machine, found by the environment variables that the launcher sets."""

    def __init__(self, launch: str) -> None:
        self._launch = launch
        self.processes: dict[int, int] = {}  # rank -> process id
        self._expected: set[int] = set()  # ranks of this machine; known from the first one that was seen
        self._first_seen_at = 0.0  # on the monotonic clock, in seconds

    @property
    def are_complete(self) -> bool:
        """Whether all ranks of this machine have been seen."""
        return bool(self._expected) and self._expected <= self.processes.keys()

    def missing(self, launcher: int) -> list[int]:
        """Return the ranks of this machine that do not run; empty until the first rank was seen."""
        if not self.are_complete:
            self._scan_children(launcher)
        dead = {rank for rank, process in self.processes.items() if _is_dead(process)}
        late = set[int]()
        if self._expected and time.monotonic() - self._first_seen_at > STARTING_SECONDS:
            late = self._expected - self.processes.keys()  # started and ended between two checks
        return sorted(dead | late)

    def _scan_children(self, launcher: int) -> None:
        import psutil

        with suppress(psutil.Error):  # the launcher has ended
            for process in psutil.Process(launcher).children(recursive=True):
                self._add_if_rank(process)

    def _add_if_rank(self, process: psutil.Process) -> None:
        """Record a process if it is a rank: RANK is set for it and not for its parent, unlike for a rank's children."""
        import psutil

        with suppress(psutil.Error, ValueError):
            own = process.environ()
            if own.get("FTCLI_LAUNCHED") != self._launch or "RANK" not in own:
                return
            parent = process.parent()
            if parent is None or "RANK" in parent.environ():
                return
            rank, local = int(own["RANK"]), int(own.get("LOCAL_RANK", "0"))
            self.processes[rank] = process.pid
            if not self._expected:
                self._first_seen_at = time.monotonic()
            self._expected |= set(range(rank - local, rank - local + int(own.get("LOCAL_WORLD_SIZE", "0"))))


def flight_records(folder: RunFolder) -> list[Path]:
    """Return the files of NCCL's flight recorder, one for each rank. They are written when a collective times out."""
    return sorted(folder.path.glob(f"{FLIGHT_RECORDER}*"))


def _heartbeat(rank: int) -> str:
    return f"rank-{rank}.json"


def _takes_files(folder: RunFolder) -> bool:
    """Return whether a file of the size of a failure record can be written into the folder."""
    probe = folder.path / f".room.{os.getpid()}"
    try:
        probe.write_bytes(bytes(4096))
        probe.unlink()
    except OSError:
        with suppress(OSError):
            probe.unlink()
        return False
    return True


def _is_dead(process: int) -> bool:
    """Return whether a process has ended, even if its parent has not collected its exit code."""
    import psutil

    try:
        return bool(psutil.Process(process).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
