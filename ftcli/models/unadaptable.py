"""Find the modules of a model that cannot have an adapter, although peft would give them one.

The module imports torch inside functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

READ_BY_KERNELS = ("conv1d", "x_proj", "dt_proj", "out_proj")  # parts of state-space layers


def find_unadaptable(model: nn.Module) -> dict[str, str]:
    """Return the modules of a model whose adapter would be wrong or would not be trained, with the reason.

    peft adds its product to the output of a linear layer. Routers of PhiMoE and Llama 4 are linear layers that return
    a tuple. Kernels of state-space layers read the weights of some of their projections and do not call these.
    """
    import torch

    found = {}
    for name, module in model.named_modules():
        plain = name.replace(".base_layer", "")
        if isinstance(module, torch.nn.Linear) and not _returns_a_product(module):
            kind = type(module).__name__
            found[plain] = f"the output of a {kind} is not the product of its input and its weight"
        own = dict(module.named_parameters(recurse=False))
        if {"A_log", "D"} <= own.keys():  # the two parameters that Mamba and Mamba 2 have
            inside = [child for child, _ in module.named_children() if child in READ_BY_KERNELS]
            found |= {f"{plain}.{child}": "kernels of state-space layers read its weight only" for child in inside}
    return found


def _returns_a_product(module: Any) -> bool:
    """Return whether a linear layer returns one value for each of its outputs; no weight is read.

    Only layers of transformers with a forward of their own are called, with tensors without values.
    """
    import torch

    if type(module).forward is torch.nn.Linear.forward or not type(module).__module__.startswith("transformers."):
        return True
    weights = {name: p.detach().to("meta") for name, p in module.named_parameters()}
    try:
        output = torch.func.functional_call(
            module, weights, (module.weight.new_empty(2, 3, module.in_features, device="meta"),)
        )
    except Exception:  # the layer has other inputs
        return False
    return isinstance(output, torch.Tensor) and output.shape == (2, 3, module.out_features)
