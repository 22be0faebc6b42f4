"""Compute the gated MLP of a recomputed layer, and the norm before it, in tiles of tokens.

Both work on each token alone. The inner tensors of the MLP (gate, up, their product, and the gradients of all three)
are the largest of a layer. Without tiles they exist for all tokens of a pass at once when the layer is recomputed. With
tiles, the forward pass stores the input of the norm only, which is the residual stream. The backward pass recomputes
one tile, adds up the gradients of the weights in float32, and frees the tile before it begins with the next one. The
sums over tokens are computed in another order, so gradients of weights agree with those of the whole MLP up to
rounding. All other values depend on one token and are the same.

When gradient checkpointing recomputes a layer, nothing in the layer reads the values of the MLP's output, unless a norm
follows. The output is not computed again then.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ftcli.models.architectures import architecture_of
from ftcli.models.estimates.memory_estimate import tiles_of_pass
from ftcli.models.kernels.norm_casts import cast
from ftcli.models.kernels.unread_outputs import recomputation
from ftcli.models.structure import base_model_of, layers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ftcli.config.recipe import Recipe
    from ftcli.models.architectures import Architecture

MLP = "mlp"  # name of the gated MLP in the layers of transformers that may be tiled
GATED = (("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj"))
ALIGNMENT = 16  # tokens; matrix products are slower for other numbers of rows


def tile_mlps(model: nn.Module, recipe: Recipe, recomputed: str, *, has_hooks: bool = False) -> list[str]:
    """Compute the MLPs of a model's layers in tiles of tokens, in forward passes that have enough tokens.

    Layers must be recomputed as a whole. Modules, names and weights stay. In training the norm before an MLP returns
    its input, and the MLP computes the norm. If layers are compiled, a tile has graphs of its own, and a layer ends its
    graph before the MLP.

    Args:
        model: The model, not prepared. The forward of its MLPs and of the norms before them is replaced.
        recipe: The recipe with `model.torch_compile` decided.
        recomputed: What the backward pass computes again; only the mode tiled has tiles.
        has_hooks: Whether the backend has hooks inside layers, which would gather weights again for each tile.

    Returns:
        A line for the log; none unless the mode is tiled.
    """
    inner = base_model_of(model)
    row = architecture_of(getattr(getattr(inner, "config", None), "model_type", None))
    if recomputed != "tiled":
        return []
    compiled = bool(recipe.model.torch_compile)
    # fp8 scales a tensor by its largest element, which differs from tile to tile.
    can_tile = row.tiles_mlp and recipe.precision != "fp8" and not has_hooks
    layers = [layer for layer in layers_of(model) if can_tile and _has_gated_mlp(layer, row)]
    for layer in layers:
        tile(getattr(layer, row.cast_norms[1]), getattr(layer, MLP), compiled=compiled, keeps_output=row.norms_outputs)
    if not layers:
        return ["MLPs in tiles of tokens: none, layers of this model, precision or profile are recomputed as a whole"]
    return [f"MLPs in tiles of tokens: {len(layers)}, in long forward passes"]


def _has_gated_mlp(layer: Any, row: Architecture) -> bool:
    """Return whether a layer has the norm of its table row and a gated MLP, by the names of its modules."""
    mlp = getattr(layer, MLP, None)
    is_gated = any(all(hasattr(mlp, name) for name in names) for names in GATED)
    return is_gated and isinstance(getattr(layer, row.cast_norms[1], None), nn.Module)


def tile(norm: Any, mlp: Any, *, compiled: bool = False, keeps_output: bool = True) -> None:
    """Replace the forward functions of an MLP and of the norm before it.

    All MLPs get the same function, and so do all norms, so that compiled layers share their graphs.

    Args:
        norm: The norm, whose output only the MLP reads.
        mlp: The MLP.
        compiled: Whether a tile is compiled. Liger's functions are not.
        keeps_output: Whether the rest of the layer needs the values of the output in its backward pass.
    """
    has_plain_forwards = not any("forward" in vars(module) for module in (norm, mlp))
    mlp.tiling = Tiling(norm, mlp, compiled=compiled and has_plain_forwards, keeps_output=keeps_output)
    norm.plain_forward, norm.forward = norm.forward, MethodType(_pass_on, norm)
    mlp.plain_forward, mlp.forward = mlp.forward, MethodType(_forward, mlp)


def _pass_on(norm: Any, hidden: Tensor) -> Tensor:
    """Return the input of a norm in training, and its output otherwise."""
    result: Tensor = hidden if norm.training else norm.plain_forward(hidden)
    return result


@torch.compiler.disable
def _forward(mlp: Any, hidden: Tensor) -> Tensor:
    """Compute an MLP of `hidden` `[..., H]`, in tiles where gradients are recorded and there are enough tokens."""
    if not mlp.training:
        result: Tensor = mlp.plain_forward(hidden)
        return result
    tiling: Tiling = mlp.tiling
    parameters = [parameter for parameter in tiling.parameters() if parameter.requires_grad]
    has_gradients = torch.is_grad_enabled() and (hidden.requires_grad or bool(parameters))
    if not has_gradients or tiles_of_pass(hidden.numel() // hidden.shape[-1]) == 1:
        return tiling.whole(hidden)
    flat = hidden.reshape(1, -1, hidden.shape[-1])
    result = _TiledMlp.apply(tiling, flat, *parameters)
    return result.reshape(*hidden.shape[:-1], result.shape[-1])


class Tiling:
    """How an MLP and the norm before it are computed.

    Args:
        norm: The norm.
        mlp: The MLP.
        compiled: Whether the two are compiled.
        keeps_output: Whether the rest of the layer needs the values of the output in its backward pass.
    """

    def __init__(self, norm: nn.Module, mlp: nn.Module, *, compiled: bool, keeps_output: bool) -> None:
        self.modules, self.keeps_output = (norm, mlp), keeps_output
        self.function: Callable[..., Tensor] = norm_and_multiply
        if compiled:
            self.function = torch.compile(norm_and_multiply_in_graph, dynamic=True)
        self.draws = any(isinstance(module, nn.Dropout) and module.p > 0 for module in mlp.modules())
        self.dtype: torch.dtype | None = None  # of the output, once it is known

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of both modules."""
        for module in self.modules:
            yield from module.parameters()

    def whole(self, hidden: Tensor) -> Tensor:
        """Return the MLP of the norm of `hidden` `[..., H]`, a tile or all tokens."""
        return self.function(*self.modules, hidden)


def norm_and_multiply(norm: Any, mlp: Any, hidden: Tensor) -> Tensor:
    """Return the MLP of the norm of `hidden` `[..., H]`."""
    result: Tensor = mlp.plain_forward(cast(norm.plain_forward(hidden)))
    return result


def norm_and_multiply_in_graph(norm: Any, mlp: Any, hidden: Tensor) -> Tensor:
    """Return the MLP of the norm of `hidden` `[..., H]`, both as their classes define them."""
    result: Tensor = type(mlp).forward(mlp, cast(type(norm).forward(norm, hidden)))
    return result


class _TiledMlp(torch.autograd.Function):
    """The MLP of the norm of `hidden` `[1, N, H]`, which stores its input only and recomputes tiles."""

    @staticmethod
    def forward(ctx: Any, tiling: Tiling, hidden: Tensor, *parameters: nn.Parameter) -> Tensor:
        """Return the output `[1, N, H]`."""
        ctx.save_for_backward(hidden)
        ctx.tiling, ctx.parameters = tiling, parameters
        ctx.autocast = _autocast_state(hidden.device.type)
        ctx.random = _random_state(hidden.device) if tiling.draws else None
        if recomputation.runs and not tiling.keeps_output and tiling.dtype is not None:
            # Checkpointing ends the recomputation as soon as `hidden` is stored. A layer that does read the output gets
            # gradients that are not numbers, instead of wrong ones.
            return torch.full((), torch.nan, dtype=tiling.dtype, device=hidden.device).expand_as(hidden)
        output: Tensor | None = None
        # A cast of a weight that autocast cached here would have no gradient.
        with torch.autocast(**ctx.autocast | {"cache_enabled": False}):
            for begin, end in _tiles(hidden.shape[1]):
                tile = tiling.whole(hidden[:, begin:end])
                if output is None:
                    output = tile.new_empty(1, hidden.shape[1], tile.shape[-1])
                output[:, begin:end] = tile
                del tile  # before the next one is computed
        assert output is not None
        tiling.dtype = output.dtype
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        """Return the gradients of `hidden` and of the parameters for `upstream` `[1, N, H]`."""
        (hidden,) = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[1] else None
        sums: list[Tensor | None] = [None] * len(ctx.parameters)
        with ExitStack() as stack:
            if ctx.random is not None:
                stack.enter_context(_with_random_state(hidden.device, ctx.random))
            stack.enter_context(torch.autocast(**ctx.autocast))
            for begin, end in _tiles(hidden.shape[1]):
                _add_tile(ctx.tiling, hidden, upstream, (begin, end), ctx.parameters, of_hidden, sums)
        pairs = zip(sums, ctx.parameters, strict=True)
        return None, of_hidden, *(None if total is None else total.to(parameter.dtype) for total, parameter in pairs)


def _add_tile(
    tiling: Tiling,
    hidden: Tensor,
    upstream: Tensor,
    tile: tuple[int, int],
    parameters: Sequence[nn.Parameter],
    of_hidden: Tensor | None,
    sums: list[Tensor | None],
) -> None:
    """Recompute one tile and compute its gradients.

    Args:
        tiling: How norm and MLP are computed.
        hidden: The input `[1, N, H]`.
        upstream: The gradient of the output `[1, N, H]`.
        tile: First token, and the token after the last.
        parameters: The trained parameters of both.
        of_hidden: The gradient of the input `[1, N, H]`. The tokens of the tile are written.
        sums: The gradients of the parameters, in float32 or wider. Those of the tile are added.
    """
    begin, end = tile
    with torch.enable_grad(), recomputation:  # nothing reads the values of `output`
        piece = hidden[:, begin:end].detach().requires_grad_(of_hidden is not None)
        output = tiling.whole(piece)
    inputs = [*parameters] if of_hidden is None else [piece, *parameters]
    found: list[Tensor | None] = list(torch.autograd.grad(output, inputs, upstream[:, begin:end], allow_unused=True))
    del output
    if of_hidden is not None:
        of_piece = found.pop(0)
        of_hidden[:, begin:end] = 0 if of_piece is None else of_piece
    for place in reversed(range(len(found))):
        gradient = found.pop()
        if gradient is None:
            continue
        total = sums[place]
        if total is None:
            sums[place] = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        else:
            total.add_(gradient)


def _tiles(tokens: int) -> Iterator[tuple[int, int]]:
    """Yield the first token of each tile of a pass, and the token after its last."""
    size = -(-tokens // tiles_of_pass(tokens))
    size = -(-size // ALIGNMENT) * ALIGNMENT
    for begin in range(0, tokens, size):
        yield begin, min(begin + size, tokens)


def _autocast_state(kind: str) -> dict[str, Any]:
    """Return the arguments of `torch.autocast` for the present state, because a backward pass runs outside of it."""
    return {
        "device_type": kind,
        "enabled": torch.is_autocast_enabled(kind),
        "dtype": torch.get_autocast_dtype(kind),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return the states of the random generators of the host and of a GPU."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


@contextmanager
def _with_random_state(device: torch.device, state: tuple[Tensor, Tensor | None]) -> Iterator[None]:
    """Use the random numbers of a state in a block, and the present ones after it."""
    of_host, of_device = state
    with torch.random.fork_rng([] if of_device is None else [device]):
        torch.set_rng_state(of_host)
        if of_device is not None:
            torch.cuda.set_rng_state(of_device, device)
        yield
