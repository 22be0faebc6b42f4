"""Any profile on CPU processes over gloo, with the same YAML, and several runs after each other in one process.

Accelerate alone fails silently here: a MULTI_GPU config trains as one process, an FSDP config as N unrelated ones.
"""

from __future__ import annotations

import os


def has_accelerator() -> bool:
    """Say whether this machine has a device other than the CPU that PyTorch can use."""
    import torch

    return torch.accelerator.is_available()


def name_the_device() -> None:
    """Tell DeepSpeed, which other libraries import, that there is only a CPU: it would complain on standard output."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


def forget_former_runs() -> None:
    """Reset Accelerate's process-wide state: one process may hold several runs after each other (notebooks)."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state()
    GradientState._reset_state()
    PartialState._reset_state()


def start_on_cpu() -> None:
    """Create the process group over gloo before any Accelerator, and let FSDP believe it may start."""
    import torch
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    name_the_device()
    if "WORLD_SIZE" in os.environ and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["WORLD_SIZE"])))
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        from deepspeed.ops import __compatible_ops__

        # It would compile what only inference uses, and wait for ever for a build that was killed.
        __compatible_ops__["deepspeed_shm_comm"] = False
    state = PartialState(cpu=True)
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true" and state.backend is not None:
        # Accelerate enters FSDP from its GPU types only; the device stays the CPU.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
