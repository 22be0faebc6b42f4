"""Read rank, world size and launch facts of this process from the environment that the launcher has set.

No other module reads these variables of its own process. They are read at each call, because tests and rank servers
change the environment. Light: never imports torch.
"""

from __future__ import annotations

import os

LAUNCHED = "FTCLI_LAUNCHED"  # set by ftcli's parent process: a token of this launch
PARENT = "FTCLI_PARENT"  # set by ftcli's parent process: its process id
PROFILE = "FTCLI_PROFILE"  # set by ftcli's parent process: the path of the profile


def current_rank() -> int:
    """Return the rank of this process among all; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Return the rank of this process on its machine; 0 without a launcher."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """Return the number of processes on all machines; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_world_size(default: int = 1) -> int:
    """Return the number of processes on this machine; `default` if the launcher does not set it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", default))


def has_rank() -> bool:
    """Return whether a launcher has given this process a rank."""
    return "LOCAL_RANK" in os.environ


def has_ftcli_parent() -> bool:
    """Return whether ftcli's parent process started this process, directly or through a launcher."""
    return LAUNCHED in os.environ


def is_launched() -> bool:
    """Return whether ftcli's parent, torchrun or a bare `accelerate launch` started this process as a worker."""
    names = os.environ.keys()
    by_torchrun = "TORCHELASTIC_RUN_ID" in names or {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= names
    # For distributed_type NO there is no torchrun; its launcher always sets these three together.
    by_accelerate = {"ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND"} <= names
    return has_ftcli_parent() or by_torchrun or by_accelerate


def launch_token() -> str:
    """Return the token of this launch, which all its processes share; "" without ftcli's parent process."""
    return os.environ.get(LAUNCHED, "")


def parent_id() -> int | None:
    """Return the process id of ftcli's parent process; None without one."""
    return int(os.environ[PARENT]) if PARENT in os.environ else None


def profile_path() -> str | None:
    """Return the path of the profile that ftcli's parent process chose; None without one."""
    return os.environ.get(PROFILE)
