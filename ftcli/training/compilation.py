"""Choose whether the layers of a model are compiled, from the recipe or from the time that this would save."""

from __future__ import annotations

import math
import shutil
from typing import TYPE_CHECKING, Any

from ftcli.data.packing import lengths_of
from ftcli.models.architectures import architecture_of
from ftcli.models.estimates.memory_saving import offloads_without_recomputing
from ftcli.models.estimates.pass_budget import FULL_TOKENS, enough_tokens
from ftcli.models.estimates.shape import Shape
from ftcli.models.kernels.compile import COMPILERS, HOOKS, LEAST_SAVED, compile_problem, seconds_saved
from ftcli.models.kernels.compile_options import ROUNDS_ON_CPUS, rounds_as_uncompiled_layers
from ftcli.models.structure import base_model_of
from ftcli.runtime.installed import is_installed

if TYPE_CHECKING:
    from torch import nn

    from ftcli.config.plan import Plan
    from ftcli.config.recipe import Recipe
    from ftcli.data.cache import PreparedRows


def choose_compile(
    model: nn.Module,
    recipe: Recipe,
    plan: Plan,
    rows: PreparedRows,
    recomputed: str,
    *,
    device_type: str,
    may_compile: bool,
    is_whole: bool = True,
) -> tuple[Recipe, list[str]]:
    """Choose whether layers are compiled.

    The recipe decides, if the backend allows it and the losses stay those of uncompiled layers. Where the recipe leaves
    it open, layers are compiled on GPUs if this saves time, and a layer that cannot be compiled runs as it is.

    Args:
        model: The model, not yet prepared.
        recipe: The recipe; `model.torch_compile` is true, false or None.
        plan: The plan of the run.
        rows: The rows of the run.
        recomputed: What the backward pass computes again: none, selective, full or tiled.
        device_type: Type of the device, such as "cuda".
        may_compile: Whether the backend allows layers to be compiled.
        is_whole: Whether each process has all weights.

    Returns:
        The recipe with `model.torch_compile` decided, and one line for the log if layers are not compiled on a GPU, or
        not compiled although the recipe requests it.
    """
    requested = recipe.model.torch_compile
    if requested and not may_compile:
        return _with_compile(recipe, compiled=False), [f"torch_compile: left out, {HOOKS}"]
    if requested and not rounds_as_uncompiled_layers(recipe, device_type):
        reason = f"before torch {ROUNDS_ON_CPUS} compiled layers with an adapter round differently on CPUs"
        return _with_compile(recipe, compiled=False), [f"torch_compile: left out, {reason}"]
    if requested is not None:
        return recipe, []
    on_gpu = device_type == "cuda"
    if not on_gpu:
        problem: str | None = "there is no GPU"
    elif recipe.model.quantization is not None and not is_whole:
        problem = "4-bit weights are in shards"
    else:
        problem = _reason_not_to_compile(model, recipe, plan, rows, recomputed, may_compile)
    lines = [f"torch_compile: none, {problem}"] if problem and on_gpu else []
    return _with_compile(recipe, compiled=problem is None), lines


def _with_compile(recipe: Recipe, *, compiled: bool) -> Recipe:
    """Return the recipe with `model.torch_compile` set."""
    section = recipe.model.model_copy(update={"torch_compile": compiled})
    return recipe.model_copy(update={"model": section})


def _reason_not_to_compile(
    model: nn.Module, recipe: Recipe, plan: Plan, rows: PreparedRows, recomputed: str, may_compile: bool
) -> str | None:
    """Return why a model on a GPU is not compiled if the recipe leaves it open, in a few words, or None."""
    config: Any = getattr(base_model_of(model), "config", None)
    kind = getattr(config, "model_type", None)
    shape = Shape.of(config.to_dict()) if architecture_of(kind).compiles_layers else None
    if shape is None:
        return f"no gain is known for models of type {kind}"
    if recipe.precision == "fp32":
        return "fp32 is meant for exact results"
    if offloads_without_recomputing(recipe) or recomputed == "selective":
        return "it cannot be combined with the memory saving of this run"
    if not may_compile:
        return HOOKS
    if not any(map(shutil.which, COMPILERS)) or not is_installed("triton"):
        return "it needs a C++ compiler and Triton"
    if (unusable := compile_problem()) is not None:
        return unusable
    of_row = recipe.data.max_length if rows.streamed else int(lengths_of(rows.train).sum()) / max(plan.rows or 1, 1)
    steps, tokens = plan.steps or 0, of_row * plan.global_size / plan.processes
    passes = plan.accumulation if recipe.batch.micro_size != "auto" else math.ceil(tokens / FULL_TOKENS)
    device, host = seconds_saved(shape, tokens * steps, passes * steps, enough=enough_tokens(shape))
    if device + host < LEAST_SAVED:
        return (
            f"this run is too short for compilation to pay off: {tokens / passes:.0f} tokens a pass would save about "
            f"{device:.0f} s of the device and {host:.0f} s of the host"
        )
    return None
