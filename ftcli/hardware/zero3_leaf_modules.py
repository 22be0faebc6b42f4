"""Layers that ZeRO-3 gathers as one module (DeepSpeed's leaf modules), and the dtype of their shards in a window.

    between accumulation windows    float32; the optimizer writes the shards, all other code reads them
    inside a window                 16 bits, for weights that autocast uses only in matrix products

In a window each shard is rounded once, gathered in 16 bits and multiplied in 16 bits. Otherwise every pass rounds the
shard, DeepSpeed converts it to float32 on arrival, and autocast rounds it again. Gradients would be copied in the same
way. docs/explanation/performance.md has the time that this takes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ftcli.hardware.zero3_patches import sends_16_bit_gradients
from ftcli.models.structure import layers_of
from ftcli.runtime.patches import declare

if TYPE_CHECKING:
    from accelerate import Accelerator


GATHER_STREAM = "_DeepSpeedZeRoOffload__allgather_stream"  # private in DeepSpeed 0.19, without a public name
STREAM = declare(
    __name__,
    "zero3-gather-stream",
    library="deepspeed",
    versions=">=0.19.8,<0.20",
    purpose="Makes DeepSpeed's stream of all-gathers wait for the rounding and the update of weights",
    without="The host then waits for the device once or twice per accumulation window.",
    alternative="None: the stream has no public name.",
    apis=(f"deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload.{GATHER_STREAM}",),
    measurement="303.1 ms a step, without it 302.3 ms, 32.4 GiB both times: 1B, 4 x 4,096 tokens, two H100s. Lines "
    "with the same patches differ as much.",
)
ROUNDED = declare(
    __name__,
    "zero3-rounded-shards",
    library="deepspeed",
    versions=">=0.19.8,<0.20",
    purpose="Replaces the float32 shards of matrix weights by 16-bit copies during an accumulation window",
    without="Each pass then rounds and copies all weights again.",
    alternative="None: DeepSpeed casts each weight when it gathers it.",
    apis=(
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.leaf_parameters",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.empty_partition_cache",
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.reduce_bucket_size",
        "deepspeed.runtime.zero.partition_parameters:ZeroParamStatus.NOT_AVAILABLE",
        *(
            f"deepspeed.runtime.zero.partition_parameters:Init.{name}"
            for name in ("ds_tensor", "ds_status", "ds_numel", "ds_zero_param_process_group")
        ),
        "torch:_foreach_copy_",
    ),
    measurement="299.4 ms and 32.4 GiB a step, without it 309.9 ms and 33.0 GiB: 1B, 4 x 4,096 tokens, two H100s.",
)
# Keys of DeepSpeed that change how weights are gathered.
OTHER_GATHERING_KEYS = ("stage3_use_all_reduce_for_fetch_params", "zero_quantized_weights")
LEAF_PASSES = declare(
    __name__,
    "zero3-leaf-passes",
    library="deepspeed",
    versions=">=0.19.8,<0.20",
    purpose="Reduces the gradients of a leaf module once, after the last of several forward passes",
    without="A task that calls the model several times before one backward pass fails under ZeRO-3.",
    alternative="None: DeepSpeed has no setting for it.",
    apis=(
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3._leaf_module_hooks",
        "torch.utils.hooks:RemovableHandle.hooks_dict_ref",
    ),
    unmeasured="Without it such a task fails, so there is nothing to compare.",
)


def leaves_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model that can be leaf modules in DeepSpeed 0.19.

    DeepSpeed releases the gradients of a leaf module from a hook on the input of the module. If the input needs no
    gradient, it does so at once, before the gradients are complete. These layers are therefore left out:

    - all layers of a model with frozen weights, and a first layer without trained weights before it;
    - layers with weights that another module uses too, because that module adds to the gradients later;
    - layers of models outside transformers, which might run several times per forward pass.

    Args:
        model: The unprepared model.
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
    """Return how many names each weight has in a module."""
    modules = (one for _, one in module.named_modules(remove_duplicate=False))
    named = (one.named_parameters(recurse=False, remove_duplicate=False) for one in modules)
    return Counter(weight for weights in named for _, weight in weights)


def reduce_after_last_pass(zero: Any) -> None:
    """Make the hooks of leaf modules reduce gradients once, after the last of several forward passes.

    DeepSpeed's hook runs each time the backward pass leaves a layer: twice after two forward passes. Autograd sets the
    gradient of a weight when all passes have added to it. Before the last pass the weights have no gradient. DeepSpeed
    would reduce zeros there, and stop at an assertion when the same weight comes a second time.

    Args:
        zero: DeepSpeed's stage-3 optimizer.
    """
    if not LEAF_PASSES.is_usable():
        return
    for handle in zero._leaf_module_hooks:
        hooks = handle.hooks_dict_ref()
        if hooks is not None and handle.id in hooks:
            hooks[handle.id] = partial(_reduce_if_complete, hooks[handle.id])


def _reduce_if_complete(reduce: Callable[..., None], layer: nn.Module, *gradients: Any) -> None:
    """Call DeepSpeed's hook unless the weights of the layer wait for the gradients of another forward pass."""
    if any(weight.grad is not None for weight in layer.parameters()):
        reduce(layer, *gradients)


@contextmanager
def share_weight_casts(accelerator: Accelerator) -> Iterator[None]:
    """Return a context for a window, in which the shards of matrix weights are rounded to 16 bits once.

    No product and no gradient changes. An optimizer step inside the context writes to the float32 shards, which the
    parameters refer to again after the context.

    Args:
        accelerator: The Accelerator with the prepared DeepSpeed engine.
    """
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    zero: Any = accelerator.deepspeed_engine_wrapped.engine.optimizer
    weights = _weights_to_round(zero, accelerator)
    if any(weight.ds_status != ZeroParamStatus.NOT_AVAILABLE for weight in weights):
        zero.empty_partition_cache()  # an evaluation left some of them whole, in float32
    exact = [weight.ds_tensor.data for weight in weights]
    try:
        if weights:
            _round(weights)
            gather_after_current_stream(zero, accelerator.device)
        yield
    finally:
        for weight, shard in zip(weights, exact, strict=True):
            weight.ds_tensor.data = shard
            if weight.ds_status == ZeroParamStatus.NOT_AVAILABLE:
                weight.data = shard.new_empty(0)  # float32, as before the context


def _round(weights: list[Any]) -> None:
    """Replace the float32 shards of weights by 16-bit copies. An optimizer step replaces the copies again."""
    exact = [weight.ds_tensor.data for weight in weights]
    rounded = [torch.empty_like(shard, dtype=weight.comm_dtype) for weight, shard in zip(weights, exact, strict=True)]
    torch._foreach_copy_(rounded, exact)
    for weight, shard in zip(weights, rounded, strict=True):
        weight.ds_tensor.data = shard


def gather_after_current_stream(zero: Any, device: torch.device) -> None:
    """Make DeepSpeed's all-gather stream wait for the current stream, which has written shards."""
    stream = getattr(zero.parameter_offload, GATHER_STREAM, None) if STREAM.is_usable() else None
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    elif device.type == "cuda":
        torch.cuda.current_stream().synchronize()


def _weights_to_round(zero: Any, accelerator: Accelerator) -> list[Any]:
    """Return the weights of leaf modules that are sent in 16 bits and whose gradients are summed in float32.

    The gradients are summed in float32 by zero3_patches.py, or by DeepSpeed's bucket if they fit in it. These weights
    are left out and are cast when they are gathered:

    - weights outside leaf modules, because their gradient hooks require the dtype that a weight had at their creation;
    - offloaded shards, and shards with further copies on the same machine;
    - all weights if DeepSpeed gathers in one dtype or in fewer bits.
    """
    config = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
    fits = zero.reduce_bucket_size if getattr(zero, "contiguous_gradients", False) else 0
    fits = math.inf if sends_16_bit_gradients(zero) else fits
    if any(config.get(name) for name in OTHER_GATHERING_KEYS) or not ROUNDED.is_usable():
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
