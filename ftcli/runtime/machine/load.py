"""Sample the load of one process: its GPU through NVML, its CPU time and memory, and what its machine has left.

A sample costs well under a millisecond of processor time without a GPU. Nothing here calls CUDA, so that the device is
never waited for. Light: never imports torch.
"""

from __future__ import annotations

import os
import platform
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftcli.runtime.machine.host_memory import HostMemoryReader
from ftcli.runtime.machine.nvml import POWER_LIMIT, Ask, Nvml, read_slowdowns

GIGA = 10**9
GPU_UTILISATION, GPU_MEMORY, GPU_POWER = "gpu_utilisation_percent", "gpu_memory_gb", "gpu_power_watts"
GPU_TEMPERATURE, GPU_THROTTLED = "gpu_temperature_celsius", "gpu_throttled_percent"
GPU_POWER_LIMITED = "gpu_power_limited_percent"
CPU, PROCESS_MEMORY, HOST_MEMORY = "cpu_percent", "process_memory_gb", "host_memory_available_gb"


@dataclass(frozen=True)
class Load:
    """One sample of the load of a rank. `values` has only what could be read.

    Attributes:
        rank: The rank.
        machine: Name of its machine.
        process: Its process id.
        number: Samples of this process so far.
        seconds: When it was taken, on the monotonic clock of this process.
        values: Name -> value; the unit is the last part of the name.
        host_limit_gb: Memory of the machine or its container, in GB of 10^9 bytes.
        gpu: NVML's number of its GPU; None without one.
        slowdowns: What lowered the clock of the GPU, other than its power limit.
        waited_percent: Of the time in which its threads could run, the part without a core; None if it is not known.
    """

    rank: int
    machine: str
    process: int
    number: int
    seconds: float
    values: dict[str, float]
    host_limit_gb: float
    gpu: int | None = None
    slowdowns: list[str] = field(default_factory=list)
    waited_percent: float | None = None


class LoadSampler:
    """Samples this process and, after `open_gpu`, its GPU. Use one thread only: a call of NVML may take long.

    Args:
        rank: Rank of this process.
        root: Folder that holds proc and sys.
    """

    def __init__(self, rank: int, root: Path = Path("/")) -> None:
        import psutil

        self._rank, self._machine, self._number = rank, platform.node(), 0
        self._process, self._memory = psutil.Process(), HostMemoryReader(root)
        self._nvml: Nvml | None = None
        self._handle: Any = None
        self._gpu: int | None = None
        self._cpu, self._clock = time.process_time(), time.monotonic()
        self._tasks = root / "proc" / "self" / "task"
        self._scheduled = read_scheduled(self._tasks)

    def open_gpu(self, uuid: str) -> None:
        """Sample a GPU from now on.

        Args:
            uuid: The GPU's UUID as CUDA has it, without a first word.

        Raises:
            NvmlMissingError: NVML cannot be used.
        """
        if self._nvml is None:
            self._nvml = Nvml()
        ask = self._nvml.ask
        found = (ask("nvmlDeviceGetHandleByUUID", f"{kind}-{uuid}") for kind in ("GPU", "MIG"))
        self._handle = next((handle for handle in found if handle is not None), None)
        self._gpu = None if self._handle is None else ask("nvmlDeviceGetIndex", self._handle)

    def close(self) -> None:
        """Shut NVML down if it is in use."""
        if self._nvml is not None:
            self._nvml.close()
        self._nvml = self._handle = self._gpu = None

    def _waited_percent(self) -> float | None:
        """Return the part of the time since the previous sample in which threads waited for a core; if known."""
        before, self._scheduled = self._scheduled, read_scheduled(self._tasks)
        each = [(now, before.get(thread, (0, 0))) for thread, now in self._scheduled.items()]
        ran, waited = (sum(now[part] - then[part] for now, then in each) for part in (0, 1))
        return 100 * waited / (ran + waited) if ran + waited > 0 else None

    def sample(self) -> Load:
        """Return the load of this process now. Its CPU time is that since the previous sample."""
        cpu, clock = time.process_time(), time.monotonic()
        share = 100 * (cpu - self._cpu) / max(clock - self._clock, 1e-9)
        self._cpu, self._clock, self._number = cpu, clock, self._number + 1
        host = self._memory.read()
        values = {
            CPU: share,
            PROCESS_MEMORY: self._process.memory_info().rss / GIGA,
            HOST_MEMORY: host.available / GIGA,
        }
        slowdowns: list[str] | None = None
        if self._nvml is not None and self._handle is not None:
            slowdowns = read_slowdowns(self._handle, self._nvml.ask)
            values |= _gpu_values(self._handle, self._nvml.ask, slowdowns)
        return Load(
            rank=self._rank,
            machine=self._machine,
            process=self._process.pid,
            number=self._number,
            seconds=clock,
            values=values,
            host_limit_gb=host.limit / GIGA,
            gpu=self._gpu,
            slowdowns=[reason for reason in slowdowns or () if reason != POWER_LIMIT],
            waited_percent=self._waited_percent(),
        )


def read_scheduled(tasks: Path) -> dict[str, tuple[int, int]]:
    """Return how long each thread of a process has run, and has waited for a core, in nanoseconds, by its id.

    Args:
        tasks: The folder /proc/PID/task. Systems without it, or without its statistics, give nothing.
    """
    times: dict[str, tuple[int, int]] = {}
    if not tasks.is_dir():
        return times
    for name in os.listdir(tasks):  # a run has many threads, so this loop is kept short
        with suppress(OSError, ValueError), open(f"{tasks}/{name}/schedstat", "rb") as file:  # it may have ended
            ran, waited, _ = map(int, file.read().split())
            times[name] = (ran, waited)
    return times


def _gpu_values(handle: Any, ask: Ask, slowdowns: list[str] | None) -> dict[str, float]:
    """Return what NVML knows of a GPU. Values that it lacks or may not read are left out."""
    rates, memory = ask("nvmlDeviceGetUtilizationRates", handle), ask("nvmlDeviceGetMemoryInfo", handle)
    power, temperature = ask("nvmlDeviceGetPowerUsage", handle), ask("nvmlDeviceGetTemperature", handle, 0)
    values = {
        GPU_UTILISATION: None if rates is None else float(rates.gpu),
        GPU_MEMORY: None if memory is None else memory.used / GIGA,
        GPU_POWER: None if power is None else power / 1000,  # NVML has milliwatts
        GPU_TEMPERATURE: None if temperature is None else float(temperature),
    }
    if slowdowns is not None:
        values[GPU_THROTTLED] = 100.0 * any(reason != POWER_LIMIT for reason in slowdowns)
        values[GPU_POWER_LIMITED] = 100.0 * (POWER_LIMIT in slowdowns)
    return {name: value for name, value in values.items() if value is not None}
