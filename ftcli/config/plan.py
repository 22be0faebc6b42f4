"""Derive the plan of a run from its recipe and the number of processes: micro-batches, accumulation, steps, warm-up.

Gradient accumulation is always derived and never set. This module reads no file. Light: never imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftcli.runtime.errors import InputError

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe
    from ftcli.config.recipe_training import Train


AUTO_SIZE = 8  # rows of a micro-batch under `batch.micro_size: auto` if their tokens are not known


@dataclass(frozen=True)
class PassCounts:
    """The forward passes of one process in a step, where they are formed by tokens.

    Attributes:
        fewest: Passes of the step with the fewest.
        most: Passes of the step with the most.
        mean: Passes of a step on average.
        tokens: Tokens of the largest pass, with padding.
    """

    fewest: int
    most: int
    mean: float
    tokens: int

    def __str__(self) -> str:
        if self.fewest == self.most:
            return pluralise(self.most, "forward pass", "es")
        return f"{self.fewest} to {self.most} forward passes ({self.mean:.1f} on average)"


@dataclass(frozen=True)
class Plan:
    """The plan of one recipe on one number of processes. A value is None if the number of rows is not known yet."""

    processes: int
    global_size: int  # rows per optimizer step, over all processes
    micro_size: int  # rows per forward pass of one process
    accumulation: int  # micro-batches per optimizer step of one process
    rows: int | None  # training rows of an epoch
    steps_per_epoch: int | None  # optimizer steps
    steps: int | None  # optimizer steps of the run
    warmup_steps: int | None  # optimizer steps
    passes: PassCounts | None = None  # where they are formed by tokens; micro size and accumulation then do not say it

    @property
    def typical_passes(self) -> int:
        """Forward passes of one process in a typical step."""
        return self.accumulation if self.passes is None else max(1, round(self.passes.mean))

    @property
    def typical_rows(self) -> int:
        """Rows of one process in a typical forward pass."""
        return max(1, self.global_size // self.processes // self.typical_passes)

    @property
    def batch_layout(self) -> str:
        """How the rows of a step are divided, as text: `16 = 8 rows x 1 micro-batch x 2 processes`."""
        if self.passes is not None:
            shared = f" on each of {self.processes} processes" if self.processes > 1 else ""
            return f"{pluralise(self.global_size, 'row')} in {self.passes}{shared}"
        rows, batches = pluralise(self.micro_size, "row"), pluralise(self.accumulation, "micro-batch", "es")
        return f"{self.global_size} = {rows} x {batches} x {pluralise(self.processes, 'process', 'es')}"


def pluralise(number: int, word: str, ending: str = "s") -> str:
    """Return a number and its noun, with the plural ending unless the number is 1."""
    return f"{number} {word}{'' if number == 1 else ending}"


def derive_batches(global_size: int, micro_size: int, processes: int) -> tuple[int, int]:
    """Return (rows per forward pass, forward passes per optimizer step) of one process.

    Rows per forward pass are the largest divisor of the rows of a process that is at most `micro_size`.

    Args:
        global_size: Rows per optimizer step over all processes.
        micro_size: Maximum number of rows per forward pass.
        processes: Number of processes.

    Raises:
        InputError: The rows of a step cannot be divided evenly. The hint names the nearest valid sizes.
    """
    if global_size % processes:
        below = global_size - global_size % processes
        sizes = [str(size) for size in (below, below + processes) if size > 0]
        raise InputError(
            f"batch.global_size {global_size} cannot be divided evenly over {processes} processes",
            hint=f"use {' or '.join(sizes)}, or a number of processes that divides {global_size}",
        )
    rows = global_size // processes
    micro = max(size for size in _divisors(rows) if size <= micro_size)
    return micro, rows // micro


def _divisors(number: int) -> Iterator[int]:
    """Yield the divisors of a number; the root of a square comes twice."""
    for size in range(1, math.isqrt(number) + 1):
        if number % size == 0:
            yield from (size, number // size)


def micro_size_limit(recipe: Recipe) -> int:
    """Return the maximum number of rows per forward pass; under `auto` that of rows whose tokens are not known."""
    size = recipe.batch.micro_size
    return AUTO_SIZE if isinstance(size, str) else size


def derive_shards(copies: int, shards: int, processes: int) -> int:
    """Return the number of processes that hold the shards of one copy of the model.

    Args:
        copies: Number of copies of the model.
        shards: Shards per copy in the profile; 1 derives the number from the processes.
        processes: Number of processes.

    Raises:
        InputError: The processes cannot be divided in this way. The message names the key of the profile.
    """
    key = "parallelism_config_dp_replicate_size"
    if shards > 1 and copies * shards != processes:
        raise InputError(
            f"{key} {copies} x parallelism_config_dp_shard_size {shards} is not {processes} processes",
            hint=f"use --num-processes {copies * shards}, or delete the shard size: it then follows from the processes",
        )
    if processes % copies:
        raise InputError(
            f"{processes} processes cannot be divided evenly over {copies} copies of the model ({key})",
            hint=f"use a multiple of {copies} for --num-processes, or another {key}",
        )
    if copies > 1 and processes == copies:
        raise InputError(
            f"{key} {copies} leaves one process for each copy of the model, so there is nothing to shard",
            hint=f"use --num-processes {2 * copies} or more, or the profile ddp",
        )
    return processes // copies


def require_later_end(step: int, last: int | None) -> int:
    """Return the step of a checkpoint; raise `InputError` if a run of `last` steps ends before it."""
    if last is not None and last < step:
        raise InputError(
            f"the checkpoint is of step {step}, but the recipe ends after {last}",
            hint="raise train.max_steps or train.epochs, or name an earlier checkpoint with --resume DIR",
        )
    return step


def derive_steps(
    train: Train, rows: int | None, global_size: int, *, drop_last: bool = True
) -> tuple[int | None, int | None]:
    """Return (steps per epoch, steps of the run), in optimizer steps; None where the rows are not known.

    Args:
        train: Section `train` of the recipe.
        rows: Training rows of an epoch; None if not known.
        global_size: Rows per optimizer step.
        drop_last: Whether an epoch ends with the last complete global batch.

    Raises:
        InputError: An epoch has fewer rows than one step.
    """
    per_epoch = None if rows is None else rows // global_size if drop_last else math.ceil(rows / global_size)
    if per_epoch == 0:
        raise InputError(
            f"data.train has {rows} rows, fewer than batch.global_size {global_size}",
            hint="add rows, lower batch.global_size, or set data.drop_last to false",
        )
    if train.max_steps is not None:
        return per_epoch, train.max_steps
    assert train.epochs is not None
    return per_epoch, None if per_epoch is None else math.ceil(round(train.epochs * per_epoch, 6))


def check_rows_of_a_pass(recipe: Recipe) -> None:
    """Raise `InputError` if the machine would choose the rows whose statistics batch norm is trained with.

    A run would have another curve on another GPU, and could not be resumed there.
    """
    if recipe.model.batch_norm != "frozen" and recipe.batch.micro_size == "auto":
        raise InputError(
            "batch.micro_size: auto depends on the GPU, which would change the curve: model.batch_norm: "
            f"{recipe.model.batch_norm} trains with the statistics of the rows of one forward pass",
            hint="set batch.micro_size to a number, or batch_norm to frozen",
        )


def check_rows_of_all_processes(state: Mapping[str, Any], recipe: Recipe, plan: Plan) -> None:
    """Raise `InputError` if a resumed run with `model.batch_norm: sync` would normalise with another number of rows.

    Args:
        state: The checkpoint's state.json.
        recipe: The recipe of the run.
        plan: The plan of the run.
    """
    if recipe.model.batch_norm != "sync" or not isinstance(state["recipe"]["batch"]["micro_size"], int):
        return
    batch, processes = state["recipe"]["batch"], state["written_by"]["processes"]
    before = derive_batches(batch["global_size"], batch["micro_size"], processes)[0] * processes
    now = plan.micro_size * plan.processes
    if before != now:
        raise InputError(
            "resuming: model.batch_norm: sync takes the statistics of the rows of all processes in one forward pass: "
            f"{before} rows when the checkpoint was written, {now} rows with {plan.processes} processes",
            hint=f"use a number of processes and a batch.micro_size whose product is {before}, or accept another loss "
            "curve with --resume-anyway (in Python resume_anyway=True)",
        )


def derive_plan(recipe: Recipe, processes: int, rows: int | None = None) -> Plan:
    """Return the plan of a recipe.

    Args:
        recipe: A valid recipe.
        processes: Number of processes.
        rows: Training rows of an epoch; None if not known.

    Raises:
        InputError: The sizes do not fit together, or the warm-up is longer than the run.
    """
    micro, accumulation = derive_batches(recipe.batch.global_size, micro_size_limit(recipe), processes)
    if recipe.batch.micro_size == "auto" and accumulation == 1 < micro:
        # Steps may have several passes. Backends then have to be set up for accumulation.
        micro, accumulation = derive_batches(recipe.batch.global_size, micro // 2, processes)
    drop_last = recipe.data.drop_last
    per_epoch, steps = derive_steps(recipe.train, rows, recipe.batch.global_size, drop_last=drop_last)
    warmup = recipe.schedule.warmup_steps
    warmup_steps: int | None = int(warmup)
    if 0 < warmup < 1:
        warmup_steps = None if steps is None else math.ceil(round(warmup * steps, 6))
    if steps is not None and warmup_steps is not None and warmup_steps > steps:
        raise InputError(
            f"schedule.warmup_steps is {warmup_steps}, longer than the run of {steps} steps",
            hint="lower it, or give a fraction below 1",
        )
    return Plan(
        processes=processes,
        global_size=recipe.batch.global_size,
        micro_size=micro,
        accumulation=accumulation,
        rows=rows,
        steps_per_epoch=per_epoch,
        steps=steps,
        warmup_steps=warmup_steps,
    )


def describe_dropped_rows(recipe: Recipe, plan: Plan) -> list[str]:
    """Return at most one line: the number of rows that each epoch leaves out (`data.drop_last`)."""
    if not recipe.data.drop_last or plan.rows is None or not (rest := plan.rows % plan.global_size):
        return []
    return [
        f"data.drop_last: each epoch leaves out {pluralise(rest, 'row')} of {plan.rows}, drawn by the seed, because "
        f"batch.global_size is {plan.global_size}"
    ]


def describe_best_candidates(recipe: Recipe, plan: Plan) -> list[str]:
    """Return at most one line: evaluations that `checkpoint.keep_best` cannot choose, since nothing is saved then."""
    evaluated, saved = recipe.evaluate.every_steps, recipe.checkpoint.every_steps
    if recipe.checkpoint.keep_best is None or plan.steps is None:
        return []
    if evaluated is not None and saved is not None and evaluated % saved == 0:
        return []
    before_last = plan.steps - 1
    both = 0 if evaluated is None or saved is None else before_last // math.lcm(evaluated, saved)
    counts = f"evaluate.every_steps is {evaluated or 'not set'}, and checkpoint.every_steps {saved or 'not set'}"
    if both == 0:
        return [f"checkpoint.keep_best: only the last step is both evaluated and saved, so it is the best: {counts}"]
    assert evaluated is not None
    return [
        f"checkpoint.keep_best: {both + 1} of {pluralise(before_last // evaluated + 1, 'evaluation')} are at steps "
        f"that are saved, and only these can be the best: {counts}"
    ]


def shorten_for_dry_run(recipe: Recipe) -> Recipe:
    """Return the recipe with a length of two steps, for a dry run."""
    short = recipe.train.model_copy(update={"max_steps": 2, "epochs": None})
    schedule = recipe.schedule.model_copy(update={"warmup_steps": min(recipe.schedule.warmup_steps, 1)})
    return recipe.model_copy(update={"train": short, "schedule": schedule})
