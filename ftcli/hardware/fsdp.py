"""Shard weights, gradients and optimizer state with PyTorch's fully_shard, through Accelerate's FSDP2."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard

import torch

from ftcli.hardware import fsdp_mixed_precision, weight_broadcast
from ftcli.hardware.backend import Backend
from ftcli.hardware.fsdp_mixed_precision import send_gradients_in_16_bits
from ftcli.hardware.gradient_clipping import clip_grads_with_norm, get_total_norm, unscale_gradients
from ftcli.hardware.optimizer_state import NO_ELEMENTS, StateShard, open_state, trained_parameters
from ftcli.models.structure import LAYERS, base_model_of
from ftcli.runtime.errors import InputError
from ftcli.runtime.patches import declare
from ftcli.runtime.process import world_size
from ftcli.runtime.process_settings import change

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from ftcli.config.plan import Plan
    from ftcli.config.recipe import Recipe
    from ftcli.hardware.collectives import Ranks


PREFETCH = True  # all-gather the weights of the next block before this block computes
KEEP_LAST = True  # the weights of the last block stay whole between its forward and its backward pass


def embeddings_problem() -> str | None:
    """Return how Accelerate differs from what `_return_none_once` needs: one call of each method per `prepare`."""
    import inspect

    from accelerate.utils import fsdp_utils

    text = inspect.getsource(fsdp_utils)
    counts = {name: text.count(name) for name in ("get_input_embeddings", "get_output_embeddings")}
    return None if set(counts.values()) == {1} else f"Accelerate's fsdp_utils calls {counts}, and not each one once"


EMBEDDINGS = declare(
    __name__,
    "fsdp-embeddings",
    library="accelerate",
    versions=">=1.15,<1.16",
    purpose="Makes a model return no embeddings during Accelerate's `prepare`, if FSDP2 would fail otherwise",
    without="Models without embeddings, or with embeddings inside a block, are refused under FSDP.",
    alternative="`fully_shard` before `prepare`, which would replace all of Accelerate's FSDP2.",
    apis=("accelerate.utils.fsdp_utils:fsdp2_prepare_model",),
    required=True,
    also=embeddings_problem,
)
CONSTANT_SIZES = declare(
    __name__,
    "fsdp-constant-sizes",
    library="torch",
    versions=">=2.11,<2.14",
    purpose="Makes compiled layers in shards treat integers, such as the size of a head, as constants",
    without="Kernels of such layers then divide by a symbol: rotary embeddings take about eight times as long.",
    alternative="`torch.compile(dynamic=False)`, which compiles a graph for each length of rows.",
    apis=("torch._dynamo.config:skip_fsdp_guards",),
    measurement="376.6 ms a step, without it 384.8 ms, 43.6 GiB both times: 3B, one row of 8,192 tokens, two H200s. "
    "Rotary embeddings of 8B take [5.6 ms](../explanation/performance.md#fsdp2) a step, and took 38 ms before.",
)


class FSDP2(Backend):
    """PyTorch's fully_shard. Parameters are DTensors, sharded by their first dimension.

    Gradients are summed after every micro-batch. Unreduced gradients would be whole ones: 4 bytes per weight of the
    model on every rank. The sums overlap with the backward pass.
    """

    sync_every_micro_batch: ClassVar[bool] = True

    def accelerator_options(self) -> dict[str, Any]:
        """Return the FSDP plugin of the profile, which Accelerate reads from the launcher's environment.

        The empty mixed-precision policy keeps the dtype of the weights; `precision.py` gives the reason.
        `shard_small_params` replaces the policy for some of them.
        """
        from accelerate.utils import FullyShardedDataParallelPlugin
        from torch.distributed.fsdp import MixedPrecisionPolicy

        plugin = FullyShardedDataParallelPlugin(mixed_precision_policy=MixedPrecisionPolicy())
        # `broadcast_weights` replaces this option. Accelerate's version holds the whole model besides the shards and
        # does not send persistent buffers. It also confuses parameters on the meta device when it gives the optimizer
        # its shards.
        plugin.cpu_ram_efficient_loading = False
        return {"fsdp_plugin": plugin, **_device_mesh_options()}

    def reads_weights_once(self) -> bool:
        """Return whether the profile requires one rank to read the weights for all ranks."""
        return os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "false").lower() == "true"

    def configure(self, accelerator: Accelerator, recipe: Recipe, plan: Plan) -> None:
        """Do not pin host shards on a machine without GPU, because pinning needs one.

        On GPUs host shards are pinned. Accelerate then adds gloo to the process group, which sums the norms of
        gradients on the host.
        """
        from torch.distributed.fsdp import CPUOffloadPolicy

        plugin = accelerator.state.fsdp_plugin
        if accelerator.device.type == "cpu" and self.offloads(accelerator):
            plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)

    def before_prepare(self, accelerator: Accelerator, model: nn.Module) -> nn.Module:
        """Return the model on the host, because sharding moves it, with corrected answers for Accelerate.

        Accelerate shards the input embeddings as one FSDP unit. Three kinds of models would fail in `prepare`:

        - a model without input embeddings, where `get_input_embeddings` raises;
        - a model whose embeddings are inside a block that is a unit already, because they would be sharded twice;
        - a model whose embeddings and head share a weight inside adapters, which Accelerate does not detect. Without
          units for both, the weight is sharded once with the rest of the model.
        """
        inner = base_model_of(model)
        _name_units(accelerator, inner)
        try:
            embeddings = inner.get_input_embeddings()
        except (NotImplementedError, AttributeError):  # not a language model, or not a model of transformers
            embeddings = None
        if embeddings is None or _is_inside_unit(accelerator, inner, embeddings):
            _return_none_once(model, "get_input_embeddings")
        elif _share_parameter_in_adapters(embeddings, inner.get_output_embeddings()):
            _return_none_once(model, "get_input_embeddings")
            _return_none_once(model, "get_output_embeddings")
        return model

    def offloads(self, accelerator: Accelerator) -> bool:
        """Return whether shards are on the host and are updated there."""
        from torch.distributed.fsdp import CPUOffloadPolicy

        return isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy)

    @contextmanager
    def broadcast_weights(self, accelerator: Accelerator, model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
        """Return a context in which the model has no values, then give every rank its shards. A collective.

        `Accelerator.prepare` shards the model inside the context. After it the reading rank sends and frees one
        parameter at a time.
        """
        from torch.distributed.tensor import distribute_tensor

        names = {parameter: name for name, parameter in model.named_parameters()}
        groups = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
        values = {
            name: weight_broadcast.replace(p, torch.empty_like(p, device="meta"))
            for name, p in model.named_parameters()
        }
        if not weight_broadcast.is_reader():
            values.clear()
        yield
        parameters: dict[str, Any] = dict(model.named_parameters())
        for group, members in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [parameters[name] for name in members]
        memory, device = weight_broadcast.HostMemory(), accelerator.device
        for name, parameter in parameters.items():
            value = values.pop(name) if weight_broadcast.is_reader() else torch.empty(parameter.shape, device=device)
            shard = distribute_tensor(value.to(device, parameter.dtype), parameter.device_mesh, parameter.placements)
            weight_broadcast.replace(parameter, shard.cpu() if self.offloads(accelerator) else shard)
            memory.release(value)
        model.to()  # moves nothing, but makes fully_shard read its parameters again
        weight_broadcast.share_buffers(model, accelerator.device)

    def shard_small_params(
        self, accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, dtype: torch.dtype | None
    ) -> None:
        """Shard the parameters that stay float32; `Accelerator.prepare` then shards the others for `dtype`."""
        fsdp_mixed_precision.shard_small_params(accelerator, model, optimizer, dtype)

    def after_prepare(self, model: nn.Module, dtype: torch.dtype | None, *, skips: bool) -> None:
        """Set when blocks all-gather their weights, and the dtype in which they send gradients.

        By default a block all-gathers its weights when the host reaches it. In the forward pass each block now first
        requests the weights of the next one. This saves time if the host is slower than the device. In the backward
        pass PyTorch prefetches already. The last block is the first one of the backward pass, so its weights
        are not freed after the forward pass.
        """
        from torch.distributed.fsdp import FSDPModule

        for modules in model.modules():
            blocks = [block for block in modules if isinstance(block, FSDPModule)] if _is_list(modules) else []
            for block, following in pairwise(blocks):
                if PREFETCH:
                    block.set_modules_to_forward_prefetch([following])
            if blocks and KEEP_LAST:
                blocks[-1].set_reshard_after_forward(False)
        if self.sync_every_micro_batch:
            send_gradients_in_16_bits(model)
        keep_sizes_constant()

    def share_weight_casts(self, accelerator: Accelerator) -> AbstractContextManager[None]:
        """Return a context that keeps no casts: weights are freed after use, but their whole casts would remain."""
        return nullcontext()

    def clip_grad_norm(
        self, accelerator: Accelerator, parameters: list[nn.Parameter], max_norm: float | None, factor: float
    ) -> Tensor:
        """Divide the local gradients by `factor` and clip them to the global norm of all shards. A collective."""
        from torch.distributed.tensor import DTensor, Partial, Replicate

        gradients: list[Any] = [parameter.grad for parameter in parameters if parameter.grad is not None]
        unscale_gradients(gradients, factor)
        local = [gradient.to_local() for gradient in gradients]
        norm = get_total_norm(local, accelerator.device)
        if gradients:
            mesh = gradients[0].device_mesh
            # Sum over shards, but not over copies of shards (HSDP).
            summed = [Partial() if placement.is_shard() else Replicate() for placement in gradients[0].placements]
            norm = DTensor.from_local(norm.square(), mesh, summed, run_check=False).full_tensor().sqrt()
            clip_grads_with_norm(local, norm.to(local[0].device), max_norm)
        return norm

    def flush(self, model: nn.Module) -> None:
        """Free the gathered weights of every unit. Local.

        The outermost unit stays whole after a forward pass. PyTorch could free its weights while they are read.
        """
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def full_parameter(self, parameter: nn.Parameter) -> Tensor:
        """Return the whole parameter, all-gathered. A collective."""
        value: Any = parameter.data
        whole: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
        return whole

    def state_shards(
        self, model: nn.Module, optimizer: Any, ranks: Ranks, names: Collection[str]
    ) -> Iterator[StateShard]:
        """Yield the rows of every trained parameter on this rank. With HSDP the first copy saves them. Local.

        Raises:
            RuntimeError: A parameter is not sharded by its first dimension.
        """
        from torch.distributed.tensor import Shard

        for name, parameter in trained_parameters(model, names):
            mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
            if placements[-1] != Shard(0):
                raise RuntimeError(f"{name} is sharded as {placements}, not by its first dimension")
            rows, rest = parameter.shape[0], parameter.shape[1:].numel()
            start = min(mesh.get_local_rank(-1) * -(-rows // mesh.size(-1)), rows) * rest  # as torch.chunk splits
            is_first_copy = mesh.ndim == 1 or mesh.get_local_rank(0) == 0
            with open_state(parameter, optimizer.optimizer.state[parameter]) as tensors:
                local = {k: v.to_local() if hasattr(v, "to_local") else v for k, v in tensors.items()}
                saved = slice(0, local["weight"].numel()) if is_first_copy else NO_ELEMENTS
                yield StateShard(name, start, local, saved)


def keep_sizes_constant() -> None:
    """Make torch.compile treat integers of modules in shards as constants of a graph, as it does for other modules.

    Otherwise they are symbols of graphs for all lengths of rows. Nothing changes if no layer is compiled.
    """
    if "torch._dynamo" in sys.modules and CONSTANT_SIZES.is_usable():
        import torch._dynamo.config

        change(torch._dynamo.config, "skip_fsdp_guards", False)


def _device_mesh_options() -> dict[str, Any]:
    """Return the sizes of copies and shards if the profile has several copies of the model (HSDP); else nothing.

    Accelerate requires both sizes. Neighbouring ranks share a copy, so that its shards stay inside one machine.
    """
    from accelerate.utils import ParallelismConfig

    from ftcli.config.plan import derive_shards

    if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() != "true":
        return {}
    copies, shards = (int(os.environ.get(f"PARALLELISM_CONFIG_DP_{n}_SIZE", "1")) for n in ("REPLICATE", "SHARD"))
    shards = derive_shards(copies, shards, world_size())
    return {"parallelism_config": ParallelismConfig(dp_replicate_size=copies, dp_shard_size=shards)}


def _is_list(modules: nn.Module) -> TypeGuard[nn.ModuleList]:
    """Return whether a module is a list of modules."""
    return isinstance(modules, torch.nn.ModuleList)


def _name_units(accelerator: Accelerator, model: nn.Module) -> None:
    """Name the classes of the units: those of the profile, or those that the model names and contains.

    A model with a vision or text tower may name classes of parts that it was built without. Accelerate would refuse it.

    Raises:
        InputError: The profile names a class that the model does not contain.
    """
    plugin = accelerator.state.fsdp_plugin
    held = {type(module).__name__ for module in model.modules()}
    if (names := plugin.transformer_cls_names_to_wrap) is None:
        declared: Any = getattr(model, "_no_split_modules", None) if LAYERS.is_usable() else None
        if set(declared or ()) - held:
            plugin.transformer_cls_names_to_wrap = sorted(set(declared) & held)
        return
    if missing := [name for name in names if name not in held]:
        raise InputError(
            f"fsdp_transformer_layer_cls_to_wrap: {', '.join(missing)} is not in the model, a {type(model).__name__}",
            hint="remove the key from the profile, or name a class of its layers: "
            + ", ".join(sorted(name for name in getattr(model, "_no_split_modules", None) or () if name in held)),
        )


def _is_inside_unit(accelerator: Accelerator, model: nn.Module, embeddings: nn.Module) -> bool:
    """Return whether the embeddings are in one of the blocks that Accelerate shards as units."""
    plugin = accelerator.state.fsdp_plugin
    classes: Any = getattr(model, "_no_split_modules", None) if LAYERS.is_usable() else None
    names = plugin.transformer_cls_names_to_wrap or classes or []
    units = [module for module in model.modules() if type(module).__name__ in set(names)]
    return any(embeddings is module for unit in units for module in unit.modules())


def _share_parameter_in_adapters(embeddings: nn.Module, head: nn.Module | None) -> bool:
    """Return whether embeddings and head share a parameter although their `weight` attributes differ."""
    if head is None or getattr(embeddings, "weight", None) is head.weight:
        return False
    return bool({id(p) for p in embeddings.parameters()} & {id(p) for p in head.parameters()})


def _return_none_once(model: Any, method: str) -> None:
    """Replace a method of the model by one that returns None and then removes itself; Accelerate calls it once."""
    EMBEDDINGS.require()

    def return_none() -> None:
        del model.__dict__[method]

    model.__dict__[method] = return_none
