"""Prepare runs for a loop of the user, and write the files of their run folder.

With `output` the folder is claimed and gets the same files as with `ftcli train`: recipe.yaml, profile.yaml,
environment.json, metrics.jsonl and status.json. Only accepted changes of a recipe are printed. Without `output` nothing
is written.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from ftcli.config.compatibility import check_pair, check_trackers
from ftcli.config.load import read_recipe
from ftcli.runtime.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUME, InputError, RunError
from ftcli.runtime.load_monitor import LoadMonitor
from ftcli.runtime.process import current_rank
from ftcli.runtime.reader_errors import user_path
from ftcli.runtime.run_folder import RunFolder
from ftcli.runtime.stop import StopRequest
from ftcli.runtime.threads import wait_passively
from ftcli.training.resume import AUTO, belongs_to, find_start

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe
    from ftcli.training.run import Run
    from ftcli.training.step import Step

_owners: weakref.WeakValueDictionary[Path, OwnLoop] = weakref.WeakValueDictionary()  # the newest of each run folder


def prepare(
    recipe: Recipe | str | Path,
    *,
    overrides: Sequence[str] = (),
    output: str | Path | None = None,
    cpu: bool = False,
    weights: str | Path | None = None,
    dry_run: bool = False,
    resume: str | Path | None = None,
    resume_anyway: bool = False,
) -> Run:
    """Build everything that a training run needs, for a loop of your own. A collective.

    Works in a notebook (one process) and in every launched process.

    Args:
        recipe: A `Recipe`, a recipe file, or the name of a shipped recipe.
        overrides: Changes of the recipe such as "train.max_steps=10", applied in order.
        output: The run folder. None: nothing is written, and nothing can be saved.
        cpu: Train on the CPU, even on a machine with GPUs.
        weights: A folder of trained weights (a run's `final/`) to start from instead of the recipe's model. With an
            adapter it is the adapter's folder.
        dry_run: Prepare two steps and one evaluation batch.
        resume: A checkpoint to continue from, written on any hardware: its folder, that of a run with checkpoints, or
            "auto" for the newest one of `output`, if there is one.
        resume_anyway: Continue also with a recipe that gives another loss curve, with other rows, or with other frozen
            weights than those of the checkpoint.

    Returns:
        A `Run` for `ftcli.steps`, `ftcli.evaluate` and `ftcli.save_checkpoint`. `run.model` is the prepared model.

    Raises:
        InputError: The recipe, the data, the model or the checkpoint is wrong, the recipe differs from that of the
            checkpoint, it cannot run on the profile of `accelerate launch`, or `output` holds another run, or one that
            another process trains. Other processes are kept out of `output` as long as the run exists.

    Example:
        >>> run = ftcli.prepare("recipe.yaml", overrides=["train.max_steps=100"], output="runs/mine")
        >>> for step in ftcli.steps(run):
        ...     print(step.number, step.loss)
        >>> ftcli.evaluate(run)["loss"]
    """
    from ftcli.config.profile import profile_of_process

    wait_passively(cpu=cpu)  # before torch is loaded
    from ftcli.training import setup
    from ftcli.training.run_start import rewind_run_folder, write_run_inputs

    requested = read_recipe(recipe, overrides)
    profile = profile_of_process(os.environ) if "ACCELERATE_MIXED_PRECISION" in os.environ else None
    trackers = [] if output is None else check_trackers(requested)  # without a folder nothing is sent
    if problems := trackers + ([] if profile is None else check_pair(requested, profile)):
        raise InputError(problems)
    folder = None if output is None else RunFolder(output)
    with ExitStack() as lock:
        if folder is not None and current_rank() == 0:
            lock.enter_context(folder.locked())
        start = _find_start(folder, requested, resume, anyway=resume_anyway)
        if folder is not None:
            resuming = resume == AUTO or (start is not None and belongs_to(folder, start))
            folder.check_free(resuming=resuming)  # on every rank, so that none waits for one that was refused
            if current_rank() == 0:
                folder.claim(resuming=resuming)
        run = setup.prepare(
            requested,
            output=output,
            cpu=cpu,
            weights=None if weights is None else user_path(weights, "weights"),
            dry_run=dry_run,
            resume=start,
            resume_anyway=resume_anyway,
        )
        if run.folder is not None:
            run.is_measured = True  # the loop evaluates by itself, and nothing repeats what it evaluated
            if current_rank() == 0:
                write_run_inputs(run.folder, run.resolved.applied_to(requested), profile, start, dry_run=dry_run)
                rewind_run_folder(run, run.folder, from_start=start is None)
                run.folder.write_status("loading", run.first_step, 0)
            run.stop = StopRequest(run.folder)
            run.load = LoadMonitor(run.folder)
            run.record = OwnLoop(run)
            _take_folder(run.record, run.folder)
        weakref.finalize(run, lock.pop_all().close)
    return run


def _find_start(folder: RunFolder | None, recipe: Recipe, resume: str | Path | None, *, anyway: bool) -> Path | None:
    """Return the checkpoint to continue from, after a comparison of its recipe with `recipe`."""
    if resume is None:
        return None
    if folder is None and resume == AUTO:
        raise InputError('resume="auto" needs `output`, the folder in which it looks for checkpoints')
    return find_start(folder or RunFolder(resume), recipe, str(resume), anyway=anyway)


def _take_folder(record: OwnLoop, folder: RunFolder) -> None:
    """Make a run the only one of this process that writes into its folder; an earlier one may still be in its loop."""
    place = folder.path.resolve()
    if (earlier := _owners.get(place)) is not None:
        earlier.leave_folder()
    _owners[place] = record


class OwnLoop:
    """Writes metrics and status of a user's loop. It is a context manager around each loop over the steps."""

    def __init__(self, run: Run) -> None:
        from ftcli.training.reporter import Reporter
        from ftcli.training.trackers import end_trackers

        weakref.finalize(run, end_trackers, run.hardware.accelerator).atexit = False  # evaluations may follow the loop
        # The run has this object. With a reference back, Python would free a run that is no longer used only when its
        # garbage collector runs, and settings of torch would be restored at any moment, also while torch compiles.
        run = weakref.proxy(run)
        self.run, self.reporter, self._has_begun = run, Reporter(run, quiet=True), False
        self._end_status: tuple[str, int, str] | None = None  # state, exit code and error after the loop has ended
        self._failure: RunError | None = None

    def __enter__(self) -> None:
        self._end_status = None
        if not self._has_begun:
            self._has_begun = True
            self.reporter.__enter__()
        else:
            self._write_status("running", 0, "")
            self.reporter.begin_load()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run = self.run
        run.load.stop()
        if self._failure is not None and isinstance(error, GeneratorExit):  # in the body of the loop
            kind, error, trace = RunError, self._failure, None
        if error is None or isinstance(error, GeneratorExit):
            self.reporter.end_loop()
            # Python closes a generator in the same way for both.
            reason = f"the loop was left after step {run.position} of {run.steps}, by `break` or an error"
            if error is None:  # another rank may have the reason
                why = f" ({run.stop.reason})" if run.stop.reason else ""
                reason = f"stopped on request after step {run.position} of {run.steps}{why}"
                run.stop.forget()  # it is met: a second call continues
            is_done = run.position == run.steps
            self._end_status = ("done", EXIT_DONE, "") if is_done else ("stopped", EXIT_RESUME, reason)
        else:
            self.reporter.__exit__(kind, error, trace)
            if not isinstance(error, Exception):  # Ctrl-C inside a step
                reason = f"interrupted in step {run.position + 1} of {run.steps}"
                self._end_status = ("stopped", EXIT_RESUME, reason)
        if self._end_status is not None:
            self._write_status(*self._end_status)

    def step(self, step: Step) -> None:
        """Record an optimizer step, and write a row of metrics if one is due."""
        self.reporter.step(step)

    def evaluation(self, metrics: dict[str, float], seconds: float) -> None:
        """Record the metrics of an evaluation of some seconds after the newest step."""
        self.reporter.trackers.start()
        self.reporter.evaluation(self.run.position, metrics, seconds)
        if self._end_status is not None:
            self._write_status(*self._end_status)

    def fail(self, error: RunError) -> None:
        """Record that the run cannot continue, inside the loop or after it."""
        self._failure = error
        if self._end_status is not None:
            self._end_status = ("failed", EXIT_FAILED, f"{type(error).__name__}: {error}")
            self._write_status(*self._end_status)

    def leave_folder(self) -> None:
        """Leave the run folder to a newer run. This run writes nothing more, and cannot be saved."""
        self.reporter.trackers.end()
        self.reporter.trackers.names = []
        self.reporter.folder = self.run.folder = None

    def _write_status(self, state: str, code: int, error: str) -> None:
        """Write status.json on the main rank."""
        if self.reporter.folder is not None:
            self.reporter.folder.write_status(state, self.run.position, code, error)
