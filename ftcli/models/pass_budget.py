"""Choose how many tokens a forward pass may have under `batch.micro_size: auto`, and what is then recomputed.

The budget follows from the memory estimate, so it is the same on every rank and after a resume. The module never
imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftcli.models.memory_estimate import USABLE_FRACTION, describe_estimate, estimate_modes, modes_to_try, tiles_mlps

if TYPE_CHECKING:
    from ftcli.config.profile import ShardCounts
    from ftcli.config.recipe import Recipe
    from ftcli.models.shape import ModelSize, Shape


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
        mode: What the backward pass recomputes.
        reason: Why, in a few words.
    """

    tokens: int
    mode: str
    reason: str


def enough_tokens(shape: Shape | None) -> int:
    """Return the tokens of a pass on a GPU below which it does not end earlier, because the host is slower.

    Args:
        shape: The sizes of the model; None if it is not a known transformer.
    """
    if shape is None:
        return LEAST_ENOUGH
    return min(max(int(TOKENS_TIMES_WEIGHTS["cuda"] / shape.layer_products), LEAST_ENOUGH), MOST_ENOUGH)


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
    can_recompute: bool = True,
    fused: bool = False,
    compiled: bool = False,
) -> PassBudget:
    """Choose the tokens of a forward pass and the recomputation mode.

    The fastest mode is taken that has room for the longest row and for passes that keep a GPU busy. Recomputation costs
    more time than a second pass, as long as each pass has enough tokens.

    Args:
        recipe: The recipe of the run.
        sizes: The size of the model.
        shares: Over how many processes the profile shards weights, gradients and optimizer state.
        longest: Tokens of the longest row.
        of_step: Tokens of one process in the largest step, with padding.
        capacity: Memory of the smallest device in bytes; None without a device.
        can_recompute: Whether the model's layers support recomputation.
        fused: Whether the layers are compiled in the modes none and full, or have Liger's norms and gates.
        compiled: Whether the layers are compiled in the modes none and full.
    """
    can_tile = tiles_mlps(recipe, sizes.shape, shares)
    modes, reason = modes_to_try(recipe, can_recompute=can_recompute, compiled=fused, can_tile=can_tile)
    if capacity is None:
        return PassBudget(max(longest, CPU_TOKENS), modes[0], reason or "auto: no device")
    how: dict[str, Any] = {"fused": fused, "compiled": compiled}

    def fitting(mode: str, fraction: float) -> int:
        """Return the most tokens, up to those of a step, whose estimate is at most a fraction of the memory."""
        low, high = 0, max(longest, of_step) + 1
        while high - low > 1:
            tokens = (low + high) // 2
            total = estimate_modes(recipe, sizes, shares, tokens=tokens, **how)[mode].total
            low, high = (tokens, high) if total <= fraction * capacity else (low, tokens)
        return low

    enough = enough_tokens(sizes.shape)
    needed = max(longest, min(of_step, enough))
    mode = next((mode for mode in modes if fitting(mode, USABLE_FRACTION) >= needed), None)
    mode = mode or max(modes, key=lambda mode: fitting(mode, USABLE_FRACTION))  # the first of equal ones
    usable, cautious = fitting(mode, USABLE_FRACTION), fitting(mode, CAUTIOUS_FRACTION)
    if len(modes) > 1:
        total = estimate_modes(recipe, sizes, shares, tokens=needed, **how)
        reason = reason or "auto: it fits"
        if mode != modes[0]:
            faster = modes[modes.index(mode) - 1]
            reason = f"auto: {faster} needs {total[faster].total / 1e9:.2f} GB for {needed} tokens"
        if usable < longest:
            reason = "auto: the mode with the least memory, which may not fit either"
    return PassBudget(max(longest, cautious, min(usable, max(FULL_TOKENS, enough))), mode, reason)


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
    """Return a line for the log with the memory of the largest pass, and what is recomputed for which reason.

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
    estimates = estimate_modes(recipe, sizes, shares, tokens=tokens, fused=fused, compiled=compiled)
    batch = f"at most {tokens} tokens in a forward pass" if sizes.shape else None
    return describe_estimate(estimates[budget.mode], capacity, batch, budget.mode, budget.reason)
