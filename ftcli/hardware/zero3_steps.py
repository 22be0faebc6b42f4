"""What a step of ZeRO-3 is spared: a second set of weights, and a host that works while the device waits for it.

Behind its last gradient DeepSpeed waits for the device, and only then lets go of small weights, one by one, and takes
norms group by group: on two H200s the device had nothing to do for 13 + 5 of 836 ms of an 8B shape.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .ddp import norm_of


def hasten(engine: Any) -> None:
    """Let an engine of DeepSpeed step as said above; no number moves but for the order in which a norm is added up."""
    zero = engine.optimizer
    _step_what_is_gathered(zero)
    zero.get_grad_norm_direct = partial(_norm, zero)
    zero._get_norm_groups = partial(_norms, zero, zero._get_norm_groups)
    wait = zero.independent_gradient_partition_epilogue
    zero.independent_gradient_partition_epilogue = partial(_let_go_and_wait, engine, wait)


def _step_what_is_gathered(zero: Any) -> None:
    """Let masters be the very pieces that are gathered, where both are of one dtype on one device.

    DeepSpeed 0.19 means to, yet it compares a device with a name: 4 bytes for each of the rank's elements.
    """
    for master, piece in zip(zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat, strict=True):
        alike = piece is not None and (piece.dtype, piece.device, piece.shape)
        if alike == (master.dtype, master.device, master.shape):
            master.data = piece.data


def _let_go_and_wait(engine: Any, wait: Callable[[], None]) -> None:
    """Let go of small weights, which are whole on every rank, before the host waits for the last gradients."""
    if engine.is_gradient_accumulation_boundary():
        engine.optimizer._partition_all_parameters()
    wait()


def _norms(zero: Any, of_each: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Return the norm of all gradients, of one sum over ranks; of each group, where the host or others have some."""
    ranks = {parameters[0].ds_process_group for parameters in zero.fp16_groups}
    if zero.offload_optimizer or len(ranks) != 1:
        return of_each()
    gradients = [gradient for group in range(len(zero.fp16_groups)) for gradient in zero.averaged_gradients[group]]
    return [_norm(zero, gradients, zero.fp16_groups[0])]


def _norm(zero: Any, gradients: list[Tensor], parameters: list[Any]) -> Tensor:
    """Return the norm of gradients that all ranks have pieces of, or -1, DeepSpeed's word for one that is not finite.

    As every profile takes it: by itself DeepSpeed copies each gradient to float64 (27 of 951 ms, 8B on two H200s).
    """
    square = norm_of(gradients, zero.device).double().square()
    torch.distributed.all_reduce(square, group=parameters[0].ds_process_group)
    return torch.where(square.isfinite(), square.sqrt(), -1.0)
