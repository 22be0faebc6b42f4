"""Choose how many tokens a forward pass may have under `batch.micro_size: auto`, and how memory is then saved.

The budget follows from the memory estimate, so it is the same on every rank and after a resume. The module never
imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftcli.models.estimates.memory_estimate import USABLE_FRACTION
from ftcli.models.estimates.memory_saving import (
    MemorySaving,
    describe_estimate,
    estimate_saving,
    fits_host,
    savings_to_try,
)

if TYPE_CHECKING:
    from ftcli.config.profile import ShardCounts
    from ftcli.config.recipe import Recipe
    from ftcli.models.estimates.shape import ModelSize, Shape


# A pass takes at least the time in which Python starts its operations. Tokens that take as long, times the weights of a
# layer: 4 ms a layer, 6 operations a weight at 400 TFLOPS. A GPU computes meanwhile, a CPU does not: there it is a cost
# of each pass, measured with SmolLM2-135M and LoRA on one core as that of 22 tokens.
TOKENS_TIMES_WEIGHTS = {"cuda": 2.7e11, "cpu": 8e7}
LEAST_ENOUGH, MOST_ENOUGH = 1024, 32_768  # tokens of a pass on a GPU
SHORT_ROW = 0.5  # of data.max_length, below which packing puts several rows into one and is proposed
FULL_TOKENS = 8192  # of a pass on a GPU; larger passes hardly train more tokens per second
CPU_TOKENS = 2048  # of a pass without a GPU, where the memory is shared with everything else
# Up to FULL_TOKENS a pass may use all usable memory. Larger ones leave room for errors of the estimate.
CAUTIOUS_FRACTION = 0.75


@dataclass(frozen=True)
class PassBudget:
    """How many tokens a forward pass may have.

    Attributes:
        tokens: The most tokens, with padding.
        saving: How memory is saved.
        reason: Why, in a few words.
    """

    tokens: int
    saving: MemorySaving
    reason: str


def enough_tokens(shape: Shape | None) -> int:
    """Return the tokens of a pass on a GPU below which it does not end earlier, because the host is slower.

    Args:
        shape: The sizes of the model; None if it is not a known transformer.
    """
    if shape is None:
        return LEAST_ENOUGH
    return min(max(int(TOKENS_TIMES_WEIGHTS["cuda"] / shape.layer_products), LEAST_ENOUGH), MOST_ENOUGH)


def needed_tokens(longest: int, of_step: int, shape: Shape | None) -> int:
    """Return the tokens for which a pass must have room: of the longest row, and enough to keep a GPU busy.

    Args:
        longest: Tokens of the longest row.
        of_step: Tokens of one process in a step, or the most that they can be.
        shape: The sizes of the model; None if it is not a known transformer.
    """
    return max(longest, min(of_step, enough_tokens(shape)))


def pass_costs(device_type: str, shape: Shape | None) -> dict[str, int]:
    """Return what a forward pass costs besides its tokens: `enough` and `overhead` of `PassRule`.

    Args:
        device_type: Type of the device, such as "cuda".
        shape: The sizes of the model; None if it is not a known transformer.
    """
    if device_type != "cpu":
        return {"enough": enough_tokens(shape), "overhead": 0}
    overhead = 0 if shape is None else min(int(TOKENS_TIMES_WEIGHTS["cpu"] / shape.layer_products), MOST_ENOUGH)
    return {"enough": 0, "overhead": overhead}


def choose_budget(
    recipe: Recipe,
    sizes: ModelSize,
    shares: ShardCounts,
    *,
    longest: int,
    of_step: int,
    capacity: int | None,
    host: int | None = None,
    may_move_table: bool = False,
    can_recompute: bool = True,
    fused: bool = False,
    compiled: bool = False,
) -> PassBudget:
    """Choose the tokens of a forward pass and how memory is saved.

    The fastest way is taken that has room for the longest row and for passes that keep a GPU busy. Recomputation costs
    more time than a second pass, as long as each pass has enough tokens.

    Args:
        recipe: The recipe of the run.
        sizes: The size of the model.
        shares: Over how many processes the profile shards weights, gradients and optimizer state.
        longest: Tokens of the longest row.
        of_step: Tokens of one process in the largest step, with padding.
        capacity: Memory of the smallest device in bytes; None without a device.
        host: Bytes of host memory that a process may use; None if they are not known.
        may_move_table: Whether the profile lets frozen embeddings be in host memory.
        can_recompute: Whether the model's layers support recomputation.
        fused: Whether the layers are compiled in the modes none and full, or have Liger's norms and gates.
        compiled: Whether the layers are compiled in the modes none and full.
    """
    savings, reason = savings_to_try(
        recipe, sizes, shares, can_recompute=can_recompute, compiled=fused, may_move_table=may_move_table
    )
    if capacity is None:
        return PassBudget(max(longest, CPU_TOKENS), savings[0], reason or "auto: no device")
    how: dict[str, Any] = {"fused": fused, "compiled": compiled}

    def fitting(saving: MemorySaving, fraction: float) -> int:
        """Return the most tokens, up to those of a step, whose estimate is at most a fraction of the memory."""
        low, high = 0, max(longest, of_step) + 1
        while high - low > 1:
            tokens = (low + high) // 2
            estimate = estimate_saving(recipe, sizes, shares, saving, tokens=tokens, **how)
            fits = estimate.total <= fraction * capacity and fits_host(recipe, estimate, host)
            low, high = (tokens, high) if fits else (low, tokens)
        return low

    enough, needed = enough_tokens(sizes.shape), needed_tokens(longest, of_step, sizes.shape)
    saving = next((one for one in savings if fitting(one, USABLE_FRACTION) >= needed), None)
    if saving is None:  # the least memory, and the first of equal ones
        estimates = {one: estimate_saving(recipe, sizes, shares, one, tokens=longest, **how) for one in savings}
        possible = [one for one in savings if fits_host(recipe, estimates[one], host)] or savings[:1]
        saving = min(possible, key=lambda one: (-fitting(one, USABLE_FRACTION), estimates[one].total))
    usable, cautious = fitting(saving, USABLE_FRACTION), fitting(saving, CAUTIOUS_FRACTION)
    if len(savings) > 1:
        reason = reason or "auto: it fits"
        if saving != savings[0]:
            faster = savings[savings.index(saving) - 1]
            total = estimate_saving(recipe, sizes, shares, faster, tokens=needed, **how).total
            reason = f"auto: {faster} needs {total / 1e9:.2f} GB for {needed} tokens"
        if usable < longest:
            reason = "auto: the way with the least memory, which may not fit either"
    return PassBudget(max(longest, cautious, min(usable, max(FULL_TOKENS, enough))), saving, reason)


def describe_passes(
    recipe: Recipe,
    sizes: ModelSize,
    shares: ShardCounts,
    budget: PassBudget,
    *,
    tokens: int,
    capacity: int | None,
    fused: bool = False,
    compiled: bool = False,
) -> str:
    """Return a line for the log with the memory of the largest pass, and how memory is saved for which reason.

    Args:
        recipe: The recipe of the run.
        sizes: The size of the model.
        shares: Over how many processes the profile shards weights, gradients and optimizer state.
        budget: The result of `choose_budget`.
        tokens: Tokens of the largest pass, with padding.
        capacity: Memory of the smallest device in bytes; None without a device.
        fused: As in `choose_budget`.
        compiled: As in `choose_budget`.
    """
    how: dict[str, Any] = {"tokens": tokens, "fused": fused, "compiled": compiled}
    estimate = estimate_saving(recipe, sizes, shares, budget.saving, **how)
    batch = f"at most {tokens} tokens in a forward pass" if sizes.shape else None
    return describe_estimate(estimate, capacity, batch, budget.saving, budget.reason)
