"""Run the training loop. There are no callbacks: users write a loop over `steps`, and `train` is the default one."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from ftcli.runtime.stop import Stopped
from ftcli.training.batches.window import is_stop_requested, windows
from ftcli.training.checkpointing import record_missed_metrics, roll_back, save_checkpoint
from ftcli.training.evaluation import measure
from ftcli.training.final_weights import save_final
from ftcli.training.first_pass import losses_of
from ftcli.training.garbage_collection import close_at_exit, collect_between_steps
from ftcli.training.gradient_watch import check_gradients, check_still_trained, name_unused_tensors
from ftcli.training.out_of_memory import explain_out_of_memory
from ftcli.training.reporter import Reporter
from ftcli.training.run import due
from ftcli.training.step import Step

if TYPE_CHECKING:
    from ftcli.training.batches.window import AccumulationWindow, ControlMessage
    from ftcli.training.run import Run


def steps(run: Run) -> Iterator[Step]:
    """Train, and yield after each optimizer step. A collective: call it on all ranks, and leave it at the same step.

    After a roll-back (`faults.non_finite: rollback`) step numbers continue from the checkpoint. A second call continues
    after the last step. With an `output`, metrics and status are written. A step with `stop` is the last one.

    Args:
        run: A run from `ftcli.prepare`.

    Yields:
        The finished step. Reading its loss waits for the device.

    Raises:
        InputError: The model, the optimizer or the learning rate of the run was replaced.
        RunError: A step was interrupted, or is not finite.

    Example:
        >>> for step in ftcli.steps(run):
        ...     print(step.number, step.loss)
    """
    return close_at_exit(_steps(run))


def _steps(run: Run) -> Generator[Step, None, None]:
    turn = run.progress.enter(run)
    with nullcontext() if run.record is None else run.record:
        while True:
            if not run.guard.check_previous_step():  # the newest step of a loop that was left, or of this one
                roll_back(run)
            yield from collect_between_steps(_train_until_undone(run, turn), run.first_step)
            if not run.guard.must_roll_back:
                return


def _train_until_undone(run: Run, turn: int) -> Iterator[Step]:
    """Train from `run.first_step` to the end, or to a step that must be undone.

    The loss is the sum of terms, each the sum of its contributions divided by its count in the global batch (terms.py).
    Accelerate divides by the accumulation and averages over ranks, so micro-batch sums are multiplied by both first.
    """
    model, optimizer, heartbeat = run.model, run.optimizer, run.heartbeat
    model.train()
    weights = run.hardware.trained(model)
    zero: torch.Tensor = torch.zeros(run.terms.width, device=run.hardware.accelerator.device)
    run.stop.start_clock(run.recipe.train.max_minutes)  # only now, so that each launch makes at least one step
    ahead = windows(run)
    window = next(ahead, None)
    for number in range(run.first_step, run.steps):
        assert window is not None
        check_still_trained(run, weights)
        heartbeat.beat("waiting for ranks", number)
        message = window.message()
        run.apply_stream_counts(message.stream_counts, number + 1)
        rate = run.learning_rate(number)
        run.progress.begin_step(run, rate)  # before the window, because DeepSpeed steps inside backward
        run.reseed(number)
        sums, losses = _accumulate(run, window, message, zero, number)
        heartbeat.beat("optimizer", number)
        norm = run.hardware.clip_grad_norm(weights, run.recipe.optimizer.max_grad_norm) if message.rows else zero[0]
        if message.rows:
            run.hardware.step(optimizer)
        means = run.terms.means(run.hardware.ranks.sum_on_device(sums), message)
        heartbeat.beat("loading rows", number)
        done, end, window = window, run.moment(), next(ahead, None)  # loads rows while the device computes
        heartbeat.beat("waiting for the device", number)
        if not run.guard.check_previous_step():  # reads values of the step before; this step is still on the device
            break
        run.guard.watch(number + 1, done.ids, losses, loss=means.loss, norm=norm)
        check_gradients(run, number + 1)
        run.progress.end_step(number + 1)
        step = Step(
            number=number + 1,
            learning_rate=rate,
            items=message.items,
            samples=message.digest % 2**64,
            rows=message.rows,
            data_seconds=done.wait.seconds(),
            end=end,
            stop=is_stop_requested(run, window, number),
            loss_tensor=means.loss,
            norm_tensor=norm,
            means=means,
        )
        if run.record is not None:
            run.record.step(step)
        yield step
        run.progress.check_loop(turn)
        if run.guard.must_roll_back or step.stop:  # the caller may have checked the step, and saved it
            break
        run.hardware.train(model)  # the caller may have evaluated
    if window is not None:
        window.message()  # completes the collective that was started
    run.guard.check_previous_step()


def _accumulate(
    run: Run, window: AccumulationWindow, message: ControlMessage, zero: torch.Tensor, number: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Run forward and backward for every micro-batch of a window. Gradients are summed over ranks in the last one.

    Returns (sums of this rank by terms.py, loss of each micro-batch). The sums are `zero` for a step without rows.
    """
    sums, losses = zero, []
    factors = run.terms.factors(message, run.plan.accumulation * run.plan.processes)  # however many passes there are
    loss_of = losses_of(run, window, message, number)
    batches = run.hardware.micro_batches(window.batches if message.rows else ())  # without rows there are no copies
    for micro, batch in enumerate(batches):
        with run.hardware.accumulating(run.model, is_last=micro == len(window.ids) - 1):
            run.heartbeat.beat("forward", number)
            item_sources = batch.pop("item_sources", None)
            contributions = run.terms.read(loss_of(micro, batch))
            run.heartbeat.beat("backward", number)
            run.hardware.backward(contributions.scaled(factors))
            losses.append(contributions.unscaled())
            of_batch = run.terms.sums(contributions, item_sources)
            sums = of_batch if sums is zero else sums + of_batch
    return sums, losses


def train(run: Run) -> None:
    """Train to the end, with records, evaluations and checkpoints, and write the final weights. A collective.

    Args:
        run: A run from `ftcli.prepare`.

    Raises:
        RunError: The run cannot continue.
    """
    run.record = None  # the `Reporter` below writes the records
    with Reporter(run) as report, run.saving, run.settings, explain_out_of_memory(run), name_unused_tensors(run):
        metrics: dict[str, float] | None = {}
        stops = run.hardware.ranks.any(run.stop.requested(now=True))
        if run.starts_with_evaluation and not stops:
            metrics = _measure(run, report, run.first_step)
            record_missed_metrics(run, metrics)
        if stops or metrics is None:
            report.stopped(run.first_step)
            return
        for step in steps(run):
            report.step(step)
            evaluates = run.evaluates and due(step.number, run.recipe.evaluate.every_steps, run.steps)
            saves = step.stop or due(step.number, run.recipe.checkpoint.every_steps, run.steps)
            if (evaluates or saves) and not run.guard.check_previous_step():
                continue  # `steps` rolls back
            metrics = {}
            if evaluates:
                metrics = None if step.stop else _measure(run, report, step.number)  # None: the resumed run repeats it
            stops = step.stop or metrics is None
            if (stops or saves) and run.folder is not None:
                started = time.perf_counter()
                folder = save_checkpoint(run, step.number, metrics, background=run.recipe.checkpoint.background)
                report.saved(step.number, folder, time.perf_counter() - started)
            if stops:
                run.saving.wait()
                report.stopped(step.number)
                return
        run.saving.wait()
        if run.folder is not None:
            save_final(run)
        report.done()


def _measure(run: Run, report: Reporter, step: int) -> dict[str, float] | None:
    """Evaluate, answer prompts, record and return the metrics; None after a stop request. A collective."""
    try:
        found = measure(run)
    except Stopped:
        return None
    report.evaluation(step, *found)
    return found.metrics
