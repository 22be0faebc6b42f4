"""Patches of the hooks with which ZeRO-3 gathers and frees the weights of each layer: less of the host's time.

With many small layers the device waits for these hooks. docs/explanation/performance.md has the time that they take.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from ftcli.runtime import process_settings
from ftcli.runtime.patches import declare, has_changed

WEIGHTS = "deepspeed.runtime.zero.partition_parameters"
COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator"
OFFLOAD = "deepspeed.runtime.zero.parameter_offload"
QUIET = declare(
    __name__,
    "zero3-quiet-hooks",
    library="deepspeed",
    versions=">=0.19.8,<0.20",
    purpose="Leaves out NVTX ranges, texts that are not printed, and repeated searches for the weights of a module",
    without="The host then needs more time for the hooks of each layer.",
    alternative="None: DeepSpeed has no setting for them.",
    apis=(
        "deepspeed.utils.nvtx:enable_nvtx",
        *(f"{module}:print_rank_0" for module in (WEIGHTS, COORDINATOR, OFFLOAD)),
        f"{COORDINATOR}:iter_params",
        f"{OFFLOAD}:iter_params",
        f"{OFFLOAD}:DeepSpeedZeRoOffload.partition_all_parameters",
        *(f"{WEIGHTS}:Init.{name}" for name in ("partition", "ds_status", "ds_tensor", "ds_active_sub_modules")),
        f"{WEIGHTS}:Init.ds_zero_param_process_group",
        f"{WEIGHTS}:free_param",
        *(f"{WEIGHTS}:ZeroParamStatus.{name}" for name in ("AVAILABLE", "NOT_AVAILABLE")),
    ),
    also=has_changed(
        {
            f"{WEIGHTS}:print_rank_0": "bdf0d39499da",
            f"{WEIGHTS}:Init._partition": "16a49ed9fa9f",
            f"{WEIGHTS}:Init._partition_param": "5b70975a00f5",
            f"{COORDINATOR}:get_all_parameters": "9464ef313616",
            f"{COORDINATOR}:iter_params": "594f9e285a48",
            f"{COORDINATOR}:PartitionedParameterCoordinator.release_and_reset_all": "a2c4e931a025",
        }
    ),
    measurement="303.1 ms a step, without it 303.3 ms, 32.4 GiB both times: 1B, 4 x 4,096 tokens, two H100s. This "
    "patch and five others together: 388.7 ms a step of 0.6B, 438.4 ms without them.",
)
GATHERED = declare(
    __name__,
    "zero3-gathered-layers",
    library="deepspeed",
    versions=">=0.19.8,<0.20",
    purpose="Copies the gathered weights of a layer by one kernel, and waits for them once",
    without="Each weight of a layer then has a copy, a wait and an event of its own.",
    alternative="None.",
    apis=(
        *(
            f"{WEIGHTS}:AllGatherCoalescedHandle.{name}"
            for name in ("wait", "allgather_handle", "params", "partitions", "world_size", "use_secondary_tensor")
        ),
        f"{WEIGHTS}:AllGatherCoalescedHandle.quantization",
        f"{WEIGHTS}:AllGatherCoalescedHandle.complete",
        f"{COORDINATOR}:InflightParamRegistry.pop",
    ),
    also=has_changed(
        {
            f"{WEIGHTS}:AllGatherCoalescedHandle.__init__": "e2187c02639f",
            f"{WEIGHTS}:AllGatherCoalescedHandle.wait": "223fc0c0eedf",
            f"{COORDINATOR}:PartitionedParameterCoordinator._fetch_sub_module_impl": "5a0c0616eaa0",
        }
    ),
    measurement="303.1 ms a step, without it 313.3 ms, 32.4 GiB both times: 1B, 4 x 4,096 tokens, two H100s.",
)
Wait = Callable[..., None]


def hasten_hooks(engine: Any) -> None:
    """Install the patches of this module for a DeepSpeed engine at stage 3, until the run ends.

    Args:
        engine: The engine, before its first pass. Its modules and weights do not change any more.
    """
    from deepspeed.runtime.zero import parameter_offload, partition_parameters, partitioned_param_coordinator
    from deepspeed.utils import nvtx

    if QUIET.is_usable():
        process_settings.change(nvtx, "enable_nvtx", False)
        for module in (partition_parameters, partitioned_param_coordinator, parameter_offload):
            process_settings.change(module, "print_rank_0", partial(_print, module.print_rank_0))
        listed = Weights(engine.module, partitioned_param_coordinator.iter_params)
        for module in (partitioned_param_coordinator, parameter_offload):
            process_settings.change(module, "iter_params", listed)
        hooks = engine.optimizer.parameter_offload
        weights = list(engine.module.parameters())
        hooks.partition_all_parameters = partial(_shard_whole_weights, weights, hooks.partition_all_parameters)
        for weight in weights:
            weight.partition = partial(_shard, weight, weight.partition)
        _remember_signatures(engine.module)
    if GATHERED.is_usable():
        handle = partition_parameters.AllGatherCoalescedHandle
        process_settings.change(handle, "wait", _with_one_copy(handle.wait))
        process_settings.change(partitioned_param_coordinator.InflightParamRegistry, "pop", _pop_all_of_handle)


def _print(plain: Callable[..., None], message: Any, debug: bool = False, force: bool = False) -> None:
    """Print as DeepSpeed does, but find out the rank only if something is printed."""
    if debug or force:
        plain(message, debug=debug, force=force)


class Weights:
    """The weights of each module of a model, listed once; a replacement of DeepSpeed's `iter_params`."""

    def __init__(self, model: nn.Module, plain: Callable[..., Iterable[Any]]) -> None:
        """Remember the modules of the model. The weights of others are listed each time."""
        self.plain = plain
        self.modules = set(model.modules())
        self.listed: dict[tuple[nn.Module, bool], list[Any]] = {}

    def __call__(self, module: Any, recurse: bool = False) -> Iterator[Any]:
        """Yield the weights of a module and, with `recurse`, of its parts; then those that DeepSpeed added to it."""
        if module not in self.modules:
            yield from self.plain(module, recurse)
            return
        if (module, recurse) not in self.listed:
            self.listed[module, recurse] = list(module.parameters(recurse))
        yield from self.listed[module, recurse]
        for _, weight in module.ds_external_parameters():
            yield weight


def _shard_whole_weights(weights: list[Any], shard: Callable[[], None]) -> None:
    """Free the weights that are whole on every rank. Gathers that are not complete are left to DeepSpeed.

    DeepSpeed's count of elements that are whole is not changed; the next forward pass begins with 0.
    """
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    whole = [one for one in weights if one.ds_status != ZeroParamStatus.NOT_AVAILABLE or one.ds_active_sub_modules]
    if any(weight.ds_status != ZeroParamStatus.AVAILABLE for weight in whole):
        shard()
        return
    for weight in whole:
        weight.ds_active_sub_modules.clear()
        weight.partition()


def _shard(weight: Any, plain: Callable[..., None], *given: Any, **options: Any) -> None:
    """Free a whole weight, of which this rank keeps its shard. Other cases are left to DeepSpeed."""
    from deepspeed.runtime.zero import partition_parameters

    status = partition_parameters.ZeroParamStatus
    is_usual = not given and options in ({}, {"free_data": True}) and weight.ds_status == status.AVAILABLE
    if is_usual and weight.ds_tensor.final_location is None and weight.ds_zero_param_process_group is None:
        partition_parameters.free_param(weight)
    else:
        plain(*given, **options)


def _remember_signatures(model: nn.Module) -> None:
    """Store the signatures of DeepSpeed's autograd functions. torch reads them at each call, and would derive them."""
    from deepspeed.runtime.zero import linear

    functions = {linear.LinearFunctionForZeroStage3}
    for module in model.modules():
        functions.update(vars(module)[name] for name in ("pre_bwd_fn", "post_bwd_fn") if name in vars(module))
    for function in functions:
        forward: Any = function.forward
        forward.__signature__ = inspect.signature(forward)


def _with_one_copy(plain: Wait) -> Wait:
    """Return a method that waits for gathered weights and copies all of them by one kernel."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    @torch.no_grad()
    def wait(handle: Any, handle_dependency: bool = True) -> None:
        if handle.complete:
            return
        if not handle_dependency or not _has_equal_shards(handle):
            plain(handle, handle_dependency)
            return
        handle.allgather_handle.wait()
        mine, ranks = handle.partitions[0], handle.world_size
        gathered = mine.as_strided((ranks, mine.numel()), (mine.numel(), 1))
        lengths = [weight.ds_tensor.ds_numel for weight in handle.params]
        wholes = [mine.new_empty(ranks, length) for length in lengths]
        torch.split_with_sizes_copy(gathered, lengths, dim=1, out=wholes)
        for weight, whole in zip(handle.params, wholes, strict=True):
            weight.data = whole.view(weight.ds_shape)
            weight.ds_status = ZeroParamStatus.AVAILABLE
        if mine.is_cuda:
            mine.record_stream(torch.cuda.current_stream())
        handle.complete = True

    return wait


def _has_equal_shards(handle: Any) -> bool:
    """Return whether all ranks have equal parts of each weight of a gather, in the dtype that is gathered."""
    if handle.quantization or handle.use_secondary_tensor:
        return False
    dtype = handle.partitions[0].dtype
    return all(
        weight.ds_numel == handle.world_size * weight.ds_tensor.ds_numel and weight.ds_tensor.dtype == dtype
        for weight in handle.params
    )


def _pop_all_of_handle(registry: Any, weight: Any) -> Any:
    """Remove all weights of a gather from DeepSpeed's registry, because one wait is enough. Returns the gather."""
    handle = registry.data.pop(weight)
    for other in [other for other, its in registry.data.items() if its is handle]:
        del registry.data[other]
    return handle
