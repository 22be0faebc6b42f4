"""Evaluation rows through the model, each counted exactly once, and prompts answered, on any number of processes.

The task says what a row's values are and what they amount to, and how a prompt is written; here they are only shared
out over the ranks and brought together.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch

from ftcli.config.recipe_training import ANSWER_METRICS
from ftcli.data.task_encoders import uses_variant
from ftcli.hardware.batch_norm import average_statistics
from ftcli.inference.answers import Answer, EncodedPrompt, build_answer, check_prompt_lengths
from ftcli.inference.decode import PADDING_ROW, SamplingOptions, decode, end_tokens, forward_names, leaves_out_padding
from ftcli.inference.prompts import recipe_prompts
from ftcli.models.kernels.padding_masks import padding_of, use_padding
from ftcli.runtime.errors import InputError, shortened
from ftcli.runtime.log import log_line
from ftcli.runtime.seeds import PADDING
from ftcli.runtime.stop import Stopped
from ftcli.training.checkpointing import save_checkpoint
from ftcli.training.evaluation_drawings import write_drawings
from ftcli.training.garbage_collection import automatic_collection
from ftcli.training.nonfinite import check_newest_step

if TYPE_CHECKING:
    from torch import nn

    from ftcli.config.recipe import Recipe
    from ftcli.tasks.optional_members import Writes
    from ftcli.training.run import Run


def evaluate(run: Run) -> dict[str, float]:
    """Evaluate the model on every evaluation row, each exactly once. A collective.

    In a loop of your own, the metrics are also written to metrics.jsonl, unless the newest step was not finite and will
    be undone (`faults.non_finite: rollback`).

    Args:
        run: A run from `ftcli.prepare`.

    Returns:
        The task's metrics, equal on every rank.

    Raises:
        InputError: The recipe has no evaluation rows, or a metric of the task is not a number.
        Stopped: A command of ftcli got a signal during the evaluation. Raised on every rank, after the same batch.
        RunError: The run was stopped by a step that is not finite, or a step was interrupted.

    Example:
        >>> run = ftcli.prepare("recipe.yaml", overrides=["data.eval_rows=100"])
        >>> ftcli.evaluate(run)["loss"]
    """
    if run.eval_loader is None or run.rows.eval is None:
        raise InputError("the recipe has no evaluation rows", hint="set data.eval or data.eval_rows")
    stays = check_newest_step(run)
    run.progress.check_complete()  # the weights may be those of the next step
    started = time.perf_counter()
    average_statistics(run.hardware.unwrap(run.model), run.recipe.model.batch_norm, run.hardware.ranks)
    run.model.eval()
    collected: dict[str, list[np.ndarray]] = {}
    with torch.no_grad():
        for batch in run.eval_loader:
            run.heartbeat.beat("evaluating", run.heartbeat.now.step)
            stop_requests = run.hardware.ranks.sum_later([int(run.stop.is_listening and run.stop.requested())])
            ids = batch.pop("sample_ids")
            there = run.to_device(batch)
            with use_padding(padding_of(batch), there.get("attention_mask")):
                values = run.task.eval_step(run.model, there) | {"id": ids}
            for name, value in values.items():
                collected.setdefault(name, []).append(value.cpu().numpy())
            if stop_requests()[0]:
                raise Stopped
    gathered = {name: run.hardware.ranks.gather(np.concatenate(parts)) for name, parts in collected.items()}
    real = gathered["id"] != PADDING
    order = np.argsort(gathered["id"][real], kind="stable")
    rows = {name: values[real][order] for name, values in gathered.items()}
    if len(rows["id"]) != len(run.rows.eval) or len(np.unique(rows["id"])) != len(rows["id"]):
        raise RuntimeError(f"evaluated {len(rows['id'])} rows of {len(run.rows.eval)}: a row is missing or double")
    labels = run.rows.labels.get("eval", [])
    metrics = _as_floats(run.task.metrics(rows))
    if len(labels) > 1:
        kind, of_rows = type(run.task), {"loss": rows["loss"], "items": rows["items"]}
        if all(uses_variant(kind, "loss_of_rows", plain) for plain in ("eval_step", "metrics")):
            of_rows["loss"] = run.task.loss_of_rows(rows)  # type: ignore[attr-defined]
        losses = source_losses(of_rows, np.asarray(run.rows.eval["source"]), labels)
        metrics |= {name: value for name, value in losses.items() if name not in metrics}
    write_drawings(run, run.folder, f"step-{run.position:06d}")
    if run.record is not None and stays:
        run.record.evaluation(metrics, time.perf_counter() - started)
    return metrics


def _as_floats(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of a task as Python's floats, which JSON can hold: its code may return those of numpy."""
    floats = {}
    for name, value in metrics.items():
        try:
            if isinstance(value, str):
                raise TypeError("a text")
            floats[name] = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise InputError(
                f"the task's `metrics` returned {shortened(repr(value))} for {name}, not a number",
                hint="return floats; leave out what has no value",
            ) from error
    return floats


def source_losses(rows: dict[str, np.ndarray], sources: np.ndarray, labels: list[str]) -> dict[str, float]:
    """Return {"<label>/loss": loss per item} of the rows of each source; nothing when there is but one.

    `rows` are values `[N]` as the task's `metrics` takes them, `sources [N]` the numbers of their sources.
    """
    if len(labels) < 2:
        return {}
    losses = np.bincount(sources, rows["loss"], len(labels))
    items = np.bincount(sources, rows["items"], len(labels))  # none in a dry run that has no row of a source
    return {f"{label}/loss": float(losses[n] / items[n]) for n, label in enumerate(labels) if items[n]}


def encode_prompts(recipe: Recipe, task: Any) -> list[EncodedPrompt]:
    """Return the prompts of evaluate.generate as the task writes them; raises `InputError` where it cannot."""
    prompts = recipe_prompts(recipe.evaluate.generate)
    if prompts and not hasattr(task, "encode_prompt"):
        raise InputError(
            f"evaluate.generate: task {recipe.task} does not generate text", hint="remove evaluate.generate"
        )
    return [EncodedPrompt(prompt, task.encode_prompt(prompt.content, **prompt.options)) for prompt in prompts]


def check_prompts(recipe: Recipe, prompts: list[EncodedPrompt], model: nn.Module) -> None:
    """Raise `InputError` for a prompt that leaves no room for its answer in the model."""
    if recipe.evaluate.generate is not None:
        check_prompt_lengths(model.config, [prompt.ids for prompt in prompts], recipe.evaluate.generate.max_new_tokens)


def sample_prompts(run: Run) -> list[Answer]:
    """Return an answer to each prompt of evaluate.generate, in order and equal on every rank. A collective.

    Each rank answers every `world`-th prompt. All ranks run the same number of forward passes, because a forward pass
    of sharded weights needs all ranks. The random generators of training are not used.

    Raises:
        Stopped: A stop was requested. Raised on all ranks, after the same token.
    """
    section, ranks, plan = run.recipe.evaluate.generate, run.hardware.ranks, run.plan
    if section is None:
        return []
    choice = SamplingOptions(section.max_new_tokens, section.temperature, section.top_p, run.recipe.seed)
    tokenizer = cast("Writes", run.task).tokenizer
    plain = run.hardware.unwrap(run.model)
    names, ends = forward_names(plain), end_tokens(tokenizer, plain)
    mine = list(range(ranks.rank, len(run.prompts), ranks.world))
    most = -(-len(run.prompts) // ranks.world)  # of any rank
    answers: dict[int, list[int]] = {number: [] for number in mine}

    def should_continue(here: bool) -> bool:
        run.heartbeat.beat("answering", run.heartbeat.now.step)
        is_open, stops = ranks.sum_later([int(here), int(run.stop.requested())])()
        if stops:
            raise Stopped
        return is_open > 0

    run.model.eval()
    size = plan.micro_size if leaves_out_padding(run.hardware.unwrap(run.model)) else 1
    for first in range(0, most, size):
        numbers = mine[first : first + size] or [PADDING_ROW]
        steps = decode(
            run.model,
            names,
            [run.prompts[0].ids[:1] if number == PADDING_ROW else run.prompts[number].ids for number in numbers],
            choice,
            ends=ends,
            pad=tokenizer.pad_token_id,
            device=run.hardware.accelerator.device,
            numbers=numbers,
            should_continue=should_continue,
        )
        for tokens in steps:
            for number, token in zip(numbers, tokens, strict=True):
                if token is not None:
                    answers[number].append(token)
    every = {number: ids for part in ranks.collect(answers) for number, ids in part.items()}
    return [build_answer(tokenizer, run.prompts[number].prompt, every[number], ends) for number in sorted(every)]


class Evaluation(NamedTuple):
    """What an evaluation found.

    Attributes:
        metrics: Those of the evaluation rows and of the answers.
        seconds: How long it took.
        answers: The answers to prompts.
    """

    metrics: dict[str, float]
    seconds: float
    answers: list[Answer]


def measure(run: Run) -> Evaluation:
    """Evaluate the rows, and answer the prompts. A collective.

    If that fails after a step, a run of one process saves a checkpoint first.
    """
    started = time.perf_counter()
    with automatic_collection(), _saved_if_it_fails(run):
        metrics = {} if run.eval_loader is None else evaluate(run)
        answers = sample_prompts(run)
    return Evaluation(metrics | measure_answers(answers), time.perf_counter() - started, answers)


@contextmanager
def _saved_if_it_fails(run: Run) -> Iterator[None]:
    """Save a checkpoint if the evaluation inside raises an error, and raise it again. Without metrics.

    A step's evaluation comes before its checkpoint, which holds the metrics. A run that resumes from a checkpoint
    without metrics evaluates first. With several processes nothing is saved, because saving is a collective, and the
    other processes may be inside another one.

    Args:
        run: The run. Nothing is saved before its first step.
    """
    try:
        yield
    except Stopped:
        raise
    except Exception:
        phase = run.heartbeat.now
        if run.folder is not None and run.hardware.ranks.world == 1 and run.position > run.first_step:
            with suppress(Exception):  # the error of the evaluation is the one to report
                if folder := save_checkpoint(run, run.position):
                    log_line(f"step {run.position}: the evaluation failed; the steps before it are saved in {folder}")
        run.heartbeat.beat(phase.phase, phase.step)  # where the error was raised, for messages and status.json
        raise


def measure_answers(answers: list[Answer]) -> dict[str, float]:
    """Return the mean length of answers, in tokens, and the share that the model ended itself."""
    if not answers:
        return {}
    values = (sum(answer.tokens for answer in answers), sum(answer.ended for answer in answers))
    return {name: value / len(answers) for name, value in zip(ANSWER_METRICS, values, strict=True)}
