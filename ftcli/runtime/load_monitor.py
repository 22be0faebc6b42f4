"""Sample the load of each rank beside the training loop, and report idle or throttled GPUs and low host memory.

Each rank has a thread that samples its own load every few seconds. Ranks other than 0 write the newest sample to a
small file of the run folder. The thread of rank 0 reads these files, so there is no collective and the loop never
waits. It is not the thread of the heartbeat, because a call of NVML may hang with a faulty GPU, and heartbeats must
then go on. Machines that do not share the run folder are not seen by rank 0. Light: never imports torch.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections import deque
from dataclasses import asdict, fields
from types import TracebackType
from typing import Any

from ftcli.runtime.load_findings import LONG_SECONDS, Finding, find_all
from ftcli.runtime.log import log_line
from ftcli.runtime.machine.load import Load, LoadSampler
from ftcli.runtime.machine.nvml import NvmlMissingError
from ftcli.runtime.process import current_rank, world_size
from ftcli.runtime.run_folder import LOADS, RunFolder
from ftcli.runtime.torn_files import read_object

SAMPLE_SECONDS = 5.0
RECORD_SECONDS = 0.5  # for each rank, the least time between two records, so that many ranks do not fill the disk
QUIET_SECONDS = 600.0  # a finding that returns earlier is not reported again
JOIN_SECONDS = 2.0  # a call of NVML that takes longer is left behind
PREFIX = "load/"
FIELDS = {field.name for field in fields(Load)}


class LoadMonitor:
    """Samples the load of this process between `start` and `stop`, or inside the context.

    Args:
        folder: The run folder; None: nothing is sampled.
    """

    def __init__(self, folder: RunFolder | None = None) -> None:
        self.rank, self.world = current_rank(), world_size()
        self.step = 0  # finished optimizer steps, for events
        self.quiet = False  # write no log lines
        self._folder = folder
        self._lock = threading.Lock()  # of the attributes that the loop and the thread change
        self._pending: dict[int, list[Load]] = {}  # rank -> samples that no row of metrics has
        self._recent: dict[int, deque[Load]] = {}
        self._reported: dict[tuple[str, str], float] = {}  # kind and subject of a finding -> when it was last true
        self._taken = 0.0
        self._gpu: str | None = None
        self._begins = False  # training begins: earlier samples are no part of its metrics
        self._is_missing_logged = False
        self._thread: threading.Thread | None = None
        self._wake, self._end = threading.Event(), threading.Event()

    def __enter__(self) -> LoadMonitor:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start sampling. Without a folder, or if it was started before, nothing changes."""
        if self._folder is None or self._thread is not None:
            return
        self._wake, self._end = threading.Event(), threading.Event()  # a thread left behind keeps its own
        arguments = (self._folder, self._wake, self._end)
        self._thread = threading.Thread(target=self._run, args=arguments, name="ftcli-load", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop sampling, and remove the file of this rank."""
        if self._thread is None or self._folder is None:
            return
        with self._lock:
            self._end.set()
            self._wake.set()
        self._thread.join(JOIN_SECONDS)
        self._thread = None
        with contextlib.suppress(OSError):  # other ranks still have files in it
            (self._folder.path / LOADS / f"rank-{self.rank}.json").unlink(missing_ok=True)
            (self._folder.path / LOADS).rmdir()

    def begin_training(self, gpu: str | None) -> None:
        """Start if needed, and sample the GPU from now on. Only changes memory.

        Args:
            gpu: UUID of the GPU of this process, as CUDA has it; None without one.
        """
        self.start()
        with self._lock:
            self._gpu, self._begins = gpu, True
            self._pending.clear()
            self._wake.set()

    def take(self) -> dict[str, float]:
        """Return the means over the samples since the last call, as values of a row; empty if no record is due."""
        with self._lock:
            if not self._pending or time.monotonic() - self._taken < RECORD_SECONDS * self.world:
                return {}
            taken, self._pending, self._taken = self._pending, {}, time.monotonic()
        return mean_values(taken)

    def _run(self, folder: RunFolder, wake: threading.Event, end: threading.Event) -> None:
        """Sample until the end; the body of the thread."""
        sampler = LoadSampler(self.rank)
        if self.rank == 0:
            for stale in (folder.path / LOADS).glob("rank-*.json"):  # running ranks write their files again
                stale.unlink(missing_ok=True)
        while not end.is_set():
            with self._lock:
                begins, self._begins = self._begins, False
                if not end.is_set():
                    wake.clear()
            with contextlib.suppress(OSError):  # a full disk, a deleted folder
                self._tick(sampler, folder, begins=begins)
            wake.wait(SAMPLE_SECONDS)
        sampler.close()

    def _tick(self, sampler: LoadSampler, folder: RunFolder, *, begins: bool) -> None:
        """Take one sample. Rank 0 also reads and judges those of the other ranks."""
        if begins:
            self._open_gpu(sampler)
        load = sampler.sample()
        if begins:  # its CPU time is that of loading
            return
        if self.rank != 0:
            (folder.path / LOADS).mkdir(exist_ok=True)  # without parents: a deleted run folder is not created again
            RunFolder(folder.path / LOADS).write_json(f"rank-{self.rank}.json", asdict(load), durable=False)
            return
        self._keep(load)
        for path in (folder.path / LOADS).glob("rank-*.json"):
            record = read_object(path)
            if record is not None and record.keys() == FIELDS:  # another version of ftcli may have other fields
                self._keep(Load(**record))
        self._report(find_all(self._recent), folder)

    def _open_gpu(self, sampler: LoadSampler) -> None:
        """Begin to sample the GPU of this process. Without NVML write one line, on rank 0."""
        if self._gpu is None:
            return
        try:
            sampler.open_gpu(self._gpu)
        except NvmlMissingError as missing:
            if not self._is_missing_logged and not self.quiet:
                self._is_missing_logged = True
                log_line(f"the load of GPUs is not recorded: {missing}; {missing.remedy}")

    def _keep(self, load: Load) -> None:
        """Keep a sample of any rank, unless it was kept before."""
        recent = self._recent.setdefault(load.rank, deque())
        if recent and recent[-1].process != load.process:  # of an earlier launch
            recent.clear()
        if recent and recent[-1].number == load.number:
            return
        recent.append(load)
        while load.seconds - recent[0].seconds >= LONG_SECONDS:
            recent.popleft()
        with self._lock:
            if not self._begins:
                self._pending.setdefault(load.rank, []).append(load)

    def _report(self, findings: list[Finding], folder: RunFolder) -> None:
        """Write a line and an event for each finding that is new."""
        now = time.monotonic()
        for finding in findings:
            key = (finding.kind, finding.subject)
            is_known = key in self._reported and now - self._reported[key] < QUIET_SECONDS
            self._reported[key] = now
            if is_known:
                continue
            if not self.quiet:
                log_line(finding.text)
            folder.append_event(finding.kind, self.step, finding.text)


def mean_values(samples: dict[int, list[Load]]) -> dict[str, float]:
    """Return the mean of each value of each rank, named as in rows of metrics: `load/<value>/rank-<r>`.

    Args:
        samples: Samples of each rank.
    """
    collected: dict[tuple[str, int], list[float]] = {}
    for rank, loads in samples.items():
        for load in loads:
            for name, value in load.values.items():
                collected.setdefault((name, rank), []).append(value)
    return {
        f"{PREFIX}{name}/rank-{rank}": round(statistics.fmean(values), 3)
        for (name, rank), values in sorted(collected.items())
    }


def gpu_uuid(device: Any) -> str | None:
    """Return the UUID of a device of torch; None if it is no GPU. Reads properties only and never waits for the device.

    Args:
        device: A `torch.device`.
    """
    if device.type != "cuda":
        return None
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)
