"""Scale the small tensor inside a LoRA layer instead of its output, where no bit changes.

LoRA adds `B(A(x)) * scaling` to the output of a layer. peft multiplies the output of B, which has all features of the
layer. The backward pass then keeps two gradients of that size, one for the layer and a scaled one for B. Here the
output of A is multiplied, which has `r` features. If the scaling is a power of two, products and roundings are the same
to the last bit, except below the smallest normal number.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from ftcli.models.estimates.memory_estimate import is_exact_scaling
from ftcli.runtime.patches import declare

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ftcli.config.recipe import Recipe


LORA_FORWARD = declare(
    __name__,
    "lora-scaling",
    library="peft",
    versions=">=0.19,<0.22",
    purpose="Multiplies the small tensor inside a LoRA layer by its scaling, instead of the layer's output",
    without="A recomputed layer then needs a quarter more memory in its backward pass, with the same result.",
    alternative="None: peft has no option for the place of the multiplication.",
    apis=(
        *(f"peft.tuners.lora.layer:LoraLayer.{name}" for name in ("lora_variant", "_cast_input_dtype", "scaling")),
        "peft.tuners.lora.layer:Linear.forward",
    ),
    measurement="2835.1 ms and 23.3 GiB a step, without it 2868.4 ms and 25.0 GiB: LoRA of 8B, 8 recomputed rows of "
    "4,096 tokens, one H200. One row of QLoRA: 435.5 ms and 6.0 GiB, without it 430.2 ms and 6.2 GiB.",
)


def scale_inside_adapters(model: nn.Module, recipe: Recipe) -> None:
    """Let the LoRA layers of a model scale the output of A, if the recipe trains them under autocast in bfloat16.

    Layers with another scaling than a power of two, with DoRA, or with several adapters stay as they are.

    Args:
        model: The model with its adapter. The classes of its LoRA layers are replaced by subclasses.
        recipe: The recipe.
    """
    if recipe.adapter.type == "none" or recipe.precision != "bf16" or not LORA_FORWARD.is_usable():
        return
    for module in model.modules():
        kind: Any = type(module)
        if kind in _plain_classes() and _can_scale_inside(module):
            module.__class__ = _scaled_class(kind)


@cache
def _plain_classes() -> tuple[type, ...]:
    """Return the classes of LoRA layers that compute `base(x) + B(A(x)) * scaling`, as far as they are installed."""
    from peft.import_utils import is_bnb_4bit_available
    from peft.tuners.lora import layer

    if not is_bnb_4bit_available():
        return (layer.Linear,)
    from peft.tuners.lora.bnb import Linear4bit

    return layer.Linear, Linear4bit


def _can_scale_inside(module: Any) -> bool:
    """Return whether a LoRA layer has one plain adapter, whose scaling is a power of two."""
    scalings = list(module.scaling.values())
    return len(scalings) == 1 and not module.lora_variant and is_exact_scaling(scalings[0])


@cache
def _scaled_class(plain: Any) -> type:
    """Return the subclass of a class of LoRA layers that scales the output of A."""

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the output of the layer and of its adapter for `x` `[..., features]`."""
        import torch

        adapters = self.active_adapters
        is_plain = not (args or kwargs or self.disable_adapters or self.merged or self.lora_variant)
        if not is_plain or len(adapters) != 1 or not torch.is_autocast_enabled(x.device.type):
            result: Tensor = plain.forward(self, x, *args, **kwargs)
            return result
        name = adapters[0]
        own = self.base_layer(x)
        small = self.lora_A[name](self.lora_dropout[name](self._cast_input_dtype(x, self.lora_A[name].weight.dtype)))
        added = own + self.lora_B[name](small * self.scaling[name])
        return added.to(own.dtype)

    return type(plain.__name__, (plain,), {"forward": forward, "__module__": plain.__module__})
