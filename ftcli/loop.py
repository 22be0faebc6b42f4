"""The one loop: optimizer steps, evaluation, and the default way to run both. Names no task, model or hardware.

`steps` is a generator, so the body of the caller's own `for` is the only hook there is; `train` is the default body.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .artifacts import save_final
from .checkpoint import save
from .faults import Stopped
from .report import Reporter
from .sampling import PADDING, digest
from .schedule import due, learning_rate

if TYPE_CHECKING:
    from .run import Run
    from .tasks.protocol import Batch


@dataclass
class Step:
    """One optimizer step that is done. Reading `loss` or `grad_norm` waits for the device; the rest is on the host."""

    number: int  # steps done, this one included
    learning_rate: float
    items: int  # what the loss is a mean over: items of the whole global batch
    samples: int  # digest of the ids of the rows that were really delivered, over all ranks
    rows: int
    data_seconds: float  # time this process waited for its rows
    stop: bool  # a rank was asked to end the run, before or during this step; never true of the last
    loss_tensor: torch.Tensor
    norm_tensor: torch.Tensor

    @cached_property
    def loss(self) -> float:
        """Loss per item, before the step's update."""
        return float(self.loss_tensor)

    @cached_property
    def grad_norm(self) -> float:
        """Global 2-norm of the gradient, before clipping; not finite when fp16 skipped the step."""
        return float(self.norm_tensor)


@dataclass
class Window:
    """The micro-batches of one rank for one step, on the host, and what all ranks say of theirs."""

    batches: list[Batch]
    agreed: Callable[[], list[int]]  # waits for the sums over ranks: items, digest, rows, stop requests
    seconds: float


def windows(run: Run) -> Iterator[Window]:
    """Yield the windows of the steps to come; each one's message to the other ranks is already under way."""
    batches = iter(run.train_loader)
    for _ in range(run.first_step, run.steps):
        started = time.perf_counter()
        window = list(itertools.islice(batches, run.plan.accumulation))
        ids = torch.cat([batch.pop("sample_ids") for batch in window]).numpy()
        items = sum(run.task.count(batch) for batch in window)
        message = [items, digest(ids), int((ids != PADDING).sum()), int(run.stop.requested() or run.saving.failed())]
        yield Window(window, run.hardware.ranks.sum_later(message), time.perf_counter() - started)


def steps(run: Run) -> Iterator[Step]:
    """Train: yield after each optimizer step.

    The loss of a step is the sum over its items divided by the items of the whole global batch. Accelerate divides
    by the accumulation and the ranks are averaged, so each micro-batch's sum is multiplied by both first.
    """
    accelerator, model, optimizer = run.hardware.accelerator, run.model, run.optimizer
    model.train()
    run.stop.start_clock(run.recipe.train.max_minutes)  # not before: each launch does a step
    ahead = windows(run)
    window = next(ahead, None)
    for number in range(run.first_step, run.steps):
        assert window is not None
        items, samples, rows, _ = window.agreed()
        rate = learning_rate(
            number,
            peak=run.recipe.optimizer.learning_rate,
            name=run.recipe.schedule.name,
            steps=run.steps,
            warmup_steps=run.plan.warmup_steps or 0,
            min_ratio=run.recipe.schedule.min_ratio,
        )
        for group in optimizer.param_groups:  # before the window: some backends step inside backward
            group["lr"] = rate
        run.reseed(number)
        scale = run.plan.accumulation * run.plan.processes / max(items, 1)
        total = torch.zeros((), device=accelerator.device)
        for batch in window.batches:
            with accelerator.accumulate(model):
                loss = run.task.loss(model, run.to_device(batch))
                run.hardware.backward(loss * scale)
                total += loss.detach()
        norm = run.hardware.clip(model, run.recipe.optimizer.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        done = window
        window = next(ahead, None)  # the host prepares the next rows while the device works
        yield Step(
            number=number + 1,
            learning_rate=rate,
            items=items,
            samples=samples % 2**64,
            rows=rows,
            data_seconds=done.seconds,
            stop=window is not None and window.agreed()[3] > 0,  # the newest message, so at this very step
            loss_tensor=run.hardware.ranks.sum_on_device(total) / max(items, 1),
            norm_tensor=norm,
        )
        model.train()  # the caller may have evaluated


def evaluate(run: Run) -> dict[str, float]:
    """Return the task's metrics over every evaluation row, each counted exactly once, equal on every rank.

    Raises `Stopped` on all ranks, after the same batch, when the run was asked to stop meanwhile.
    """
    assert run.eval_loader is not None and run.rows.eval is not None
    run.model.eval()
    collected: dict[str, list[np.ndarray]] = {}
    with torch.no_grad():
        for batch in run.eval_loader:
            asked = run.hardware.ranks.sum_later([int(run.stop.requested())])
            ids = batch.pop("sample_ids")
            values = run.task.eval_step(run.model, run.to_device(batch)) | {"id": ids}
            for name, value in values.items():
                collected.setdefault(name, []).append(value.cpu().numpy())
            if asked()[0]:
                raise Stopped
    gathered = {name: run.hardware.ranks.gather(np.concatenate(parts)) for name, parts in collected.items()}
    real = gathered["id"] != PADDING
    order = np.argsort(gathered["id"][real], kind="stable")
    rows = {name: values[real][order] for name, values in gathered.items()}
    if len(rows["id"]) != len(run.rows.eval) or len(np.unique(rows["id"])) != len(rows["id"]):
        raise RuntimeError(f"evaluated {len(rows['id'])} rows of {len(run.rows.eval)}: a row is missing or double")
    return run.task.metrics(rows)


def train(run: Run) -> None:
    """Train to the end: record, evaluate, save, stop when asked; then write the final weights.

    Once asked to stop, nothing is begun that resuming can do: a step's evaluation that was cut short or left out is
    not recorded, and the resumed run begins with it.
    """
    with Reporter(run) as report, run.saving:
        metrics: dict[str, float] | None = {}
        stops = run.hardware.ranks.any(run.stop.requested(now=True))
        if run.starts_with_evaluation and not stops:
            metrics = _measure(run, report, run.first_step)
        if stops or metrics is None:
            report.stopped(run.first_step)
            return
        for step in steps(run):
            report.step(step)
            metrics = {}
            if run.eval_loader is not None and due(step.number, run.recipe.evaluate.every_steps, run.steps):
                metrics = None if step.stop else _measure(run, report, step.number)
            stops = step.stop or metrics is None
            if stops or due(step.number, run.recipe.checkpoint.every_steps, run.steps):
                started = time.perf_counter()
                folder = save(run, step.number, metrics, background=run.recipe.checkpoint.background)
                report.saved(step.number, folder, time.perf_counter() - started)
            if stops:
                run.saving.wait()
                report.stopped(step.number)
                return
        run.saving.wait()
        save_final(run)
        report.done()


def _measure(run: Run, report: Reporter, step: int) -> dict[str, float] | None:
    """Evaluate, record and return the metrics; None when the run was asked to stop meanwhile."""
    try:
        metrics = evaluate(run)
    except Stopped:
        return None
    report.evaluation(step, metrics)
    return metrics


__all__: list[Any] = ["Step", "evaluate", "steps", "train"]
