"""Save and load the state of a run: weights, optimizer state and buffers, by parameter name.

The format is the same for all backends, on safetensors. Each rank writes the ranges of flattened parameters that it
holds, under keys `kind/name@start`. The headers of the files are the index. A reader loads the ranges that overlap its
own, so the number of ranks may change. Nothing is gathered or unpickled (reasons: docs/explanation/our-own-code.md).
background.py has the threads, tensor_files.py the layout in memory, resume.py the rules, folder.py that of a folder.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from ftcli.checkpoint.background import run_on_every_rank
from ftcli.checkpoint.folder import FORMAT, newest_intact, prune, publish, read_state, update_state
from ftcli.checkpoint.foreign_files import remove_checkpoint
from ftcli.checkpoint.reader import CheckpointReader
from ftcli.checkpoint.tensor_files import (
    FileContents,
    TensorFile,
    copy_to_host,
    saved_bytes,
    split_into_files,
    wait_for_copies,
)
from ftcli.config.trust import stored_form
from ftcli.data.fingerprints import FORMULA
from ftcli.hardware.batch_norm import average_statistics
from ftcli.runtime.checkpoint_names import STATE, checkpoint_path, step_of
from ftcli.runtime.durable_files import make_folder, write_durably
from ftcli.runtime.environment import package_versions
from ftcli.runtime.errors import DiskError, InputError, RunError
from ftcli.runtime.log import log_line
from ftcli.runtime.process import local_world_size, profile_path
from ftcli.runtime.run_folder import RunFolder, has_checkpoints
from ftcli.tasks.shared.metric_names import require_metric
from ftcli.training.nonfinite import REMEDY, check_newest_step
from ftcli.training.progress import gather_cursors

if TYPE_CHECKING:
    from ftcli.training.run import Run


@torch.no_grad()
def save_checkpoint(
    run: Run, step: int, metrics: dict[str, float] | None = None, *, background: bool = False
) -> Path | None:
    """Write a checkpoint into the run folder, then remove old ones. A collective.

    Args:
        run: The run.
        step: Number of the step that was just done.
        metrics: Metrics of an evaluation after this step. `checkpoint.keep_best` compares them.
        background: Copy all values to host memory and write them in a thread. The checkpoint is complete when
            `run.saving.wait()` returns. The next save waits for it. Without it, the checkpoint is complete on return.

    Returns:
        The checkpoint folder. None if the newest step was not finite and will be undone.

    Raises:
        DiskError: A rank could not write this checkpoint, or the previous one in the background. On every rank.
        RuntimeError: A rank failed for another reason. On every rank.
        RunError: The run was stopped by a step that is not finite, or a step was interrupted.
        InputError: The run has no folder, or a newer run has it; the ranks do not share it; or `step` is not the step
            of the run. Or the metrics lack that of `checkpoint.keep_best`; a checkpoint without metrics is then
            written first.

    Example:
        >>> run = ftcli.prepare("recipe.yaml", output="runs/mine")
        >>> for step in ftcli.steps(run):
        ...     if step.number % 100 == 0:
        ...         ftcli.save_checkpoint(run, step.number)
    """
    if run.is_measured_only:
        return None
    if run.folder is None:
        if run.record is not None:
            raise InputError("the folder of this run belongs to a run that was prepared with the same output since")
        raise InputError("the run has no folder to save into", hint="name one: ftcli.prepare(recipe, output=FOLDER)")
    if not check_newest_step(run):
        return None
    run.progress.check_complete()
    if step != run.position:
        message = f"save_checkpoint was called for step {step}, but the run has done {run.position} steps"
        raise InputError(message, hint="pass step.number")
    run.heartbeat.beat("saving", step)
    try:
        _check_metric(run, metrics)
    except InputError:
        save_checkpoint(run, step)  # without metrics, so that no step is lost
        raise
    run.saving.wait()
    average_statistics(run.hardware.unwrap(run.model), run.recipe.model.batch_norm, run.hardware.ranks)
    folder, state = checkpoint_path(run.folder.path, step), _state(run, step, metrics or {})
    live = split_into_files(run.hardware.state_shards(run.model, run.optimizer))
    if background and _has_room(run):
        copies = [copy_to_host(part) for part in live]
        wait_for_copies()
        run.saving.start(partial(_write, run, folder, state, copies))
    else:
        _write(run, folder, state, map(_copied, live))
    return folder


@torch.no_grad()
def load(run: Run, folder: Path) -> None:
    """Load weights, optimizer state and buffers of a checkpoint into a prepared run. A collective.

    The checkpoint may have been written by any backend on any number of ranks.

    Args:
        run: The run.
        folder: The checkpoint. The caller has checked its files (`damage`).

    Raises:
        InputError: The checkpoint has other parameters than the run trains.
    """
    state = read_state(folder)
    _check_names(state["parameters"], run.hardware.trained_shapes(run.model), folder)
    run.hardware.start_from_update(run.model, run.optimizer, state["optimizer_updates"])
    with CheckpointReader(folder, list(state["files"])) as stored:
        for shard in run.hardware.state_shards(run.model, run.optimizer):
            for kind, tensor in shard.tensors.items():
                if kind in ("weight", "buffer") or stored.has(kind, shard.name):
                    values = stored.read(kind, shard.name, shard.start, tensor.numel())
                    tensor.copy_(values.view(tensor.shape))
                else:  # the moment of a parameter that had no gradient when the checkpoint was written
                    tensor.zero_()
    if run.hardware.loss_scale is not None and state["loss_scale"] is not None:
        run.hardware.loss_scale.restore(state["loss_scale"])


def record_missed_metrics(run: Run, metrics: dict[str, float] | None) -> None:
    """Add the metrics of a repeated evaluation to the checkpoint that the run resumed from. A collective.

    A stop had interrupted the evaluation of that checkpoint. With the metrics `checkpoint.keep_best` considers it. A
    checkpoint of another run is not changed.

    Args:
        run: The run.
        metrics: The metrics; None if the evaluation was interrupted again.
    """
    if run.folder is None or run.first_step == 0 or metrics is None or run.is_measured_only:
        return
    _check_metric(run, metrics)
    folder, ranks = checkpoint_path(run.folder.path, run.first_step), run.hardware.ranks

    def write() -> None:
        if ranks.is_main and (folder / STATE).exists():
            update_state(folder, metrics=metrics)

    run_on_every_rank(ranks, f"{folder} could not be written", write)
    run.is_measured = True


def _state(run: Run, step: int, metrics: dict[str, float]) -> dict[str, Any]:
    """Return the contents of state.json without its list of files. A collective."""
    profile = profile_path()
    return {
        "format": FORMAT,
        "step": step,
        "steps": run.steps,
        "seed": run.recipe.seed,
        "optimizer_updates": run.hardware.updates(run.model, run.optimizer),
        "loss_scale": None if run.hardware.loss_scale is None else run.hardware.loss_scale.state(),
        "not_finite": run.guard.record,
        "metrics": metrics,
        "written_by": {
            "profile": "no profile" if profile is None else Path(profile).stem,
            "distributed_type": run.hardware.distributed_type,
            "processes": run.plan.processes,
        },
        "data": {
            "formula": FORMULA,
            "fingerprint": run.rows.fingerprint,
            "digests": run.rows.digests,
            "rows": run.plan.rows,
            "facts": run.rows.facts,
            "streams": None if run.stream is None else run.stream.digests,
        },
        "stream": gather_cursors(run, step),
        "resolution": run.resolved.entries,
        "frozen": run.base,
        **({"helpers": run.helpers} if run.helpers else {}),
        "derived": run.derived,
        "versions": package_versions(),
        "parameters": run.hardware.trained_shapes(run.model),
        "buffers": [s.name for s in run.hardware.state_shards(run.model, run.optimizer) if "buffer" in s.tensors],
        "recipe": stored_form(run.recipe).model_dump(mode="json"),
    }


def _copied(part: FileContents) -> TensorFile:
    """Copy one part to the host and wait for the copy."""
    copied = copy_to_host(part)
    wait_for_copies()
    return copied


def _has_room(run: Run) -> bool:
    """Return whether every host has memory for the copies of its ranks. Torch keeps the memory, so decide once."""
    if run.saving.has_room is None:
        ranks, needed = run.hardware.ranks, saved_bytes(run.hardware.state_shards(run.model, run.optimizer))
        free = psutil.virtual_memory().available // local_world_size()
        run.saving.has_room = all(ranks.collect(needed < free))
        if not run.saving.has_room and ranks.is_main:
            sizes = f"{needed / 1e9:.3g} GB are needed here, {free / 1e9:.3g} GB are free"
            log_line(f"training waits for each checkpoint: too little host memory to save in the background ({sizes})")
    return run.saving.has_room


def _write(run: Run, folder: Path, state: dict[str, Any], parts: Iterable[TensorFile]) -> None:
    """Write and publish a checkpoint, then remove old ones. A collective, on any thread.

    Files are written into a temporary folder. It gets its final name when the files of all ranks are on the disk.
    """
    assert run.folder is not None
    run_folder, ranks, section, path = run.folder, run.hardware.ranks, run.recipe.checkpoint, run.folder.path
    temporary, what = folder.with_name(f"{folder.name}.tmp"), f"{folder} could not be written"

    def begin() -> None:
        if ranks.is_main:
            run_folder.ensure()
            make_folder(temporary.parent)
            remove_checkpoint(temporary)
            temporary.mkdir()

    def write() -> dict[str, Any]:
        names = (f"rank-{ranks.rank:05d}-{number:04d}.safetensors" for number in itertools.count())
        return {
            name: write_durably(temporary / name, part.header, part.data.numpy().data)
            for part, name in zip(parts, names, strict=False)
        }

    def finish() -> None:
        if ranks.is_main:
            run_folder.sync_rows()  # after a power cut the metrics must reach as far as the checkpoint
            publish(temporary, folder, state)
            prune(path, section.keep, section.keep_best)

    try:
        run_on_every_rank(ranks, what, begin)
        _check_seen(run_folder, temporary, run_on_every_rank(ranks, what, temporary.is_dir))
        records = run_on_every_rank(ranks, what, write)
        state["files"] = {name: record for part in records for name, record in part.items()}
        run_on_every_rank(ranks, what, finish)
    except (RuntimeError, DiskError) as error:
        if ranks.is_main:
            with suppress(OSError):
                remove_checkpoint(temporary)  # the disk may be full
        run_folder.check()
        if isinstance(error, DiskError) and not has_checkpoints(path):
            raise DiskError(error.what, has_checkpoints=False) from error
        raise


def _check_seen(run_folder: RunFolder, temporary: Path, seen: list[bool]) -> None:
    """Raise if a rank does not see the folder that the main rank has just created.

    Args:
        run_folder: The run folder.
        temporary: The folder that the main rank created in it.
        seen: Whether each rank sees it, in order of rank.

    Raises:
        InputError: The ranks are on several machines, which do not share the run folder.
        DiskError: The ranks are on one machine, so the folder was deleted.
    """
    if all(seen):
        return
    run_folder.check()
    if local_world_size(len(seen)) < len(seen):
        raise InputError(
            f"rank {seen.index(False)} does not see {temporary}",
            hint="the run folder must lie on a file system that all machines share",
        )
    raise DiskError(f"{temporary} was deleted while it was written", has_checkpoints=has_checkpoints(run_folder.path))


def _check_metric(run: Run, metrics: dict[str, float] | None) -> None:
    """Raise `InputError` if the metric of `checkpoint.keep_best` is missing.

    Names that a task declares were checked before, but some of them depend on the evaluation rows.
    """
    best = run.recipe.checkpoint.keep_best
    if metrics and best is not None:
        require_metric(best.metric, metrics)


def _check_names(stored: dict[str, list[int]], trained: dict[str, list[int]], folder: Path) -> None:
    """Raise `InputError` for the first parameter whose name or shape differs between the checkpoint and the run."""
    for name in [*trained, *stored]:
        if stored.get(name) != trained.get(name):
            raise InputError(
                f"{folder} is of another model: {name} is {stored.get(name, 'not there')}, "
                f"and {trained.get(name, 'not trained')} in this run",
                hint="resume with the recipe that wrote it: `ftcli show CHECKPOINT` prints it",
            )


def roll_back(run: Run) -> None:
    """Reset a run to its newest checkpoint. It then continues without the rows of its non-finite steps. A collective.

    Raises:
        RunError: There is no checkpoint.
    """
    run.saving.wait()  # the newest checkpoint may still be written
    checkpoint = run.hardware.ranks.collect(_newest_checkpoint(run) if run.hardware.ranks.is_main else None)[0]
    if checkpoint is None:
        remedy = "save earlier (checkpoint.every_steps)" if run.folder else "pass ftcli.prepare an `output`, and save"
        raise RunError(f"faults.non_finite: rollback: there is no checkpoint to return to; {remedy}, or {REMEDY}")
    load(run, checkpoint)
    run.first_step = step_of(checkpoint)
    run.progress.end_step(run.first_step)
    if run.stream is not None:
        run.stream.seek(run.first_step, read_state(checkpoint)["stream"])
    elif run.order is not None:
        run.order.first_step = run.first_step
    run.guard.must_roll_back = False
    if run.hardware.ranks.is_main and run.folder is not None:
        run.folder.rewind(run.first_step)
        excluded = f"{len(run.guard.excluded)} rows of non-finite steps are excluded"
        log_line(f"resumed after step {run.first_step} from {checkpoint}; {excluded}")


def _newest_checkpoint(run: Run) -> Path | None:
    """Return the newest intact checkpoint of a run, or the checkpoint of another run that it started from."""
    if run.folder is None:
        return None
    own, problems = newest_intact(run.folder.path)
    for problem in problems:
        log_line(problem)
    origin = run.folder.origin()
    return own or (Path(origin) if origin else None)
