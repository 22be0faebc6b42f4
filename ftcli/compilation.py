"""Layers of a transformers model compiled by torch.compile, each in place: one graph for all that are alike.

A layer's forward in training is replaced and nothing else: names, hooks of backends and gradient checkpointing stay
outside of what is compiled, evaluation and generation run as before. Attention over documents in one row is left to
its own kernels, so a graph ends before it and another begins behind it. Lengths may change: the second one that is
met compiles once more, for all lengths.
"""

from __future__ import annotations

import shutil
from functools import partial
from typing import TYPE_CHECKING, Any

from .base_model import base_model_of
from .errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from .recipe import Recipe

COMPILERS = ("c++", "g++", "clang++")  # torch.compile makes C++ for CPUs, and C for the launches of its GPU kernels


def check_compile(recipe: Recipe) -> None:
    """Raise `InputError` where a recipe asks for compiled layers and this machine cannot make them."""
    if recipe.model.torch_compile and not any(map(shutil.which, COMPILERS)):
        told = f"model.torch_compile needs a C++ compiler, and none of {', '.join(COMPILERS)} is here"
        raise InputError(told, hint="install one, or set model.torch_compile to false")


def compile_layers(model: nn.Module, recipe: Recipe, *, hooked: bool) -> list[str]:
    """Compile the layers of a model that is not prepared yet, where asked for; return the line for the log.

    `hooked`: the backend will fetch weights by hooks on every module inside a layer: nothing is compiled, and the line
    says so. Raises `InputError` for a model whose layers are not known.
    """
    if not recipe.model.torch_compile:
        return []
    if hooked:
        return ["torch_compile: left out, this profile fetches weights by hooks inside of layers"]
    check_compile(recipe)
    inner = base_model_of(model)
    kinds = set(getattr(inner, "_no_split_modules", None) or ())
    layers = [layer for name, layer in inner.named_modules() if type(layer).__name__ in kinds and name[-1:].isdigit()]
    if not layers:
        told = f"model.torch_compile: {type(inner).__name__} does not say what its layers are"
        raise InputError(told, hint="set it to false")
    _leave_attention_out()
    for layer in layers:
        _compile(layer)
    return [f"torch_compile: {len(layers)} layers, each in place; the first steps wait for it"]


class Graphs:
    """How many graphs a run has compiled so far, and the step that compiled the last one: after a warm-up, none."""

    def __init__(self) -> None:
        self.before = self.count = _graphs()
        self.last_step = 0

    def note(self, step: int) -> None:
        """Take note of what was compiled up to the end of a step."""
        if (count := _graphs()) != self.count:
            self.count, self.last_step = count, step

    def told(self) -> str:
        """Return the line for the log."""
        return f"torch_compile: {self.count - self.before} graphs, the last in step {self.last_step}"


def _graphs() -> int:
    """Return how many graphs torch.compile has made in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def _compile(layer: Any) -> None:
    """Let a layer's forward be compiled while it trains.

    transformers 5.23 has gradient checkpointing in the forward of its layers, 5.17 in their call. In one graph with it
    nothing would be compiled, as attention ends a graph and a checkpoint cannot be cut: it stays outside.
    """
    import torch

    plain = type(layer).forward
    checkpoints = plain.__code__.co_name == "forward_with_checkpointing"
    own = plain.__wrapped__ if checkpoints else plain
    fast = torch.compile(own.__get__(layer))

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not layer.training:
            return plain(layer, *args, **kwargs)
        if checkpoints and layer.gradient_checkpointing:
            return layer._gradient_checkpointing_func(partial(fast, **{**kwargs, **_without_cache(kwargs)}), *args)
        return fast(*args, **kwargs)

    layer.forward = forward


def _without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return what transformers puts in place of a cache where a layer will be computed again."""
    return {name: False if name == "use_cache" else None for name in kwargs if name in ("use_cache", "past_key_values")}


def _leave_attention_out() -> None:
    """Keep our attention out of graphs: it asks what machine this is, and some of its kernels cannot be traced."""
    import torch
    from transformers import AttentionInterface

    from .attention import BY_TORCH, NAME, attend

    torch._dynamo.config.optimize_ddp = False  # it would cut each layer's graph again, by DDP's buckets
    AttentionInterface.register(NAME, torch.compiler.disable(attend))
    AttentionInterface.register(BY_TORCH, torch.compiler.disable(partial(attend, flash=False)))
