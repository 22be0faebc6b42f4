"""Run a network of convolutions and batch norms in channels-last format, so that the channels of a pixel are adjacent.

The convolution kernels of GPUs compute in this format. In the other one every convolution converts its input and its
output, and batch norm has slower kernels. A tensor keeps its shape and its values: only its strides change.

Convolutions, batch norms, pooling and elementwise operations return the format of their input. Therefore only the input
of the first convolution is converted. Weights keep their format, because backends flatten and shard them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ftcli.models.structure import is_of_transformers

if TYPE_CHECKING:
    from torch import Tensor


UNUSED = "original_module"  # peft's name for a module beside the copy that is trained and called


def use_channels_last(model: nn.Module, device_type: str) -> list[str]:
    """Convert the input of a model's first convolution to channels-last format, if it has batch norms and runs on CUDA.

    Only for models of transformers. A network of the user may have a `view` that needs the usual format.

    Args:
        model: The model. Its first convolution gets a forward pre-hook; nothing else changes.
        device_type: Type of the device that the model will run on.

    Returns:
        One line for the log, or none if nothing is converted.
    """
    modules = list(model.modules())
    # Group norm returns to the usual format, so that each of them would convert twice.
    has_group_norms = any(isinstance(module, nn.GroupNorm) for module in modules)
    is_fitting = is_of_transformers(model) and not has_group_norms and any(map(_is_batch_norm, modules))
    if device_type != "cuda" or not is_fitting:
        return []
    convolutions = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d) and UNUSED not in name.split(".")
    ]
    if not convolutions:
        return []
    convolutions[0].register_forward_pre_hook(_convert)
    return [f"convolutions in channels-last format: {len(convolutions)}"]


def _is_batch_norm(module: nn.Module) -> bool:
    """Return whether a module is a batch norm of images, also a frozen one of a detector, a class of its own."""
    kind = type(module).__name__
    return isinstance(module, (nn.BatchNorm2d, nn.SyncBatchNorm)) or ("BatchNorm" in kind and kind.endswith("2d"))


def _convert(module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return the inputs with images `[B, C, H, W]` in channels-last format; None leaves others as they are."""
    if not inputs or inputs[0].ndim != 4:
        return None
    images: Tensor = inputs[0]
    # contiguous() would leave images with one channel as they are: their strides fit both formats.
    return (images.to(memory_format=torch.channels_last), *inputs[1:])
