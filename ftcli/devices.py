"""How many processes a run has, and whether this machine's devices can carry them.

Counts without importing torch, and knows of a profile only its kind and its number of processes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

from .errors import InputError, Problem

if TYPE_CHECKING:
    from .profiles import Profile


def count_processes(
    profile: Profile | None, num_processes: int | None, *, cpu: bool = False, num_machines: int = 1
) -> int:
    """Return how many processes a run has over all machines.

    An explicit number wins, then the profile's, then all visible GPUs, or 2 for a rehearsal on the CPU. A
    profile without distribution has exactly 1. Raises `InputError` when no number can be had; whether the
    GPUs suffice is `check_devices`' question.
    """
    if num_processes is not None and num_processes < 1:
        raise InputError(f"--num-processes is {num_processes}", hint="it counts all processes: 1 or more")
    if profile is None or profile.distributed_type == "NO":
        if num_processes not in (None, 1):
            name = "without a profile a run" if profile is None else f"profile {profile.name}"
            raise InputError(
                f"{name} has exactly one process, --num-processes is {num_processes}",
                hint="choose a distributed profile: --profile ddp, fsdp or zero3",
            )
        return 1
    if num_processes is not None or profile.num_processes is not None:
        return num_processes or profile.num_processes or 1
    if cpu:
        return 2 * num_machines
    if not (gpus := count_gpus()):
        raise InputError([_no_gpu(profile)])
    return gpus * num_machines


def check_devices(
    profile: Profile | None, num_processes: int, *, cpu: bool = False, num_machines: int = 1
) -> list[Problem]:
    """Return why this machine's GPUs cannot carry that many processes of a profile; empty when they can."""
    if cpu or profile is None or profile.distributed_type == "NO":
        return []
    if not (gpus := count_gpus()):
        return [_no_gpu(profile)]
    local = -(-num_processes // num_machines)
    if local <= gpus:
        return []
    what = f"{local} processes on this machine, but it has {gpus} visible GPU{'s' * (gpus > 1)}"
    return [Problem(what, hint=f"use --num-processes {gpus * num_machines}, or look at CUDA_VISIBLE_DEVICES")]


def _no_gpu(profile: Profile) -> Problem:
    return Problem(
        f"profile {profile.name} needs GPUs, and this machine shows none",
        hint="to rehearse it on the CPU: --cpu --num-processes 2",
    )


def count_gpus() -> int:
    """Return the number of GPUs that training processes will see, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        listed = [item.strip() for item in visible.split(",")]
        return len(listed[: listed.index("-1")] if "-1" in listed else [item for item in listed if item])
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    listing = subprocess.run([program, "-L"], capture_output=True, text=True)
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


def gpu_memory() -> int | None:
    """Return the memory in bytes of this machine's smallest GPU, without importing torch; None without one."""
    program = shutil.which("nvidia-smi")
    if program is None or not count_gpus():
        return None
    query = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]  # in MiB
    listing = subprocess.run(query, capture_output=True, text=True).stdout.split()
    return min((int(size) * 2**20 for size in listing if size.isdigit()), default=None)


def count_cores() -> int:
    """Return the number of CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
