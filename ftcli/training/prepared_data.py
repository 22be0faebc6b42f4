"""Prepare the task, the rows, the prompts and the plan of a run, before a model is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ftcli.config.plan import Plan, derive_plan
from ftcli.config.task_registry import recording_task, refresh_task
from ftcli.data.cache import PreparedRows, prepare_rows
from ftcli.runtime.errors import InputError
from ftcli.runtime.process import world_size
from ftcli.tasks.protocol import has_companions
from ftcli.tasks.shared.metric_names import check_metric
from ftcli.training.batches.passes import PassRule, RowSizes

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe
    from ftcli.inference.answers import EncodedPrompt
    from ftcli.tasks.protocol import Task


STAND_INS = 1000  # documents that may stand in for others


@dataclass(frozen=True)
class PreparedData:
    """The rows of a run and their division into steps.

    Attributes:
        task: The recipe's task, with its processor loaded.
        rows: The cached rows to train on and to evaluate.
        prompts: Prompts to answer at each evaluation, encoded.
        plan: Steps, micro-batch size and accumulation for the number of processes.
        sizes: The tokens of the training rows; None where they are not known.
        passes: How the rows of a step are divided into forward passes by tokens; None: by number.
    """

    task: Task
    rows: PreparedRows
    prompts: list[EncodedPrompt]
    plan: Plan
    sizes: RowSizes | None = None
    passes: PassRule | None = None

    @property
    def stand_ins(self) -> Sequence[int]:
        """Some documents that may stand in, blank, where a micro-batch has no row; the best first.

        Passes that are sized by tokens get the shortest, so that the padding takes little memory.
        """
        if self.passes is None:
            return (0,)
        longest = self.passes.sizes.longest
        shortest = longest.argpartition(min(STAND_INS, len(longest)) - 1)[:STAND_INS]
        rows: list[int] = shortest[longest[shortest].argsort(kind="stable")].tolist()
        return rows if self.rows.bins is None else [self.rows.bins[row][0] for row in rows]

    def with_micro_size(self, recipe: Recipe) -> PreparedData:
        """Return the data with the plan of a recipe that has another `batch.micro_size`."""
        return replace(self, plan=derive_plan(recipe, self.plan.processes, self.rows.train_rows))


def prepare_data(recipe: Recipe, *, trains: bool, dry_run: bool) -> PreparedData:
    """Build the task, prepare its rows, and derive the plan. Local rank 0 builds the cache, other ranks wait for it.

    The plan is derived twice. Before rows are prepared it checks that the processes can divide the batch. The number of
    steps is known only afterwards.

    Args:
        recipe: The recipe.
        trains: False for weights that are only evaluated. Then the metric of `checkpoint.keep_best` is not checked.
        dry_run: Keep one evaluation batch for each process.

    Returns:
        The task, the rows, the encoded prompts and the plan.

    Raises:
        InputError: The data, the prompts, the batch or the metric of `checkpoint.keep_best` is wrong.
    """
    from ftcli.tasks.build import build_task
    from ftcli.training.evaluation import encode_prompts

    processes = world_size()
    derive_plan(recipe, processes)
    refresh_task(recipe.task)
    task = build_task(recipe)
    if recipe.data.streaming and has_companions(task):
        raise InputError(
            f"task {recipe.task} collates each row with other rows of the data set, which a stream does not have",
            hint="set data.streaming to false",
        )
    if trains:
        check_metric(recipe, type(task))
    with recording_task(recipe.task):
        prompts = encode_prompts(recipe, task)
    rows = prepare_rows(recipe, task)
    if trains:
        check_metric(recipe, type(task), rows.labels.get("eval", []))
    plan = derive_plan(recipe, processes, rows.train_rows)
    if dry_run and rows.eval is not None:
        count = min(len(rows.eval), plan.micro_size * plan.processes)
        rows = replace(rows, eval=rows.eval.select(range(count)))
    return PreparedData(task, rows, prompts, plan, RowSizes.of(rows))
