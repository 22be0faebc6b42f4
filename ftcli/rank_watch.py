"""What goes wrong with launched ranks, as their parent sees it: failures they record, and deaths without a word.

A rank that ends takes its heartbeat away, and one that fails has recorded its error before; so a heartbeat whose
process is gone, and no record, is a rank that was killed: by the system for lack of host memory, or by a crash outside
of Python. Its peers only tell that a connection broke, and torchrun keeps its own report for half a minute, as long
as it waits for them. Light: never imports torch.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from typing import Any

from .errors import EXIT_INPUT
from .faults import failure_records
from .run_folder import HEARTBEATS, RunFolder


class RankWatch:
    """The trouble of one launch; what was seen first is the cause, what comes later may be its consequence."""

    def __init__(self, folder: RunFolder, launch: str) -> None:
        self.since: float | None = None  # when trouble was seen first, on the monotonic clock
        self.lost: list[int] = []  # ranks that had died without a word by then
        self.is_input = False  # a rank told what is wrong with the user's input
        self._folder, self._launch = folder, launch
        self._stale = failure_records(folder)
        self._processes: dict[str, int | None] = {}  # name of a heartbeat -> its process; None: of another launch

    def look(self) -> None:
        """See whether ranks are in trouble by now; does nothing once they are."""
        if self.since is not None:
            return
        gone = self._gone()  # before the records are read: a rank may record and end in between
        records = self.records()
        recorded = {record["rank"] for record in records}
        lost = [rank for rank in gone if rank not in recorded]
        if recorded or lost:
            self.since, self.lost = time.monotonic(), lost
            self.is_input = any(record["exit_code"] == EXIT_INPUT for record in records)

    def records(self) -> list[dict[str, Any]]:
        """Return the failures that ranks of this run have recorded, the earliest first."""
        return [record for record in failure_records(self._folder) if record not in self._stale]

    def told(self) -> str:
        """Return which ranks died without a word, as one line; an empty string when none did."""
        if not self.lost:
            return ""
        names = f"rank {self.lost[0]}" if len(self.lost) == 1 else f"ranks {', '.join(map(str, self.lost))}"
        if not _takes_files(self._folder):
            return (
                f"{names} failed and could not record why, as {self._folder.path} takes no files any more; what they "
                "printed stands above. Checkpoints that stand are whole; when the disk takes files again, --resume "
                "auto goes on"
            )
        return (
            f"{names} died without recording an error, as a process does that the system kills, for instance for lack "
            "of host memory"
        )

    def _gone(self) -> list[int]:
        """Return the ranks whose heartbeat stands though their process is gone; each file is read once."""
        found = []
        for path in (self._folder.path / HEARTBEATS).glob("rank-*.json"):
            if path.name not in self._processes:
                with suppress(FileNotFoundError):
                    beat = json.loads(path.read_text(encoding="utf-8"))
                    self._processes[path.name] = beat["process"] if beat["launch"] == self._launch else None
            process = self._processes.get(path.name)
            if process is not None and _is_dead(process) and path.exists():
                found.append(int(path.stem.removeprefix("rank-")))
        return sorted(found)


def _takes_files(folder: RunFolder) -> bool:
    probe = folder.path / f".room.{os.getpid()}"
    try:
        probe.write_bytes(bytes(4096))  # of one record
        probe.unlink()
    except OSError:
        with suppress(OSError):
            probe.unlink()
        return False
    return True


def _is_dead(process: int) -> bool:
    import psutil

    try:
        return bool(psutil.Process(process).status() == psutil.STATUS_ZOMBIE)  # its launcher has not looked yet
    except psutil.NoSuchProcess:
        return True
