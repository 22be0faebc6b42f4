"""Forecast a run under one profile: memory by part, what fits, and the time of a step. Light: never imports torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ftcli.config.compatibility import check_pair
from ftcli.config.graph_exclusions import expects_graphs
from ftcli.config.plan import Plan, derive_batches, derive_plan
from ftcli.config.profile import ShardCounts
from ftcli.models.architectures import architecture_of
from ftcli.models.estimates.frozen_sharding import choose_frozen
from ftcli.models.estimates.memory_estimate import (
    USABLE_FRACTION,
    MemoryEstimate,
    has_fresh_gradients,
)
from ftcli.models.estimates.memory_saving import (
    MemorySaving,
    estimate_saving,
    offloads_without_recomputing,
    savings_to_try,
)
from ftcli.models.estimates.pass_budget import FULL_TOKENS, enough_tokens
from ftcli.models.estimates.step_time import StepTime, estimate_step
from ftcli.models.estimates.step_work import Kernels, Rows
from ftcli.models.kernels.compile import LEAST_SAVED, seconds_saved
from ftcli.runtime.errors import InputError

if TYPE_CHECKING:
    from ftcli.config.profile import Profile
    from ftcli.config.recipe import Recipe
    from ftcli.models.estimates.shape import ModelSize
    from ftcli.runtime.gpus import GPU


# Part of the memory in the output -> names of it in the estimate. A part of the output may have several.
PARTS = {
    "weights": ("weights",),
    "gradients": ("gradients", "arriving gradients", "gradients of CUDA graphs"),
    "optimizer": ("optimizer",),
    "activations": ("activations",),
    "logits": ("logits",),
    "casts": ("copies of weights", "rounded weights"),
    "communication buffers": ("gathered",),
}
WORTH_NAMING = 0.97  # part of a step time below which another micro size is named
FLASH_4_HEADS = (64, 96, 128)  # features of a head that flash-attn 4 supports (docs/explanation/kernels.md)
FLASH_4_GPUS = ("H100", "H200", "B200")


@dataclass(frozen=True)
class Target:
    """The run and the GPUs that a forecast is about.

    Attributes:
        recipe: The recipe.
        size: The size of the model; None if it is not known.
        model_type: `model_type` of the model; None if it is not known.
        rows: Training rows of an epoch; None if not known.
        lengths: Lengths of the rows.
        longest: Tokens of the longest row.
        typical: Tokens of some rows that stand for all, ascending; empty if they are not known or rows are packed.
        gpu: The GPU with its rates; None if they are not known.
        capacity: Bytes of a GPU; None if not known.
        gpus: Number of GPUs.
    """

    recipe: Recipe
    size: ModelSize | None
    model_type: str | None
    rows: int | None
    lengths: Rows
    longest: int
    gpu: GPU | None
    capacity: int | None
    gpus: int
    typical: tuple[int, ...] = ()

    @property
    def usable(self) -> float | None:
        """Bytes of a GPU that tensors may take."""
        return None if self.capacity is None else USABLE_FRACTION * self.capacity


@dataclass(frozen=True)
class Forecast:
    """What is expected of a run under one profile.

    Attributes:
        profile: Name of the profile.
        gpus: Number of GPUs it uses.
        problem: Why the recipe cannot run on this profile; empty if it can.
        plan: Batch sizes and steps; None if there are none.
        memory: Peak of a GPU; None if the model's size is not known.
        saving: How memory is saved; None if that is not known.
        compiled: Whether layers are compiled.
        fits: Whether the memory is within the usable part of a GPU; None if either is not known.
        time: Time of a step; None if it is not known.
        tokens: Tokens of a step over all GPUs, with padding.
        faster: The forecast of a smaller micro size that also fits and is faster, because less is recomputed.
        frozen: Where frozen weights are; None if the profile has no choice.
    """

    profile: str
    gpus: int
    problem: str = ""
    plan: Plan | None = None
    memory: MemoryEstimate | None = None
    saving: MemorySaving | None = None
    compiled: bool = False
    fits: bool | None = None
    time: StepTime | None = None
    tokens: float = 0.0
    faster: Forecast | None = None
    frozen: str | None = None

    @property
    def mode(self) -> str:
        """What the backward pass recomputes; empty if that is not known."""
        return "" if self.saving is None else self.saving.mode

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part of the output; empty if the memory is not known."""
        if self.memory is None:
            return {}
        uses = self.memory.bytes_by_use
        return {part: sum(uses.get(name, 0) for name in names) for part, names in PARTS.items()}

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second over all GPUs."""
        return None if self.time is None else self.tokens / self.time.total

    @property
    def hours(self) -> float | None:
        """Hours of the whole run, without evaluations and checkpoints."""
        known = self.time is not None and self.plan is not None and self.plan.steps is not None
        return self.time.total * self.plan.steps / 3600 if known else None  # type: ignore[union-attr, operator]

    def cost(self, price: float | None) -> float | None:
        """Return the cost of the whole run.

        Args:
            price: Price of one GPU for one hour; None if not known.
        """
        return None if price is None or self.hours is None else price * self.hours * self.gpus


def forecast(profile: Profile, target: Target) -> Forecast:
    """Return what is expected of a run under a profile.

    The micro size is the largest that the recipe allows and that fits. The backward pass recomputes as little as fits.
    If nothing fits, the forecast is that of the smallest memory.

    Args:
        profile: The profile.
        target: The run and the GPUs.
    """
    recipe, processes = target.recipe, 1 if profile.distributed_type == "NO" else target.gpus
    known = Forecast(profile.name, processes)
    if problems := check_pair(recipe, profile):
        return replace(known, problem=problems[0].what)
    try:
        plan, shares = derive_plan(recipe, processes, target.rows), profile.shard_counts(processes)
    except InputError as error:
        return replace(known, problem=error.problems[0].what)
    known = replace(known, plan=plan, tokens=plan.global_size * target.lengths.tokens)
    if target.size is None:
        return known
    rows = 1 if recipe.batch.micro_size == "auto" else plan.micro_size
    how, in_shards = (
        {"fused": compiled or _has_liger(target, compiled), "compiled": compiled}
        for compiled in (_compiles(counts, target, plan, "none") for counts in (ShardCounts(), shares))
    )
    of_rows: dict[str, Any] = {"rows": rows, "tokens": target.longest, "capacity": target.capacity}
    shares, frozen = choose_frozen(recipe, target.size, shares, in_shards=in_shards, **of_rows, **how)
    known = replace(known, frozen=frozen)
    if recipe.batch.micro_size == "auto" and target.typical:
        return replace(_by_tokens(profile, target, plan, shares), tokens=known.tokens, frozen=frozen)
    candidates = [_of_size(profile, target, plan, shares, micro) for micro in _micro_sizes(recipe, processes)]
    if recipe.batch.micro_size == "auto":  # the run chooses the mode for one row, and adds rows as long as they fit
        least = min(candidates[-1], key=lambda one: one.memory.total if one.memory else 0)
        saving = next((one.saving for one in candidates[-1] if one.fits is not False), least.saving)
        candidates = [[one for one in ways if one.saving == saving] for ways in candidates]
    tried = [candidate for ways in candidates for candidate in ways]
    chosen = next((one for one in tried if one.fits is not False), None)
    if chosen is None:
        chosen = min(tried, key=lambda one: one.memory.total if one.memory else 0)
    chosen = replace(chosen, tokens=known.tokens, frozen=frozen)
    others = [one for one in tried if one.fits and one.time and _micro_size(one) != _micro_size(chosen)]
    best = min(others, key=_seconds, default=chosen)
    is_faster = best.time is not None and _seconds(best) < WORTH_NAMING * _seconds(chosen)
    return replace(chosen, faster=best) if chosen.fits and is_faster else chosen


def _by_tokens(profile: Profile, target: Target, plan: Plan, shares: ShardCounts) -> Forecast:
    """Return the forecast of a run whose rows are divided by their tokens, as the run divides them."""
    from ftcli.training.short_rows import expect_passes  # imports numpy

    recipe, size = target.recipe, target.size
    assert size is not None
    compiled = _compiles(shares, target, plan, "none")
    how = {"fused": compiled or _has_liger(target, compiled), "compiled": compiled}
    known = {"may_move_table": profile.may_move_embeddings, **how}
    expected = expect_passes(recipe, size, shares, plan, list(target.typical), target.capacity, **known)
    passes, budget = expected.plan.passes, expected.budget
    assert passes is not None and budget is not None
    memory = estimate_saving(recipe, size, shares, budget.saving, tokens=expected.tokens, **how)
    compiled = _compiles(shares, target, plan, budget.saving.mode)
    # The time is that of equal passes, as many as there are on average. Their numbers need not be whole.
    rows = plan.global_size / plan.processes
    count: Any = min(passes.mean, rows)
    equal = replace(plan, micro_size=rows / count, accumulation=count)
    return Forecast(
        profile.name,
        plan.processes,
        plan=expected.plan,
        memory=memory,
        saving=budget.saving,
        compiled=compiled,
        fits=None if target.usable is None else memory.total <= target.usable,
        time=_time(target, shares, equal, budget.saving, compiled),
    )


def _time(target: Target, shares: ShardCounts, plan: Plan, saving: MemorySaving, compiled: bool) -> StepTime | None:
    """Return the time of a step; None if the rates of the GPU or the model's shape are not known."""
    recipe, size, gpu, mode = saving.applied_to(target.recipe), target.size, target.gpu, saving.mode
    if gpu is None or size is None or size.shape is None or recipe.precision not in gpu.products:
        return None
    liger, flash = _has_liger(target, compiled), _has_flash_attention_4(target)
    kernels = Kernels(mode, compiled, liger, flash, _has_graphs(target, shares, mode))
    return estimate_step(recipe, size, size.shape, shares, plan, target.lengths, kernels, gpu)


def _micro_size(one: Forecast) -> int | None:
    """Return the micro size of a forecast; None without a plan."""
    return None if one.plan is None else one.plan.micro_size


def _seconds(one: Forecast) -> float:
    """Return the seconds of a step."""
    return 0.0 if one.time is None else one.time.total


def _micro_sizes(recipe: Recipe, processes: int) -> list[int]:
    """Return the micro sizes that the recipe allows, the largest first."""
    rows, limit = recipe.batch.global_size // processes, recipe.batch.micro_size
    most = rows if isinstance(limit, str) else min(rows, limit)
    return [size for size in range(most, 0, -1) if rows % size == 0]


def _of_size(profile: Profile, target: Target, plan: Plan, shares: ShardCounts, micro: int) -> list[Forecast]:
    """Return a forecast for each way to save memory that the recipe allows, for one micro size."""
    recipe, size = target.recipe, target.size
    assert size is not None
    micro, accumulation = derive_batches(plan.global_size, micro, plan.processes)
    plan = replace(plan, micro_size=micro, accumulation=accumulation)
    tokens = micro * size.tokens_of_row(target.longest)
    forecasts = []
    can_compile = _compiles(shares, target, plan, "none")
    may_move = profile.may_move_embeddings
    for saving in savings_to_try(recipe, size, shares, compiled=can_compile, may_move_table=may_move)[0]:
        compiled = _compiles(shares, target, plan, saving.mode)
        how = {
            "fused": compiled or _has_liger(target, compiled),
            "compiled": compiled,
            "fresh_gradients": has_fresh_gradients(shares, plan),
            "graphs": _has_graphs(target, shares, saving.mode),
        }
        memory = estimate_saving(recipe, size, shares, saving, tokens=tokens, **how)
        fits = None if target.usable is None else memory.total <= target.usable
        time = _time(target, shares, plan, saving, compiled)
        forecasts.append(
            Forecast(
                profile.name,
                plan.processes,
                plan=plan,
                memory=memory,
                saving=saving,
                compiled=compiled,
                fits=fits,
                time=time,
            )
        )
    return forecasts


def _compiles(shares: ShardCounts, target: Target, plan: Plan, mode: str) -> bool:
    """Return whether the run compiles its layers; training/compilation.py decides by the same rules."""
    recipe, shape = target.recipe, target.size.shape if target.size else None
    has_hooks = shares.is_stage_3 and (recipe.adapter.type != "none" or (shape is not None and shape.has_experts))
    if shape is None or has_hooks or mode == "selective":
        return False
    if recipe.model.quantization is not None and shares != ShardCounts() and recipe.model.torch_compile is None:
        return False
    if recipe.model.torch_compile is not None:
        return bool(recipe.model.torch_compile)
    if not architecture_of(target.model_type).compiles_layers or recipe.precision == "fp32":
        return False
    if offloads_without_recomputing(recipe):
        return False
    if plan.steps is None:
        return True
    tokens = target.lengths.tokens * plan.global_size / plan.processes
    passes = plan.accumulation if recipe.batch.micro_size != "auto" else math.ceil(tokens / FULL_TOKENS)
    saved = seconds_saved(shape, tokens * plan.steps, passes * plan.steps, enough=enough_tokens(shape))
    return sum(saved) >= LEAST_SAVED


def _has_graphs(target: Target, shares: ShardCounts, mode: str) -> bool:
    """Return whether passes are CUDA graphs, if the GPUs have room for them."""
    is_whole = shares == ShardCounts()
    return target.gpu is not None and is_whole and mode == "none" and expects_graphs(target.recipe, target.model_type)


def _has_liger(target: Target, compiled: bool) -> bool:
    """Return whether layers have Liger's kernels, if the package is installed where the run trains."""
    is_known = architecture_of(target.model_type).liger_norm is not None
    return is_known and not compiled and target.recipe.model.use_liger_kernel is not False


def _has_flash_attention_4(target: Target) -> bool:
    """Return whether attention is flash-attn 4, if the package is installed where the run trains."""
    shape = target.size.shape if target.size else None
    if shape is None or target.gpu is None or target.recipe.precision == "fp32":
        return False
    is_packable = architecture_of(target.model_type).packed_attention is not None
    is_open = target.recipe.model.attn_implementation in (None, "flash_attention_4")
    has_heads = shape.attention // shape.heads in FLASH_4_HEADS
    return is_packable and is_open and has_heads and target.gpu.name.startswith(FLASH_4_GPUS)
