"""Choose and apply kernels, compilation and recomputation for a loaded model, before `Accelerator.prepare`.

None of them may change the loss curve beyond rounding. `accelerate_model` fixes their order and gives the reasons.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from ftcli.config.profile import profile_of_process
from ftcli.config.recipe import COUNT_ONCE, counted_twice
from ftcli.data.packing import lengths_of, row_capacity
from ftcli.hardware.batch_norm import trained_norms
from ftcli.models.architectures import EXPERT_MODULES
from ftcli.models.estimates.frozen_sharding import choose_frozen
from ftcli.models.estimates.memory_saving import MemorySaving, choose_saving, host_memory_of
from ftcli.models.estimates.pass_budget import choose_budget, describe_passes, pass_costs
from ftcli.models.estimates.shape import ModelSize, Shape
from ftcli.models.kernels.activation_checkpointing import can_recompute, enable_recomputation
from ftcli.models.kernels.activation_offloading import offload_activations
from ftcli.models.kernels.adapter_scaling import scale_inside_adapters
from ftcli.models.kernels.channels_last import use_channels_last
from ftcli.models.kernels.compile import compile_layers
from ftcli.models.kernels.cuda_graphs import use_cuda_graphs
from ftcli.models.kernels.float8 import multiply_in_float8
from ftcli.models.kernels.host_embeddings import keep_embeddings_on_host, movable_bytes
from ftcli.models.kernels.liger import liger_problem, use_liger
from ftcli.models.kernels.norm_casts import leave_adapter_inputs, share_casts
from ftcli.models.kernels.tiled_mlp import tile_mlps
from ftcli.models.structure import base_model_of
from ftcli.runtime.errors import InputError
from ftcli.runtime.process import local_world_size
from ftcli.training.batches.passes import PassRule
from ftcli.training.compilation import choose_compile
from ftcli.training.gradient_watch import rare_module_names
from ftcli.training.pass_sizes import count_passes_of_run, largest_micro_batch
from ftcli.training.short_rows import note_of_run

if TYPE_CHECKING:
    from torch import nn

    from ftcli.config.plan import PassCounts
    from ftcli.config.profile import ShardCounts
    from ftcli.config.recipe import Recipe
    from ftcli.data.cache import PreparedRows
    from ftcli.hardware.interface import Hardware
    from ftcli.training.batches.passes import RowSizes
    from ftcli.training.prepared_data import PreparedData


@dataclass(frozen=True)
class Recomputation:
    """What the backward pass computes again, and the passes that this has room for.

    Attributes:
        saving: How memory is saved.
        memory_line: The line for the log that gives the memory estimate.
        passes: How rows are divided into forward passes by tokens; None: by number.
        counts: The number of passes; None without `passes`.
        notes: Lines for the log about rows that are short.
        frozen_line: The line for the log about frozen weights; None if they cannot be whole or sharded.
        is_replicated: Whether each device has the whole model although the profile shards it.
    """

    saving: MemorySaving
    memory_line: str
    passes: PassRule | None = None
    counts: PassCounts | None = None
    notes: tuple[str, ...] = ()
    frozen_line: str | None = None
    is_replicated: bool = False


@dataclass(frozen=True)
class Acceleration:
    """What was done to a model.

    Attributes:
        recomputation: What the backward pass computes again.
        compiled: Whether the layers are compiled.
        kernel_lines: One line for the log for each kernel, and for compilation where it was left out.
    """

    recomputation: Recomputation
    compiled: bool
    kernel_lines: list[str]

    @property
    def memory_lines(self) -> list[str]:
        """Lines for the log: the memory estimate, and what packing would bring."""
        choice = self.recomputation
        return [*([choice.frozen_line] if choice.frozen_line else []), choice.memory_line, *choice.notes]

    def applied_to(self, data: PreparedData) -> PreparedData:
        """Return the data of the run with the passes that its rows are divided into."""
        plan = replace(data.plan, passes=self.recomputation.counts)
        return replace(data, plan=plan, passes=self.recomputation.passes)


def accelerate_model(
    model: nn.Module, recipe: Recipe, data: PreparedData, hardware: Hardware
) -> tuple[nn.Module, Recipe, Acceleration]:
    """Choose and apply recomputation, kernels and compilation, and give the model its precision. A collective.

    The order is fixed:

    1. Recomputation is chosen from a memory estimate. The estimate depends on whether layers are compiled, so
       compilation is chosen first, as if nothing were recomputed. ZeRO-3 has hooks inside the layers of a model with an
       adapter, which prevent compilation; with whole weights there are none.
    2. Compilation is chosen for good, because it cannot be combined with selective recomputation.
    3. Kernels replace parts of the layers. Layers are compiled last, because a graph contains the layer as it is then.
       CUDA graphs capture the whole model later, when two micro-batches have had the same shape.
    4. The backend makes the model compute in the recipe's precision. The optimizer is built for the result.

    Args:
        model: The model with its adapter, not yet prepared.
        recipe: The recipe.
        data: The rows and the plan of the run.
        hardware: The hardware of the run.

    Returns:
        The model, the recipe with compilation and memory saving set to what is done, and what was done.

    Raises:
        InputError: The recipe asks for a kernel that this model or machine cannot use.
    """
    device_type = hardware.accelerator.device.type
    compile_choice = partial(choose_compile, model, plan=data.plan, rows=data.rows, device_type=device_type)
    of_profile = (hardware.may_compile(model), hardware.backend.has_whole_weights)
    whole, compiled = (
        bool(compile_choice(recipe, recomputed="none", may_compile=may, is_whole=has_all)[0].model.torch_compile)
        for may, has_all in ((True, True), of_profile)
    )
    choice = choose_recomputation(model, recipe, data, hardware, compiled=compiled, whole_compiled=whole)
    if choice.is_replicated:
        hardware.replicate()
    may_compile, is_whole = hardware.may_compile(model), hardware.backend.has_whole_weights
    recomputed, is_open = choice.saving.mode, recipe.model.torch_compile is None
    recipe = choice.saving.applied_to(recipe)
    recipe, not_compiled = compile_choice(recipe, recomputed=recomputed, may_compile=may_compile, is_whole=is_whole)
    passes = choice.counts.most if choice.counts is not None else data.plan.accumulation
    kernel_lines = [*use_kernels(model, recipe, hardware, recomputed, passes, falls_back=is_open), *not_compiled]
    model = hardware.before_prepare(model, recipe)
    kernel_lines += keep_embeddings_on_host(model, recipe)
    return model, recipe, Acceleration(choice, bool(recipe.model.torch_compile), kernel_lines)


def use_kernels(
    model: nn.Module, recipe: Recipe, hardware: Hardware, recomputed: str, passes: int = 1, *, falls_back: bool = False
) -> list[str]:
    """Replace parts of the layers by faster ones, where the recipe and this machine allow it, and compile the layers.

    Args:
        model: The model, not yet prepared.
        recipe: The recipe with `model.torch_compile` decided.
        hardware: The hardware of the run.
        recomputed: What the backward pass computes again: none, selective, full or tiled.
        passes: Forward passes of a step on each process, at most.
        falls_back: Whether a layer that cannot be compiled runs as it is; otherwise that is an error.

    Returns:
        One line for the log for each part.

    Raises:
        InputError: The recipe asks for a kernel that this model or machine cannot use.
    """
    device_type = hardware.accelerator.device.type
    is_whole = hardware.backend.has_whole_weights
    share_casts(model)
    leave_adapter_inputs(model, recipe)
    scale_inside_adapters(model, recipe)
    return [
        *use_liger(model, recipe, on_gpu=device_type == "cuda"),
        *multiply_in_float8(model, recipe, device_type),
        *tile_mlps(model, recipe, recomputed, has_hooks=not hardware.may_compile(model)),
        *use_channels_last(model, device_type),
        *compile_layers(model, recipe, recomputed, falls_back=falls_back),
        *use_cuda_graphs(model, recipe, device_type, recomputed=recomputed, is_whole=is_whole, first=passes),
    ]


def choose_recomputation(
    model: nn.Module, recipe: Recipe, data: PreparedData, hardware: Hardware, *, compiled: bool, whole_compiled: bool
) -> Recomputation:
    """Choose what the backward pass computes again, from the recipe or from a memory estimate, and apply it.

    A collective. All ranks make the same choice, for the smallest device.

    Args:
        model: The model, not yet prepared.
        recipe: The recipe.
        data: The rows and the plan of the run.
        hardware: The hardware of the run.
        compiled: Whether its layers will be compiled if nothing is recomputed selectively.
        whole_compiled: The same for a model that is whole on each device.

    Returns:
        What is computed again, and with `batch.micro_size: auto` how rows are divided into passes.

    Raises:
        InputError: The recipe asks for recomputation or for passes by tokens, which batch norm does not allow.
    """
    plan, rows, device_type = data.plan, data.rows, hardware.accelerator.device.type
    profile = profile_of_process(os.environ)
    of_profile = profile.shard_counts(plan.processes)
    sizes = _sizes(model, recipe)
    memory = (_gpu_memory(hardware), host_memory_of(local_world_size()))
    own = (*memory, sizes.trained, sizes.frozen_bytes, sizes.table_bytes)
    capacities, hosts, trained, frozen, tables = zip(*hardware.ranks.collect(own), strict=True)
    sizes = ModelSize(max(trained), max(frozen), sizes.shape, min(tables))  # ties may not exist on every rank yet
    kind = getattr(getattr(base_model_of(model), "config", None), "model_type", "unknown")
    has_liger = liger_problem(recipe, kind, on_gpu=device_type == "cuda") is None
    norms, capacity = any(trained_norms(model)), min((size for size in capacities if size is not None), default=None)
    recomputes = can_recompute(model) and not norms
    how_sharded, how_whole = (
        {"can_recompute": recomputes, "fused": each or has_liger, "compiled": each, "host": min(hosts)}
        for each in (compiled, whole_compiled)
    )
    if has_rare_parts := _has_rare_parts(model, recipe, data.task):
        hardware.allow_unused()
    either = how_whole | {"in_shards": how_sharded, "has_rare_parts": has_rare_parts}
    shares, frozen_line = _choose_frozen(recipe, data, sizes, of_profile, capacity, either)
    how: dict[str, Any] = how_sharded if shares == of_profile else how_whole
    how |= {"capacity": capacity, "may_move_table": profile.may_move_embeddings}
    if recipe.batch.micro_size == "auto" and data.sizes is not None:
        choice = _choose_passes(recipe, data, data.sizes, sizes, shares, device_type, how)
    else:
        is_flat = getattr(data.task, "is_flat", False)
        largest = largest_micro_batch(recipe, plan, rows, data.sizes, is_flat=is_flat, size=plan.micro_size)
        tokens = _longest_row(recipe, rows)
        choice = Recomputation(*choose_saving(recipe, sizes, shares, plan, tokens=tokens, largest=largest, **how))
        if data.sizes is not None:
            by_number = PassRule(data.sizes, plan.processes, 0, is_flat)
            choice = replace(choice, notes=tuple(note_of_run(recipe, plan, rows, by_number, sizes.shape, device_type)))
    choice = replace(choice, frozen_line=frozen_line, is_replicated=shares != of_profile)
    if norms:
        _check_batch_norm(recipe, choice)
    enable_recomputation(model, choice.saving.mode)
    if choice.saving.offloads:
        offload_activations(model)
    return choice


def _check_batch_norm(recipe: Recipe, choice: Recomputation) -> None:
    """Check that nothing computes the statistics of trained batch norm twice."""
    if choice.saving.mode != "none":
        raise InputError(counted_twice(choice.saving.mode, recipe.model.batch_norm), hint=COUNT_ONCE)


def _choose_frozen(
    recipe: Recipe,
    data: PreparedData,
    sizes: ModelSize,
    shares: ShardCounts,
    capacity: int | None,
    how: dict[str, Any],
) -> tuple[ShardCounts, str | None]:
    """Choose whether frozen weights are sharded. With `batch.micro_size: auto` a pass has at least one row."""
    rows, size = 1 if recipe.batch.micro_size == "auto" else data.plan.micro_size, data.sizes
    tokens, largest = _longest_row(recipe, data.rows), None
    if size is not None and rows > 1 and capacity is not None and shares.shards_on_gpus:
        is_flat = getattr(data.task, "is_flat", False)
        largest = largest_micro_batch(recipe, data.plan, data.rows, size, is_flat=is_flat, size=rows)
    return choose_frozen(recipe, sizes, shares, rows=rows, tokens=tokens, capacity=capacity, largest=largest, **how)


def _has_rare_parts(model: nn.Module, recipe: Recipe, task: Any) -> bool:
    """Return whether steps may leave trained parameters without a gradient: those of single experts and `sparse`.

    A recipe that only warns of missing gradients may have others.
    """
    if recipe.faults.missing_gradient == "warn":
        return True
    trained = [name.split(".") for name, parameter in model.named_parameters() if parameter.requires_grad]
    rare = rare_module_names(task)
    # All experts of a layer in one tensor always have a gradient; single experts are numbered.
    return any(
        part in rare and (part not in EXPERT_MODULES or following.isdigit())
        for parts in trained
        for part, following in pairwise(parts)
    )


def _choose_passes(
    recipe: Recipe,
    data: PreparedData,
    rows: RowSizes,
    sizes: ModelSize,
    shares: ShardCounts,
    device_type: str,
    how: dict[str, bool],
) -> Recomputation:
    """Choose the tokens of a forward pass, and with them what is computed again. See `choose_recomputation`."""
    plan, is_flat = data.plan, getattr(data.task, "is_flat", False)
    longest = int((rows.tokens if is_flat else rows.longest * rows.documents).max())
    of_step = largest_micro_batch(recipe, plan, data.rows, rows, is_flat=is_flat, size=plan.global_size)
    share = -(-(longest * plan.global_size if of_step is None else of_step) // plan.processes)
    budget = choose_budget(recipe, sizes, shares, longest=longest, of_step=share, **how)
    shape = sizes.shape
    rule = PassRule(
        sizes=rows,
        processes=plan.processes,
        budget=budget.tokens,
        is_flat=is_flat,
        **pass_costs(device_type, shape),
        attention=0.0 if shape is None else shape.attention / shape.layer_products,
    )
    counts = count_passes_of_run(recipe, plan, data.rows, rule)
    of_line = {name: how[name] for name in ("capacity", "fused", "compiled")}
    line = describe_passes(recipe, sizes, shares, budget, tokens=counts.tokens, **of_line)
    notes = note_of_run(recipe, plan, data.rows, rule, shape, device_type)
    return Recomputation(budget.saving, line, rule, counts, tuple(notes))


def _sizes(model: nn.Module, recipe: Recipe) -> ModelSize:
    """Return the sizes that the memory estimate needs."""
    config: Any = getattr(model, "config", None)
    shape = Shape.of(config.to_dict()) if hasattr(config, "to_dict") else None
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)
    return ModelSize(trained, frozen, shape, movable_bytes(model, recipe))


def _longest_row(recipe: Recipe, rows: PreparedRows) -> int:
    """Return the number of tokens of the longest row that the model is trained on."""
    if rows.bins is not None or rows.streamed or "input_ids" not in rows.train.column_names:
        return row_capacity(rows.train, recipe.data.max_length)
    return int(lengths_of(rows.train).max())


def _gpu_memory(hardware: Hardware) -> int | None:
    """Return the memory of this process's GPU in bytes; None without a GPU, because processes share the host memory."""
    device = hardware.accelerator.device
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
