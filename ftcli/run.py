"""Recipe -> Run, in one documented order, with one call of Accelerator.prepare.

    plan and rows -> hardware -> task's model -> adapter -> loaders -> optimizer -> prepare -> checks

Everything that trains starts here: the command line's worker, a bare `accelerate launch`, and a notebook.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cache import PreparedRows, prepare_rows
from .checkpoint_folder import abandon, damage, read_state, step_of
from .errors import InputError
from .faults import Stopped, StopRequest, end_early, record_failure, watch_parent, watch_peers
from .heartbeat import Heartbeat
from .loaders import Collate, Rows, build_loaders
from .planning import Plan, derive_plan
from .positions import check_lengths
from .recipe import Recipe
from .recipe_file import dump_recipe, load_recipe
from .resumption import belongs_to, check_rows
from .run_folder import DRY_RUN, ORIGIN, START, RunFolder, describe_environment
from .sampling import TrainOrder, seed_of
from .saving import Saving
from .schedule import due, learning_rate

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

    from .evaluation import EncodedPrompt
    from .hardware import Hardware
    from .nonfinite import Flags
    from .profiles import Profile
    from .stream_loader import StreamLoader
    from .tasks.protocol import Batch, Task


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
    flags: Flags
    facts: list[str]  # one line each, for the log
    folder: RunFolder | None = None
    stop: StopRequest = field(default_factory=StopRequest)
    saving: Saving = field(default_factory=Saving)
    heart: Heartbeat = field(default_factory=Heartbeat)
    prompts: list[EncodedPrompt] = field(default_factory=list)  # to answer at each evaluation
    first_step: int = 0
    is_measured: bool = True  # the checkpoint that the run goes on from holds the metrics of its step
    is_measured_only: bool = False  # runs of `ftcli parity`: no checkpoint is written, they are never resumed

    @property
    def steps(self) -> int:
        """Length of the run, in optimizer steps."""
        assert self.plan.steps is not None  # rows are known
        return self.plan.steps

    @property
    def stream(self) -> StreamLoader | None:
        """The loader of training rows, where they are a stream."""
        loader: Any = self.train_loader
        return loader if self.rows.streamed else None

    def settle_stream(self, sums: Sequence[int], step: int) -> None:
        """Take what all processes read of a stream for a step; raises `InputError` for too many unusable rows."""
        if self.stream is not None:
            self.stream.settle(sums, step)

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
        device = self.hardware.accelerator.device
        return {
            name: value.to(device, non_blocking=True) if hasattr(value, "to") else value
            for name, value in batch.items()
        }

    def any_batch(self) -> Batch:
        """Return a batch of one training row on the device, without taking it from the order of rows."""
        rows = Rows(self.rows.train, self.task, training=True, bins=self.rows.bins)
        batch = Collate(self.task)([rows[(0, 0)]])
        return self.to_device({name: value for name, value in batch.items() if name != "sample_ids"})

    def reseed(self, step: int) -> None:
        """Seed this process's generators (dropout) from (seed, step, rank): they carry no state between steps."""
        import torch

        torch.manual_seed(seed_of(self.recipe.seed, step, self.hardware.ranks.rank))


def prepare(
    recipe: Recipe | str | Path,
    *,
    overrides: Sequence[str] = (),
    output: str | Path | None = None,
    cpu: bool = False,
    weights: Path | None = None,
    dry_run: bool = False,
    resume: str | Path | None = None,
    resume_anyway: bool = False,
) -> Run:
    """Return a `Run` for `for step in ftcli.steps(run)`; writes no folder unless `output` names one.

    Works in a notebook (one process) and inside every launched process. `weights` is a folder of trained weights
    (a run's final/) to start from instead of the recipe's model; a dry run has two steps and one evaluation batch.
    `resume` is the folder of a checkpoint to go on from; with `resume_anyway` also on other rows.
    Raises `InputError` for what is wrong with recipe, data or model, before the model's weights are read where that
    can be known.
    """
    import torch

    from . import hardware as hardware_package
    from .checkpoint import check_disk, load
    from .evaluation import check_prompts, encode_prompts
    from .models import quiet_libraries
    from .nonfinite import Flags
    from .optimizers import build_optimizer
    from .stream_loader import build_stream
    from .tasks import build_task

    quiet_libraries()
    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if dry_run:
        loaded = _shortened(loaded)
    derive_plan(loaded, world)
    task = build_task(loaded)
    prompts = encode_prompts(loaded, task)
    rows = prepare_rows(loaded, task)
    plan = derive_plan(loaded, world, rows.train_rows)
    first_step = 0 if resume is None else _first_step(Path(resume), rows, anyway=resume_anyway)
    if dry_run and rows.eval is not None:
        first = range(min(len(rows.eval), plan.micro_size * world))
        rows = replace(rows, eval=rows.eval.select(first))
    folder = None if output is None else RunFolder(output)
    hardware = hardware_package.build(
        loaded,
        plan,
        cpu=cpu,
        trackers=[] if folder is None else list(loaded.log.trackers),
        folder=None if folder is None else str(folder.path),
    )
    model = _build_model(loaded, task, rows, weights)
    check_prompts(loaded, prompts, model)
    check_lengths(model, loaded, rows)
    model = hardware.fit(model, loaded)
    optimizer = build_optimizer(model, loaded)
    flags = Flags(loaded.faults, hardware, excluded=set())
    train_loader, eval_loader = build_loaders(loaded, plan, task, rows, first_step, flags.excluded)
    order: Any = None if train_loader is None else train_loader.batch_sampler
    loaders = [loader for loader in (train_loader, eval_loader) if loader is not None]
    with hardware.handing_out(model, optimizer):
        model, optimizer, *loaders = hardware.accelerator.prepare(model, optimizer, *loaders)
    prepared = iter(loaders)
    stream = build_stream(loaded, plan, task, rows.facts, hardware.ranks, flags.excluded) if rows.streamed else None
    facts = [
        *rows.told,
        *([] if stream is None else [stream.told]),
        _describe(loaded, plan, rows),
        f"device {hardware.accelerator.device.type}, {hardware.distributed_type}, {world} processes",
        hardware.check_dtypes(model, loaded),
        _count_parameters(hardware, model),
    ]
    torch.manual_seed(seed_of(loaded.seed, hardware.ranks.rank))
    run = Run(
        recipe=loaded,
        plan=plan,
        task=task,
        hardware=hardware,
        model=model,
        optimizer=optimizer,
        train_loader=next(prepared) if stream is None else stream,
        eval_loader=next(prepared, None),
        order=order,
        rows=rows,
        flags=flags,
        facts=facts,
        folder=folder,
        prompts=prompts,
        first_step=first_step,
    )
    check_disk(run)
    if resume is not None:
        if stream is not None:
            stream.go_back(first_step, read_state(Path(resume)).get("stream"))
        hardware.settle_buckets(model, lambda: task.loss(model, run.any_batch()))  # before buffers are loaded
        load(run, Path(resume))
        run.is_measured = bool(read_state(Path(resume))["metrics"])
        flags.restore(read_state(Path(resume))["not_finite"])
        facts.append(f"goes on after step {first_step} from {resume}")
    return run


def _first_step(checkpoint: Path, rows: PreparedRows, *, anyway: bool) -> int:
    """Return the number of steps that are done in a checkpoint; raises `InputError` when it does not fit."""
    if problem := damage(checkpoint, hashes=False):
        raise InputError(problem)
    state = read_state(checkpoint)
    check_rows(state, rows.fingerprint, anyway=anyway)
    step: int = state["step"]
    return step


def _build_model(recipe: Recipe, task: Task, rows: PreparedRows, weights: Path | None) -> nn.Module:
    """Return the task's model with its adapter, in training mode and not yet prepared."""
    from .adapters import add_adapter
    from .hardware import built_whole
    from .hardware.precision import load_dtype, trained_dtype
    from .token_rows import new_rows

    model, heads = task.load_model(rows.facts, dtype=load_dtype(recipe), weights=weights)
    with built_whole():
        model = add_adapter(
            model,
            recipe.adapter,
            seed=recipe.seed,
            keep=heads,
            dtype=trained_dtype(recipe),
            task_type=task.peft_type,
            rows=new_rows(model, recipe),
            weights=weights,
        )
    task.finish_model(model)
    if recipe.model.gradient_checkpointing:
        if not getattr(model, "supports_gradient_checkpointing", False):
            told = f"model.gradient_checkpointing: {recipe.model.name} does not support it"
            raise InputError(told, hint="set it to false")
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return model.train()


def _describe(recipe: Recipe, plan: Plan, rows: PreparedRows) -> str:
    evaluated = "none" if rows.eval is None else str(len(rows.eval))
    packed = "" if rows.bins is None else f" of {len(rows.train)} documents"
    trained = "a stream of rows" if rows.streamed else f"{plan.rows} rows{packed}"
    return (
        f"{recipe.task} of {recipe.model.name}: {trained}, {evaluated} for evaluation, "
        f"{plan.steps} steps of {plan.global_size} = {plan.micro_size} rows x {plan.accumulation} micro-batches "
        f"x {plan.processes} processes"
    )


def _count_parameters(hardware: Hardware, model: nn.Module) -> str:
    from .hardware import full_shape

    sizes = [(full_shape(p).numel(), p.requires_grad) for p in hardware.unwrap(model).parameters()]
    trained, total = sum(n for n, trains in sizes if trains), sum(n for n, _ in sizes)
    return f"{trained / 1e6:.2f} of {total / 1e6:.2f} million parameters trained ({100 * trained / total:.2f} %)"


def work(
    recipe: Recipe,
    profile: Profile | None,
    *,
    output: Path,
    cpu: bool = False,
    dry_run: bool = False,
    record_start: bool = False,
    resuming: bool = False,
    start: Path | None = None,
    resume_anyway: bool = False,
) -> None:
    """Train as one process of a run, from claimed folder to final weights: what every form of launch ends in.

    `start` is the checkpoint to go on from; `resuming` says that the folder may hold the run's beginning. With
    `record_start` start.json holds a digest of every trained weight as it was before the first step.
    """
    from .loop import train

    folder = RunFolder(output)
    is_main = int(os.environ.get("RANK", "0")) == 0
    if is_main and "FTCLI_LAUNCHED" not in os.environ:  # our parent claimed it already
        folder.claim(resuming=resuming)  # before failures are recorded: a refusal must leave no trace in another's run
    is_alone = "FTCLI_LAUNCHED" not in os.environ and os.environ.get("WORLD_SIZE", "1") == "1"
    with record_failure(folder), Heartbeat(folder) as heart, StopRequest.listening(folder) as stop:
        watch_parent()
        watch_peers(folder)
        try:
            with stop.at_once() if is_alone else nullcontext():
                if is_main:
                    _write_intent(folder, recipe, profile, start)
                    if dry_run:
                        folder.write_text(
                            DRY_RUN, "two steps, to see that everything works; the next dry run replaces this folder\n"
                        )
                run = prepare(
                    recipe, output=output, cpu=cpu, dry_run=dry_run, resume=start, resume_anyway=resume_anyway
                )
                run.heart = heart
                _check_world(run, profile)
                if run.hardware.ranks.is_main:
                    folder.rewind(run.first_step, evaluated=run.is_measured)
                    abandon(folder.path, run.first_step)
                    device = str(run.hardware.accelerator.device)
                    folder.write_json("environment.json", describe_environment(device, run.plan.processes))
                if record_start:
                    _record_start(run, folder)
        except Stopped:
            end_early(folder, stop.reason)
            return
        run.stop = stop
        train(run)
        run.hardware.close()


def _record_start(run: Run, folder: RunFolder) -> None:
    """Write start.json; a collective, one weight is whole at a time."""
    import torch

    from .models import largest_dropout

    weights = {
        name: hashlib.sha256(value.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, value in run.hardware.parameters(run.model, trained_only=True)
        if value is not None  # not on the main process
    }
    dropout = max(largest_dropout(run.hardware.unwrap(run.model)), run.recipe.adapter.lora_dropout)
    if run.hardware.ranks.is_main:
        folder.write_json(START, {"weights": weights, "dropout": dropout})


def evaluate_run(path: str | Path, profile: Profile | None = None, *, cpu: bool = False) -> dict[str, float]:
    """Return the metrics of a run's final weights on its recipe's evaluation rows, and write evaluation.json."""
    from .evaluation import evaluate

    folder = RunFolder(path)
    with record_failure(folder):
        watch_parent()
        watch_peers(folder)
        recipe = load_recipe(folder.path / "recipe.yaml")
        if recipe.data.eval is None and not recipe.data.eval_rows:
            raise InputError("the recipe has no evaluation rows", hint="set data.eval or data.eval_rows")
        if not folder.final.is_dir():
            raise InputError(f"{folder.path} has no final weights", hint="`ftcli show RUN` tells how far it is")
        quiet = recipe.evaluate.model_copy(update={"generate": None})  # rows are measured here, prompts are not asked
        run = prepare(recipe.model_copy(update={"evaluate": quiet}), cpu=cpu, weights=folder.final)
        _check_world(run, profile)
        metrics = evaluate(run)
        if run.hardware.ranks.is_main:
            folder.write_json("evaluation.json", metrics)
        run.hardware.close()
    return metrics


def _shortened(recipe: Recipe) -> Recipe:
    """Return the recipe cut to two steps."""
    short = recipe.train.model_copy(update={"max_steps": 2, "epochs": None})
    schedule = recipe.schedule.model_copy(update={"warmup_steps": min(recipe.schedule.warmup_steps, 1)})
    return recipe.model_copy(update={"train": short, "schedule": schedule})


def _write_intent(folder: RunFolder, recipe: Recipe, profile: Profile | None, start: Path | None) -> None:
    folder.write_text("recipe.yaml", dump_recipe(recipe))
    folder.write_text("profile.yaml", "# trained without a profile\n" if profile is None else profile.as_yaml())
    folder.write_status("loading", 0 if start is None else step_of(start), 0)
    if start is not None and not belongs_to(folder, start):
        folder.write_json(ORIGIN, {"checkpoint": str(start.resolve()), "step": step_of(start)})


def _check_world(run: Run, profile: Profile | None) -> None:
    """Raise when what runs is not what the profile says: Accelerate does not always tell."""
    if profile is None:
        return
    real = run.hardware.distributed_type.replace("MULTI_CPU", "MULTI_GPU")
    wanted = profile.distributed_type
    if real != wanted and not (run.plan.processes == 1 and {real, wanted} == {"NO", "MULTI_GPU"}):
        raise RuntimeError(
            f"profile {profile.name} asks for {wanted}, but Accelerate started {run.hardware.distributed_type} "
            f"on {run.plan.processes} processes; start it with: ftcli train RECIPE --profile {profile.name}"
        )
