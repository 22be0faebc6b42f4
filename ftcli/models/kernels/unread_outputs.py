"""Leave out the last matrix product of a compiled layer, or of a tile, while the backward pass recomputes it.

The last product of a layer with a gated MLP is added to the residual stream. Gradients of the layer need its inputs,
but not its result. Gradient checkpointing ends the recomputation of a layer that is not compiled at the last tensor
that is stored for the backward pass. A compiled graph computes everything. That is a quarter of the products of a
recomputed Llama layer.

The product is an operation of its own here, which torch.compile does not look into. During a recomputation it returns
values that are not numbers. If a layer did read them, its gradients would not be numbers either, and the run would
stop.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ftcli.models.architectures import architecture_of
from ftcli.models.estimates.shape import OF_WHOLE_LAYERS
from ftcli.models.structure import base_model_of, layers_of
from ftcli.runtime.patches import declare, has_changed

OUTPUT = "mlp.down_proj"  # name of the last product in the layers of transformers that have a gated MLP
FUNCTIONS = "bitsandbytes.functional"
PRODUCT, LAYER = "bitsandbytes.autograd._functions:MatMul4Bit", "bitsandbytes.nn.modules:Linear4bit"
FOUR_BITS = declare(
    __name__,
    "four-bit-outputs",
    library="bitsandbytes",
    versions=">=0.50.2,<0.51",
    purpose="Leaves out the last product of a layer with 4-bit weights while the layer is recomputed",
    without="Recomputed layers with 4-bit weights then compute a quarter of their products in vain.",
    alternative="None: bitsandbytes has no function that depends on the recomputation.",
    apis=(
        f"{PRODUCT}.forward",
        f"{PRODUCT}.backward",
        f"{LAYER}.forward",
        *(f"{FUNCTIONS}:QuantState.{name}" for name in ("absmax", "blocksize", "code", "nested", "offset", "state2")),
        *(f"{FUNCTIONS}:QuantState.{name}" for name in ("dtype", "quant_type", "shape")),
        f"{FUNCTIONS}:dequantize_4bit",
    ),
    also=has_changed(
        {
            f"{PRODUCT}.forward": "29f4e21a4fe9",
            f"{PRODUCT}.backward": "053e8719319a",
            f"{LAYER}.forward": "d52cf6345771",
        }
    ),
    measurement="2663.4 ms a step, without it 2829.3 ms, 12.7 GiB both times: QLoRA of 8B, 8 recomputed rows of 4,096 "
    "tokens, one H200.",
)
NESTED_BLOCK = 256  # weights of a block of quantised scales, the only number that bitsandbytes multiplies with


class Recomputation(threading.local):
    """Whether gradient checkpointing is recomputing a layer in this thread; a context for the recomputation."""

    runs = False

    def __enter__(self) -> None:
        self.runs = True

    def __exit__(self, *error: object) -> None:
        self.runs = False


recomputation = Recomputation()


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a checkpointed layer's forward pass and recomputation, for `context_fn`."""
    return nullcontext(), recomputation


def leave_out_unread_outputs(model: nn.Module, recomputed: str) -> None:
    """Leave out the last product of each layer when the layer is recomputed.

    Layers whose output passes a norm stay as they are, as do layers with experts, biases, DoRA or fp8, and all layers
    where a backend multiplies by functions of its own (ZeRO-3).

    Args:
        model: The model, whose layers will be compiled. The classes of the last linear layers are replaced by
            subclasses.
        recomputed: What the backward pass computes again; only the modes full and tiled leave products out.
    """
    row = architecture_of(getattr(getattr(base_model_of(model), "config", None), "model_type", None))
    has_plain_products = isinstance(nn.functional.linear, BuiltinFunctionType)
    if recomputed in OF_WHOLE_LAYERS and has_plain_products and row.tiles_mlp and not row.norms_outputs:
        for layer in layers_of(model):
            leave_out(layer.get_submodule(OUTPUT))


def leave_out(module: Any) -> None:
    """Replace the class of a linear layer, or of the frozen layer below its LoRA adapter.

    Args:
        module: The last linear layer of a layer. Nothing reads the values of its output in the backward pass.
    """
    if getattr(module, "lora_variant", None):  # DoRA reads the output
        return
    linear = getattr(module, "base_layer", module)
    kind: Any = type(linear)
    if kind is nn.Linear and linear.bias is None:
        linear.__class__ = _spared_linear()
    elif kind.__name__ == "Linear4bit" and linear.bias is None and FOUR_BITS.is_usable():
        linear.__class__ = _spared_four_bits(kind)


@cache
def _spared_linear() -> type:
    """Return the subclass of `nn.Linear` that leaves out its product in a recomputation."""

    def forward(self: Any, x: Tensor) -> Tensor:
        """Return the product of `x` `[..., K]` and the weight `[N, K]`, `[..., N]`."""
        weight, kind = self.weight, x.device.type
        if not is_compiling():
            return nn.functional.linear(x, weight)
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x, weight = x.to(dtype), weight.to(dtype)
        result: Tensor = torch.ops.ftcli.output_product(x, weight)
        return result

    return type("Linear", (nn.Linear,), {"forward": forward, "__module__": nn.Linear.__module__})


@cache
def _spared_four_bits(plain: Any) -> type:
    """Return the subclass of bitsandbytes' 4-bit layer that leaves out its product in a recomputation."""

    def forward(self: Any, x: Tensor) -> Tensor:
        """Return the product of `x` `[..., K]` and the weight `[N, K]`, `[..., N]`."""
        state: Any = getattr(self.weight, "quant_state", None)  # FSDP replaces the weight; bitsandbytes finds the state
        scales = state.state2 if state is not None and state.nested else None
        is_known = state is not None and self.compute_dtype is not None and len(state.shape) == 2
        is_known &= is_compiling()
        if not is_known or x.shape[-1] != state.shape[1] or (scales is not None and scales.blocksize != NESTED_BLOCK):
            result: Tensor = plain.forward(self, x)
            return result
        result = torch.ops.ftcli.output_product_4bit(
            x.to(self.compute_dtype),
            self.weight.view(-1, 1),
            state.shape,
            state.absmax if scales is None else scales.absmax,
            state.blocksize,
            state.quant_type,
            state.dtype,
            None if scales is None else state.absmax,
            None if scales is None else scales.code,
            None if scales is None else state.offset,
        )
        return result.to(x.dtype)

    return type(plain.__name__, (plain,), {"forward": forward, "__module__": plain.__module__})


def _unread(x: Tensor, features: int) -> Tensor:
    """Return values that are not numbers in place of a product `[..., features]`."""
    return x.new_full((*x.shape[:-1], features), torch.nan)


@torch.library.custom_op("ftcli::output_product", mutates_args=())
def output_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return the product of `x` `[..., K]` and `weight` `[N, K]`, or no numbers if a layer is recomputed."""
    return _unread(x, weight.shape[0]) if recomputation.runs else nn.functional.linear(x, weight)


@output_product.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _keep_factors(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    """Store what the gradients need: the weight, and `x` if the weight is trained."""
    x, weight = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)


def _gradients_of_factors(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of `x` and of the weight."""
    x, weight = ctx.saved_tensors
    of_x = upstream @ weight if ctx.needs_input_grad[0] else None
    of_weight = upstream.flatten(0, -2).t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
    return of_x, of_weight


output_product.register_autograd(_gradients_of_factors, setup_context=_keep_factors)


@torch.library.custom_op("ftcli::output_product_4bit", mutates_args=())
def output_product_4bit(
    x: Tensor,
    packed: Tensor,
    shape: Sequence[int],
    absmax: Tensor,
    blocksize: int,
    quant_type: str,
    dtype: torch.dtype,
    absmax_8bit: Tensor | None,
    absmax_code: Tensor | None,
    absmax_offset: Tensor | None,
) -> Tensor:
    """Return the product of `x` `[..., K]` and a 4-bit weight `[N, K]`, or no numbers if a layer is recomputed.

    The arguments are those of bitsandbytes' own operation, and `dtype`, that of the weight before it was quantised.
    """
    if recomputation.runs:
        return _unread(x, shape[0])
    scales = {"absmax_8bit": absmax_8bit, "absmax_code": absmax_code, "absmax_offset": absmax_offset}
    result: Tensor = torch.ops.bitsandbytes.gemm_4bit.default(x, packed, shape, absmax, blocksize, quant_type, **scales)
    return result


@output_product_4bit.register_fake
def _(x: Tensor, packed: Tensor, shape: Sequence[int], *rest: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], shape[0]))


def _keep_codes(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Store the weight as it is packed, and how."""
    _, packed, ctx.shape, absmax, ctx.blocksize, ctx.quant_type, ctx.dtype, *scales = inputs
    ctx.save_for_backward(packed, absmax, *scales)


def _gradient_of_input(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradient of `x`, as bitsandbytes computes it."""
    from bitsandbytes.functional import QuantState, dequantize_4bit

    packed, absmax, absmax_8bit, absmax_code, absmax_offset = ctx.saved_tensors
    nested = {}
    if absmax_8bit is not None:
        inner = QuantState(absmax=absmax, blocksize=NESTED_BLOCK, code=absmax_code, dtype=torch.float32)
        absmax, nested = absmax_8bit, {"offset": absmax_offset, "state2": inner}
    state = QuantState(
        absmax=absmax,
        shape=torch.Size(ctx.shape),
        dtype=ctx.dtype,
        blocksize=ctx.blocksize,
        quant_type=ctx.quant_type,
        **nested,
    )
    return upstream @ dequantize_4bit(packed, state).to(upstream.dtype), *[None] * 9


output_product_4bit.register_autograd(_gradient_of_input, setup_context=_keep_codes)
