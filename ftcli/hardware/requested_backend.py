"""The backend that the launcher's environment requests, and how it reads weights. Needs no Accelerator."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeVar

from ftcli.hardware import weight_broadcast
from ftcli.hardware.backend import Backend
from ftcli.hardware.ddp import DDP, Replicas
from ftcli.hardware.deepspeed import DeepSpeed
from ftcli.hardware.fsdp import FSDP2
from ftcli.runtime.patches import declare

if TYPE_CHECKING:
    from torch import nn


T = TypeVar("T")
BACKENDS: dict[str, Backend] = {  # by the name of Accelerate's DistributedType
    "NO": DDP(),
    "MULTI_GPU": DDP(),
    "MULTI_CPU": DDP(),
    "FSDP": FSDP2(),
    "DEEPSPEED": DeepSpeed(),
    "REPLICAS": Replicas(),  # instead of FSDP or DeepSpeed, where a run chooses it
}

LAUNCH = "accelerate.utils.launch"
LAUNCHER_VARIABLES = declare(
    __name__,
    "launcher-variables",
    library="accelerate",
    versions=">=1.15,<1.16",
    purpose="Reads the profile from the environment variables that Accelerate's launcher exports",
    without="The profile of a launched process would be unknown, so the process is refused.",
    alternative="`PartialState().distributed_type`, which starts the process group and lacks most settings.",
    apis=(
        f"{LAUNCH}:prepare_deepspeed_cmd_env.ACCELERATE_USE_DEEPSPEED",
        f"{LAUNCH}:prepare_multi_gpu_env.ACCELERATE_USE_FSDP",
        f"{LAUNCH}:prepare_multi_gpu_env.FSDP_CPU_RAM_EFFICIENT_LOADING",
        f"{LAUNCH}:prepare_extend_env_parallelism_config.ACCELERATE_USE_PARALLELISM_CONFIG",
        f"{LAUNCH}:prepare_extend_env_parallelism_config.PARALLELISM_CONFIG_",
    ),
    required=True,
)


def requested_backend() -> Backend:
    """Return the backend that the launcher's environment requests, in Accelerate's variables."""
    LAUNCHER_VARIABLES.require()
    for name in ("DEEPSPEED", "FSDP"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true":
            return BACKENDS[name]
    return BACKENDS["NO"]


def reads_weights_once() -> bool:
    """Return whether one of several ranks reads the weights for all, as the profile requires."""
    return weight_broadcast.has_several_ranks() and requested_backend().reads_weights_once()


def load_whole_weights() -> AbstractContextManager[None]:
    """Return a context in which transformers and peft load whole weights, which `Hardware.prepare` shards."""
    return requested_backend().load_whole_weights()


def read_weights(read: Callable[[], tuple[nn.Module, T]], build: Callable[[], nn.Module]) -> tuple[nn.Module, T]:
    """Read a model with whole weights; if the profile requires it, on one rank only. A collective.

    Args:
        read: Returns a model with its weights, and a result.
        build: Returns the same model without weights. Ranks that do not read call it on the meta device.

    Returns:
        The model of this rank, and the result of `read`, which is equal on all ranks.
    """
    with load_whole_weights():
        return weight_broadcast.read_for_all(read, build) if reads_weights_once() else read()


def is_quantised(model: nn.Module) -> bool:
    """Return whether the model has 4-bit weights (bitsandbytes), which every rank reads from its own disk."""
    return any(type(parameter).__name__ == "Params4bit" for parameter in model.parameters())
