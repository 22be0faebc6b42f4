"""Which weights FSDP2 sends in 16 bits: those that autocast would only ever multiply in them.

    layers' products of matrices    cast, then gathered: half the bytes, and no cast that stays until the backward pass
    norms and all else that is small    float32, in one unit that is gathered before the model's forward pass
    embeddings and head    float32, in units of their own

A cast commutes with gathering, so every product is that of a model that is whole, to the last bit; norms that travelled
in bfloat16 would stand still for many updates (precision.py). Gradients are summed over ranks in float32.
The small unit has no hooks: hooks inside of layers would cut the graphs that layers are compiled to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.optim import Optimizer

PRODUCTS = ("Linear", "Conv1D")  # names of modules that only multiply; subclasses may do more
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
