"""Report a run: metrics, tracker events, status, and progress on standard error.

Only the main process writes; on other ranks calls do nothing. Values are read from the device only when a row of
metrics is due. On a GPU they are read one step later, so that the device has work meanwhile. Progress is a bar on a
terminal, and plain lines in a log file.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from ftcli.checkpoint.folder import describe_best
from ftcli.models.kernels.compile import GraphCounter
from ftcli.runtime.errors import EXIT_DONE, EXIT_FAILED, EXIT_INPUT, EXIT_RESUME, InputError
from ftcli.runtime.load_monitor import gpu_uuid
from ftcli.runtime.log import log_line
from ftcli.runtime.redaction import redact
from ftcli.runtime.terminal import printable, progress_bar, shortened
from ftcli.training.run import due
from ftcli.training.trackers import Trackers

if TYPE_CHECKING:
    from ftcli.inference.answers import Answer
    from ftcli.training.run import Run
    from ftcli.training.step import HostCopy, Step


SHOWN_ANSWERS = 3  # answers in the log; samples.jsonl has all
WIDEST = 100  # characters of an answer in the log
STATUS_SECONDS = 0.5  # least time between two updates of status.json, because each replaces the file
QUIET_SECONDS = 2.0  # least time between plain progress lines, except for the first and the last


class Reporter:
    """Context that records one run, to its last step or to the exception that ends it.

    Args:
        run: The run.
        quiet: Whether to write only files and trackers, and print nothing.
        late: Whether to write a row during the next step. None: if a device computes beside the host, and not `quiet`,
            because a user's loop may do anything between two steps.
    """

    def __init__(self, run: Run, *, quiet: bool = False, late: bool | None = None) -> None:
        self.run, self.folder = run, run.folder if run.hardware.ranks.is_main else None
        self.main = run.hardware.ranks.is_main
        self.trackers = Trackers(run)
        self.quiet = quiet
        self.terminal = self.main and not quiet and sys.stderr.isatty()
        self.number = run.first_step
        self._started = time.perf_counter()
        self._items = self._rows = 0
        self._data_seconds = 0.0
        self._since = run.moment()  # the end of the last row
        self._paused = self._trained = 0.0  # seconds of pauses since then, and of training in all rows
        self._printed = self._stated = self._seconds = 0.0
        self._began = (run.first_step, 0.0)  # the step, and the seconds of this launch, since which no step was undone
        self._is_first = True  # the next step is the first of this launch
        self._late = not quiet and run.hardware.accelerator.device.type == "cuda" if late is None else late
        self._unwritten: tuple[Step, HostCopy] | None = None  # the step whose row is written during the next one
        self._graphs = GraphCounter() if run.compiled else None

    def __enter__(self) -> Reporter:
        if self.main:
            for line in self.run.log_lines:
                self.print_line(line)
            if self.folder is not None:
                self.folder.write_status("running", self.number, 0)
        self.trackers.start()
        if self.terminal:
            self._start_progress()
        self.begin_load()
        return self

    def begin_load(self) -> None:
        """Sample the load of this process from now on."""
        self.run.load.quiet = self.quiet
        self.run.load.begin_training(gpu_uuid(self.run.hardware.accelerator.device))

    def _start_progress(self) -> None:
        """Start the progress bar."""
        self._progress = progress_bar(self.run.steps)
        self._bar = self._progress.add_task("training", total=self.run.steps, completed=self.number, line="")
        self._progress.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_loop()
        if isinstance(error, Exception) and self.folder is not None:  # stop.py records an interruption
            code = EXIT_INPUT if isinstance(error, InputError) else EXIT_FAILED
            with contextlib.suppress(OSError):  # the disk may be full; the original error is raised anyway
                self.folder.write_status("failed", self.number, code, f"{type(error).__name__}: {error}")
        self.trackers.end()

    def end_loop(self) -> None:
        """Write what is not written yet. Evaluations may follow, and trackers get them."""
        with contextlib.suppress(Exception):  # after an error the device may be lost
            self._write_late_row()
        self.run.load.stop()
        if self.terminal:
            self._progress.stop()

    def print_line(self, line: str) -> None:
        """Print one line to standard error on the main process.

        Args:
            line: The line.
        """
        if self.main and not self.quiet:
            if self.terminal and hasattr(self, "_progress"):
                console = self._progress.console
                console.print(printable(f"ftcli: {redact(line)}", console.file), highlight=False, markup=False)
            else:
                log_line(line)

    def step(self, step: Step) -> None:
        """Record an optimizer step, and write a row of metrics when one is due.

        Args:
            step: The finished step.
        """
        self._write_late_row()
        if self._is_first and self.main and not self.quiet:
            self._report_first_step(step)
        self.number = self.run.load.step = step.number
        if self._graphs is not None:
            self._graphs.update(step.number)
        self._items += step.items
        self._rows += step.rows
        self._data_seconds += step.data_seconds
        if not self.main:
            return
        if due(step.number, self.run.recipe.log.every_steps, self.run.steps) or step.stop:
            self._unwritten = step, step.begin_reading()
            if not self._late or self._is_followed_by_pause(step):
                self._write_late_row()
        elif self.terminal:
            self._progress.update(self._bar, completed=step.number)

    def _is_followed_by_pause(self, step: Step) -> bool:
        """Return whether an evaluation, a checkpoint or the end follows a step, so that its row cannot wait."""
        pauses = self.run.recipe.evaluate.every_steps, self.run.recipe.checkpoint.every_steps
        return step.stop or any(due(step.number, every, self.run.steps) for every in pauses)

    def _write_late_row(self) -> None:
        """Write the row of the previous step if it was not written yet."""
        unwritten, self._unwritten = self._unwritten, None
        if unwritten is not None:
            step, copy = unwritten
            step.finish_reading(copy)
            self._write_step(step)

    def _write_step(self, step: Step) -> None:
        """Write and show the row of a step."""
        row = self._row(step)
        undone = self.run.recipe.faults.non_finite != "skip"
        if undone and not self.run.guard.is_good(row["loss"], row["grad_norm"]):
            return  # a step that is undone or ends the run has no row
        self._write(row)
        self._show(row, last=step.number == self.run.steps or step.stop)

    def _report_first_step(self, step: Step) -> None:
        """Print and record the seconds until the end of the first step, with loading and compilation."""
        self._is_first = False
        float(step.loss_tensor)  # waits for the device
        began = self.run.loading.began
        seconds, parts = time.perf_counter() - began, self.run.loading.until(self._started)
        self.print_line(f"first step after {seconds:.1f} s, {self._started - began:.1f} s of it for loading")
        self.print_line("loading: " + ", ".join(f"{part} {taken:.1f} s" for part, taken in parts.items()))
        if self.folder is not None and (path := self.folder.path / "environment.json").exists():
            facts = json.loads(path.read_text(encoding="utf-8"))
            times = {"seconds_to_first_step": seconds, "seconds_of_loading": parts}
            self.folder.write_json(path.name, facts | times)

    def _row(self, step: Step) -> dict[str, Any]:
        """Return the row of metrics of a step.

        A row may be written at the end of the next step, so the time of writing says nothing about the speed.
        """
        values = {"loss": step.loss, "grad_norm": step.grad_norm}
        elapsed = max(step.end.seconds_since(self._since) - self._paused, 1e-9)
        self._trained += elapsed
        scale = self.run.hardware.loss_scale
        row = {
            "step": step.number,
            **values,
            **({} if scale is None else {"loss_scale": scale.scale, "skipped_steps": scale.skipped}),
            "learning_rate": step.learning_rate,
            "items": step.items,
            "samples": step.samples,
            **{f"train/{name}/loss": loss for name, loss in step.source_losses.items()},
            **{f"train/{name}": mean for name, mean in (step.term_losses | step.notes).items()},
            **({"epoch": self._epoch(step.number)} if self.run.stream is None else self.run.stream.metrics()),
            f"{self.run.task.item}s_per_second": self._items / elapsed,
            "rows_per_second": self._rows / elapsed,
            "data_wait_share": self._data_seconds / elapsed,
            "peak_memory_gb": _peak_memory() / 1e9,
            "seconds": self._trained,
            **self.run.load.take(),
        }
        self._since, self._items, self._rows, self._data_seconds, self._paused = step.end, 0, 0, 0.0, 0.0
        return row

    def _epoch(self, number: int) -> float:
        """Return the number of passes over the training rows after a step. Dropped rows do not count."""
        rows, plan = self.run.rows.train_rows, self.run.plan
        assert rows is not None  # the run is not a stream
        if self.run.recipe.data.drop_last:
            return number * plan.global_size / rows
        assert plan.steps_per_epoch is not None
        epochs, steps = divmod(number, plan.steps_per_epoch)
        return epochs + steps * plan.global_size / rows

    def _write(self, row: dict[str, Any]) -> None:
        """Write a row of metrics into the run folder and to trackers."""
        if self.folder is not None:
            self.folder.append_metrics(row)
            if time.perf_counter() - self._stated >= STATUS_SECONDS:
                self._stated = time.perf_counter()
                self.folder.write_status("running", row["step"], 0)
        self.trackers.log(row)

    def _show(self, row: dict[str, Any], *, last: bool) -> None:
        """Show a row of metrics on the progress bar or as a line."""
        if self._began[0] != self.run.first_step:  # a rollback
            self._began = self.run.first_step, self._seconds
        self._seconds = row["seconds"]
        speed, waits = row[f"{self.run.task.item}s_per_second"], row["data_wait_share"]
        line = (
            f"loss {row['loss']:.4f}  grad_norm {row['grad_norm']:.3f}  lr {row['learning_rate']:.2e}  "
            f"{speed:.0f} {self.run.task.item}s/s"
        )
        if self.run.stream is not None:  # training may wait for a slow stream
            line += f"  epoch {row['epoch']:.2f}  waiting for rows {waits:.0%}"
        if self.terminal:
            self._progress.update(self._bar, completed=row["step"], line=line)
        elif last or time.perf_counter() - self._printed >= QUIET_SECONDS:
            self._printed = time.perf_counter()
            done, seconds = row["step"] - self._began[0], row["seconds"] - self._began[1]
            left = seconds / max(done, 1) * (self.run.steps - row["step"])
            self.print_line(f"step {row['step']}/{self.run.steps}  {line}  {left:.0f} s left")

    def evaluation(self, step: int, metrics: dict[str, float], seconds: float, answers: Sequence[Answer] = ()) -> None:
        """Record the metrics of an evaluation, and the answers to prompts.

        Args:
            step: Number of finished steps.
            metrics: Name -> value.
            seconds: Time for which training waited.
            answers: All go into samples.jsonl, the first ones into the log.
        """
        self._paused += seconds
        if self.main:
            row = {"step": step} | {f"eval/{name}": value for name, value in metrics.items()}
            self._write(row)
            self.print_line(f"step {step}: evaluation " + ", ".join(f"{k} {v:.4f}" for k, v in metrics.items()))
        if self.main and answers:
            self._show_answers(step, answers)

    def _show_answers(self, step: int, answers: Sequence[Answer]) -> None:
        """Write answers to prompts into samples.jsonl and to trackers, and the first ones into the log."""
        for answer in answers[:SHOWN_ANSWERS]:
            self.print_line(
                f"step {step}: {shortened(answer.prompt.last_text, WIDEST // 2)} -> {shortened(answer.text, WIDEST)}"
            )
        if self.folder is not None:
            if more := len(answers[SHOWN_ANSWERS:]):
                self.print_line(f"step {step}: {more} more in {self.folder.samples}")
            self.folder.append_samples([{"step": step} | answer.as_dict() for answer in answers])
            self.trackers.log_answers(list(answers[:SHOWN_ANSWERS]), step)

    def saved(self, step: int, folder: Path | None, seconds: float) -> None:
        """Record a checkpoint that is complete or written in the background.

        Args:
            step: Number of finished steps.
            folder: Folder of the checkpoint.
            seconds: Time for which training waited.
        """
        self._paused += seconds  # saving is not training time
        if folder is not None:
            text = "writing {} in the background, training waited" if self.run.saving.pending else "saved {} in"
            self.print_line(f"step {step}: {text.format(folder)} {seconds:.1f} s")
            if self.folder is not None:  # status.json must not be older than the checkpoint
                self.folder.write_status("running", step, 0)
                self.folder.append_event("checkpoint", step, f"training waited {seconds:.1f} s")

    def stopped(self, step: int) -> None:
        """Record that the run stopped early on request, for instance after a signal.

        Args:
            step: Number of finished steps.
        """
        if self.main:
            self._report_stream()
            message = f"stopped on request after step {step} of {self.run.steps}"
            if step == self.run.first_step:
                message = f"stopped on request before step {step + 1} of {self.run.steps}, nothing new to save"
            message += f" ({self.run.stop.reason})" if self.run.stop.reason else ""  # empty if another rank had it
            next_step = f"continues after step {step}" if step else "starts from the beginning"
            self.print_line(f"{message}; --resume auto {next_step}")
            self._report_best()
            if self.folder is not None:
                self.folder.write_status("stopped", step, EXIT_RESUME, message)

    def _report_stream(self) -> None:
        """Print the summary of a stream."""
        if self.run.stream is not None:
            self.print_line(self.run.stream.summary())

    def _report_best(self) -> None:
        """Print the best checkpoint, if the recipe keeps it."""
        if self.folder is not None and (best := describe_best(self.folder.path)):
            self.print_line(f"best checkpoint: {best}")

    def done(self) -> None:
        """Record that the run is complete."""
        if self.main:
            self._report_stream()
            if self._graphs is not None:
                self.print_line(self._graphs.summary())
            seconds = time.perf_counter() - self.run.loading.began
            if self.folder is not None:
                self.print_line(f"done in {seconds:.0f} s; weights in {self.folder.final}")
                self._report_best()
                self.folder.write_status("done", self.number, EXIT_DONE)
            else:
                self.print_line(f"done in {seconds:.0f} s; nothing was written (no output folder)")


def _peak_memory() -> int:
    """Return the peak memory in bytes: of the device if there is one, else of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
