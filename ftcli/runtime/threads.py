"""Set how the threads of a computation on the CPU wait for each other. Light: never imports torch.

OpenMP's threads spin while they wait. If another program needs the core, the thread they wait for does not get one.
With OMP_WAIT_POLICY=PASSIVE they sleep. OpenMP reads the variable when its library is loaded, which torch does.
"""

from __future__ import annotations

import os
import shutil
import sys

POLICY = "OMP_WAIT_POLICY"
# With one of these the user has decided how threads wait: OpenMP's own variable, that of GNU, and that of LLVM.
CHOSEN = (POLICY, "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_set_here: dict[str, str] = {}  # variables that `wait_passively` has set in this process


def passive_waiting(*, cpu: bool = False) -> dict[str, str]:
    """Return the variable that makes threads sleep while they wait; nothing on GPUs, or if the user chose.

    Args:
        cpu: Whether the user asked for the CPU. `accelerate launch --cpu` and a machine without GPUs count too.
    """
    is_chosen = any(name in os.environ for name in CHOSEN)
    by_accelerate = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1")
    return {POLICY: "PASSIVE"} if (cpu or by_accelerate or not may_have_gpus()) and not is_chosen else {}


def wait_passively(*, cpu: bool = False) -> None:
    """Make the threads of this process and of those it starts sleep while they wait, if it computes on the CPU.

    If torch is loaded already, nothing is changed.

    Args:
        cpu: Whether the user asked for the CPU.
    """
    if "torch" not in sys.modules:
        _set_here.update(passive_waiting(cpu=cpu))
        os.environ.update(_set_here)


def users_environment() -> dict[str, str]:
    """Return the environment variables of this process, without those that `wait_passively` has set."""
    return {name: value for name, value in os.environ.items() if _set_here.get(name) != value}


def may_have_gpus() -> bool:
    """Return whether this process may see GPUs, without starting a program, which takes up to a second."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return False
    return shutil.which("nvidia-smi") is not None
