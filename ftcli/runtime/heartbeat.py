"""Write the phase and the step of each rank to a small file of the run folder, and find the slowest rank.

All ranks go through the same phases, and each counts its phase changes. The other ranks wait for the rank with the
lowest count. The main thread only records a change in memory. A background thread writes the file every two seconds, so
that a slow disk does not delay a step. On rank 0 that thread also checks whether the current step takes much longer
than usual. Each rank measures durations with its own monotonic clock, and times of two machines are never compared.
Light: never imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ftcli.runtime.log import log_line
from ftcli.runtime.process import current_rank, launch_token, world_size
from ftcli.runtime.run_folder import HEARTBEATS, RunFolder

WRITE_SECONDS = 2.0
FACTOR = 10  # a lap is slow when it takes this many times the median of earlier laps of its kind
LEAST_SECONDS = 10.0  # shorter laps are never slow
FIRST_SECONDS = 300.0  # a lap without earlier laps of its kind is slow after this time
SEPARATE_PHASES = ("loading", "evaluating", "answering", "saving")  # each is its own lap; other phases form a step


@dataclass(slots=True)
class Beat:
    """The current phase of one rank."""

    count: int  # phase changes so far
    phase: str
    step: int  # finished optimizer steps
    since: float  # start of the phase in seconds, on the monotonic clock of this process


class Heartbeat:
    """Records the phase of this process. As a context manager it also writes heartbeat files and watches on rank 0.

    Args:
        folder: The run folder; None writes no files.
    """

    def __init__(self, folder: RunFolder | None = None) -> None:
        self.rank, self.world = current_rank(), world_size()
        self.now = Beat(0, SEPARATE_PHASES[0], 0, time.monotonic())
        self._folder = None if folder is None else folder.path / HEARTBEATS
        self._lap, self._lap_began = (SEPARATE_PHASES[0], 0), time.monotonic()
        self._laps: dict[str, deque[float]] = {}
        self._reported_lap: float | None = None  # start of the last lap that was reported as slow
        self._ages = HeartbeatAges()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ftcli-heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        if self._folder is not None:
            if self.rank == 0:
                for stale in self._folder.glob("rank-*.json"):  # running ranks write their files again
                    stale.unlink(missing_ok=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        if self._folder is None:
            return
        self._thread.join()
        if error is None:  # the last phases of a failed run stay, because they help to find the cause
            (self._folder / f"rank-{self.rank}.json").unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # other ranks still have files in it
                self._folder.rmdir()

    def beat(self, phase: str, step: int) -> None:
        """Record that this process enters a phase. Only changes memory.

        Args:
            phase: Name of the phase.
            step: Number of finished optimizer steps.
        """
        self.now = Beat(self.now.count + 1, phase, step, time.monotonic())
        lap = (phase if phase in SEPARATE_PHASES else "step", step)
        if lap != self._lap:
            began = time.monotonic()
            self._laps.setdefault(self._lap[0], deque(maxlen=101)).append(began - self._lap_began)
            self._lap, self._lap_began = lap, began

    def _run(self) -> None:
        """Write the heartbeat every two seconds until the context ends; the body of the background thread."""
        assert self._folder is not None
        while True:
            with contextlib.suppress(OSError, ValueError):  # a full disk, a deleted folder, an incomplete file
                self._write(self.now)
                if self.rank == 0:
                    self._ages.update(self._folder)
                    self._report_slow_lap()
            if self._end.wait(WRITE_SECONDS):
                return

    def _write(self, beat: Beat) -> None:
        assert self._folder is not None
        process = {"process": os.getpid(), "launch": launch_token()}  # read by rank_monitor.py
        record = asdict(beat) | {"seconds": time.monotonic() - beat.since} | process
        del record["since"]  # a monotonic clock has no meaning in another process
        self._folder.mkdir(exist_ok=True)  # without parents: a deleted run folder is not created again
        RunFolder(self._folder).write_json(f"rank-{self.rank}.json", record, durable=False)

    def _report_slow_lap(self) -> None:
        """Log the slowest rank once for each lap that takes far longer than usual."""
        (kind, step), began = self._lap, self._lap_began
        earlier = list(self._laps.get(kind, ()))
        usual = statistics.median(earlier) if earlier else None
        elapsed = time.monotonic() - began
        limit = FIRST_SECONDS if usual is None else max(LEAST_SECONDS, FACTOR * usual)
        if elapsed <= limit or self._reported_lap == began:
            return
        self._reported_lap = began
        name = "loading" if kind == "loading" else f"{'' if kind == 'step' else f'{kind} after '}step {step}"
        compared = "" if usual is None else f", usually {usual:.1f} s"
        assert self._folder is not None
        slowest = describe_slowest(self._folder, self.world, self._ages)
        line = f"{name} has taken {elapsed:.0f} s{compared}: {slowest}"
        log_line(line, every_rank=True)
        RunFolder(self._folder.parent).append_event("stall", step, line)


class HeartbeatAges:
    """Measures how long each heartbeat file has been unchanged, on the monotonic clock of this process."""

    def __init__(self) -> None:
        # file name -> ((inode, modification time), when this process first saw them, in seconds)
        self._seen: dict[str, tuple[tuple[int, int], float]] = {}

    def update(self, folder: Path) -> None:
        """Record which files of a folder have changed since the last call."""
        now = time.monotonic()
        for entry in os.scandir(folder):
            status = entry.stat()
            stamp = status.st_ino, status.st_mtime_ns
            if self._seen.get(entry.name, (None, 0.0))[0] != stamp:
                self._seen[entry.name] = stamp, now

    def silence(self, rank: int) -> float:
        """Return for how many seconds the heartbeat file of a rank has been unchanged."""
        name = f"rank-{rank}.json"
        return time.monotonic() - self._seen[name][1] if name in self._seen else 0.0


def describe_slowest(folder: Path, world: int, ages: HeartbeatAges) -> str:
    """Return a sentence that names the slowest ranks and their phase.

    Args:
        folder: The folder with the heartbeat files.
        world: Number of ranks.
        ages: Ages of the heartbeat files, as this process has seen them.
    """
    beats: dict[int, dict[str, Any]] = {}
    for rank in range(world):
        path = folder / f"rank-{rank}.json"
        if not path.exists():
            return f"rank {rank} has written no heartbeat yet"
        beats[rank] = json.loads(path.read_text(encoding="utf-8"))
    least = min(beat["count"] for beat in beats.values())
    behind = [rank for rank, beat in beats.items() if beat["count"] == least]
    slowest = beats[behind[0]]
    where = f"{slowest['phase']} (step {slowest['step']}) for {slowest['seconds']:.0f} s"
    silent = ages.silence(behind[0])
    if silent > 5 * WRITE_SECONDS:
        where += f", and has written no heartbeat for {silent:.0f} s"
    if len(behind) == world:
        return f"{'all ranks have' if world > 1 else 'it has'} been in {where}"
    names = f"rank {behind[0]}, has" if len(behind) == 1 else f"ranks {', '.join(map(str, behind))}, have"
    return f"the slowest, {names} been in {where}"
