"""Record the position of the loop over a run's steps, and refuse changes that the loop cannot follow.

A user's loop may be left by `break` and entered again. `steps` then continues after the last complete step. Another
optimizer or model in the run, and options of the optimizer that were set by hand, raise an error. This module is
independent of task, model and hardware.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ftcli.runtime.errors import InputError, RunError

if TYPE_CHECKING:
    from ftcli.training.run import Run


OPTIONS = ("lr", "weight_decay", "betas", "eps", "momentum")  # of a parameter group, which the recipe sets


class Progress:
    """Position of one run.

    Attributes:
        done: Number of steps that are done; None before the first loop.
    """

    def __init__(self) -> None:
        self.done: int | None = None
        self._in_step = False
        self._newest_loop = 0  # number of the newest loop; only this one may continue
        self._prepared: tuple[object, object] | None = None  # model and optimizer
        self._options: list[list[object]] | None = None  # of each parameter group, as last set

    def remember(self, run: Run) -> None:
        """Record the prepared model, the prepared optimizer and its learning rates."""
        self._prepared = (run.model, run.optimizer)
        self._options = _options(run)

    def enter(self, run: Run) -> int:
        """Begin a loop over the remaining steps, or continue after a loop that was left.

        Returns:
            The number of the loop, for `check_loop`.

        Raises:
            RunError: A step was interrupted before it was complete, or another run was prepared since.
            InputError: The model or the optimizer of the run was replaced, or columns of its rows are not known.
        """
        from ftcli.training.derived_columns import check_columns

        self.check_complete()
        self._check_not_replaced(run)
        check_columns(run)
        if self.done is None or self.done < run.steps:
            _check_newest(run)
        if self.done is None:
            self.done = run.first_step
        elif self.done != run.first_step and self.done < run.steps:
            if run.stream is not None:
                run.stream.seek(self.done, gather_cursors(run, self.done))
            elif run.order is not None:
                run.order.first_step = self.done
        run.first_step = self.done
        self._newest_loop += 1
        return self._newest_loop

    def begin_step(self, run: Run, rate: float) -> None:
        """Set the learning rate of the next step.

        Raises:
            RunError: Another run was prepared since.
            InputError: The model, the optimizer or a learning rate of the run was replaced.
        """
        self._check_not_replaced(run)
        _check_newest(run)
        if self._options is not None and _options(run) != self._options:
            raise InputError(
                "the learning rate or the parameter groups of run.optimizer were changed in the loop; they follow from "
                "the recipe and the step, so that a resumed run has the same",
                hint="set the keys of optimizer and schedule in the recipe",
            )
        for group in run.optimizer.param_groups:
            group["lr"] = rate * group["lr_factor"]
        self._options = _options(run)
        self._in_step = True

    def end_step(self, done: int) -> None:
        """Record that `done` steps are done. The number may be smaller than before, after a roll-back."""
        self.done, self._in_step = done, False

    def check_complete(self) -> None:
        """Raise `RunError` if a step was interrupted, because the weights may be those of the next step."""
        if self._in_step:
            raise RunError(
                f"step {(self.done or 0) + 1} was interrupted before it was complete, so weights and gradients may be "
                "half updated. Prepare the run again; with resume=CHECKPOINT it continues from that checkpoint"
            )

    def check_loop(self, loop_number: int) -> None:
        """Raise `RunError` if a newer loop over the same run has begun."""
        if loop_number != self._newest_loop:
            raise RunError(
                f"another loop over the steps of this run has begun, and {self.done} steps are done; "
                "only the newest loop can continue"
            )

    def _check_not_replaced(self, run: Run) -> None:
        """Raise `InputError` if the model or the optimizer of the run is not the prepared object."""
        if self._prepared is None:
            return
        current = (run.model, run.optimizer)
        for name, value, prepared in zip(("model", "optimizer"), current, self._prepared, strict=True):
            if value is not prepared:
                raise InputError(
                    f"run.{name} was replaced by another object ({type(value).__name__}); "
                    "a run trains the model and the optimizer that `prepare` has built",
                    hint="choose the optimizer by optimizer.name"
                    if name == "optimizer"
                    else "change the model in the task's load_model or finish_model",
                )


def _options(run: Run) -> list[list[object]]:
    """Return the values of `OPTIONS` for each parameter group; None for what an optimizer does not have."""
    return [[group.get(name) for name in OPTIONS] for group in run.optimizer.param_groups]


def _check_newest(run: Run) -> None:
    """Raise `RunError` if another run was prepared in this process since, also if that has failed.

    Accelerate has one state in a process, for instance the number of micro-batches by which gradients are divided, and
    torch has one value of each setting. `prepare` sets both for the newest run.
    """
    if run.settings.is_replaced():
        what = (
            "another run was prepared in this process since, which changed settings of Accelerate and torch that this "
            "run trains with"
        )
        if run.record is not None and run.folder is None:
            raise RunError(f"{what}, and has its folder: prepare this run again with another output")
        how = "Save this run by ftcli.save_checkpoint(run, run.position), and prepare it again with resume=CHECKPOINT"
        raise RunError(f"{what}. {how}")


def gather_cursors(run: Run, step: int) -> list[list[int]] | None:
    """Return the cursor of every lane of a stream after a step, as integers. A collective.

    Args:
        run: The run.
        step: Number of the step.

    Returns:
        One row of integers for each lane; None if the training rows are not a stream.
    """
    if run.stream is None:
        return None
    cursors: list[list[int]] = np.unique(run.hardware.ranks.gather(run.stream.cursors(step)), axis=0).tolist()
    return cursors
