"""Which weights FSDP2 sends in 16 bits (ZeRO-3 too): those that autocast only multiplies in them; and their gradients.

    layers' products of matrices    cast, then gathered: half the bytes, and no cast that stays until the backward pass
    norms and all else that is small    float32, in one unit that is gathered before the model's forward pass
    embeddings and head    float32, in units of their own

A cast commutes with gathering, so every product is that of a model that is whole, to the last bit; norms that travelled
in bfloat16 would stand still for many updates (precision.py). Gradients are summed over ranks in float32; those of such
products have 16 bits when they come, so where all shards are in one machine they travel as they are (sums.py).
The small unit has no hooks: hooks inside of layers would cut the graphs that layers are compiled to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from .sums import add_up, in_one_machine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accelerate import Accelerator
    from torch import Tensor
    from torch.optim import Optimizer

PRODUCTS = ("Linear", "Conv1D", "Float8Linear")  # names of modules that only multiply; subclasses may do more
SMALL = 0.02  # of all elements; where the rest is more, no unit may hold it whole


def cut_ahead(accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, dtype: torch.dtype | None) -> bool:
    """Shard what must stay float32 before Accelerate shards the rest, and let that travel in `dtype`; say whether.

    Nothing happens, and all travels as it is held, without a `dtype`, with weights that are frozen or not float32, and
    where what is no product of matrices is large, as experts are.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if dtype is None or any(not p.requires_grad or p.dtype != torch.float32 for p in model.parameters()):
        return False
    plugin, ends = accelerator.state.fsdp_plugin, _ends(model)
    small = _small(model, ends) if ends else []
    if not small:
        return False
    mesh = getattr(accelerator, "torch_device_mesh", None)
    how: dict[str, Any] = {
        "offload_policy": plugin.cpu_offload,
        "mesh": None if mesh is None else mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)],
        "reshard_after_forward": False,
    }
    names = {parameter: name for name, parameter in model.named_parameters()}
    fully_shard(small, **how)
    fully_shard(ends, **how) if len({module.weight for module in ends}) == 1 else [fully_shard(m, **how) for m in ends]
    _drive(model, small)
    found: dict[str, Any] = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [found[names[parameter]] for parameter in group["params"]]
    plugin.mixed_precision_policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    return True


def products(model: nn.Module) -> list[Any]:
    """Return the parameters of a language model that its layers only multiply by; nothing of other models."""
    ends = _ends(model)
    kept = {parameter for module in ends for parameter in module.parameters()}
    modules = [module for module in model.modules() if ends and type(module).__name__ in PRODUCTS]
    return [p for module in modules for p in module.parameters(recurse=False) if p not in kept]


def _ends(model: Any) -> list[Any]:
    """Return the modules of embeddings and head; nothing where the model does not name them as two matrices."""
    if {"get_input_embeddings", "get_output_embeddings"} & set(vars(model)):  # fsdp.py's answers, for Accelerate
        return []
    try:
        ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    except (AttributeError, NotImplementedError):
        return []
    whole = [list(dict(module.named_parameters())) == ["weight"] for module in ends if module is not None]
    return ends if whole == [True, True] else []


def _small(model: nn.Module, ends: list[nn.Module]) -> list[nn.Module]:
    """Return the outermost modules that hold what is neither a product of matrices nor `ends`; nothing: it is large."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():  # from the outermost on
        if module in inside or module in ends or type(module).__name__ in PRODUCTS:
            continue
        if next(module.parameters(recurse=False), None) is not None:
            found.append(module)
            inside.update(module.modules())
    size = sum(parameter.numel() for module in found for parameter in module.parameters())
    return found if size <= SMALL * sum(parameter.numel() for parameter in model.parameters()) else []


def _drive(model: nn.Module, small: list[Any]) -> None:
    """Gather the small unit before each forward pass of the model, in place of its own hooks; backward frees it."""
    from torch.distributed.fsdp import fully_shard

    state: Any = fully_shard.state(small[0])  # type: ignore[attr-defined]
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    model.register_forward_pre_hook(lambda module, inputs: _gather(small[0]))


def _gather(unit: Any) -> None:
    unit.unshard()


def send_gradients_in_16_bits(model: nn.Module) -> bool:
    """Let units that travel in 16 bits send their gradients so, where shards are in one machine; say whether any does.

    Gradients must come as the backward pass made them: sums over micro-batches have more than 16 bits.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard

    found = False
    for unit in model.modules():
        if not isinstance(unit, FSDPModule):
            continue
        policy = fully_shard.state(unit)._mp_policy  # type: ignore[attr-defined]
        shards = [
            parameter.device_mesh.shape[-1] for parameter in unit.parameters() if hasattr(parameter, "device_mesh")
        ]
        if policy.param_dtype is None or policy.reduce_dtype != torch.float32 or not shards:
            continue
        if shards[0] > 1 and in_one_machine(shards[0]):  # neighbouring ranks share a copy of the model
            unit.set_custom_reduce_scatter(Float32Sums(policy.param_dtype, shards[0]))  # type: ignore[arg-type]
            found = True
    return found


class Float32Sums:
    """FSDP2's sum of gradients over ranks (torch's `ReduceScatter`): sent in 16 bits, added up in float32."""

    def __init__(self, dtype: torch.dtype, shards: int) -> None:
        self.dtype, self.shards, self.sent = dtype, shards, 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return room for what is sent, or for this rank's part of the sum: FSDP2 asks for that one next."""
        (count,) = size
        is_sum = count * self.shards == self.sent
        self.sent = 0 if is_sum else count
        return torch.empty(size, dtype=dtype if is_sum else self.dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Fill `output_tensor [N / ranks]` with this rank's part of the sum, or the mean, of all inputs `[N]`."""
        assert (input_tensor.dtype, output_tensor.dtype) == (self.dtype, torch.float32)
        assert op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) and not async_op, "FSDP2 asks for nothing else"
        add_up(input_tensor.view(group.size(), -1), group, mean=op == dist.ReduceOp.AVG, out=output_tensor)
