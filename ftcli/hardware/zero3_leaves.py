"""Layers that ZeRO-3 gathers as one, DeepSpeed's leaf modules: which may be, and what their pieces are in training.

    between windows of micro-batches    float32, which steps write and everything else reads
    inside of one    in 16 bits, what autocast only multiplies: rounded once, gathered so, multiplied so

Without the second line each pass rounds a piece for its journey, DeepSpeed makes float32 of it on arrival, autocast
rounds it again, and gradients go back the same way: copies of all weights, 88 of 1039 ms of an 8B shape on two H200s.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..base_model import layers_of
from .zero3_sums import sends_as_they_come

if TYPE_CHECKING:
    from accelerate import Accelerator

GATHERING = "_DeepSpeedZeRoOffload__allgather_stream"  # DeepSpeed 0.19's, which has no other word for it
OTHERWISE = ("stage3_use_all_reduce_for_fetch_params", "zero_quantized_weights")  # keys of DeepSpeed that gather so


def leaves_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model that may gather as one, in DeepSpeed 0.19.

    A leaf's gradients are taken by a hook on its input, or at once where that needs none: none is a leaf of a model
    with frozen weights, nor one before which nothing is trained. Weights that another module uses too would be taken
    before that one has added to them, and so would those of layers that run several times: layers of models that are
    not transformers' own stay as they are.
    """
    if not all(weight.requires_grad for weight in model.parameters()):
        return []
    first, uses = next(model.parameters(), None), _uses(model)
    return [
        layer
        for layer in layers_of(model)
        if type(layer).__module__.startswith("transformers.")
        and all(weight is not first and uses[weight] == n for weight, n in _uses(layer).items())
    ]


def _uses(module: nn.Module) -> Counter[nn.Parameter]:
    """Return how many times each weight is in a module, by all of its names."""
    inside = (part for _, part in module.named_modules(remove_duplicate=False))
    return Counter(weight for part in inside for weight in part._parameters.values() if weight is not None)


@contextmanager
def sharing_casts(accelerator: Accelerator) -> Iterator[None]:
    """Round pieces of products' weights once, for a window of micro-batches; no bit of a product or a gradient changes.

    A step inside of the block writes to the float32 pieces, which are all there is after it.
    """
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    zero: Any = accelerator.deepspeed_engine_wrapped.engine.optimizer
    weights = _rounded(zero, accelerator)
    if any(weight.ds_status != ZeroParamStatus.NOT_AVAILABLE for weight in weights):
        zero.empty_partition_cache()  # an evaluation left them whole, in float32
    exact = [weight.ds_tensor.data for weight in weights]
    try:
        if weights:
            _round(weights)
            _gather_after_this(zero, accelerator.device)
        yield
    finally:
        for weight, piece in zip(weights, exact, strict=True):
            weight.ds_tensor.data = piece
            if weight.ds_status == ZeroParamStatus.NOT_AVAILABLE:
                weight.data = piece.new_empty(0)  # in float32, as it was found


def _round(weights: list[Any]) -> None:
    """Let pieces be in 16 bits; a step that makes them float32 again lets go of those."""
    exact = [weight.ds_tensor.data for weight in weights]
    rounded = [torch.empty_like(piece, dtype=weight.comm_dtype) for weight, piece in zip(weights, exact, strict=True)]
    torch._foreach_copy_(rounded, exact)
    for weight, piece in zip(weights, rounded, strict=True):
        weight.ds_tensor.data = piece


def _gather_after_this(zero: Any, device: torch.device) -> None:
    """Let DeepSpeed's stream of gatherings wait for what is under way, which by itself it would not."""
    stream = getattr(zero.parameter_offload, GATHERING, None)
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    elif device.type == "cuda":  # another version has another name for it
        torch.cuda.current_stream().synchronize()


def _rounded(zero: Any, accelerator: Accelerator) -> list[Any]:
    """Return weights of leaves that travel in 16 bits, and whose gradients are summed in float32 all the same.

    zero3_sums.py does, or DeepSpeed's own bucket that makes them float32, if one fits in there. Gradients of what is no
    leaf are taken by hooks that know the dtype a weight had when they were made. Offloaded pieces are cast on their way
    as ever, and so are those that a machine keeps further copies of, and all where what travels is of one dtype or in
    fewer bits.
    """
    config = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
    fits = zero.reduce_bucket_size if getattr(zero, "contiguous_gradients", False) else 0
    fits = math.inf if sends_as_they_come(zero) else fits
    if any(config.get(name) for name in OTHERWISE):
        return []
    return [
        weight
        for weights in getattr(zero, "leaf_parameters", {}).values()
        for weight in weights
        if hasattr(weight, "comm_dtype")
        and weight.ds_numel <= fits
        and weight.ds_tensor.device.type == accelerator.device.type
        and weight.ds_zero_param_process_group is None
    ]
