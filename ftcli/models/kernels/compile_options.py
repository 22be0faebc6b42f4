"""Set the options of torch.compile under which layers are compiled: one graph for all lengths, rounded as without it.

All are read when a graph is compiled, at its first call, so they stay set until the run ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftcli.runtime.patches import declare
from ftcli.runtime.process_settings import change

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe

ROUNDS_ON_CPUS = "2.13"  # first tested torch whose compiled layers round as uncompiled ones on CPUs too; 2.11 does not
BUDGET = 0.9  # fraction of the activations that a graph would keep for the backward pass

OPTIONS = declare(
    __name__,
    "compile-options",
    library="torch",
    versions=">=2.11,<2.14",
    purpose="Sets options of torch.compile until the run ends: one graph for all lengths, the same rounding",
    without="Layers are then not compiled.",
    alternative="`torch.compile(options=...)`, which takes the options of Inductor only.",
    apis=(
        "torch._dynamo.config:specialize_float",
        *(f"torch._inductor.config:{name}" for name in ("emulate_precision_casts", "shape_padding")),
        "torch._functorch.config:activation_memory_budget",
        "torch.fx.experimental._config:use_duck_shape",
    ),
    newer_apis=("torch._inductor.config:triton.mix_order_reduction_non_strict_mode",),
    unmeasured="Without it, layers are not compiled, so a step takes what it takes without "
    "[compiled-layers](#compiled-layers).",
)


def rounds_as_uncompiled_layers(recipe: Recipe, device_type: str) -> bool:
    """Return whether this torch can round in compiled layers where uncompiled ones do, if the recipe needs it.

    Args:
        recipe: The recipe. Only adapters on layers in 16 bits need these roundings. Those may also be frozen weights in
            bfloat16 under fp32.
        device_type: Type of the device, such as "cuda".
    """
    import torch
    from packaging.version import Version

    has_16_bits = recipe.precision != "fp32" or recipe.model.dtype == "bfloat16"
    is_needed = recipe.adapter.type != "none" and has_16_bits
    return not is_needed or device_type != "cpu" or Version(torch.__version__) >= Version(ROUNDS_ON_CPUS)


def set_compile_options(recipe: Recipe, recomputed: str) -> None:
    """Set all options.

    Args:
        recipe: The recipe.
        recomputed: Gradient checkpointing of the run: none, selective, full or tiled.
    """
    _use_one_norm_kernel_for_all_lengths()
    _pad_no_products()
    _round_like_uncompiled_layers(recipe)
    _use_a_symbol_for_each_size()
    _specialize_floats()
    _recompute_cheap_results(recipe, recomputed)


def _pad_no_products() -> None:
    """Leave the sizes of products as they are.

    By default torch.compile pads a size that is no multiple of 8, such as the rank of a LoRA adapter with r=4, if a
    short benchmark is faster with it. Up to torch 2.11 it first compares the length of rows with limits, so the graph
    counts only for lengths between them, and the next shorter or longer row compiles all layers again. Besides, ranks
    could choose differently.
    """
    import torch._inductor.config

    change(torch._inductor.config, "shape_padding", False)


def _use_one_norm_kernel_for_all_lengths() -> None:
    """Compute the two gradient sums of a norm in one kernel for all lengths of rows, if this torch has the option.

    By default torch.compile uses one kernel for long rows only. It then compiles another graph for short rows, and all
    ranks wait for the rank that compiles it (docs/explanation/performance.md).
    """
    import torch._inductor.config

    if hasattr(torch._inductor.config.triton, "mix_order_reduction_non_strict_mode"):
        change(torch._inductor.config.triton, "mix_order_reduction_non_strict_mode", True)


def _use_a_symbol_for_each_size() -> None:
    """Use a separate symbol for the length of rows in graphs, even if it is equal to another size.

    By default torch uses one symbol for equal sizes. A first row of 4096 tokens in a model of hidden size 4096 would
    fix the length of the graph, and the next other length would compile every layer again.
    """
    import torch.fx.experimental._config

    change(torch.fx.experimental._config, "use_duck_shape", False)


def _specialize_floats() -> None:
    """Compile a float of a layer (a norm's epsilon, a LoRA scaling) as a constant of its graph, with a guard.

    By default it becomes an input of graphs for all lengths: a float64 tensor on the host, with a C++ kernel that
    rounds it in every call. Before its first C++ kernel, Inductor tests the vector instructions of the processor. With
    torch 2.11 that takes about half of the first step. All layers of a model have the same floats, so they still share
    their graphs.
    """
    import torch._dynamo

    change(torch._dynamo.config, "specialize_float", True)


def _recompute_cheap_results(recipe: Recipe, recomputed: str) -> None:
    """Recompute cheap results in the backward pass of graphs with an adapter, unless layers are recomputed anyway.

    By default the partitioner keeps results such as the gated product of an MLP and the output of a norm. Recomputing
    them takes one pass over memory and gives the same bits. The option is read when a graph is compiled, at the first
    call, so it stays set until the run ends.
    """
    import torch._functorch.config

    keeps_less = recipe.adapter.type != "none" and recomputed == "none"
    change(torch._functorch.config, "activation_memory_budget", BUDGET if keeps_less else 1.0)


def _round_like_uncompiled_layers(recipe: Recipe) -> None:
    """Round results of compiled layers with an adapter where uncompiled layers do.

    An adapter adds a small value to a frozen layer's output in bfloat16. It is lost by rounding if it is below half a
    unit of the last place. A fused kernel would not round there. That is closer to float32, but the curve would differ
    from that of profiles that cannot compile (docs/explanation/determinism.md). torch 2.11 ignores the setting on CPUs.
    """
    import torch._inductor.config

    change(torch._inductor.config, "emulate_precision_casts", recipe.adapter.type != "none")
