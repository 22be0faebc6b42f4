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
from .hardware.out_of_memory import out_of_memory_told
from .nonfinite import go_back
from .report import Reporter
from .sampling import PADDING, digest

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
    stop: bool  # a rank was asked to end the run
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
    ids: list[np.ndarray]  # of the rows of each micro-batch
    agreed: Callable[[], list[int]]  # waits for the sums over ranks: items, digest, rows, stop requests
    seconds: float


def windows(run: Run) -> Iterator[Window]:
    """Yield the windows of the steps to come; each one's message to the other ranks is already under way."""
    batches = iter(run.train_loader)
    for _ in range(run.first_step, run.steps):
        started = time.perf_counter()
        window = list(itertools.islice(batches, run.plan.accumulation))
        parts = [batch.pop("sample_ids").numpy() for batch in window]
        ids = np.concatenate(parts)
        items = sum(run.task.count(batch) for batch in window)
        message = [items, digest(ids), int((ids != PADDING).sum()), int(run.stop.requested())]
        yield Window(window, parts, run.hardware.ranks.sum_later(message), time.perf_counter() - started)


def steps(run: Run) -> Iterator[Step]:
    """Train: yield after each optimizer step; when bad steps are undone (recipe: `faults`), numbers go back."""
    yield from _stretch(run)
    while run.flags.must_go_back:
        go_back(run)
        yield from _stretch(run)


def _stretch(run: Run) -> Iterator[Step]:
    """Train from `run.first_step` on, to the end or to a step that must be undone.

    The loss of a step is the sum over its items divided by the items of the whole global batch. Accelerate divides
    by the accumulation and the ranks are averaged, so each micro-batch's sum is multiplied by both first.
    """
    accelerator, model, optimizer, heart = run.hardware.accelerator, run.model, run.optimizer, run.heart
    model.train()
    ahead = windows(run)
    window = next(ahead, None)
    for number in range(run.first_step, run.steps):
        assert window is not None
        heart.beat("waiting for ranks", number)
        items, samples, rows, stops = window.agreed()
        rate = run.learning_rate(number)
        for group in optimizer.param_groups:  # before the window: some backends step inside backward
            group["lr"] = rate
        run.reseed(number)
        scale = run.plan.accumulation * run.plan.processes / max(items, 1)
        zero, losses = torch.zeros((), device=accelerator.device), []
        for batch in window.batches if rows else ():  # no row is left when all were undone before: nothing moves
            with accelerator.accumulate(model):
                heart.beat("forward", number)
                loss = run.task.loss(model, run.to_device(batch))
                heart.beat("backward", number)
                run.hardware.backward(loss * scale)
                losses.append(loss.detach())
        norm = zero
        if rows:
            norm = run.hardware.clip(model, run.recipe.optimizer.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        mean = run.hardware.ranks.sum_on_device(sum(losses, zero)) / max(items, 1)
        done = window
        heart.beat("loading rows", number)
        window = next(ahead, None)  # the host prepares the next rows while the device works
        heart.beat("waiting for the device", number)
        if not run.flags.settle():  # of the step before: the device works on this one
            break
        run.flags.watch(number + 1, done.ids, losses, loss=mean, norm=norm)
        yield Step(
            number=number + 1,
            learning_rate=rate,
            items=items,
            samples=samples % 2**64,
            rows=rows,
            data_seconds=done.seconds,
            stop=stops > 0,
            loss_tensor=mean,
            norm_tensor=norm,
        )
        if run.flags.must_go_back:  # the caller has asked
            break
        model.train()  # the caller may have evaluated
    if window is not None:
        window.agreed()  # its message is under way
    run.flags.settle()


def evaluate(run: Run) -> dict[str, float]:
    """Return the task's metrics over every evaluation row, each counted exactly once, equal on every rank."""
    assert run.eval_loader is not None and run.rows.eval is not None
    run.model.eval()
    collected: dict[str, list[np.ndarray]] = {}
    with torch.no_grad():
        for batch in run.eval_loader:
            run.heart.beat("evaluating", run.heart.now.step)
            ids = batch.pop("sample_ids")
            values = run.task.eval_step(run.model, run.to_device(batch)) | {"id": ids}
            for name, value in values.items():
                collected.setdefault(name, []).append(value.cpu().numpy())
    gathered = {name: run.hardware.ranks.gather(np.concatenate(parts)) for name, parts in collected.items()}
    real = gathered["id"] != PADDING
    order = np.argsort(gathered["id"][real], kind="stable")
    rows = {name: values[real][order] for name, values in gathered.items()}
    if len(rows["id"]) != len(run.rows.eval) or len(np.unique(rows["id"])) != len(rows["id"]):
        raise RuntimeError(f"evaluated {len(rows['id'])} rows of {len(run.rows.eval)}: a row is missing or double")
    return run.task.metrics(rows)


def train(run: Run) -> None:
    """Train to the end: record, evaluate, save, stop when asked; then write the final weights."""
    with Reporter(run) as report, out_of_memory_told(run):
        if run.first_step == 0 and run.recipe.evaluate.at_start and run.eval_loader is not None:
            report.evaluation(0, evaluate(run))
        for step in steps(run):
            report.step(step)
            metrics: dict[str, float] = {}
            evaluates = run.eval_loader is not None and _due(step.number, run.recipe.evaluate.every_steps, run.steps)
            saves = step.stop or _due(step.number, run.recipe.checkpoint.every_steps, run.steps)
            if (evaluates or saves) and not run.flags.settle():
                continue  # `steps` goes back
            if evaluates:
                metrics = evaluate(run)
                report.evaluation(step.number, metrics)
            if saves:
                started = time.perf_counter()
                folder = save(run, step.number, metrics)
                report.saved(step.number, folder, time.perf_counter() - started)
            if step.stop and step.number < run.steps:
                report.stopped(step.number)
                return
        save_final(run)
        report.done()


def _due(step: int, every: int | None, last: int) -> bool:
    return step == last or (every is not None and step % every == 0)


__all__: list[Any] = ["Step", "evaluate", "steps", "train"]
