"""Find the modules of a model that cannot have an adapter, although peft would give them one.

The module imports torch inside functions.
"""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

from ftcli.models.structure import full_shape

if TYPE_CHECKING:
    from torch import nn


READS_WEIGHT = re.compile(r"self\.(\w+)\.weight\b(?!\.(?:device|dtype))")


def find_unadaptable(model: nn.Module) -> dict[str, str]:
    """Return the modules of a model whose adapter would be wrong or would not be trained.

    peft adds its product to the output of a linear layer. Routers of PhiMoE and Llama 4 are linear layers that return
    a tuple. State-space layers and those of linear attention pass the weights of some of their modules to kernels, and
    do not call these modules.

    Args:
        model: A model, with or without an adapter, sharded or not.

    Returns:
        The reason by the name of the module in the model without adapter.
    """
    import torch

    found = {}
    for name, module in model.named_modules():
        plain, kind = name.replace(".base_layer", ""), type(module).__name__
        if isinstance(module, torch.nn.Linear) and not _returns_a_product(module):
            found[plain] = f"the output of a {kind} is not the product of its input and its weight"
        if "A_log" in dict(module.named_parameters(recurse=False)):  # the decay of a state
            for child in _only_read(module):
                found[f"{plain}.{child}"] = f"a {kind} passes the weight alone to kernels, so it would have no effect"
    return found


def _only_read(module: nn.Module) -> list[str]:
    """Return the names of the linear layers and convolutions in a module whose weights its own code reads."""
    import torch

    try:
        code = inspect.getsource(type(module))
    except (OSError, TypeError):  # the class has no file
        return []
    read = set(READS_WEIGHT.findall(code))
    kinds = (torch.nn.Linear, torch.nn.Conv1d)
    return [name for name, child in module.named_children() if name in read and isinstance(child, kinds)]


def _returns_a_product(module: Any) -> bool:
    """Return whether a linear layer returns one value for each of its outputs; no weight is read.

    Only the forward methods of transformers' own layers are run, on tensors without values and without hooks.
    """
    import torch

    forward = type(module).forward
    if forward is torch.nn.Linear.forward or not type(module).__module__.startswith("transformers."):
        return True
    empty: Any = object.__new__(type(module))
    torch.nn.Module.__init__(empty)
    for name, value in vars(module).items():
        if not name.startswith("_"):  # settings, without hooks and parts
            setattr(empty, name, value)
    empty.register_parameter("bias", None)
    for name, one in module.named_parameters(recurse=False):
        weight = torch.empty(full_shape(one), dtype=one.dtype, device="meta")
        empty.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))
    try:
        output = forward(empty, torch.empty(2, 3, module.in_features, dtype=module.weight.dtype, device="meta"))
    except Exception:  # its inputs have another shape, or it has parts of its own
        return False
    return isinstance(output, torch.Tensor) and output.shape == (2, 3, module.out_features)
