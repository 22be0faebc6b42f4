"""Count the processes of a launch and check that this machine has devices for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftcli.runtime.devices import count_gpus
from ftcli.runtime.errors import InputError, Problem

if TYPE_CHECKING:
    from ftcli.config.profile import Profile


def count_processes(
    profile: Profile | None, num_processes: int | None, *, cpu: bool = False, num_machines: int = 1
) -> int:
    """Return the number of processes of a run on all machines.

    An explicit number has precedence, then the profile's number, then one for each visible GPU. On the CPU the default
    is 2 for each machine. A profile without distribution has exactly one process.

    Args:
        profile: The profile; None for a run without one.
        num_processes: The number that the user gave, or None.
        cpu: Whether the run uses the CPU.
        num_machines: Number of machines, assumed to have equal numbers of GPUs.

    Raises:
        InputError: The number is invalid, or there is no GPU to count. `check_devices` checks the number of GPUs.
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
    """Return a problem if this machine has too few GPUs for its share of `num_processes`, else an empty list."""
    if cpu or profile is None or profile.distributed_type == "NO":
        return []
    if not (gpus := count_gpus()):
        return [_no_gpu(profile)]
    local = -(-num_processes // num_machines)
    if local <= gpus:
        return []
    what = f"{local} processes on this machine, but it has {gpus} visible GPU{'s' * (gpus > 1)}"
    return [Problem(what, hint=f"use --num-processes {gpus * num_machines}, or check CUDA_VISIBLE_DEVICES")]


def _no_gpu(profile: Profile) -> Problem:
    return Problem(
        f"profile {profile.name} needs GPUs, and this machine has no visible GPU",
        hint="to try it on the CPU: --cpu --num-processes 2",
    )
