"""Describe a prepared run for the log, in one line per fact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftcli.config.plan import Plan, describe_best_candidates, describe_dropped_rows, pluralise
from ftcli.config.recipe_model import NO_MODEL
from ftcli.models.adapter_targets import describe_unadapted
from ftcli.models.adapters import describe_cut_tie
from ftcli.models.kernels.document_attention import describe_attention
from ftcli.models.module_names import describe_saved
from ftcli.models.router_loss import left_out_losses
from ftcli.models.structure import base_model_of, full_shape
from ftcli.models.unreached import describe_unreached

if TYPE_CHECKING:
    from torch import nn

    from ftcli.config.recipe import Recipe
    from ftcli.data.cache import PreparedRows
    from ftcli.hardware.interface import Hardware
    from ftcli.training.run import Run


def describe_run(run: Run) -> list[str]:
    """Describe a prepared run in one line per fact.

    Args:
        run: The run.

    Raises:
        RuntimeError: The dtypes of the prepared model differ from those of the recipe.
    """
    hardware = run.hardware
    return [
        *run.resolved.lines(),
        *run.rows.log_lines,
        *_describe_rows(run),
        *([] if run.stream is None else [run.stream.description]),
        _describe_training(run.recipe, run.plan, run.rows),
        *describe_dropped_rows(run.recipe, run.plan),
        *describe_best_candidates(run.recipe, run.plan),
        describe_hardware(hardware, run.plan.processes),
        hardware.check_dtypes(run.model, run.recipe),
        *describe_cut_tie(hardware.unwrap(run.model)),
        *describe_attention(
            hardware.unwrap(run.model),
            run.recipe,
            flat=getattr(run.task, "is_flat", False),
            device_type=hardware.accelerator.device.type,
        ),
        *_left_out_losses(run),
        *describe_unreached(hardware.unwrap(run.model), run.recipe),
        *describe_unadapted(hardware.unwrap(run.model), run.recipe.adapter),
        *describe_saved(hardware.unwrap(run.model), run.recipe.adapter),
        _count_parameters(hardware, run.model),
    ]


def _describe_rows(run: Run) -> list[str]:
    """Return what the task reports about the training rows. Counts are those of rows that are not left out."""
    task: Any = run.task
    if not hasattr(task, "describe_rows"):
        return []
    facts = run.rows.facts
    columns = getattr(task, "answer_columns", ())  # a derived task may have others
    if hasattr(task, "count_answers") and not run.rows.streamed and {*columns} <= {*run.rows.train.column_names}:
        counts = task.count_answers(run.rows.train, facts)
        facts = facts | {key: count for key, count in counts.items() if isinstance(facts.get(key), int)}
    return list(task.describe_rows(facts))


def _left_out_losses(run: Run) -> list[str]:
    """Return a line about losses of the model's own that are not trained; causal models alone have them."""
    config: Any = getattr(base_model_of(run.hardware.unwrap(run.model)), "config", None)
    if run.task.peft_type != "CAUSAL_LM" or not hasattr(config, "to_dict"):
        return []
    return left_out_losses(config.to_dict())


def describe_hardware(hardware: Hardware, processes: int) -> str:
    """Return the kind of device, the backend and the number of processes.

    Args:
        hardware: The hardware of the run.
        processes: Number of processes.
    """
    backend = "" if hardware.distributed_type == "NO" else f", {hardware.distributed_type}"  # NO: not distributed
    return f"device {hardware.accelerator.device.type}{backend}, {pluralise(processes, 'process', 'es')}"


def _describe_training(recipe: Recipe, plan: Plan, rows: PreparedRows) -> str:
    evaluated = "none" if rows.eval is None else str(len(rows.eval))
    packed = "" if rows.bins is None else f" of {len(rows.train)} documents"
    trained = "a stream of rows" if rows.streamed else f"{plan.rows} rows{packed}"
    model = "its own model" if recipe.model.name == NO_MODEL else recipe.model.name
    return f"{recipe.task} of {model}: {trained}, {evaluated} for evaluation, {plan.steps} steps of {plan.batch_layout}"


def _count_parameters(hardware: Hardware, model: nn.Module) -> str:
    sizes = [(full_shape(p).numel(), p.requires_grad) for p in hardware.unwrap(model).parameters()]
    trained, total = sum(n for n, trains in sizes if trains), sum(n for n, _ in sizes)
    return f"{trained / 1e6:.2f} of {total / 1e6:.2f} million parameters trained ({100 * trained / total:.2f} %)"
