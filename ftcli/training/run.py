"""One training run: what `prepare` builds and the loop steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

from ftcli.checkpoint.background import BackgroundSaver
from ftcli.config.plan import Plan
from ftcli.config.recipe import Recipe
from ftcli.data.cache import PreparedRows
from ftcli.data.revisions import Resolved
from ftcli.data.sampler import TrainOrder
from ftcli.models.estimates.memory_saving import MemorySaving
from ftcli.runtime.heartbeat import Heartbeat
from ftcli.runtime.load_monitor import LoadMonitor
from ftcli.runtime.process_settings import Settings
from ftcli.runtime.run_folder import RunFolder
from ftcli.runtime.seeds import seed_of
from ftcli.runtime.stop import StopRequest
from ftcli.tasks.protocol import has_first_pass
from ftcli.training.batches.dataloaders import Collate, Rows
from ftcli.training.batches.moment import Moment
from ftcli.training.optim.schedule import learning_rate
from ftcli.training.progress import Progress

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

    from ftcli.hardware.interface import Hardware
    from ftcli.inference.answers import EncodedPrompt
    from ftcli.tasks.protocol import Batch, Task
    from ftcli.training.batches.streaming_loader import StreamLoader
    from ftcli.training.gradient_watch import Resumed
    from ftcli.training.nonfinite import NonFiniteGuard
    from ftcli.training.own_loop import OwnLoop
    from ftcli.training.terms import LossTerms


P = ParamSpec("P")
T = TypeVar("T")


class LoadingTimes:
    """The seconds that the parts of loading take, each measured from its own start to its own end.

    Args:
        began: When the launch began, on the clock of `time.perf_counter`.
    """

    def __init__(self, began: float) -> None:
        self.began = began
        self.seconds = {"imports": time.perf_counter() - began}

    def timed(self, part: str, function: Callable[P, T]) -> Callable[P, T]:
        """Return a function that calls `function` and records how long it took.

        Args:
            part: Name of the part of loading.
            function: The function.
        """

        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            started = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds[part] = time.perf_counter() - started
            return result

        return call

    def until(self, end: float) -> dict[str, float]:
        """Return the seconds of each part, and of everything else between the begin of the launch and `end`.

        Args:
            end: When loading ended, on the clock of `time.perf_counter`.
        """
        return self.seconds | {"other": max(0.0, end - self.began - sum(self.seconds.values()))}


@dataclass
class Run:
    """One training run on this process, ready for `steps`: everything the loop touches, prepared."""

    recipe: Recipe
    plan: Plan
    task: Task
    hardware: Hardware
    model: nn.Module
    optimizer: Optimizer
    train_loader: DataLoader | StreamLoader
    eval_loader: DataLoader | None
    order: TrainOrder | None  # what the loader of training rows follows; None: they are a stream
    rows: PreparedRows
    guard: NonFiniteGuard
    resolved: Resolved  # commits of what is on the hub
    base: dict[str, Any] | None  # what the model was before training; see trained_on.py
    helpers: dict[str, str]  # digests of frozen helper models; see helper_models.py
    log_lines: list[str] = field(default_factory=list)  # facts about the run, one line each
    folder: RunFolder | None = None
    stop: StopRequest = field(default_factory=StopRequest)
    saving: BackgroundSaver = field(default_factory=BackgroundSaver)
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    load: LoadMonitor = field(default_factory=LoadMonitor)
    prompts: list[EncodedPrompt] = field(default_factory=list)  # to answer at each evaluation
    first_step: int = 0
    memory_saving: MemorySaving = MemorySaving("none")  # what the recipe and `auto` came to
    compiled: bool = False  # whether layers are, as far as the profile lets them
    is_measured: bool = True  # the checkpoint that the run resumes from has the metrics of its step
    loading: LoadingTimes = field(default_factory=lambda: LoadingTimes(time.perf_counter()))
    progress: Progress = field(default_factory=Progress)
    record: OwnLoop | None = None  # of a loop of the user's own; `train` writes by itself
    resumed: Resumed | None = None  # what gradient_watch.py compares with, where the run began at a checkpoint
    settings: Settings = field(default_factory=Settings)  # of other libraries, which the run changed
    is_measured_only: bool = False  # runs of `ftcli parity`: no checkpoint is written, they are never resumed
    derived: str | None = None  # key of the columns that the model derived from the rows
    lacks_columns: bool = False  # whether those of the training rows are not known
    terms: LossTerms = field(init=False)

    def __post_init__(self) -> None:
        from ftcli.training.terms import LossTerms  # imports torch

        self.terms = LossTerms.of(self.task, self.rows.sources)

    @property
    def steps(self) -> int:
        """Length of the run, in optimizer steps."""
        assert self.plan.steps is not None  # rows are known
        return self.plan.steps

    @property
    def position(self) -> int:
        """Number of optimizer steps that are done."""
        return self.first_step if self.progress.done is None else self.progress.done

    def passes_of(self, step: int) -> int:
        """Return the number of forward passes of this process in the step after `step` steps."""
        if self.order is None or self.order.divide is None:
            return self.plan.accumulation
        return self.order.passes_of(step, self.plan.processes)

    @property
    def stream(self) -> StreamLoader | None:
        """The loader of training rows, where they are a stream."""
        loader: Any = self.train_loader
        return loader if self.rows.streamed else None

    def apply_stream_counts(self, sums: Sequence[int], step: int) -> None:
        """Add the stream counts of all processes for a step; raises `InputError` for too many unusable rows."""
        if self.stream is not None:
            self.stream.advance(sums, step)

    @property
    def evaluates(self) -> bool:
        """Whether an evaluation has anything to do: rows to measure or prompts to answer."""
        return self.eval_loader is not None or bool(self.prompts)

    @property
    def starts_with_evaluation(self) -> bool:
        """Whether an evaluation is due before the first step: at the start, or one that the stop before cut short."""
        section = self.recipe.evaluate
        if not self.evaluates or self.first_step == 0:
            return self.evaluates and section.at_start
        return not self.is_measured and due(self.first_step, section.every_steps, self.steps)

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of the step after `step` steps."""
        return learning_rate(
            step,
            peak=self.recipe.optimizer.learning_rate,
            name=self.recipe.schedule.name,
            steps=self.steps,
            warmup_steps=self.plan.warmup_steps or 0,
            min_ratio=self.recipe.schedule.min_ratio,
        )

    def to_device(self, batch: Batch) -> Batch:
        """Return a batch's tensors on the device of this process; numbers stay numbers."""
        from ftcli.training.batches.prefetch import on_device

        return on_device(batch, self.hardware.accelerator.device)

    def any_batch(self) -> Batch:
        """Return a batch of one training row on the device, without taking it from the order of rows."""
        columns = self.rows.derived["train"]
        rows = Rows(self.rows.train, self.task, training=True, bins=self.rows.bins, columns=columns)
        batch = Collate(self.task)([rows[(0, 0)]])
        return self.to_device({name: value for name, value in batch.items() if name != "sample_ids"})

    def loss_of(self, batch: Batch, ids: NDArray[np.int64] | None = None) -> Tensor:
        """Return the weighted sum of all contributions of a batch, a scalar, as if the batch were a whole step.

        Args:
            batch: Tensors of B rows on the device.
            ids: Ids of the rows, `[B]`. Default: no two rows are the same, and none is padding.
        """
        import torch

        task: Any = self.task
        further = []
        if has_first_pass(task):
            from ftcli.training.first_pass import values_of

            with torch.no_grad():
                values = task.first_pass(self.model, batch)
            torch.clear_autocast_cache()  # its casts of weights have no gradient
            ids = np.arange(len(next(iter(values.values())))) if ids is None else ids
            further = [values_of(values, ids).seen_by(ids)]
        contributions = self.terms.read(task.loss(self.model, batch, *further))
        return contributions.scaled(term.weight for term in self.terms.terms.values())

    def moment(self) -> Moment:
        """Return this moment, on the clocks of the host and of this process's device."""
        return Moment(self.hardware.accelerator.device)

    def reseed(self, step: int, micro_batch: int | None = None) -> None:
        """Seed this process's generators (dropout) from (seed, step, rank): they carry no state between steps.

        Tasks with a first pass seed each micro-batch, so that both passes draw alike.
        """
        parts = [] if micro_batch is None else [micro_batch]
        self.hardware.reseed(seed_of(self.recipe.seed, step, self.hardware.ranks.rank, *parts))


def due(step: int, every: int | None, last: int) -> bool:
    """Return whether an action is due after `step` steps: every `every` steps (None: never) and after the last step."""
    return step == last or (every is not None and step % every == 0)
