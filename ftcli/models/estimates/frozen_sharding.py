"""Choose whether the frozen weights under an adapter are sharded or whole. Light: never imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ftcli.config.profile import ShardCounts
from ftcli.models.estimates.memory_estimate import USABLE_FRACTION
from ftcli.models.estimates.memory_saving import MemorySaving, estimate_saving, savings_to_try

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe
    from ftcli.models.estimates.shape import ModelSize


def choose_frozen(
    recipe: Recipe,
    sizes: ModelSize,
    shares: ShardCounts,
    *,
    rows: int,
    tokens: int,
    capacity: int | None,
    largest: int | None = None,
    has_rare_parts: bool = False,
    can_recompute: bool = True,
    fused: bool = False,
    compiled: bool = False,
) -> tuple[ShardCounts, str | None]:
    """Choose whether an adapter and the weights under it are sharded, or whole on each device.

    Whole frozen weights are never gathered. The adapter is small, so it is whole then too, and trained as under ddp.
    With auto the weights are whole if they fit without more recomputation than shards need, because recomputing takes
    longer than gathering. They are sharded if activations or gradients are not known to be as ddp needs them.

    Args:
        recipe: The recipe of the run.
        sizes: The size of the model.
        shares: Over how many processes the profile shards weights, gradients and optimizer state.
        rows: Rows of a micro-batch.
        tokens: Tokens of the longest row. Rows of images have the patches of an image.
        capacity: Memory of the smallest device in bytes; None without a device.
        largest: Tokens of the largest micro-batch; None if every row may be the longest.
        has_rare_parts: Whether steps may leave trained weights without a gradient, which ddp does not allow.
        can_recompute: Whether the model's layers support recomputation.
        fused: Whether the layers are compiled in the modes none and full, or have Liger's norms and gates.
        compiled: Whether the layers are compiled in the modes none and full.

    Returns:
        The counts of the run, and a line for the log; None if there is nothing to choose.
    """
    requested = recipe.model.shard_frozen
    has_choice = shares.shards_on_gpus and recipe.adapter.type != "none"
    if not has_choice:
        return shares, None
    whole, reason = ShardCounts(), "as set"
    if requested == "auto":
        if capacity is None:
            requested, reason = True, "auto: no device"
        elif has_rare_parts:
            requested, reason = True, "auto: not every step trains all modules"
        else:
            how: dict[str, Any] = {"fused": fused, "compiled": compiled}
            how["tokens"] = rows * sizes.tokens_of_row(tokens) if largest is None else largest
            savings = savings_to_try(recipe, sizes, whole, can_recompute=can_recompute, compiled=fused)[0]
            requested, reason = _by_memory(recipe, sizes, (shares, whole), savings, USABLE_FRACTION * capacity, how)
    where = f"sharded over {shares.weights} processes" if requested else "whole on each GPU, so trained as under ddp"
    return shares if requested else whole, f"frozen weights {sizes.frozen_bytes / 1e9:.2f} GB, {where} ({reason})"


def _by_memory(
    recipe: Recipe,
    sizes: ModelSize,
    counts: tuple[ShardCounts, ShardCounts],
    savings: Sequence[MemorySaving],
    limit: float,
    how: Mapping[str, Any],
) -> tuple[bool, str]:
    """Return whether to shard because of memory, and the reason: whole weights win where both fit with one saving.

    Ways for which `auto` would use the host's memory come last, because its size is not known here.

    Args:
        recipe: The recipe of the run.
        sizes: The size of the model.
        counts: Over how many processes weights are sharded, if they are, and the counts of whole weights.
        savings: The ways to save memory, the fastest first.
        limit: Usable bytes of the smallest device.
        how: Further arguments of `estimate_saving`.
    """
    for saving in sorted(savings, key=lambda one: one.on_host != savings[0].on_host):
        sharded, whole = (estimate_saving(recipe, sizes, each, saving, **how).total for each in counts)
        if whole <= limit and sizes.shape is None:
            return True, "auto: activations not known"
        if whole <= limit:
            return False, "auto: they fit" + f" with gradient_checkpointing {saving}" * (saving != savings[0])
        if sharded <= limit:
            break
    return True, f"auto: whole ones would need {whole / 1e9:.2f} GB"
