"""Patches of DeepSpeed's ZeRO-3 optimizer: 16-bit gradients without a float32 copy, and a cheaper step.

Inside one machine, 16-bit gradients are reduce-scattered directly. DeepSpeed would copy each to a float32 bucket,
arrange the bucket by rank, divide it and send twice the bytes. docs/explanation/our-own-code.md has measurements.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ftcli.hardware.gradient_clipping import get_total_norm
from ftcli.hardware.gradient_reduction import in_one_machine, reduce_scatter_in_float32
from ftcli.runtime.patches import declare, has_changed

AVERAGE = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"  # private in DeepSpeed 0.19, without a public name
STAGE_3_MODULE = "deepspeed.runtime.zero.stage3"
STAGE_3_OPTIMIZER = f"{STAGE_3_MODULE}:DeepSpeedZeroOptimizer_Stage3"
SIXTEEN_BIT_GRADIENTS = declare(
    __name__,
    "zero3-16-bit-gradients",
    library="deepspeed",
    versions=">=0.19.8,<0.20",
    purpose="Replaces the function that averages gradients, so that 16-bit gradients are sent in 16 bits",
    without="DeepSpeed then copies each gradient to float32 and sends twice the bytes.",
    alternative="None: DeepSpeed's communication dtype also rounds the sum.",
    apis=(
        f"{STAGE_3_OPTIMIZER}.{AVERAGE}",
        f"{STAGE_3_OPTIMIZER}.contiguous_gradients",
        f"{STAGE_3_OPTIMIZER}.all2all_process_group",
    ),
    measurement="320.5 ms and 35.2 GiB a step, without it 328.8 ms and 36.1 GiB: 1B, 4 x 4,096 tokens, two H100s.",
)
STEP = declare(
    __name__,
    "zero3-step",
    library="deepspeed",
    versions=">=0.19.8,<0.20",
    purpose="Replaces the gradient norm, shares master weights with shards, and frees small weights earlier",
    without="A step then needs 4 more bytes for each element of the rank's shard.",
    alternative="None.",
    apis=tuple(
        f"{STAGE_3_OPTIMIZER}.{name}"
        for name in (
            "get_grad_norm_direct",
            "_get_norm_groups",
            "independent_gradient_partition_epilogue",
            "_partition_all_parameters",
            "averaged_gradients",
            "fp16_groups",
            "fp32_partitioned_groups_flat",
            "fp16_partitioned_groups_flat",
            "offload_optimizer",
        )
    ),
    measurement="303.1 ms and 32.4 GiB a step, without it 298.7 ms and 34.7 GiB: 1B, 4 x 4,096 tokens, two H100s.",
)
UNREAD_NORM = declare(
    __name__,
    "zero3-unread-norm",
    library="deepspeed",
    versions=">=0.19.8,<0.20",
    purpose="Steps without reading the gradient norm on the host, unless steps that are not finite are skipped",
    without="The host then waits for the device in each step, and the device for the host before the next one.",
    alternative="None: DeepSpeed skips each step that is not finite, and must read the norm to know.",
    apis=(f"{STAGE_3_OPTIMIZER}.step", f"{STAGE_3_MODULE}:is_invalid_grad_norm"),
    also=has_changed({f"{STAGE_3_OPTIMIZER}.step": "de68804aaea1"}),
    measurement="281.6 ms a step, without it 298.2 ms, 32.4 GiB both times: 1B, 4 x 4,096 tokens, two H200s. 0.6B, 8 "
    "rows: 368.6 ms, without it 402.1 ms, 47.5 GiB both times.",
)
Average = Callable[[list[Any], torch.dtype], list[Tensor]]


def send_16_bit_gradients(zero: Any, processes: int) -> bool:
    """Make a ZeRO-3 optimizer reduce-scatter 16-bit gradients without a float32 copy.

    Nothing changes without the patch or if the ranks are on several machines. Nothing changes either if
    DeepSpeed converts gradients to float32 (`contiguous_gradients`) or sends them in fewer bits.

    Args:
        zero: DeepSpeed's stage-3 optimizer.
        processes: Number of ranks.

    Returns:
        Whether the patch is installed.
    """
    if not SIXTEEN_BIT_GRADIENTS.is_usable():
        return False
    plain = getattr(zero, AVERAGE)
    if zero.contiguous_gradients or zero.all2all_process_group or not in_one_machine(processes):
        return False
    setattr(zero, AVERAGE, partial(_average, plain))
    return True


def sends_16_bit_gradients(zero: Any) -> bool:
    """Return whether `send_16_bit_gradients` has patched this optimizer."""
    return AVERAGE in vars(zero)


def _average(plain: Average, weights: list[Any], dtype: torch.dtype) -> list[Tensor]:
    """Return this rank's flat float32 shard of the mean gradient of each weight; `plain` averages float32 ones."""
    wide, thin = [[w for w in weights if (w.grad.dtype == torch.float32) == is_wide] for is_wide in (True, False)]
    shards = dict(zip(wide, plain(wide, dtype) if wide else (), strict=True))
    if thin:
        shards |= zip(thin, _mean([w.grad for w in thin], thin[0].ds_process_group), strict=True)
    return [shards[weight] for weight in weights]


def _mean(gradients: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Return this rank's shard of the mean over ranks of each gradient. Shards are equal, except for the last ones."""
    ranks, rank = group.size(), dist.get_rank(group)
    lengths = [-(-gradient.numel() // ranks) for gradient in gradients]
    rows = [
        torch.nn.functional.pad(gradient.reshape(-1), (0, ranks * length - gradient.numel())).view(ranks, length)
        if gradient.numel() % ranks
        else gradient.reshape(ranks, length)
        for gradient, length in zip(gradients, lengths, strict=True)
    ]
    parts = rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)
    means = reduce_scatter_in_float32(parts, group, mean=True).split(lengths)
    return [
        mean[: max(0, min(length, gradient.numel() - rank * length))]
        for mean, length, gradient in zip(means, lengths, gradients, strict=True)
    ]


def install_step_patches(engine: Any, *, skips: bool) -> None:
    """Install the changes of a step on a DeepSpeed engine, unless their patches are left out.

    Results do not change, except for the summation order of the gradient norm. The changes avoid a second copy of the
    float32 shards, compute one global norm, free small weights before the wait for the last gradients, and leave the
    norm on the device.

    Args:
        engine: The engine at stage 3, before its first step.
        skips: Whether a step that is not finite must leave the weights unchanged. The host then reads the norm.
    """
    zero = engine.optimizer
    if not (skips or zero.offload_optimizer) and UNREAD_NORM.is_usable():
        zero.step = partial(_step_without_reading, zero.step)
    if not STEP.is_usable():
        return
    _share_master_weights(zero)
    zero.get_grad_norm_direct = partial(_norm, zero)
    zero._get_norm_groups = partial(_norms, zero, zero._get_norm_groups)
    wait = zero.independent_gradient_partition_epilogue
    zero.independent_gradient_partition_epilogue = partial(_free_small_weights_and_wait, engine, wait)


def _share_master_weights(zero: Any) -> None:
    """Use one tensor as master weight and as gathered shard if both have the same dtype and device.

    DeepSpeed 0.19 intends this but compares a device with a name. The second copy has 4 bytes per element of the rank.
    """
    for master, shard in zip(zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat, strict=True):
        alike = shard is not None and (shard.dtype, shard.device, shard.shape)
        if alike == (master.dtype, master.device, master.shape):
            master.data = shard.data


def _free_small_weights_and_wait(engine: Any, wait: Callable[[], None]) -> None:
    """Free small weights, which are whole on every rank, before the host waits for the last gradients."""
    if engine.is_gradient_accumulation_boundary():
        engine.optimizer._partition_all_parameters()
    wait()


def _norms(zero: Any, of_each: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Return the global gradient norm, from one all-reduce. A collective.

    Returns DeepSpeed's norms per group if the optimizer is offloaded or parameters belong to several process groups.
    """
    ranks = {parameters[0].ds_process_group for parameters in zero.fp16_groups}
    if zero.offload_optimizer or len(ranks) != 1:
        return of_each()
    gradients = [gradient for group in range(len(zero.fp16_groups)) for gradient in zero.averaged_gradients[group]]
    return [_norm(zero, gradients, zero.fp16_groups[0])]


def _norm(zero: Any, gradients: list[Tensor], parameters: list[Any]) -> Tensor:
    """Return the norm of sharded gradients, or -1 if it is not finite, as DeepSpeed does. A collective.

    DeepSpeed's own function copies each gradient to float64.
    """
    square = get_total_norm(gradients, zero.device).double().square()
    torch.distributed.all_reduce(square, group=parameters[0].ds_process_group)
    return torch.where(square.isfinite(), square.sqrt(), -1.0)


def _step_without_reading(step: Callable[[], None]) -> None:
    """Step without reading on the host whether the gradient norm is finite.

    A step that is not finite then changes the weights, as it does on other backends. `training/nonfinite.py` finds it
    before the weights are used, because the norm that DeepSpeed keeps is infinity.
    """
    from deepspeed.runtime.zero import stage3

    plain = stage3.is_invalid_grad_norm
    stage3.is_invalid_grad_norm = _is_never_invalid
    try:
        step()
    finally:
        stage3.is_invalid_grad_norm = plain


def _is_never_invalid(norm: Tensor) -> bool:
    """Return False, in place of DeepSpeed's function, which would read `norm`."""
    return False
