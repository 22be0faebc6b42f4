"""Patches of the ZeRO-3 optimizer step: fewer copies and collectives, no waits of the host, gradients freed after it.

DeepSpeed's step gathers each small weight by a collective of its own and then waits for the device. It copies all
gradients into one tensor although they are in one buffer, and keeps that buffer during the next forward pass.
docs/explanation/performance.md has the time and memory that each patch saves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ftcli.config.profile import gradient_part
from ftcli.hardware.zero3_leaf_modules import gather_after_current_stream
from ftcli.hardware.zero3_patches import STAGE_3_OPTIMIZER
from ftcli.runtime.patches import declare, has_changed

ZERO = "deepspeed.runtime.zero"
WEIGHTS = f"{ZERO}.partition_parameters:Init"
PARTITIONS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"  # private in DeepSpeed 0.19
ALIGNED = 512  # bytes between the starts of gathered weights, as in tensors of their own
SMALL_WEIGHTS = declare(
    __name__,
    "zero3-small-weights",
    library="deepspeed",
    versions=">=0.19.8,<0.20",
    purpose="Gathers all small weights by one collective after a step, without a wait for the device",
    without="Each small weight then has a collective of its own, and the device is idle until the next forward pass.",
    alternative="None: a lower `stage3_param_persistence_threshold` gathers small weights in each pass.",
    apis=(
        f"{STAGE_3_OPTIMIZER}._post_step",
        f"{STAGE_3_OPTIMIZER}.persistent_parameters",
        *(f"{WEIGHTS}.{name}" for name in ("ds_tensor", "ds_status", "ds_numel", "ds_shape", "ds_process_group")),
    ),
    also=has_changed({f"{STAGE_3_OPTIMIZER}._post_step": "fdb2946cdf23"}),
    measurement="303.1 ms a step, without it 309.8 ms, 32.4 GiB both times: 1B, 4 x 4,096 tokens, two H100s.",
)
GRADIENT_BUFFER = declare(
    __name__,
    "zero3-gradient-buffer",
    library="deepspeed",
    versions=">=0.19.8,<0.20",
    purpose="Steps on DeepSpeed's buffer of gradients without a copy, and writes to it with one kernel per bucket",
    without="Each step then copies all gradients of the rank, and launches a kernel for each weight.",
    alternative="None.",
    apis=(
        *(f"{STAGE_3_OPTIMIZER}.{name}" for name in ("averaged_gradients", "fp32_partitioned_groups_flat")),
        *(f"{STAGE_3_OPTIMIZER}.{name}" for name in ("fp16_partitioned_groups_flat", "gradient_accumulation_dtype")),
        *(f"{STAGE_3_OPTIMIZER}.{name}" for name in ("offload_optimizer", "partition_grads", "micro_step_id")),
        f"{STAGE_3_OPTIMIZER}._prepare_fp32_grad_for_sub_group",
        f"{STAGE_3_OPTIMIZER}._reassign_or_swap_out_partitioned_parameters",
        f"{STAGE_3_OPTIMIZER}.{PARTITIONS}",
        "torch:_foreach_copy_",
        "torch:_foreach_add_",
    ),
    also=has_changed(
        {
            f"{STAGE_3_OPTIMIZER}.partition_grads": "8051e2d33291",
            f"{STAGE_3_OPTIMIZER}._prepare_fp32_grad_for_sub_group": "1608174141e2",
            f"{STAGE_3_OPTIMIZER}._reassign_or_swap_out_partitioned_parameters": "a5f5c6f2eedd",
        }
    ),
    measurement="303.1 ms a step, without it 296.0 ms, 32.4 GiB both times: 1B, 4 x 4,096 tokens, two H100s. This "
    "patch and five others together: 388.7 ms a step of 0.6B, 438.4 ms without them.",
)
GRADIENT_MEMORY = declare(
    __name__,
    "zero3-gradient-memory",
    library="deepspeed",
    versions=">=0.19.8,<0.20",
    purpose="Frees the gradients after a step, and allocates those of each sub-group when its first gradient arrives",
    without="All gradients, 4 bytes for each element of the rank's shard, are then in memory during the forward pass. "
    "Without `zero3-gradient-buffer` too, a weight that a step does not use is stepped with its last gradient.",
    alternative="None: DeepSpeed allocates one buffer once.",
    apis=(
        *(f"{STAGE_3_OPTIMIZER}.{name}" for name in ("grad_partitions_flat_buffer", "fp16_groups", "step")),
        f"{STAGE_3_OPTIMIZER}.{PARTITIONS}",
        f"{WEIGHTS}.partition_numel",
    ),
    measurement="303.1 ms and 32.4 GiB a step, without it 298.5 ms and 34.7 GiB: 1B, 4 x 4,096 tokens, two H100s.",
)
STREAM_WAITS = declare(
    __name__,
    "zero3-stream-waits",
    library="deepspeed",
    versions=">=0.19.8,<0.20",
    purpose="Makes the stream that steps wait for the last sums of gradients, in place of the host",
    without="The host then waits for the device after each backward pass, and the device for the host.",
    alternative="None.",
    apis=(
        f"{STAGE_3_OPTIMIZER}.reduce_and_partition_stream",
        f"{STAGE_3_OPTIMIZER}.independent_gradient_partition_epilogue",
    ),
    also=has_changed({f"{STAGE_3_OPTIMIZER}.independent_gradient_partition_epilogue": "dbac78c41d55"}),
    measurement="303.1 ms a step, without it 301.0 ms, 32.4 GiB both times: 1B, 4 x 4,096 tokens, two H100s. Lines "
    "with the same patches differ as much. This patch and five others together: 388.7 ms a step of 0.6B, 438.4 ms "
    "without them.",
)


class OrderedStream(torch.cuda.Stream):
    """A stream for which the current stream waits when the host is asked to wait."""

    def synchronize(self) -> None:
        """Make the current stream wait for this one. The host goes on."""
        torch.cuda.current_stream().wait_stream(self)


def sub_group_size(model: nn.Module, processes: int) -> int:
    """Return the elements of a rank's shard whose gradients are allocated and stepped together.

    Args:
        model: The unprepared model.
        processes: Number of ranks.
    """
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    return gradient_part(trained // processes)


def hasten_step(engine: Any) -> None:
    """Install the patches of this module on a DeepSpeed engine. An optimizer on the host keeps DeepSpeed's step.

    Args:
        engine: The engine at stage 3, before its first step.
    """
    zero = engine.optimizer
    if zero.offload_optimizer:
        return
    has_codes = any(hasattr(weight.ds_tensor, "ds_quant_scale") for weight in zero.persistent_parameters)
    if not has_codes and zero.parameter_offload.offload_device is None and SMALL_WEIGHTS.is_usable():
        zero._post_step = partial(_gather_small_weights, zero, zero._post_step)
    if GRADIENT_BUFFER.is_usable():
        prepare = zero._prepare_fp32_grad_for_sub_group
        zero._prepare_fp32_grad_for_sub_group = partial(_step_on_buffer, zero, {}, prepare)
        reassign = zero._reassign_or_swap_out_partitioned_parameters
        zero._reassign_or_swap_out_partitioned_parameters = partial(_reassign_copies, zero, reassign)
        zero.partition_grads = partial(_add_to_buffer, zero, zero.partition_grads)
    if GRADIENT_MEMORY.is_usable():
        buffers = divide_buffer(zero)
        zero.partition_grads = partial(_allocate_and_add, buffers, zero.partition_grads)
        zero.step = partial(_step_and_free, zero, buffers, zero.step)
    elif GRADIENT_BUFFER.is_usable():  # its step divides the gradients in place
        zero.step = partial(_step_and_clear, zero, zero.step)
    stream = zero.reduce_and_partition_stream
    is_own = stream is not None and stream.device.type == "cuda" and stream != torch.cuda.default_stream()
    if is_own and STREAM_WAITS.is_usable():
        zero.reduce_and_partition_stream = OrderedStream()


def _gather_small_weights(zero: Any, finish: Callable[[Any], None], timers: Any) -> None:
    """Finish a step as DeepSpeed does, but gather the small weights by one collective. A collective."""
    weights = zero.persistent_parameters
    zero.persistent_parameters = []
    try:
        finish(timers)
    finally:
        zero.persistent_parameters = weights
    gather(weights)
    gather_after_current_stream(
        zero, torch.device(zero.device)
    )  # DeepSpeed's gathers of other weights read what was stepped


@torch.no_grad()
def gather(weights: list[Any]) -> None:
    """Make sharded weights whole. A collective for each dtype and group; the host does not wait for the device.

    Args:
        weights: Parameters of DeepSpeed. Those that are whole already are left alone.
    """
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    kinds: dict[tuple[Any, torch.dtype], list[Any]] = {}
    for weight in weights:
        if weight.ds_status == ZeroParamStatus.NOT_AVAILABLE:
            kinds.setdefault((weight.ds_process_group, weight.ds_tensor.dtype), []).append(weight)
    for (group, _), alike in kinds.items():
        ranks = group.size()
        shards = [weight.ds_tensor for weight in alike]
        mine = torch.cat(shards)
        gathered = mine.new_empty(ranks, mine.numel())
        dist.all_gather_into_tensor(gathered.view(-1), mine, group=group)
        lengths = [shard.numel() for shard in shards]
        step = ALIGNED // mine.element_size()
        places = [-(-ranks * length // step) * step for length in lengths]
        spaces = mine.new_empty(sum(places)).split(places)
        wholes = [space[: ranks * length].view(ranks, length) for space, length in zip(spaces, lengths, strict=True)]
        torch.split_with_sizes_copy(gathered, lengths, dim=1, out=wholes)
        for weight, whole in zip(alike, wholes, strict=True):
            weight.data = whole.view(-1)[: weight.ds_numel].view(weight.ds_shape)
            weight.ds_status = ZeroParamStatus.AVAILABLE


Views = dict[int, tuple[list[Tensor], Tensor | None]]


def _step_on_buffer(zero: Any, views: Views, prepare: Callable[[int], None], group: int) -> None:
    """Make the buffer of gradients the gradient of a group's master weights. DeepSpeed would copy it.

    `views` has the gradients of each group in the step before, and the view of all of them. The device waits here.
    """
    master, gradients = zero.fp32_partitioned_groups_flat[group], zero.averaged_gradients[group]
    known, flat = views.get(group, ([], None))
    if len(known) != len(gradients) or any(one is not other for one, other in zip(known, gradients, strict=True)):
        flat = adjacent(gradients)
        views[group] = (gradients, flat)
    if flat is None or (flat.dtype, flat.shape) != (master.dtype, master.shape):
        prepare(group)
        return
    master.grad = flat
    zero.averaged_gradients[group] = None


def adjacent(tensors: list[Tensor]) -> Tensor | None:
    """Return one flat tensor that has the memory of several ones; None if they are not side by side in one buffer."""
    if not tensors:
        return None
    first = tensors[0]
    buffer, place = first.untyped_storage().data_ptr(), first.storage_offset()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == buffer and tensor.dtype == first.dtype
        if not (same and tensor.storage_offset() == place and tensor.is_contiguous()):
            return None
        place += tensor.numel()
    return first.as_strided((place - first.storage_offset(),), (1,))


def _reassign_copies(zero: Any, reassign: Callable[[int], None], group: int) -> None:
    """Copy master weights to the shards that are gathered, unless both are the same memory."""
    master, shard = zero.fp32_partitioned_groups_flat[group], zero.fp16_partitioned_groups_flat[group]
    if shard is None or (shard.dtype, shard.data_ptr()) != (master.dtype, master.data_ptr()):
        reassign(group)


def _add_to_buffer(
    zero: Any, plain: Callable[[list[Any], list[Tensor]], list[Tensor]], weights: list[Any], shards: list[Tensor]
) -> list[Tensor]:
    """Write the averaged gradients of a bucket to the buffer, or add them to it after the first pass of a window.

    Uses one kernel for many weights. Results are those of `plain`, which uses one for each.
    """
    partitions, rank = getattr(zero, PARTITIONS), dist.get_rank(weights[0].ds_process_group)
    pairs = [
        (partitions[weight.ds_id].narrow(0, 0, shard.numel()), shard)
        for weight, shard in zip(weights, shards, strict=True)
        if weight.ds_tensor.numel() * rank < weight.ds_numel  # the rest is padding
    ]
    if any(shard.dtype != buffer.dtype or shard.device != buffer.device for buffer, shard in pairs):
        return plain(weights, shards)
    buffers = [buffer for buffer, _ in pairs]
    if pairs and zero.micro_step_id == 0:
        torch._foreach_copy_(buffers, [shard for _, shard in pairs])
    elif pairs:
        torch._foreach_add_(buffers, [shard for _, shard in pairs])
    for weight in weights:
        if weight.grad is not None and weight.grad.is_cuda:
            weight.grad.record_stream(torch.cuda.current_stream())
        weight.grad = None
    return buffers


Buffers = dict[int, Tensor]


def divide_buffer(zero: Any) -> Buffers:
    """Replace DeepSpeed's buffer of gradients by one for each sub-group, which has no memory yet.

    A backward pass then allocates the gradients of a sub-group when the activations of later layers are already freed.

    Args:
        zero: DeepSpeed's stage-3 optimizer.

    Returns:
        The buffer of each weight, by the number that DeepSpeed gives the weight. Weights of a sub-group share one.
    """
    whole, partitions, buffers = zero.grad_partitions_flat_buffer, getattr(zero, PARTITIONS), {}
    zero.grad_partitions_flat_buffer = None
    whole.untyped_storage().resize_(0)
    for weights in zero.fp16_groups:
        sizes = [weight.partition_numel() for weight in weights]
        buffer = whole.new_empty(sum(sizes))
        for weight, part in zip(weights, buffer.split(sizes), strict=True):
            partitions[weight.ds_id], buffers[weight.ds_id] = part, buffer
        buffer.untyped_storage().resize_(0)
    return buffers


def _allocate_and_add(
    buffers: Buffers,
    add: Callable[[list[Any], list[Tensor]], list[Tensor]],
    weights: list[Any],
    shards: list[Tensor],
) -> list[Tensor]:
    """Allocate the buffers of weights that are freed, then add gradients to them."""
    for weight in weights:
        _allocate(buffers[weight.ds_id])
    return add(weights, shards)


def _allocate(buffer: Tensor) -> None:
    """Allocate a buffer of gradients if it is freed. It has zeros, which are the gradients of unused weights."""
    if not buffer.untyped_storage().size():
        buffer.untyped_storage().resize_(buffer.numel() * buffer.element_size())
        buffer.zero_()


def _step_and_clear(zero: Any, step: Callable[[], None]) -> None:
    """Step, then set the gradients to zero, so that an unused weight does not keep its gradient."""
    step()
    zero.grad_partitions_flat_buffer.zero_()


def _step_and_free(zero: Any, buffers: Buffers, step: Callable[[], None]) -> None:
    """Step, then free the buffers of gradients when the device is done with them.

    A buffer is still freed if no weight of its sub-group had a gradient. DeepSpeed reads it all the same.
    """
    for buffer in buffers.values():
        _allocate(buffer)
    step()
    zero.averaged_gradients = {}
    for buffer in {id(buffer): buffer for buffer in buffers.values()}.values():
        if buffer.is_cuda:  # allocated on the stream of sums
            buffer.record_stream(torch.cuda.current_stream())
        buffer.untyped_storage().resize_(0)
