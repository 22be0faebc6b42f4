"""Find the forward passes of a run before it starts: the largest micro-batch it will meet, and its number of passes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ftcli.config.plan import PassCounts
from ftcli.data.sampler import TrainOrder
from ftcli.training.batches.passes import PassRule, RowSizes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ftcli.config.plan import Plan
    from ftcli.config.recipe import Recipe
    from ftcli.data.cache import PreparedRows


MOST_ROWS = 20_000_000  # rows of all epochs; above, every row of a micro-batch counts as the longest
TYPICAL_STEPS = 128  # the first ones, which give the mean
MOST_STEPS = 1024  # whose passes are counted: the first, and of a longer run as many with the most tokens


def order_of(
    recipe: Recipe,
    plan: Plan,
    rows: PreparedRows,
    *,
    first_step: int = 0,
    passes: PassRule | None = None,
    names_next: bool = False,
) -> TrainOrder:
    """Return the order of the training rows.

    Args:
        recipe: The recipe.
        plan: The plan of the run.
        rows: The rows of the run, no stream.
        first_step: Number of steps that are done.
        passes: How rows are divided into passes; None: by number.
        names_next: Whether each key also names the next row of the step.
    """
    assert rows.train_rows is not None and plan.steps is not None and plan.steps_per_epoch is not None
    return TrainOrder(
        rows.train_rows,
        global_size=plan.global_size,
        micro_size=plan.micro_size,
        seed=recipe.seed,
        first_step=first_step,
        steps=plan.steps,
        steps_per_epoch=plan.steps_per_epoch,
        lengths=rows.lengths,
        divide=None if passes is None else passes.divide,
        names_next=names_next,
    )


def largest_micro_batch(
    recipe: Recipe, plan: Plan, rows: PreparedRows, sizes: RowSizes | None, *, is_flat: bool, size: int
) -> int | None:
    """Return the tokens of the largest micro-batch of a run, with padding; None if they are not known.

    Args:
        recipe: The recipe.
        plan: The plan of the run.
        rows: The rows of the run.
        sizes: The tokens of the rows.
        is_flat: Whether documents are concatenated instead of padded.
        size: Rows of a micro-batch.
    """
    tokens = _tokens(recipe, plan, rows, sizes, is_flat=is_flat, size=size)
    return None if tokens is None else int(tokens.max())


def _tokens(
    recipe: Recipe, plan: Plan, rows: PreparedRows, sizes: RowSizes | None, *, is_flat: bool, size: int
) -> NDArray[np.int64] | None:
    """Return the tokens of every micro-batch, `[steps * micro-batches]`, or None. See `largest_micro_batch`."""
    if sizes is None or plan.steps is None or plan.steps * plan.global_size > MOST_ROWS:
        return None
    assert plan.steps_per_epoch is not None
    order, epochs = order_of(recipe, plan, rows), -(-plan.steps // plan.steps_per_epoch)
    steps = (order.rows_of_epoch(epoch).reshape(-1, size) for epoch in range(epochs))
    tokens = np.concatenate([sizes.of_batches(batches, is_flat=is_flat) for batches in steps])
    return tokens[: plan.steps * plan.global_size // size]


def count_passes_of_run(recipe: Recipe, plan: Plan, rows: PreparedRows, rule: PassRule) -> PassCounts:
    """Count the forward passes of the steps of a run, and the tokens of the largest pass.

    Args:
        recipe: The recipe.
        plan: The plan of the run.
        rows: The rows of the run.
        rule: How rows are divided into passes.
    """
    assert plan.steps is not None
    order, first = order_of(recipe, plan, rows, passes=rule), min(plan.steps, MOST_STEPS)
    counted = list(range(first))
    of_step = _tokens(recipe, plan, rows, rule.sizes, is_flat=rule.is_flat, size=plan.global_size)
    if of_step is not None and plan.steps > first:
        counted += np.argsort(-of_step, kind="stable")[:MOST_STEPS].tolist()
    counts = count_passes((order.lists_of(step) for step in counted), rule)
    typical = [len(order.lists_of(step)) // rule.processes for step in range(min(first, TYPICAL_STEPS))]
    return replace(counts, mean=sum(typical) / len(typical))


def count_passes(steps: Iterable[list[list[int]]], rule: PassRule) -> PassCounts:
    """Count the passes of some steps, and the tokens of the largest one.

    Args:
        steps: The rows of each pass of a step, in global order.
        rule: How rows are divided into passes.
    """
    counts, most = [], 0
    for lists in steps:
        counts.append(len(lists) // rule.processes)
        most = max(most, *(int(rule.sizes.of_batches(np.array([one]), is_flat=rule.is_flat)[0]) for one in lists))
    return PassCounts(min(counts), max(counts), sum(counts) / len(counts), most)
