"""Check that a resumed run takes the statistics of batch norm over as many rows as before. Light: no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftcli.config.plan import derive_batches
from ftcli.runtime.errors import InputError

if TYPE_CHECKING:
    from ftcli.config.plan import Plan
    from ftcli.config.recipe import Recipe


def check_statistics(state: dict[str, Any], recipe: Recipe, plan: Plan) -> None:
    """Raise `InputError` if `model.batch_norm: sync` would normalise with other numbers of rows than before.

    Args:
        state: The checkpoint's state.json.
        recipe: The recipe of the run.
        plan: The run's division of a step over the processes.
    """
    batch, processes = state["recipe"]["batch"], state["written_by"]["processes"]
    if recipe.model.batch_norm != "sync" or not isinstance(batch["micro_size"], int):
        return
    before = derive_batches(batch["global_size"], batch["micro_size"], processes)[0] * processes
    now = plan.micro_size * plan.processes
    if before != now:
        raise InputError(
            "resuming: model.batch_norm: sync takes the statistics of the rows of all processes in one forward pass: "
            f"{before} rows when the checkpoint was written, {now} rows with {plan.processes} processes",
            hint=f"use a number of processes and a batch.micro_size whose product is {before}, or accept another loss "
            "curve with --resume-anyway",
        )
