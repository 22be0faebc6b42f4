"""Choose how a run saves memory on its devices, where the recipe leaves it to `auto`.

There are three ways: the backward pass recomputes activations, activations wait in host memory, and frozen embeddings
stay in host memory. The estimates decide, so all ranks choose the same. The module never imports torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ftcli.data.paths import model_folder
from ftcli.models.estimates.memory_estimate import (
    MODES,
    USABLE_FRACTION,
    MemoryEstimate,
    estimate_memory,
    has_fresh_gradients,
    tiles_mlps,
    uses_vocabulary_logits,
)
from ftcli.models.estimates.shape import OF_WHOLE_LAYERS, measure_model
from ftcli.runtime.errors import InputError
from ftcli.runtime.machine.host_memory import HostMemoryReader

if TYPE_CHECKING:
    from ftcli.config.plan import Plan
    from ftcli.config.profile import ShardCounts
    from ftcli.config.recipe import Recipe
    from ftcli.models.estimates.shape import ModelSize


# Of a machine's memory, for what its processes keep on the host under `auto`. PyTorch rounds pinned memory up to powers
# of two, and datasets, checkpoints and other programs need the rest.
HOST_FRACTION = 0.4


@dataclass(frozen=True)
class MemorySaving:
    """How a run saves memory on its devices.

    Attributes:
        mode: What the backward pass recomputes, one of `MODES`.
        offloads: Whether activations wait in host memory: the inputs of layers, if layers are recomputed as a whole.
        embeddings_on_host: Whether frozen input embeddings are in host memory.
    """

    mode: str
    offloads: bool = False
    embeddings_on_host: bool = False

    def applied_to(self, recipe: Recipe) -> Recipe:
        """Return a recipe in which nothing of this is left to `auto`."""
        update = {
            "gradient_checkpointing": self.mode,
            "activation_offloading": self.offloads,
            "embeddings_on_host": self.embeddings_on_host,
        }
        return recipe.model_copy(update={"model": recipe.model.model_copy(update=update)})

    @property
    def on_host(self) -> str:
        """What is in host memory, in words; empty if nothing is."""
        inputs = "inputs of layers" if self.mode in OF_WHOLE_LAYERS else "activations"
        hosted = [inputs] * self.offloads + ["embeddings"] * self.embeddings_on_host
        return f"{' and '.join(hosted)} on the host" if hosted else ""

    def __str__(self) -> str:
        return f"{self.mode}, {self.on_host}" if self.on_host else self.mode


def choose_saving(
    recipe: Recipe,
    sizes: ModelSize,
    shares: ShardCounts,
    plan: Plan,
    *,
    tokens: int,
    capacity: int | None,
    largest: int | None = None,
    host: int | None = None,
    may_move_table: bool = False,
    can_recompute: bool = True,
    fused: bool = False,
    compiled: bool = False,
) -> tuple[MemorySaving, str]:
    """Choose how memory is saved: as the recipe says, or for auto the fastest way that fits.

    With `batch.micro_size: auto` it is chosen for one row, because rows are added later as long as they fit.

    Args:
        recipe: The recipe of the run.
        sizes: The size of the model.
        shares: Over how many processes the profile shards weights, gradients and optimizer state.
        plan: The plan of the run.
        tokens: Tokens of the longest row.
        capacity: Memory of the smallest device in bytes; None without a device.
        largest: Tokens of the largest micro-batch that the run will compute, with padding. None: not known, so every
            row of a micro-batch may be the longest.
        host: Bytes of host memory that a process may use; None if they are not known.
        may_move_table: Whether the profile lets frozen embeddings be in host memory.
        can_recompute: Whether the model's layers support recomputation.
        fused: Whether the layers are compiled in the modes none and full, or have Liger's norms and gates.
        compiled: Whether the layers are compiled in the modes none and full.

    Returns:
        How memory is saved, and a line for the log with the estimate and the reason.
    """
    tokens = sizes.tokens_of_row(tokens)
    rows = 1 if recipe.batch.micro_size == "auto" else plan.micro_size
    savings, reason = savings_to_try(
        recipe, sizes, shares, can_recompute=can_recompute, compiled=fused, may_move_table=may_move_table
    )
    how: dict[str, Any] = {"tokens": rows * tokens if largest is None else largest, "fused": fused}
    # The search for a micro size accumulates gradients.
    how["fresh_gradients"] = has_fresh_gradients(shares, plan) and recipe.batch.micro_size != "auto"
    estimates = {saving: estimate_saving(recipe, sizes, shares, saving, compiled=compiled, **how) for saving in savings}
    limit = math.inf if capacity is None else USABLE_FRACTION * capacity
    saving = savings[0]
    if len(savings) > 1:
        possible = [one for one in savings if fits_host(recipe, estimates[one], host)] or savings[:1]
        least = min(possible, key=lambda one: estimates[one].total)  # the first of equal ones, which is faster
        saving = next((one for one in possible if estimates[one].total <= limit), least)
        if saving != savings[0] or not reason:
            reason = "auto: no device" if capacity is None else f"auto: {_reason(saving, possible, estimates, limit)}"
    batch = f"{rows} row{'s' * (rows > 1)} of {tokens} tokens"
    if largest is not None:
        batch = f"the largest micro-batch has {largest} tokens"
    return saving, describe_estimate(estimates[saving], capacity, batch if sizes.shape else None, saving, reason)


def offloads_without_recomputing(recipe: Recipe) -> bool:
    """Return whether all activations are on the host and nothing is recomputed. Layers are not compiled then."""
    return recipe.model.activation_offloading is True and recipe.model.gradient_checkpointing == "none"


def check_host_table(recipe: Recipe) -> None:
    """Check that the head of a local language model has a table of its own, if the recipe puts embeddings on the host.

    Other models, and embeddings that are trained, are checked when the model is loaded.

    Raises:
        InputError: The head uses the same table.
    """
    folder = model_folder(recipe.model.name)
    is_asked = recipe.model.embeddings_on_host is True and recipe.adapter.type != "none"
    if folder is None or not is_asked or not uses_vocabulary_logits(recipe):
        return
    shape = measure_model(folder, recipe).shape
    if shape is not None and shape.ties_head:
        message = "model.embeddings_on_host: the head uses the same table"
        raise InputError(message, hint="delete model.embeddings_on_host")


def host_memory_of(processes: int) -> int:
    """Return the bytes of this machine's memory that each process may use for what is kept there under `auto`.

    Args:
        processes: Processes on this machine.
    """
    return int(HOST_FRACTION * HostMemoryReader().read().limit) // processes


def fits_host(recipe: Recipe, estimate: MemoryEstimate, host: int | None) -> bool:
    """Return whether what `auto` puts on the host fits there. What the recipe itself puts there does not count.

    Args:
        recipe: The recipe of the run.
        estimate: The estimate.
        host: Bytes of host memory that a process may use; None if they are not known.
    """
    added = (size for key, size in estimate.host_bytes_by_key.items() if getattr(recipe.model, key) == "auto")
    return host is None or sum(added) <= host


def estimate_saving(
    recipe: Recipe,
    sizes: ModelSize,
    shares: ShardCounts,
    saving: MemorySaving,
    *,
    tokens: int,
    fused: bool,
    compiled: bool,
    fresh_gradients: bool = False,
    graphs: bool = False,
) -> MemoryEstimate:
    """Return the memory of a process for a forward pass of `tokens` tokens, if memory is saved in this way.

    Args:
        recipe: The recipe of the run.
        sizes: The size of the model.
        shares: Over how many processes the profile shards weights, gradients and optimizer state.
        saving: How memory is saved.
        tokens: Tokens of the forward pass, with padding.
        fused: Whether the layers are compiled in the modes none and full, or have Liger's norms and gates.
        compiled: Whether the layers are compiled in the modes none and full.
        fresh_gradients: As in `estimate_memory`.
        graphs: As in `estimate_memory`.
    """
    is_selective = saving.mode == "selective"
    return estimate_memory(
        saving.applied_to(recipe),
        sizes,
        shares,
        rows=1,
        tokens=tokens,
        mode=saving.mode,
        fused=fused and not is_selective,
        compiled=compiled and not is_selective,
        fresh_gradients=fresh_gradients,
        graphs=graphs,
    )


def describe_estimate(
    estimate: MemoryEstimate, capacity: int | None, batch: str | None, saving: MemorySaving, reason: str
) -> str:
    """Return a line for the log with an estimate, and how memory is saved for which reason.

    Args:
        estimate: The estimate.
        capacity: Memory of the smallest device in bytes; None without a device.
        batch: What the largest forward pass has; None if activations are not known.
        saving: How memory is saved.
        reason: Why, in a few words.
    """
    of_capacity = "" if capacity is None else f" of {capacity / 1e9:.2f}"
    text = str(estimate).replace(" per process", f"{of_capacity} per process", 1)
    if estimate.host_bytes:
        text += f" and {estimate.host_bytes / 1e9:.2f} GB of host memory"
    return f"memory {text}, {batch or 'activations not known'}; gradient_checkpointing {saving} ({reason})"


def savings_to_try(
    recipe: Recipe,
    sizes: ModelSize,
    shares: ShardCounts,
    *,
    can_recompute: bool = True,
    compiled: bool = False,
    may_move_table: bool = False,
) -> tuple[list[MemorySaving], str]:
    """Return the ways to save memory that a recipe leaves open, the fastest first.

    Moving the table of embeddings costs less time than recomputing anything. The inputs of recomputed layers are copied
    while the device computes, which costs less than tiles. Where the profile keeps shards in host memory, `auto` adds
    nothing there.

    Args:
        recipe: The recipe of the run.
        sizes: The size of the model.
        shares: Over how many processes the profile shards weights, gradients and optimizer state.
        can_recompute: Whether the model's layers support recomputation.
        compiled: Whether its layers can be compiled.
        may_move_table: Whether the profile lets frozen embeddings be in host memory.

    Returns:
        The ways, and the reason for the first if there is one.
    """
    can_tile = tiles_mlps(recipe, sizes.shape, shares)
    modes, reason = _modes_to_try(recipe, can_recompute=can_recompute, compiled=compiled, can_tile=can_tile)
    offloads, moves = recipe.model.activation_offloading, recipe.model.embeddings_on_host
    has_room = 0 not in (shares.weights, shares.gradients, shares.optimizer)
    savings = []
    for mode in modes:
        may_offload = offloads == "auto" and mode in OF_WHOLE_LAYERS and has_room
        may_move = moves == "auto" and may_move_table and bool(sizes.table_bytes)
        fastest = MemorySaving(mode, offloads is True, moves is True)
        savings.append(fastest)
        if may_offload:
            savings.append(replace(fastest, offloads=True))
        if may_offload and may_move:
            savings.append(replace(fastest, offloads=True, embeddings_on_host=True))
        if may_move:  # without the inputs, for a host that has no room for them
            savings.append(replace(fastest, embeddings_on_host=True))
    return savings, reason


def _modes_to_try(recipe: Recipe, *, can_recompute: bool, compiled: bool, can_tile: bool) -> tuple[list[str], str]:
    """Return what the backward pass may recompute, the fastest first, and the reason for the first if there is one."""
    requested: str = recipe.model.gradient_checkpointing
    if requested != "auto":
        return [requested], "as set"
    if recipe.model.activation_offloading is True and can_recompute:
        return ["full", "tiled"][: 1 + can_tile], "auto: only the inputs of layers are offloaded to the host"
    if not can_recompute:
        return ["none"], "auto: the layers of this model do not support recomputation"
    # A layer is compiled or selectively recomputed, not both. torch_compile in the recipe takes precedence.
    must_compile = compiled and recipe.model.torch_compile
    left_out = ["selective"] * bool(must_compile) + ["tiled"] * (not can_tile)
    return [mode for mode in MODES if mode not in left_out], ""


def _reason(
    saving: MemorySaving, savings: list[MemorySaving], estimates: dict[MemorySaving, MemoryEstimate], limit: float
) -> str:
    """Return why a way to save memory is chosen, in a few words."""
    if estimates[saving].total > limit:
        return "the way with the least memory, which may not fit either"
    if saving == savings[0]:
        return "it fits"
    faster = savings[savings.index(saving) - 1]
    return f"{faster} needs {estimates[faster].total / 1e9:.2f} GB"
