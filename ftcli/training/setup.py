"""Build a `Run` from a recipe: one page of calls, with one call of `Hardware.prepare`.

The command line's worker, `accelerate launch` without ftcli and notebooks all call `prepare`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.checkpoint.final import describe_other_base
from ftcli.checkpoint.folder import STATE, read_state
from ftcli.config.ineffective_keys import warmup_problems
from ftcli.config.load import load_recipe
from ftcli.config.plan import check_rows_of_a_pass, check_rows_of_all_processes, shorten_for_dry_run
from ftcli.config.recipe import Recipe
from ftcli.data.provenance import row_names
from ftcli.data.revisions import Resolved, resolve
from ftcli.hardware.read_ahead import read_ahead, reads_ahead
from ftcli.models.helper_models import check_helpers, helper_digests
from ftcli.models.positions import check_lengths
from ftcli.models.token_ids import check_token_ids
from ftcli.models.trained_on import check_trained_on, differences, identity_of
from ftcli.runtime.errors import InputError
from ftcli.runtime.process import has_ftcli_parent, has_rank
from ftcli.runtime.process_settings import owns_settings
from ftcli.runtime.run_folder import RunFolder
from ftcli.runtime.seeds import seed_of
from ftcli.tasks.protocol import derives_columns
from ftcli.training.batches.loaders import build_loaders
from ftcli.training.prepared_data import PreparedData, prepare_data
from ftcli.training.resume import checked_step
from ftcli.training.run import LoadingTimes, Run
from ftcli.training.run_description import describe_run
from ftcli.training.same_run import check_same_run

if TYPE_CHECKING:
    from torch import nn

    from ftcli.config.plan import Plan
    from ftcli.hardware.interface import Hardware


@owns_settings
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
    """Build everything that one training run needs, and pass it through `Accelerator.prepare` once. A collective.

    Args:
        recipe: A `Recipe`, the path of one, or the name of a shipped recipe.
        overrides: Changes such as `"train.max_steps=10"`, applied in order.
        output: The run folder. Without it nothing is written.
        cpu: Train on the CPU, even on a machine with GPUs.
        weights: A folder of trained weights (a run's `final/`) to evaluate instead of the recipe's model.
        dry_run: Prepare two steps and one evaluation batch.
        resume: The folder of a checkpoint to continue from, written on any hardware.
        resume_anyway: Continue although rows or frozen weights are not those of the checkpoint.

    Returns:
        A `Run` for `for step in ftcli.steps(run)`.

    Raises:
        InputError: The recipe, the data, the model or the checkpoint is wrong. It is raised before the weights are
            read where that is possible.

    Example:
        >>> run = ftcli.prepare("recipe.yaml", overrides=["train.max_steps=10"])
        >>> for step in ftcli.steps(run):
        ...     print(step.number, step.loss)
    """
    began = _launch_time()
    from ftcli.hardware.environment import quiet_libraries
    from ftcli.training.acceleration import accelerate_model
    from ftcli.training.derived_columns import add_columns
    from ftcli.training.disk_space import check_disk
    from ftcli.training.final_weights import check_saving
    from ftcli.training.nonfinite import NonFiniteGuard
    from ftcli.training.optim.build import build_optimizer

    quiet_libraries()  # imports some of them
    loading = LoadingTimes(began)
    how: dict[str, Any] = {"dry_run": dry_run, "weights": weights}
    start = loading.timed("recipe", _read_start)(recipe, overrides, resume, anyway=resume_anyway, **how)
    config, data, lines = loading.timed("rows", _prepare_data)(start.resolved.recipe, output=output, cpu=cpu, **how)
    first_step = start.first_step(data, anyway=resume_anyway)
    folder = None if output is None else RunFolder(output)
    hardware = loading.timed("devices", _build_hardware)(config, data.plan, folder, cpu=cpu)
    check_same_run(hardware.ranks, folder, start, rows=data.rows.fingerprint, first_step=first_step)
    guard = NonFiniteGuard(config.faults, hardware, excluded=set())
    model = loading.timed("model", build_model)(config, data, weights)
    model, config, acceleration = loading.timed("kernels", accelerate_model)(model, config, data, hardware)
    data = acceleration.applied_to(data)
    optimizer = loading.timed("optimizer", build_optimizer)(model, config, fused=hardware.steps_on_gpu)
    loaders = build_loaders(config, data, first_step, hardware, guard.excluded)
    model, optimizer, prepared = loading.timed("placing", hardware.prepare)(model, optimizer, loaders.map_style)
    loaders = loaders.with_prepared(prepared)
    guard.name_rows = row_names(config, data.rows, loaders.train)

    run = Run(
        recipe=start.resolved.recipe,
        plan=data.plan,
        task=data.task,
        hardware=hardware,
        model=model,
        optimizer=optimizer,
        train_loader=loaders.train,
        eval_loader=loaders.evaluation,
        order=loaders.order,
        rows=data.rows,
        guard=guard,
        folder=folder,
        prompts=data.prompts,
        first_step=first_step,
        loading=loading,
        resolved=start.resolved,
        base=start.checked_base(anyway=resume_anyway),
        helpers=start.checked_helpers(anyway=resume_anyway),
        memory_saving=acceleration.recomputation.saving,
        compiled=acceleration.compiled,
    )
    run.log_lines += [*start.log_lines(), *acceleration.kernel_lines, *describe_run(run), *lines]
    run.log_lines += acceleration.memory_lines
    hardware.reseed(seed_of(config.seed, hardware.ranks.rank))
    check_disk(run)
    if derives_columns(run.task):
        add_columns(run, weights=weights, state=start.state, anyway=resume_anyway)
    if start.checkpoint is not None:
        _load_checkpoint(run, start.checkpoint)
    run.progress.remember(run)
    check_saving(run)
    return run


def _check_object(recipe: Recipe | str | Path, *, is_stored: bool) -> None:
    """Raise `InputError` for a recipe object whose warm-up would be rounded; a file is checked when it is read.

    A recipe that is stored with a run may be of an earlier version, which has rounded.
    """
    if isinstance(recipe, Recipe) and not is_stored and (problems := [*warmup_problems(recipe)]):
        raise InputError(problems)


def _launch_time() -> float:
    """Return the start of this launch on the clock of time.perf_counter: of the process if launched, else now."""
    import psutil

    if not (has_ftcli_parent() or has_rank()):
        return time.perf_counter()
    return time.perf_counter() - (time.time() - psutil.Process().create_time())


@dataclass(frozen=True)
class _Start:
    """What a run starts from.

    Attributes:
        requested: The recipe as the user wrote it, with overrides.
        resolved: The same recipe with the commits of names on the hub.
        base: What the model is (`identity_of`); None if it is not on this machine before it is loaded.
        helpers: Digests of the helper models whose files are on this machine before they are loaded.
        checkpoint: Folder of the checkpoint to resume from, or None.
        state: Its state.json, or None.
    """

    requested: Recipe
    resolved: Resolved
    base: dict[str, Any] | None
    helpers: dict[str, str]
    checkpoint: Path | None
    state: dict[str, Any] | None

    def log_lines(self) -> list[str]:
        """Return the warnings about another base than that of the adapter or, with --resume-anyway, the checkpoint."""
        if self.state is None:
            return describe_other_base(self.resolved.recipe)
        model = self.resolved.recipe.model
        found = differences(self.state.get("frozen"), model.name, model.revision, now=self.base)
        return [f"warning: resuming with another base: {each}" for each in found]

    def checked_base(self, *, anyway: bool) -> dict[str, Any] | None:
        """Return what the loaded model is. One that was downloaded only now is compared with the checkpoint."""
        if self.base is not None:
            return self.base
        model, base = self.resolved.recipe.model, identity_of(self.resolved.recipe)
        if self.state is not None and base is not None and not anyway:
            check_trained_on(self.state.get("frozen"), model.name, model.revision, now=base)
        return base

    def checked_helpers(self, *, anyway: bool) -> dict[str, str]:
        """Return the digests of the loaded helper models. Those that were found only now are compared, too."""
        helpers = helper_digests(self.resolved.recipe, self.helpers)
        if self.state is not None and not anyway:
            check_helpers(self.state, self.resolved.recipe, helpers)
        return helpers

    def first_step(self, data: PreparedData, *, anyway: bool) -> int:
        """Return the number of steps that are done: those of the checkpoint, if it fits the rows."""
        if self.checkpoint is None:
            return 0
        if self.state is not None and not anyway:
            check_rows_of_all_processes(self.state, self.requested, data.plan)
        return checked_step(self.checkpoint, self.requested, data, anyway=anyway)


def _read_start(
    recipe: Recipe | str | Path,
    overrides: Sequence[str],
    resume: str | Path | None,
    *,
    dry_run: bool,
    anyway: bool,
    weights: Path | None,
) -> _Start:
    """Read the recipe and the state of a checkpoint, and check that both have the same base model.

    Weight files are read ahead from here on, because the import of libraries and the preparation of rows take seconds.
    """
    _check_object(recipe, is_stored=resume is not None or weights is not None)
    requested = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    requested = shorten_for_dry_run(requested) if dry_run else requested
    checkpoint = None if resume is None else Path(resume)
    if checkpoint is not None and not (checkpoint / STATE).is_file():
        hint = "name the folder checkpoints/step-NNNNNN of a run, or leave `resume` out"
        raise InputError(f"resume={str(resume)!r}: not a checkpoint, it has no {STATE}", hint=hint)
    state = None if checkpoint is None else read_state(checkpoint)
    resolved = resolve(requested, state)
    if weights is None:
        check_rows_of_a_pass(resolved.recipe)
    if reads_ahead():
        read_ahead(resolved.recipe)
    base, model = identity_of(resolved.recipe), resolved.recipe.model
    helpers = helper_digests(resolved.recipe)
    if state is not None and not anyway:
        check_trained_on(state.get("frozen"), model.name, model.revision, now=base)
        check_helpers(state, resolved.recipe, helpers)
    return _Start(requested, resolved, base, helpers, checkpoint, state)


def _prepare_data(
    recipe: Recipe, *, output: str | Path | None, cpu: bool, weights: Path | None, dry_run: bool
) -> tuple[Recipe, PreparedData, list[str]]:
    """Return the recipe with its micro size decided, the data, and log lines about that size. A collective."""
    from ftcli.training.memory import choose_micro_batch_size

    data, trial = prepare_data(recipe, trains=weights is None, dry_run=dry_run), partial(prepare, cpu=cpu)
    recipe, lines = choose_micro_batch_size(recipe, trial, output=output, cpu=cpu, weights=weights, sizes=data.sizes)
    return recipe, data.with_micro_size(recipe), lines


def _build_hardware(recipe: Recipe, plan: Plan, folder: RunFolder | None, *, cpu: bool) -> Hardware:
    """Create the Accelerator and the process group. Trackers write only into a run folder. A collective."""
    from ftcli.hardware import interface
    from ftcli.models.kernels.float8 import check_float8_device

    hardware = interface.build(
        recipe,
        plan,
        cpu=cpu,
        trackers=[] if folder is None else list(recipe.log.trackers),
        folder=None if folder is None else str(folder.path),
    )
    check_float8_device(recipe, hardware.accelerator.device)
    return hardware


def build_model(recipe: Recipe, data: PreparedData, weights: Path | None = None) -> nn.Module:
    """Load the task's model, add the adapter, and check the model against prompts and row lengths.

    A collective if one rank reads the weights for all.

    Args:
        recipe: The recipe.
        data: The task and its rows; the task may need their labels for a head.
        weights: A folder of trained weights to load instead of the recipe's model.

    Returns:
        The model in training mode, not yet prepared. Ranks that read no weights hold meta tensors.

    Raises:
        InputError: The model cannot be loaded, or does not fit the prompts or the rows.
    """
    from ftcli.hardware.batch_norm import set_batch_norm
    from ftcli.hardware.requested_backend import load_whole_weights, read_weights
    from ftcli.models.adapters import add_adapter
    from ftcli.models.kernels.padding_masks import replace_mask_functions
    from ftcli.models.load import READ_WEIGHTS
    from ftcli.models.own_model import load_model
    from ftcli.models.unreached import freeze_unreached
    from ftcli.training.evaluation import check_prompts

    default_reader = READ_WEIGHTS.set(read_weights)
    try:
        model, heads = load_model(data.task, recipe, data.rows.facts, weights)
    finally:
        READ_WEIGHTS.reset(default_reader)
    with load_whole_weights():
        model = add_adapter(model, recipe, keep=heads, task_type=data.task.peft_type, weights=weights)
    data.task.finish_model(model)
    data.rows.log_lines.extend(set_batch_norm(model, recipe.model.batch_norm))
    freeze_unreached(model, recipe)
    replace_mask_functions(model)
    model.train()
    check_prompts(recipe, data.prompts, model)
    check_lengths(model, recipe, data.rows)
    tokenizer = getattr(data.task, "tokenizer", None)
    data.rows.log_lines.extend(check_token_ids(model, recipe.model.name, tokenizer, data.rows))
    return model


def _load_checkpoint(run: Run, checkpoint: Path) -> None:
    """Load all state of a checkpoint into a prepared run. A collective.

    The order is fixed:

    1. A stream of rows moves to its position. This can fail, so it comes before the slow parts.
    2. DDP rebuilds its gradient buckets by a forward and a backward pass. That pass changes trained statistics of batch
       norm, so it comes before buffers are loaded.
    3. Weights, optimizer state and buffers are loaded.
    4. The gradient watch compares with the loaded weights and moments.
    """
    from ftcli.training.checkpointing import load
    from ftcli.training.gradient_watch import Resumed

    state = read_state(checkpoint)
    if run.stream is not None:
        run.stream.seek(run.first_step, state.get("stream"))
    run.hardware.rebuild_ddp_buckets(run.model, lambda: run.loss_of(run.any_batch()))
    load(run, checkpoint)
    run.is_measured = bool(state["metrics"])
    run.guard.restore(state["not_finite"])
    run.resumed = Resumed.of(run)
    run.log_lines.append(f"resumed after step {run.first_step} from {checkpoint}")
