"""The flat partitions of DeepSpeed's ZeRO: master weights and moments of this rank, as shards of parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ftcli.hardware.optimizer_state import NO_ELEMENTS, OptimizerSlot, StateShard, state_tensors
from ftcli.hardware.zero3_patches import STAGE_3_OPTIMIZER
from ftcli.runtime.patches import declare

if TYPE_CHECKING:
    from torch import Tensor, nn


STAGE_2 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
SHARDING = "deepspeed.runtime.zero.partition_parameters"
PARTITIONS = declare(
    __name__,
    "deepspeed-partitions",
    library="deepspeed",
    versions=">=0.19.8,<0.20",
    purpose="Reads and writes ZeRO's flat partitions of weights and moments, for checkpoints and the optimizer",
    without="Checkpoints would not resume on other profiles, so DeepSpeed profiles are refused.",
    alternative="DeepSpeed's `safe_get_full_*` gathers whole tensors, `safe_get_local_*` supports stage 3 only, and "
    "neither creates optimizer state.",
    apis=(
        *(f"{STAGE_3_OPTIMIZER}.{name}" for name in ("fp32_partitioned_groups_flat", "sub_group_to_group_id")),
        *(f"{STAGE_3_OPTIMIZER}.{name}" for name in ("grad_position", "get_param_id", "empty_partition_cache")),
        *(f"{SHARDING}:Init.{name}" for name in ("ds_id", "ds_numel", "ds_tensor", "ds_status", "partition")),
        *(f"{SHARDING}:ZeroParamStatus.{name}" for name in ("AVAILABLE", "INFLIGHT")),
        f"{STAGE_2}.single_partition_of_fp32_groups",
        "deepspeed.utils.mixed_precision_linkage:link_hp_params._hp_mapping",
        *(f"deepspeed.utils.tensor_fragment:tensor_fragment.{name}_fragment_address" for name in ("hp", "lp")),
        *(f"{optimizer}.override_loss_scale" for optimizer in (STAGE_2, STAGE_3_OPTIMIZER)),
    ),
    required=True,
)


def partition_slots(model: nn.Module) -> list[OptimizerSlot]:
    """Return the flat partitions that the optimizer of a DeepSpeed engine updates, each with its state."""
    zero: Any = model.optimizer
    if hasattr(zero, "fp32_partitioned_groups_flat"):  # stage 3
        groups = [
            zero.optimizer.param_groups[zero.sub_group_to_group_id[i]] for i in range(len(master_partitions(zero)))
        ]
    else:
        groups = zero.optimizer.param_groups
    # Only DeepSpeed's optimizer for the host counts steps by an int.
    has_int_step = not isinstance(zero.optimizer, torch.optim.Adam | torch.optim.SGD)
    return [
        OptimizerSlot(group, flat, zero.optimizer.state[flat], has_int_step)
        for group, flat in zip(groups, master_partitions(zero), strict=True)
    ]


def master_partitions(zero: Any) -> list[Tensor]:
    """Return the flat float32 partitions of this rank."""
    masters: list[Tensor] = (
        zero.fp32_partitioned_groups_flat
        if hasattr(zero, "fp32_partitioned_groups_flat")
        else zero.single_partition_of_fp32_groups
    )
    return masters


def shards_at_stage_3(name: str, parameter: Any, model: nn.Module) -> Iterator[StateShard]:
    """Yield the shards of a parameter that is flattened, padded and split into equal parts, one per rank."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    zero: Any = model.optimizer
    group, offset, length = zero.grad_position[zero.get_param_id(parameter)]
    start = length * torch.distributed.get_rank(parameter.ds_process_group)
    size = min(parameter.ds_numel - start, length)  # the rest is padding
    if size > 0:
        yield StateShard(name, start, _partition_range(zero, group, offset, size), slice(0, size))
        yield StateShard(name, start, {"weight": parameter.ds_tensor.narrow(0, 0, size)}, NO_ELEMENTS)
    if parameter.ds_status == ZeroParamStatus.AVAILABLE:  # small parameters stay whole on every rank
        yield StateShard(name, 0, {"weight": parameter.data}, NO_ELEMENTS)


def shards_at_stage_2(name: str, parameter: Any, model: nn.Module) -> Iterator[StateShard]:
    """Yield the shards of a parameter that is in one flat tensor with others, which is split into equal parts."""
    mapping = parameter._hp_mapping
    if mapping is not None:  # this rank has a part of the parameter
        master, inside = mapping.hp_fragment_address, mapping.lp_fragment_address
        tensors = _partition_range(model.optimizer, mapping.param_group_index, master.start, master.numel)
        yield StateShard(name, inside.start, tensors, slice(0, master.numel))
    yield StateShard(name, 0, {"weight": parameter.data}, NO_ELEMENTS)


def _partition_range(zero: Any, group: int, offset: int, length: int) -> dict[str, Tensor]:
    """Return `length` live elements of a flat partition and of its moments, by kind."""
    flat = master_partitions(zero)[group]
    return {k: v.narrow(0, offset, length) for k, v in state_tensors(flat, zero.optimizer.state[flat]).items()}
