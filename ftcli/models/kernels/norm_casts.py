"""Cast the output of a norm to 16 bits once, under autocast, for all linear layers that read it.

Autocast casts the input of each linear layer separately. The float32 output of a norm would be cast and stored once
each for queries, keys and values, and twice for a gated MLP. With one cast the forward pass has the same bits and less
is stored for the backward pass. The gradients of the linear layers are then added in 16 bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftcli.models.architectures import architecture_of
from ftcli.models.structure import base_model_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ftcli.config.recipe import Recipe


UNDER_AUTOCAST = ("bf16", "fp16", "fp8")  # precisions


def share_casts(model: nn.Module) -> None:
    """Cast the output of norms that only linear layers read to the dtype of autocast.

    Other norms, and forward passes without autocast, do not change.

    Args:
        model: A model of transformers; its norms get a forward hook.
    """
    inner = base_model_of(model)
    names = architecture_of(getattr(getattr(inner, "config", None), "model_type", None)).cast_norms
    for name, module in inner.named_modules():
        if name.rpartition(".")[2] in names:
            module.register_forward_hook(_cast_output)


def leave_adapter_inputs(model: nn.Module, recipe: Recipe) -> None:
    """Turn off peft's cast of the inputs of LoRA layers if the recipe trains under autocast.

    peft casts the input of each LoRA layer to the dtype of the adapter's weights, float32, before autocast casts it
    back to 16 bits. The result is the same to the last bit, and the float32 copies would be kept for the backward
    pass. Without autocast the two dtypes must agree, so peft's cast stays.
    """
    if recipe.adapter.type == "none" or recipe.precision not in UNDER_AUTOCAST:
        return
    module: Any
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False


def _cast_output(module: Any, inputs: Any, output: Tensor) -> Tensor:
    if module.training and hasattr(module, "plain_forward"):  # tiled_mlp.py computes the norm, and casts its output
        return output
    return cast(output)


def cast(output: Tensor) -> Tensor:
    """Return the output of a norm in the dtype of autocast; without autocast, the output itself.

    Args:
        output: `[..., H]`.
    """
    import torch

    kind = output.device.type
    return output.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else output
