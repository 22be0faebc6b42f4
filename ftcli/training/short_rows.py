"""Say what packing would bring to a run whose rows are short, from the lengths of its rows.

`ftcli check` and the log of a run use it. The module never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ftcli.config.plan import Plan, pluralise
from ftcli.config.task_registry import task_class
from ftcli.models.estimates.pass_budget import SHORT_ROW, choose_budget, pass_costs
from ftcli.training.batches.passes import PassRule, RowSizes
from ftcli.training.pass_sizes import count_passes, order_of

if TYPE_CHECKING:
    from ftcli.config.profile import ShardCounts
    from ftcli.config.recipe import Recipe
    from ftcli.data.cache import PreparedRows
    from ftcli.models.estimates.pass_budget import PassBudget
    from ftcli.models.estimates.shape import ModelSize, Shape


WORTH_NAMING = 1.3  # times as many tokens a second
STEPS = 32  # that stand for a run


def packing_note(
    recipe: Recipe, tokens: float, passes: Iterable[list[list[int]]], rule: PassRule, shape: Shape | None, device: str
) -> list[str]:
    """Return at most one line: what `data.packing` would bring. None if rows are packed, long, or no documents.

    None without a GPU: a CPU does not wait for Python, and passes of rows of similar lengths have little padding.

    Args:
        recipe: The recipe.
        tokens: Tokens of a row on average.
        passes: The rows of each pass of some steps, in global order.
        rule: The sizes of the rows, the processes, and whether rows are padded.
        shape: The sizes of the model; None if it is not a known transformer.
        device: Type of the device, such as "cuda".
    """
    length, rows = recipe.data.max_length, recipe.batch.global_size
    can_pack = getattr(task_class(recipe.task), "packs", False) and not (recipe.data.packing or recipe.data.streaming)
    fill = tokens / length
    if not can_pack or fill > SHORT_ROW or device == "cpu":
        return []
    several = length / tokens
    packed_rows = max(1, round(rows / several))
    gain = _time_of(passes, rule, **pass_costs(device, shape), most=_packed_tokens(recipe, rule, packed_rows))
    if gain < WORTH_NAMING:
        return []
    times = f"{gain:.1f}" if gain < 10 else f"{gain:.0f}"
    return [
        f"rows fill {100 * fill:.0f} % of data.max_length {length}: data.packing true would train about {times} "
        f"times as many tokens per second. A row is then about {several:.0f} of today's, none of which sees another, "
        f"so the {pluralise(rows, 'row')} of a step become {packed_rows} for the same curve"
    ]


def _packed_tokens(recipe: Recipe, rule: PassRule, rows: int) -> int:
    """Return the tokens of a pass of packed rows: those of a process in a step, or of `batch.micro_size` rows."""
    most = -(-rows // rule.processes)
    return recipe.data.max_length * (most if recipe.batch.micro_size == "auto" else min(recipe.batch.micro_size, most))


def _time_of(passes: Iterable[list[list[int]]], rule: PassRule, *, enough: int, overhead: int, most: int) -> float:
    """Return the time of some steps over that of their tokens in passes of `most` tokens without padding."""
    spent = real = 0.0
    for lists in passes:
        for first in range(0, len(lists), rule.processes):
            turn = [np.array([one]) for one in lists[first : first + rule.processes]]
            held = max(int(rule.sizes.of_batches(one, is_flat=rule.is_flat)[0]) for one in turn)
            spent += (max(held, enough) + overhead) * rule.processes
            real += sum(int(rule.sizes.of_batches(one, is_flat=True)[0]) for one in turn)
    return spent / max(real * (max(most, enough) / most), 1)


def note_of_run(
    recipe: Recipe, plan: Plan, rows: PreparedRows, rule: PassRule, shape: Shape | None, device: str
) -> list[str]:
    """Return the line of `packing_note` for the rows of a run. `rule.budget` 0: rows are divided by number."""
    if plan.steps is None or rows.streamed:
        return []
    order = order_of(recipe, plan, rows, passes=rule if rule.budget else None)
    steps = (order.lists_of(step) for step in range(min(STEPS, plan.steps)))
    return packing_note(recipe, float(rule.sizes.tokens.mean()), steps, rule, shape, device)


class ExpectedPasses(NamedTuple):
    """The passes that a run will make.

    Attributes:
        plan: The plan, with passes under `batch.micro_size: auto`.
        tokens: Tokens of the largest pass.
        notes: The line of `packing_note`.
        budget: How many tokens a pass may have, and what is recomputed; None if rows are divided by number.
    """

    plan: Plan
    tokens: int
    notes: list[str]
    budget: PassBudget | None


def expect_passes(
    recipe: Recipe,
    sizes: ModelSize,
    shares: ShardCounts,
    plan: Plan,
    lengths: list[int],
    capacity: int | None,
    *,
    host: int | None = None,
    may_move_table: bool = False,
    fused: bool = False,
    compiled: bool = False,
) -> ExpectedPasses:
    """Return the passes that a run will make, from typical lengths of its rows, without the rows.

    `ftcli check` and `ftcli plan` use it.

    Args:
        recipe: The recipe.
        sizes: The size of the model.
        shares: Over how many processes the profile shards weights, gradients and optimizer state.
        plan: The plan.
        lengths: Tokens of some rows that stand for all.
        capacity: Memory of a GPU in bytes; None without one.
        host: Bytes of host memory that a process may use; None if they are not known.
        may_move_table: Whether the profile lets frozen embeddings be in host memory.
        fused: Whether the layers are compiled in the modes none and full, or have Liger's norms and gates.
        compiled: Whether the layers are compiled in the modes none and full.
    """
    draw = np.random.default_rng(0)
    tokens = draw.choice(np.array(lengths), STEPS * plan.global_size)
    device = "cpu" if capacity is None else "cuda"
    is_flat = _is_flat(recipe, device)
    rows = RowSizes(tokens, tokens, np.ones_like(tokens))
    steps = np.arange(len(tokens)).reshape(STEPS, -1)
    of_step = int(rows.of_batches(steps, is_flat=is_flat).max())
    rule = PassRule(rows, plan.processes, 0, is_flat, **pass_costs(device, sizes.shape))
    by_number = [one.reshape(-1, plan.micro_size).tolist() for one in steps]
    if recipe.batch.micro_size != "auto":
        largest = max(int(rows.of_batches(np.array(one), is_flat=is_flat).max()) for one in by_number)
        note = packing_note(recipe, float(tokens.mean()), by_number, rule, sizes.shape, device)
        return ExpectedPasses(plan, largest, note, None)
    share = -(-of_step // plan.processes)
    how: dict[str, Any] = {"capacity": capacity, "host": host, "may_move_table": may_move_table}
    how |= {"fused": fused, "compiled": compiled}
    budget = choose_budget(recipe, sizes, shares, longest=lengths[-1], of_step=share, **how)
    rule = replace(rule, budget=budget.tokens)
    divided = [rule.divide(one.tolist()) for one in steps]
    counts = count_passes(divided, rule)
    note = packing_note(recipe, float(tokens.mean()), divided, rule, sizes.shape, device)
    return ExpectedPasses(replace(plan, passes=counts), counts.tokens, note, budget)


def _is_flat(recipe: Recipe, device: str) -> bool:
    """Return whether the rows of a recipe are probably concatenated: as set, or by default if a kernel supports it."""
    data: Any = recipe.data
    if data.packing or data.padding_free is not None:
        return bool(data.packing or data.padding_free)
    packs = getattr(task_class(recipe.task), "packs", False)
    return device == "cuda" and packs and recipe.precision != "fp32"
