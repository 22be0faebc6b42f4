"""Run any profile on CPU processes over gloo, with the same YAML file.

Without this module Accelerate fails silently on CPU: a MULTI_GPU profile trains as one process, and an FSDP profile as
N unrelated processes.
"""

from __future__ import annotations

import os

from ftcli.hardware.environment import use_cpu_in_deepspeed
from ftcli.runtime.patches import declare
from ftcli.runtime.process import has_rank, world_size

ACCELERATE_STATE = declare(
    __name__,
    "accelerate-state",
    library="accelerate",
    versions=">=1.15,<1.16",
    purpose="Resets Accelerate's process-wide state before a run, so that a process can have several runs in sequence",
    without="A second run would train with the hardware settings of the first one, so it is refused.",
    alternative="None: Accelerate's own tests use these methods.",
    apis=tuple(
        f"accelerate.state:{name}._reset_state" for name in ("AcceleratorState", "GradientState", "PartialState")
    ),
    required=True,
)
FSDP_ON_CPU = declare(
    __name__,
    "fsdp-on-cpu",
    library="accelerate",
    versions=">=1.15,<1.16",
    purpose="Enables FSDP on CPU processes, which Accelerate starts as unrelated processes",
    without="FSDP profiles are refused on CPU.",
    alternative="None: Accelerate enables FSDP for GPU types only.",
    apis=("accelerate.state:PartialState._shared_state", "accelerate.state:PartialState.distributed_type"),
    required=True,
)
CPU_EXTENSION = declare(
    __name__,
    "deepspeed-cpu-extension",
    library="deepspeed",
    versions=">=0.19.8,<0.20",
    purpose="Keeps DeepSpeed on CPU from compiling an extension that only inference uses",
    without="DeepSpeed then compiles it at the first start, and waits forever for a build that was killed.",
    alternative="None: DeepSpeed has no setting for it.",
    apis=("deepspeed.ops:__compatible_ops__",),
    unmeasured="It acts on CPUs only, where it prevents a wait without end at the first start.",
)


def reset_accelerate_state() -> None:
    """Reset Accelerate's process-wide state, so that one process can have several runs in sequence (notebooks)."""
    ACCELERATE_STATE.require()
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state()
    GradientState._reset_state()
    PartialState._reset_state()


def start_on_cpu() -> None:
    """Create the process group over gloo before the Accelerator, and enable FSDP on CPU. A collective."""
    import torch
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    use_cpu_in_deepspeed()
    if has_rank() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size()))
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true" and CPU_EXTENSION.is_usable():
        from deepspeed.ops import __compatible_ops__

        # DeepSpeed would compile this extension, which only inference uses, and wait forever for a killed build.
        __compatible_ops__["deepspeed_shm_comm"] = False
    state = PartialState(cpu=True)
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true" and state.backend is not None:
        FSDP_ON_CPU.require()
        # Accelerate enables FSDP for GPU types only. The device stays the CPU.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
