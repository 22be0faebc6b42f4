"""Compile the layers of a transformers model with torch.compile, each in place. Equal layers share a graph.

Only the training forward of a layer is replaced. Hooks of backends and gradient checkpointing stay outside the graph,
and evaluation and generation run without it. Attention over packed documents has its own kernels, so a graph ends
before it and another begins after it. Graphs are compiled for all lengths at once. Otherwise ranks that get their
second length at different steps would wait for each other's compilation.
"""

from __future__ import annotations

import shutil
from functools import partial
from typing import TYPE_CHECKING, Any

from ftcli.models.kernels.compile_options import OPTIONS, set_compile_options
from ftcli.models.kernels.compiling_processes import start_compiling_processes
from ftcli.models.structure import LAYERS, base_model_of, layers_of
from ftcli.runtime.errors import InputError
from ftcli.runtime.patches import declare
from ftcli.runtime.process_settings import change, on_restore

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from ftcli.config.recipe import Recipe
    from ftcli.models.estimates.shape import Shape


COMPILERS = ("c++", "g++", "clang++")  # torch.compile generates C++ for CPUs, and C to launch its GPU kernels

# Seconds that compiled layers save in a step, for each feature (H + I) of each layer and token: measured on an H200 for
# a Llama-3.2-1B shape in bf16 (benchmarks/tables.md). GPUs with slower memory save more.
SAVED = 2.3e-11
# Seconds of Python that compiled layers save for each layer and forward pass, with its backward pass. They count as far
# as the device waits for them. Measured on an H100 with a Qwen3-0.6B shape and passes of 2,000 tokens (1.7 times as
# fast: 3.6 ms), rounded down for faster hosts.
HOST_SAVED = 2e-3
HOOKS = "this profile gathers weights by hooks inside layers"
# Seconds of a run that justify compiling. With empty caches compilation makes the first step of 8B LoRA 12 to 15 s
# longer on one and on two H200s; twice that for slower hosts and models with more kinds of layers.
LEAST_SAVED = 30.0


def checkpointing_problem() -> str | None:
    """Return how transformers' layers differ from what `_compile` expects; None if they do not.

    Before version 5.23, transformers applies gradient checkpointing when a layer is called. Later versions wrap the
    layer's forward function.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    class Layer(GradientCheckpointingLayer):
        def forward(self) -> None:
            """Compute nothing."""

    forward: Any = Layer.forward
    if hasattr(forward, "__wrapped__") and not _has_checkpointing(forward):
        return f"transformers' layers are wrapped by {forward.__code__.co_name}, which ftcli does not expect"
    return None


COMPILING = declare(
    __name__,
    "compiled-layers",
    library="torch",
    versions=">=2.11,<2.14",
    purpose="Leaves attention out of compiled layers, and counts the compiled graphs",
    without="Layers are then not compiled.",
    alternative="`torch.compile(options=...)`, which takes the options of Inductor only.",
    apis=(
        *(f"torch._dynamo.config:{name}" for name in ("suppress_errors", "optimize_ddp")),
        "torch._inductor.config:fallback_random",
        "torch._dynamo.utils:counters",
    ),
    newer_apis=("torch._dynamo.config:nested_graph_breaks",),
    measurement="249.6 ms and 31.9 GiB a step, without it 328.0 ms and 39.9 GiB: 1B, 4 rows of 4,096 tokens, "
    "`bf16_pure`, one H100.",
)
CHECKPOINTS = declare(
    __name__,
    "compiled-checkpoints",
    library="transformers",
    versions=">=5.17,<5.25",
    purpose="Compiles the forward of a layer inside transformers' gradient checkpointing",
    without="Layers are then not compiled.",
    alternative="Accelerate's `compile_regions`, which compiles the checkpoint too: attention ends its graph.",
    apis=("transformers.modeling_utils:PreTrainedModel._set_gradient_checkpointing._gradient_checkpointing_func",),
    newer_apis=("transformers.modeling_layers:GradientCheckpointingLayer._can_checkpoint_with_cache",),
    also=checkpointing_problem,
    measurement="315.9 ms and 15.3 GiB a step, without it 402.9 ms and 16.1 GiB: 1B, 4 rows of 4,096 tokens, "
    "`bf16_pure`, full recomputation, one H100.",
)


def seconds_saved(shape: Shape, tokens: float, passes: float, *, enough: int) -> tuple[float, float]:
    """Return the seconds that compiled layers save in a run of one process: of the device, and of the host.

    Args:
        shape: The sizes of the model.
        tokens: Tokens of all forward passes.
        passes: Number of forward passes.
        enough: Tokens of a pass from which on the device does not wait for the host.
    """
    waits = max(0.0, 1 - tokens / max(passes, 1) / enough)
    return SAVED * tokens * shape.layers * (shape.hidden + shape.inner), HOST_SAVED * passes * shape.layers * waits


def compile_problem() -> str | None:
    """Return why the installed versions do not support compiled layers; None if they do."""
    return next((patch.problem() for patch in (COMPILING, OPTIONS, CHECKPOINTS, LAYERS) if not patch.is_usable()), None)


def check_compile(recipe: Recipe) -> None:
    """Check that this machine can compile the layers of a recipe.

    Args:
        recipe: The recipe.

    Raises:
        InputError: The recipe sets `model.torch_compile`, and this machine has no C++ compiler.
    """
    if recipe.model.torch_compile and not any(map(shutil.which, COMPILERS)):
        message = f"model.torch_compile needs a C++ compiler, and none of {', '.join(COMPILERS)} is installed"
        raise InputError(message, hint="install one, or set model.torch_compile to false")


def compile_layers(
    model: nn.Module, recipe: Recipe, recomputed: str = "none", *, falls_back: bool = False
) -> list[str]:
    """Compile the layers of a model if the recipe sets `model.torch_compile`.

    Args:
        model: The model before `Accelerator.prepare`.
        recipe: The recipe.
        recomputed: Gradient checkpointing of the run: none, selective, full or tiled.
        falls_back: Whether a layer that cannot be compiled runs as it is; otherwise that is an error.

    Returns:
        Lines for the log.

    Raises:
        InputError: The layers of the model are unknown.
    """
    if not recipe.model.torch_compile:
        return []
    import torch._dynamo

    from ftcli.models.kernels.unread_outputs import leave_out_unread_outputs

    check_compile(recipe)
    if (problem := compile_problem()) is not None:
        return [f"torch_compile: none, {problem}"]
    if not (layers := layers_of(model)):
        message = f"model.torch_compile: the layers of {type(base_model_of(model)).__name__} are unknown"
        raise InputError(message, hint="set model.torch_compile to false")
    change(torch._dynamo.config, "suppress_errors", falls_back)
    _exclude_attention()
    set_compile_options(recipe, recomputed)
    leave_out_unread_outputs(model, recomputed)
    for layer in layers:
        # Only above a layer that trains something: below it the backward pass has nothing to do.
        trains = any(parameter.requires_grad for parameter in layer.parameters())
        _compile(layer, gradients_of_input=recipe.adapter.type != "none" and trains)
    start_compiling_processes()
    return [f"torch_compile: {len(layers)} layers, each in place; the first steps include the compilation"]


class GraphCounter:
    """Counts the graphs that a run has compiled, and records the step of the last one."""

    def __init__(self) -> None:
        self.before = self.count = _graphs()
        self.last_step = 0

    def update(self, step: int) -> None:
        """Count the graphs that were compiled up to the end of a step.

        Args:
            step: Number of the step.
        """
        if (count := _graphs()) != self.count:
            self.count, self.last_step = count, step

    def summary(self) -> str:
        """Return the line for the log."""
        return f"torch_compile: {self.count - self.before} graphs, the last in step {self.last_step}"


def _graphs() -> int:
    """Return the number of graphs that torch.compile has compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def _compile(layer: Any, *, gradients_of_input: bool = False) -> None:
    """Compile the forward pass that a layer uses in training.

    With an adapter the first layer's input requires no gradient, while the inputs of the others do. torch.compile would
    make each graph twice for that. With `gradients_of_input` the first layer gets an input that requires a gradient, so
    that all layers share one graph. The gradient of this input is dropped.

    transformers 5.23 has gradient checkpointing in the forward of its layers, 5.17 in their call. It must stay outside
    the graph: attention ends a graph, and torch.compile cannot divide a checkpoint into two graphs.
    """
    import torch

    plain = type(layer).forward
    checkpoints = _has_checkpointing(plain)
    own = plain.__wrapped__ if checkpoints else plain
    fast = torch.compile(own.__get__(layer), dynamic=True)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not layer.training:
            return plain(layer, *args, **kwargs)
        if gradients_of_input and args:
            args = (_requiring_gradient(args[0]), *args[1:])
        if checkpoints and layer.gradient_checkpointing:
            return layer._gradient_checkpointing_func(partial(fast, **_without_cache(layer, kwargs)), *args)
        return fast(*args, **kwargs)

    layer.forward = forward


def _requiring_gradient(hidden: Any) -> Any:
    """Return a layer's input, as a new leaf where gradients are recorded and the input requires none."""
    import torch

    if not torch.is_grad_enabled() or not isinstance(hidden, torch.Tensor) or hidden.requires_grad:
        return hidden
    return hidden.detach().requires_grad_()


def _has_checkpointing(forward: Any) -> bool:
    """Return whether a layer's forward is the wrapper of transformers for gradient checkpointing."""
    return forward.__code__.co_name == "forward_with_checkpointing"


def _without_cache(layer: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a recomputed layer, without its key-value cache, as transformers does."""
    values: dict[str, Any] = {"use_cache": False}
    if not getattr(layer, "_can_checkpoint_with_cache", False):
        values |= {"past_key_values": None, "layer_past": None}
    return kwargs | {name: value for name, value in values.items() if name in kwargs}


def _exclude_attention() -> None:
    """Exclude ftcli's attention from graphs: it depends on the device, and some of its kernels cannot be traced."""
    import torch
    import torch._inductor.config
    from transformers import AttentionInterface

    from ftcli.models.kernels.document_attention import DOCUMENT_ATTENTION, DOCUMENT_ATTENTION_TORCH, attend

    change(torch._dynamo.config, "optimize_ddp", False)  # it would divide each layer's graph again, by DDP's buckets
    if hasattr(torch._dynamo.config, "nested_graph_breaks"):  # two graphs per layer instead of five
        change(torch._dynamo.config, "nested_graph_breaks", True)
    change(torch._inductor.config, "fallback_random", True)  # the same dropout masks as in uncompiled layers
    for name, function in ((DOCUMENT_ATTENTION, attend), (DOCUMENT_ATTENTION_TORCH, partial(attend, flash=False))):
        AttentionInterface.register(name, _between_graphs(function))
        on_restore(partial(AttentionInterface.register, name, function))


def _between_graphs(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Return an attention function whose graphs end with tensors `[B, T, H, K]`, the layout of the kernels.

    The backward pass of a graph needs contiguous gradients, so gradients of `[B, H, T, K]` would be copied.
    """
    import torch

    @torch.compiler.disable
    def outside(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
        return attend(module, query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), *rest, **options)

    def between(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
        return outside(module, query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), *rest, **options)

    return between
