"""Judge samples of the load of all ranks: an idle or throttled GPU, too few cores, a machine that runs out of memory.

All functions are pure: they get the samples of each rank, the oldest first. Light: never imports torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ftcli.runtime.machine.load import GPU_TEMPERATURE, GPU_UTILISATION, HOST_MEMORY, PROCESS_MEMORY, Load

IDLE, THROTTLED, CROWDED, HOST_LOW = KINDS = ("idle GPU", "throttled GPU", "crowded cores", "host memory")
LONG_SECONDS = 60.0  # a state that lasts this long is reported
IDLE_PERCENT, WORKING_PERCENT = 10.0, 50.0  # mean utilisation over that time
THROTTLED_PART = 0.5  # of the samples of that time
WAITED_PERCENT = 50.0  # mean of the time in which threads could run, but had no core
LITTLE_PART = 0.05  # of the memory of a machine
LOW_PART, END_SECONDS = 0.25, 60.0  # less than this part is left, and it lasts for less than this time
TREND_SAMPLES = 3  # the fewest from which the end is forecast
Recent = Mapping[int, Sequence[Load]]  # rank -> its samples of the last `LONG_SECONDS`, the oldest first


@dataclass(frozen=True)
class Finding:
    """One thing to look at.

    Attributes:
        kind: One of `KINDS`.
        subject: What it is about, such as "rank 3".
        text: One line for the log.
    """

    kind: str
    subject: str
    text: str


def find_all(recent: Recent) -> list[Finding]:
    """Return everything that the samples show.

    Args:
        recent: Samples of each rank.
    """
    return [*idle_gpus(recent), *throttled_gpus(recent), *crowded_cores(recent), *hosts_running_out(recent)]


def idle_gpus(recent: Recent) -> Iterator[Finding]:
    """Yield the GPUs that were idle for long while the GPU of another rank worked.

    A GPU that waits for others in a collective of NCCL is not idle: its kernel runs.

    Args:
        recent: Samples of each rank.
    """
    means = {rank: statistics.fmean(used) for rank, loads in recent.items() if (used := _utilisation(loads))}
    if not means or max(means.values()) < WORKING_PERCENT:
        return
    busiest = max(means, key=means.__getitem__)
    for rank, mean in means.items():
        if mean <= IDLE_PERCENT:
            text = (
                f"{_gpu_of(recent[rank][-1])} was idle for {LONG_SECONDS:.0f} s ({mean:.0f} % busy) while the GPU of "
                f"rank {busiest} was {means[busiest]:.0f} % busy: look at what rank {rank} waits for (data, CPU, disk)"
            )
            yield Finding(IDLE, f"rank {rank}", text)


def throttled_gpus(recent: Recent) -> Iterator[Finding]:
    """Yield the GPUs whose clock was lowered for long by temperature, hardware or an external brake.

    The power limit of a GPU is left out, because training at full load often reaches it.

    Args:
        recent: Samples of each rank.
    """
    for rank, loads in recent.items():
        slow = [load for load in loads if load.slowdowns]
        if not _is_long(loads) or len(slow) <= THROTTLED_PART * len(loads):
            continue
        reasons = dict.fromkeys(reason for load in slow for reason in load.slowdowns)
        degrees = [load.values[GPU_TEMPERATURE] for load in slow if GPU_TEMPERATURE in load.values]
        heat = f" at up to {max(degrees):.0f} C" if degrees else ""
        text = (
            f"{_gpu_of(loads[-1])} is slowed down by {' and '.join(reasons)}{heat}: all ranks wait for the slowest; "
            "check cooling and power (nvidia-smi -q -d PERFORMANCE)"
        )
        yield Finding(THROTTLED, f"rank {rank}", text)


def crowded_cores(recent: Recent) -> Iterator[Finding]:
    """Yield the machines on which processes of the run got less than half of the processor time that they could use.

    Processes with a GPU are left out: their threads mostly wait for it.

    Args:
        recent: Samples of each rank.
    """
    machines: dict[str, dict[int, float]] = {}
    for rank, loads in recent.items():
        waited = [load.waited_percent for load in loads if load.waited_percent is not None and load.gpu is None]
        if _is_long(loads) and waited and (mean := statistics.fmean(waited)) > WAITED_PERCENT:
            machines.setdefault(loads[-1].machine, {})[rank] = mean
    for machine, ranks in machines.items():
        worst = max(ranks, key=ranks.__getitem__)
        text = (
            f"on machine {machine}, rank {worst} had a core for {100 - ranks[worst]:.0f} % of the time in which it "
            f"could have computed in the last {LONG_SECONDS:.0f} s: other programs use the processor, or the run has "
            "more processes and threads than cores, and steps take longer. Stop other programs, or use fewer "
            "processes, data.workers or OMP_NUM_THREADS"
        )
        yield Finding(CROWDED, f"machine {machine}", text)


def hosts_running_out(recent: Recent) -> Iterator[Finding]:
    """Yield the machines with little memory left, or whose memory will soon be used up.

    Args:
        recent: Samples of each rank.
    """
    machines: dict[str, list[Sequence[Load]]] = {}
    for loads in recent.values():
        if loads:
            machines.setdefault(loads[-1].machine, []).append(loads)
    for machine, ranks in machines.items():
        loads = min(ranks, key=lambda each: each[-1].values[HOST_MEMORY])
        left, limit = loads[-1].values[HOST_MEMORY], loads[-1].host_limit_gb
        seconds = _seconds_left(loads)
        is_ending = left < LOW_PART * limit and seconds is not None and seconds < END_SECONDS
        if left > LITTLE_PART * limit and not is_ending:
            continue
        largest = max((each[-1] for each in ranks), key=lambda load: load.values[PROCESS_MEMORY])
        rate = f", enough for {seconds:.0f} s at this rate" if is_ending else ""
        text = (
            f"machine {machine} runs out of memory: {left:.1f} of {limit:.1f} GB are left{rate}. The system then ends "
            f"a process. The largest process of the run is rank {largest.rank} with "
            f"{largest.values[PROCESS_MEMORY]:.1f} GB; use fewer processes or loader workers (data.workers), or stop "
            "other programs"
        )
        yield Finding(HOST_LOW, f"machine {machine}", text)


def _utilisation(loads: Sequence[Load]) -> list[float]:
    """Return the utilisation in each sample; empty if some lack it, or if they do not cover `LONG_SECONDS`."""
    used = [load.values[GPU_UTILISATION] for load in loads if GPU_UTILISATION in load.values]
    return used if _is_long(loads) and len(used) == len(loads) else []


def _is_long(loads: Sequence[Load]) -> bool:
    """Return whether samples cover `LONG_SECONDS`, but for the time between two of them."""
    if len(loads) < TREND_SAMPLES:
        return False
    covered = loads[-1].seconds - loads[0].seconds
    return covered * len(loads) / (len(loads) - 1) >= LONG_SECONDS


def _seconds_left(loads: Sequence[Load]) -> float | None:
    """Return in how many seconds the memory of a machine is used up at the present rate; None if it does not fall."""
    if len(loads) < TREND_SAMPLES:
        return None
    first, last = loads[-TREND_SAMPLES], loads[-1]
    fall = first.values[HOST_MEMORY] - last.values[HOST_MEMORY]
    return last.values[HOST_MEMORY] * (last.seconds - first.seconds) / fall if fall > 0 else None


def _gpu_of(load: Load) -> str:
    """Return the name of a rank's GPU in a sentence."""
    number = "the GPU" if load.gpu is None else f"GPU {load.gpu}"
    return f"{number} of rank {load.rank} on {load.machine}"
