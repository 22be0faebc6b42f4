"""Choose whether the frozen weights under an adapter are sharded or whole. Light: never imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ftcli.config.profile import ShardCounts
from ftcli.models.estimates.memory_estimate import USABLE_FRACTION
from ftcli.models.estimates.memory_saving import MemorySaving, estimate_saving, fits_host, savings_to_try
from ftcli.models.estimates.pass_budget import needed_tokens

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
    host: int | None = None,
    has_rare_parts: bool = False,
    can_recompute: bool = True,
    fused: bool = False,
    compiled: bool = False,
    in_shards: Mapping[str, Any] | None = None,
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
        host: Bytes of host memory that a process may use; None if they are not known.
        has_rare_parts: Whether steps may leave trained weights without a gradient, which ddp does not allow.
        can_recompute: Whether the model's layers support recomputation.
        fused: Whether whole layers are compiled in the modes none and full, or have Liger's norms and gates.
        compiled: Whether whole layers are compiled in the modes none and full.
        in_shards: `fused` and `compiled` of sharded layers; None if they are the same.

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
            batch = rows * sizes.tokens_of_row(tokens) if largest is None else largest
            if recipe.batch.micro_size == "auto" and largest is None and not recipe.data.packing:
                batch = needed_tokens(batch, batch * recipe.batch.global_size // shares.weights, sizes.shape)
            own = {"fused": fused, "compiled": compiled}
            other = own if in_shards is None else {name: in_shards[name] for name in own}
            ways = savings_to_try(recipe, sizes, whole, can_recompute=can_recompute, compiled=fused)[0]
            kinds, limit = ((shares, other), (whole, own)), USABLE_FRACTION * capacity
            requested, reason = _by_memory(recipe, sizes, kinds, ways, limit=limit, tokens=batch, host=host)
    where = f"sharded over {shares.weights} processes" if requested else "whole on each GPU, so trained as under ddp"
    return shares if requested else whole, f"frozen weights {sizes.frozen_bytes / 1e9:.2f} GB, {where} ({reason})"


def _by_memory(
    recipe: Recipe,
    sizes: ModelSize,
    kinds: tuple[tuple[ShardCounts, dict[str, bool]], ...],
    savings: Sequence[MemorySaving],
    *,
    limit: float,
    tokens: int,
    host: int | None,
) -> tuple[bool, str]:
    """Return whether to shard because of memory, and the reason: whole weights win where both fit with one saving.

    Args:
        recipe: The recipe of the run.
        sizes: The size of the model.
        kinds: For sharded and for whole weights: over how many processes, and `fused` and `compiled` of the layers.
        savings: The ways to save memory, the fastest first.
        limit: Usable bytes of the smallest device.
        tokens: Tokens of a forward pass.
        host: Bytes of host memory that a process may use; None if they are not known.
    """
    needed = 0.0
    for saving in savings:
        sharded, whole = (estimate_saving(recipe, sizes, counts, saving, tokens=tokens, **how) for counts, how in kinds)
        if not fits_host(recipe, whole, host):
            continue
        needed = whole.total
        if needed <= limit and sizes.shape is None:
            return True, "auto: activations not known"
        if needed <= limit:
            return False, "auto: they fit" + f" with gradient_checkpointing {saving}" * (saving != savings[0])
        if sharded.total <= limit:
            break
    return True, f"auto: whole ones would need {needed / 1e9:.2f} GB"
