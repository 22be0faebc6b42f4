"""Sharded optimizer state, gradients and weights: DeepSpeed's ZeRO, which clips and steps inside backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ftcli.config.deepspeed_file import drop_auto, drop_left_open
from ftcli.hardware import fsdp_mixed_precision, weight_broadcast, zero3_leaf_modules
from ftcli.hardware.backend import Backend
from ftcli.hardware.deepspeed_partitions import (
    PARTITIONS,
    SHARDING,
    partition_slots,
    shards_at_stage_2,
    shards_at_stage_3,
)
from ftcli.hardware.gradient_reduction import in_one_machine
from ftcli.hardware.optimizer_state import OptimizerSlot, StateShard, trained_parameters
from ftcli.hardware.zero3_hooks import hasten_hooks
from ftcli.hardware.zero3_leaf_modules import leaves_of, reduce_after_last_pass
from ftcli.hardware.zero3_linear import replace_linear
from ftcli.hardware.zero3_patches import SIXTEEN_BIT_GRADIENTS, install_step_patches, send_16_bit_gradients
from ftcli.hardware.zero3_step import hasten_step, sub_group_size
from ftcli.models.precision import AUTOCAST
from ftcli.models.structure import layers_of
from ftcli.runtime.patches import declare
from ftcli.runtime.process_settings import on_restore

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from ftcli.config.plan import Plan
    from ftcli.config.recipe import Recipe
    from ftcli.hardware.collectives import Ranks

# Elements of a bucket in which stage 3 sums gradients, unless the profile's file sets it. NCCL sends 1 GB as fast as
# DeepSpeed's default of 2 GB (5e8). The largest matrix of a 70B model fits, as zero3_leaf_modules.py requires.
STAGE_3 = {"reduce_bucket_size": 250_000_000}
# DeepSpeed's defaults, in elements: prefetched, whole at a time, and the size up to which a weight is always whole.
PREFETCH_SIZE, MAX_LIVE_SIZE, PERSISTENT_SIZE = 50_000_000, 1_000_000_000, 100_000

HOOKS = "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload"
HIDDEN_HOOKS = declare(
    __name__,
    "zero3-hidden-hooks",
    library="torch",
    versions=">=2.11,<2.14",
    purpose="Hides DeepSpeed's gather hooks from the dispatch modes of selective checkpointing",
    without="Selective gradient checkpointing fails under ZeRO-3, so ZeRO-3 is refused.",
    alternative="None: torch has no public context without dispatch modes.",
    apis=("torch.utils._python_dispatch:_disable_current_modes",),
    required=True,
)
HOOK_FUNCTIONS = declare(
    __name__,
    "zero3-hook-functions",
    library="deepspeed",
    versions=">=0.19.8,<0.20",
    purpose="Wraps the two functions that DeepSpeed's hooks call before and after the forward of a module",
    without="Selective gradient checkpointing fails under ZeRO-3, so ZeRO-3 is refused.",
    alternative="None: the hooks have no public setting.",
    apis=tuple(f"{HOOKS}.{name}_sub_module_forward_function" for name in ("pre", "post")),
    required=True,
)
COMPILED_LINEAR = declare(
    __name__,
    "zero3-compiled-linear",
    library="deepspeed",
    versions=">=0.19.8,<0.20",
    purpose="Keeps torch.compile from tracing into DeepSpeed's linear function",
    without="torch 2.11 then compiles a graph for each of the first eight layers, and none for the others.",
    alternative="None: the function has no public name.",
    apis=("deepspeed.runtime.zero.linear:zero3_linear_wrap",),
    measurement="303.1 ms and 32.4 GiB a step, without it 334.4 ms and 36.9 GiB: 1B, 4 x 4,096 tokens, two H100s.",
)
SENT_IN_16_BITS = declare(
    __name__,
    "zero3-16-bit-weights",
    library="deepspeed",
    versions=">=0.19.8,<0.20",
    purpose="Sets the dtype in which DeepSpeed gathers the weights of matrix products",
    without="Weights are then gathered in float32, twice the bytes.",
    alternative="DeepSpeed's `torch_autocast`, which also sums gradients in 16 bits.",
    apis=("deepspeed.runtime.torch_autocast:get_comm_dtype", f"{SHARDING}:Init.ds_persist"),
    measurement="299.4 ms and 32.4 GiB a step, without it 301.4 ms and 33.0 GiB: 1B, 4 x 4,096 tokens, two H100s.",
)
RELEASE = declare(
    __name__,
    "deepspeed-release",
    library="deepspeed",
    versions=">=0.19.8,<0.20",
    purpose="Clears the optimizer and the module stack of a discarded run",
    without="The memory of such a run is then freed only at the end of the process.",
    alternative="`engine.destroy()`, which leaves both.",
    apis=("deepspeed.runtime.zero.parameter_offload:FWD_MODULE_STACK", "deepspeed:DeepSpeedEngine.destroy"),
    measurement="A discarded run of 1B leaves 0.06 GiB on each of two H200s, without the patch 6.97 GiB.",
)


class DeepSpeed(Backend):
    """ZeRO stages 2 and 3. DeepSpeed decides when gradients are summed over ranks."""

    def reads_weights_once(self) -> bool:
        """Return whether the profile requires one rank to read the weights for all ranks; at stage 3 only."""
        from accelerate.state import AcceleratorState

        return bool(AcceleratorState().deepspeed_plugin.zero3_init_flag)

    @contextmanager
    def load_whole_weights(self) -> Iterator[None]:
        """Hide ZeRO-3 from transformers.

        Otherwise transformers would hold shards besides the whole weights, and fail on a head of another size.
        """
        from accelerate.state import AcceleratorState
        from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

        unset_hf_deepspeed_config()
        try:
            yield
        finally:
            set_hf_deepspeed_config(AcceleratorState().deepspeed_plugin.dschf)
            on_restore(unset_hf_deepspeed_config)

    def configure(self, accelerator: Accelerator, recipe: Recipe, plan: Plan) -> None:
        """Write numbers of the recipe and the plan into DeepSpeed's configuration, which Accelerate would complete."""
        for patch in (PARTITIONS, HIDDEN_HOOKS, HOOK_FUNCTIONS):
            patch.require()
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        config["train_micro_batch_size_per_gpu"] = plan.micro_size
        config["gradient_accumulation_steps"] = plan.accumulation
        config["train_batch_size"] = plan.global_size
        config["gradient_clipping"] = recipe.optimizer.max_grad_norm or 0.0  # 0: DeepSpeed does not clip
        if recipe.precision == "bf16_pure":  # under bf16 this would build the float32 weights from rounded ones
            config["bf16"] = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        zero = config["zero_optimization"]
        drop_auto(zero)
        drop_left_open(config)
        if zero.get("stage") == 3:
            replace_linear()
            for name, size in STAGE_3.items():
                zero.setdefault(name, size)
            sends_16_bits = recipe.precision in AUTOCAST and SIXTEEN_BIT_GRADIENTS.is_usable()
            if sends_16_bits and in_one_machine(accelerator.num_processes):
                zero.setdefault("contiguous_gradients", False)  # no float32 bucket: zero3_patches.py
        # DeepSpeed's timer of samples per second waits for the device twice per step. The timer of the log does not.
        config.setdefault("timers", {}).setdefault("throughput", {}).setdefault("enabled", False)
        # Accelerate would replace an optimizer on the host by DeepSpeed's, which is compiled at run time.
        config.setdefault("zero_force_ds_cpu_optimizer", False)

    def before_prepare(self, accelerator: Accelerator, model: nn.Module) -> nn.Module:
        """Return the model on the host, because DeepSpeed moves it; at stage 3 with its layers as leaf modules.

        By default DeepSpeed all-gathers the weights of each module inside a layer. The next module waits for weights
        that were prefetched. With one hook per layer, the weights of the next layer arrive while this one computes.
        """
        from deepspeed.runtime.zero import linear
        from deepspeed.utils.z3_leaf_module import set_z3_leaf_module

        layers = leaves_of(model) if _is_stage_3() else []
        for layer in layers:
            set_z3_leaf_module(layer, True)
        # torch 2.11 would trace into this function, find the number of a weight, and compile a graph for each layer
        # up to the eighth. The other layers would run without compilation.
        if COMPILED_LINEAR.is_usable():
            torch.compiler.allow_in_graph(linear.zero3_linear_wrap)
        zero = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
        if _is_stage_3():
            zero.setdefault("sub_group_size", sub_group_size(model, accelerator.num_processes))
        if layers:
            whole = zero.get("stage3_param_persistence_threshold", PERSISTENT_SIZE)  # up to this size, never gathered
            sizes = [[weight.numel() for weight in layer.parameters()] for layer in layers]
            largest = max(sum(size for size in one if not isinstance(whole, int) or size > whole) for one in sizes)
            zero.setdefault("stage3_prefetch_bucket_size", max(largest, PREFETCH_SIZE))
            zero.setdefault("stage3_max_live_parameters", max(3 * largest, MAX_LIVE_SIZE))
        return model

    def may_compile(self, model: nn.Module) -> bool:
        """Return whether no hook is inside a layer: at stage 3 this requires that all layers are leaf modules."""
        leaves = leaves_of(model) if _is_stage_3() else []
        return not _is_stage_3() or (bool(leaves) and leaves == layers_of(model))

    def offloads(self, accelerator: Accelerator) -> bool:
        """Return whether DeepSpeed keeps the optimizer state on the host and updates weights there."""
        zero = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
        return (zero.get("offload_optimizer") or {}).get("device", "none") != "none"

    @contextmanager
    def broadcast_weights(self, accelerator: Accelerator, model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
        """Send every rank its shards of the reading rank's weights, before the context is entered. A collective.

        One parameter is whole at a time.
        """
        from deepspeed.runtime.zero import Init

        memory = weight_broadcast.HostMemory()

        class OneAtATime(torch.nn.Module):
            def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
                """Yield parameters; DeepSpeed broadcasts and shards each before it requests the next."""
                for parameter in model.parameters():
                    if parameter.is_meta:
                        weight_broadcast.replace(parameter, torch.empty_like(parameter, device=accelerator.device))
                    value = parameter.detach()
                    yield parameter
                    memory.release(value)
                    del value

        Init(module=OneAtATime(), config_dict_or_path=accelerator.state.deepspeed_plugin.dschf.config)
        weight_broadcast.share_buffers(model, accelerator.device)
        yield

    def after_prepare(self, model: nn.Module, dtype: torch.dtype | None, *, skips: bool) -> None:
        """Make stage 3 all-gather matrix weights in `dtype`, with hooks that are hidden from dispatch modes.

        DeepSpeed sends weights with a `comm_dtype` in that dtype and converts them to float32 on arrival. This halves
        the bytes and changes no product. DeepSpeed's `torch_autocast` would also sum gradients in 16 bits. Small
        weights are whole on every rank and keep their dtype. `before_prepare` has set the prefetch distance.
        """
        engine: Any = model
        if not _is_stage_3():
            return
        hasten_hooks(engine)
        install_step_patches(engine, skips=skips)
        hasten_step(engine)
        reduce_after_last_pass(engine.optimizer)
        hooks = engine.optimizer.parameter_offload
        for name in ("pre_sub_module_forward_function", "post_sub_module_forward_function"):
            setattr(hooks, name, _without_dispatch_modes(getattr(hooks, name)))
        if dtype is not None:
            send_16_bit_gradients(engine.optimizer, torch.distributed.get_world_size())
        sends_16_bits = dtype is not None and SENT_IN_16_BITS.is_usable()
        for weight in fsdp_mixed_precision.matrix_weights(self.unwrap(model)) if sends_16_bits else ():
            if weight.dtype == torch.float32 and not weight.ds_persist:
                weight.comm_dtype = dtype

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model inside DeepSpeed's engine."""
        inner: Any = model.module
        return inner

    def share_weight_casts(self, accelerator: Accelerator) -> AbstractContextManager[None]:
        """Return a context in which the shards of matrix weights of leaf modules are rounded to 16 bits once."""
        return zero3_leaf_modules.share_weight_casts(accelerator)

    def backward(self, accelerator: Accelerator, loss: Tensor, factor: float) -> None:
        """Add the gradients of `loss`; DeepSpeed multiplies it by `factor` and divides before it clips."""
        if factor != 1.0:
            accelerator.deepspeed_engine_wrapped.engine.optimizer.override_loss_scale(factor)
        accelerator.backward(loss)

    def clip_grad_norm(
        self, accelerator: Accelerator, parameters: list[nn.Parameter], max_norm: float | None, factor: float
    ) -> Tensor:
        """Return the global norm before clipping. DeepSpeed has unscaled, clipped and stepped inside backward.

        If the norm is not finite, the result is infinity. Then DeepSpeed has not stepped if such steps are skipped.
        """
        norm: Any = accelerator.deepspeed_engine_wrapped.engine.get_global_grad_norm()
        return torch.as_tensor(norm, dtype=torch.float32)

    def step(self, optimizer: Any, missing: Any) -> None:
        """Do nothing, because DeepSpeed steps inside backward, also tensors without a gradient."""

    def flush(self, model: nn.Module) -> None:
        """Wait for weights that an evaluation prefetched for a backward pass, and free them. Local."""
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        engine: Any = model
        if any(getattr(p, "ds_status", None) == ZeroParamStatus.INFLIGHT for p in self.unwrap(model).parameters()):
            engine.optimizer.empty_partition_cache()

    def full_parameter(self, parameter: nn.Parameter) -> Tensor:
        """Return the whole parameter, all-gathered if ZeRO-3 has sharded it. A collective."""
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        sharded: Any = parameter
        if not hasattr(sharded, "ds_id"):
            return parameter.data
        if hasattr(sharded, "comm_dtype") and sharded.ds_status == ZeroParamStatus.AVAILABLE:
            sharded.partition()  # an evaluation left it whole and rounded; gather the exact values instead
        with GatheredParameters([sharded]):
            return parameter.data.clone()

    def optimizer_slots(self, model: nn.Module, optimizer: Any) -> list[OptimizerSlot]:
        """Return the flat partitions that the optimizer updates: float32 master weights of many parameters each."""
        return partition_slots(model)

    def state_shards(
        self, model: nn.Module, optimizer: Any, ranks: Ranks, names: Collection[str]
    ) -> Iterator[StateShard]:
        """Yield this rank's part of the master weight of every parameter, then the copies used in forward passes.

        The copies are loaded but not saved, because nothing else updates them before the next step. DeepSpeed's own
        accessors gather whole tensors or support stage 3 only, and cannot create optimizer state.
        """
        for name, parameter in trained_parameters(self.unwrap(model), names):
            yield from (shards_at_stage_3 if hasattr(parameter, "ds_id") else shards_at_stage_2)(name, parameter, model)

    def release(self, model: nn.Module) -> None:
        """Free the memory of a run that is no longer used.

        In DeepSpeed 0.19, hooks of the optimizer form reference cycles that Python's garbage collector cannot see.
        A list of modules in stage 3 also keeps the last model of a process.
        """
        engine: Any = model
        engine.destroy()
        for parameter in engine.module.parameters():
            parameter.grad, parameter.data = None, parameter.data.new_empty(0)
            if hasattr(parameter, "ds_tensor"):
                parameter.ds_tensor.data = parameter.data
        if not RELEASE.is_usable():
            return
        from deepspeed.runtime.zero import parameter_offload

        zero = engine.optimizer
        zero.optimizer.state.clear()
        zero.optimizer.param_groups.clear()
        vars(zero).clear()
        parameter_offload.FWD_MODULE_STACK.clear()


def _is_stage_3() -> bool:
    """Return whether weights are sharded between uses, so that hooks gather and free them."""
    from accelerate.state import AcceleratorState

    return bool(AcceleratorState().deepspeed_plugin.zero_stage == 3)


def _without_dispatch_modes(hook: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    """Return the hook, hidden from dispatch modes.

    Selective activation checkpointing counts the operations of a layer in the forward pass and when it recomputes
    them. The operations that gather weights differ between the two.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    def hidden(module: nn.Module) -> None:
        with _disable_current_modes():
            hook(module)

    return hidden
