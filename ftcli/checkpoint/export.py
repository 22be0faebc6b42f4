"""Export trained weights for transformers and peft, from any checkpoint, on one process (`ftcli export`).

Weights are written one at a time, so that memory holds a few shards at most. A new process reloads and verifies the
export (verify.py). A folder that fails is removed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.checkpoint.answer_ends import FILE as GENERATION
from ftcli.checkpoint.answer_ends import complete_answer_ends, write_answer_ends
from ftcli.checkpoint.conversion import (
    cast_values,
    convert_adapter,
    convert_model,
    name_base_revision,
    name_base_rows,
    name_dtype,
)
from ftcli.checkpoint.deletion import DeletedCheckpoint, explain_deletion
from ftcli.checkpoint.export_job import ExportJob
from ftcli.checkpoint.final import check_base, check_final_files, find_probe, load_plain
from ftcli.checkpoint.folder import find_damage, is_checkpoint, newest_intact, read_state, stored_recipe
from ftcli.checkpoint.hf_shards import SHARD_SIZE, save_weights, shard_bytes
from ftcli.checkpoint.model_card import merged_card, model_card
from ftcli.checkpoint.proof import fits_in_memory, prove
from ftcli.checkpoint.rebuild import rebuild_by_task
from ftcli.checkpoint.task_errors import explain_task_errors
from ftcli.checkpoint.verify import ExpectedModel, digest, reload_in_fresh_process
from ftcli.config.load import load_run_recipe
from ftcli.config.trust import check_links, check_stored
from ftcli.models.adapter_folder import BASE_CONFIG, label_settings, write_adapter
from ftcli.models.hub import check_named_code
from ftcli.models.own_model import exported_part, names_in_files, record_cut_tie, save_config
from ftcli.models.trained_on import TRAINED_ON, trained_on, write_trained_on
from ftcli.runtime.checkpoint_names import checkpoints_of
from ftcli.runtime.durable_files import explain_full_disk, make_folder, sync, sync_tree
from ftcli.runtime.errors import ExportError, InputError, Problem, nearest
from ftcli.runtime.log import log_line
from ftcli.runtime.reader_errors import missing_folder, user_path
from ftcli.runtime.run_folder import RunFolder
from ftcli.runtime.stop import exit_on_sigterm
from ftcli.tasks.protocol import properties_of

if TYPE_CHECKING:
    from torch import Tensor


TRIES = 3  # of an export of the newest checkpoint, which its run may delete meanwhile
DTYPES = ("float32", "bfloat16", "float16")


def export(
    source: str | Path,
    directory: str | Path,
    *,
    merge: bool = False,
    dtype: str | None = None,
    shard_size: str = SHARD_SIZE,
    trust_remote_code: bool = False,
) -> Path:
    """Export the weights of a run or of a checkpoint, and verify them.

    A new process reloads the export and compares all weights and, if the run has a probe of them, the logits.

    Args:
        source: A run folder, of which the final weights or else the newest checkpoint are exported; or a checkpoint.
        directory: Folder to write, new or empty.
        merge: Whether to merge a LoRA adapter into its base model.
        dtype: float32, bfloat16 or float16; None keeps the dtype of training.
        shard_size: Largest size of a file, such as 5GB.
        trust_remote_code: Whether to run code of the task or the model. The stored recipe cannot enable it.

    Returns:
        The absolute path of the folder.

    Raises:
        InputError: An argument is invalid, or the source has no intact weights.
        ExportError: The reloaded model differs from the trained one.

    Example:
        >>> ftcli.export("runs/my", "exported", merge=True)
    """
    origin, target = user_path(source), user_path(directory).absolute()
    how: dict[str, Any] = {"merge": merge, "dtype": dtype, "most": shard_bytes(shard_size)}
    for left in reversed(range(TRIES)):
        try:
            return _export_once(_plan_export(origin, trusted=trust_remote_code, **how), target)
        except DeletedCheckpoint as error:
            if is_checkpoint(origin) or not left:
                raise
            log_line(f"{error.problems[0].what}; exporting the newest one")
    raise AssertionError


def _export_once(job: ExportJob, target: Path) -> Path:
    """Write an export and verify it; raises `DeletedCheckpoint` if the run deletes the checkpoint meanwhile."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"{target} is not an empty folder", hint="export into a new folder")
    temporary = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    try:
        make_folder(target.parent)
        temporary.mkdir()  # fails if a folder of this name exists
    except OSError as error:
        raise InputError(f"cannot create {target}: {error.strerror}", hint="export into another folder") from error
    with exit_on_sigterm(), explain_full_disk(target), ExitStack() as at_end:
        at_end.callback(shutil.rmtree, temporary, ignore_errors=True)
        with explain_deletion(job.checkpoint):
            expected = _write_checkpoint(job, temporary) if job.checkpoint else _write_final(job, temporary)
        distance, rounding = (
            reload_in_fresh_process(temporary, expected)
            if job.auto_class
            else (rebuild_by_task(job, temporary, expected), 0.0)
        )
        tolerance = job.tolerance_with(rounding)
        if not distance <= tolerance:
            raise ExportError(
                f"the logits of the reloaded model differ from those of the trained model by {distance:.2g}, "
                f"more than {tolerance:.2g}; {job.final or job.checkpoint} or its base model was changed"
            )
        sync_tree(temporary)
        temporary.rename(target)  # replaces an empty folder
        sync(target.parent)
    checked = "all weights are equal to the trained ones"
    if job.probe is not None:
        checked = f"its logits are within {distance:.1e} of the trained model's"
    elif expected.distance is not None:
        checked += f", and its logits are within {expected.distance:.1e} of the trained model's"
    loaded = "loads in plain transformers" if job.auto_class else "was built by its task"
    if job.recipe.model.new_tokens and job.recipe.adapter.type == "lora" and not job.merge:
        loaded += " (README.md says what a base with too few rows for the new tokens needs)"
    log_line(f"{target} {loaded}; {checked}")
    return target


def _plan_export(source: Path, *, merge: bool, dtype: str | None, most: int, trusted: bool) -> ExportJob:
    """Return the export that the arguments describe; raises `InputError` for invalid arguments."""
    if dtype is not None and dtype not in DTYPES:
        hint = nearest(dtype, DTYPES) or f"use one of {', '.join(DTYPES)}"
        raise InputError(f"--dtype {dtype} is not supported", hint=hint)
    final, checkpoint = find_weights(source)
    if checkpoint is None:
        recipe, run = load_run_recipe(source, trust_remote_code=trusted), RunFolder(source)
    else:
        with explain_deletion(checkpoint):
            recipe = check_stored(stored_recipe(checkpoint), checkpoint, trusted=trusted)
        run = RunFolder(checkpoint.parent.parent)
    if merge and recipe.adapter.type == "none":
        raise InputError("--merge: this run trained the whole model and has no adapter", hint="remove --merge")
    from ftcli.config.task_registry import find_task

    auto_class = getattr(find_task(recipe.task).Task, "auto_class", None) or ""
    if merge and not auto_class:
        raise InputError(
            "--merge supports models of transformers only, but the task of this run builds its own",
            hint="export the adapter without --merge",
        )
    return ExportJob(
        recipe=recipe,
        auto_class=auto_class,
        final=final,
        checkpoint=checkpoint,
        probe=find_probe(run, checkpoint),
        dtype=dtype or ("bfloat16" if recipe.precision == "bf16_pure" else "float32"),
        merge=merge,
        most=most,
    )


def find_weights(source: Path) -> tuple[Path | None, Path | None]:
    """Return (a run's final weights, None) or (None, an intact checkpoint); raises `InputError` without either."""
    if not source.exists():
        raise missing_folder(source)
    if is_checkpoint(source):
        if problem := find_damage(source):
            raise InputError(problem, hint="export another checkpoint: `ftcli show RUN` lists them")
        return None, source
    run = RunFolder(source)
    if run.final.is_dir():
        if newer := run.checkpoint_after_final():
            log_line(f"the run continued after its final weights; to export the newest checkpoint, name {newer}")
        return run.final, None
    checkpoint, problems = newest_intact(source) if checkpoints_of(source) else (None, [])
    if problems and not checkpoint:
        raise InputError(
            [Problem(problem, hint="no checkpoint is intact: restore one from a copy") for problem in problems]
        )
    if checkpoint is None:
        raise InputError(
            f"{source} has no final weights and no checkpoint",
            hint="check with `ftcli show RUN` that it is a run folder",
        )
    for problem in problems:
        log_line(f"{problem}; falling back to {checkpoint}")
    log_line(f"{source} has no final weights yet; exporting {checkpoint}")
    return None, checkpoint


def _write_final(job: ExportJob, folder: Path) -> ExpectedModel:
    """Write the export of a run's final weights; return what the reloaded model is compared with."""
    from ftcli.hardware.environment import quiet_libraries

    assert job.final is not None
    check_final_files(job.final, is_adapter=job.is_adapter, has_config=bool(job.auto_class))
    check_base(RunFolder(job.final.parent), job.recipe)
    trusted = job.recipe.model.trust_remote_code
    names = label_settings(job.final).get("id2label")
    expected = ExpectedModel.of(job, labels=job.head_width, names=names)
    check_named_code(str(job.final), job.recipe.model.revision, trusted=trusted)
    check_links(job.final)
    ignored = shutil.ignore_patterns("model*.safetensors*", *["adapter_*", BASE_CONFIG, TRAINED_ON] * job.merge)
    shutil.copytree(job.final, folder, ignore=ignored, dirs_exist_ok=True)
    if job.auto_class:
        complete_answer_ends(job.recipe, job.final, folder)
    if job.merge:
        quiet_libraries()
        model = load_plain(
            job.auto_class,
            job.final,
            job.head_width,
            dtype="auto",
            trust_remote_code=trusted,
            revision=job.recipe.model.revision,
        )
        ends = (folder / GENERATION).read_bytes() if (folder / GENERATION).exists() else None  # that were trained
        expected = _write_merged(job, model, folder, expected)
        if ends is not None:
            (folder / GENERATION).write_bytes(ends)
        card = folder / "README.md"
        card.write_text(merged_card(card.read_text(encoding="utf-8")), encoding="utf-8")
        return replace(expected, distance=prove(job, model, folder, labels=expected.labels))
    if job.is_adapter:
        name_base_revision(folder / "adapter_config.json", job.recipe.model)
        name_base_rows(folder, job.recipe.model.new_tokens)
        convert_adapter(folder / "adapter_model.safetensors", job.dtype)
    else:
        convert_model(job.final, folder, job.dtype, job.most)
    return expected


def _write_checkpoint(job: ExportJob, folder: Path) -> ExpectedModel:
    """Write the export of a checkpoint; return what the reloaded model is compared with."""
    import torch

    from ftcli.checkpoint.assemble import (
        adapter_weights,
        build_matching_model,
        full_weights,
        load_buffers,
        load_trained_weights,
        set_parameters,
    )
    from ftcli.checkpoint.reader import CheckpointReader
    from ftcli.hardware.environment import quiet_libraries
    from ftcli.tasks.build import build_task

    assert job.checkpoint is not None
    quiet_libraries()
    state, dtype = read_state(job.checkpoint), getattr(torch, job.dtype)
    if state["data"]["facts"] is None:
        raise InputError(
            f"an older version of ftcli wrote {job.checkpoint}, without the task's results from the rows",
            hint="resume the run for one more step, and export the checkpoint that it saves then",
        )
    task = build_task(job.recipe)
    model = build_matching_model(job.recipe, task, state)
    labels = model.config.num_labels if "Classification" in job.auto_class else 0
    names = model.config.id2label if labels else None
    expected = ExpectedModel.of(job, labels=labels, names=names)
    properties = properties_of(task)
    card = model_card(job.recipe, state["metrics"], model, job.auto_class, properties.pipeline_tag, task=task)
    with CheckpointReader(job.checkpoint, list(state["files"])) as stored:
        if not job.is_adapter:
            targets, values = full_weights(model, stored, state, dtype, part=properties.exported_part)
            expected = _write_model(job, task, exported_part(task, model), targets, values, folder, expected)
        else:
            trained = adapter_weights(model, stored)
            buffers = load_buffers(model, stored, state["buffers"])
            set_parameters(model, trained)
            if job.merge:
                expected = _write_merged(job, model, folder, expected)
                card = merged_card(card)
            else:
                tensors = {name: cast_values(value, dtype) for name, value in (trained | buffers).items()}
                write_adapter(model, tensors, folder, properties.adapter_task_type)
                write_trained_on(folder, trained_on(job.checkpoint))
                digests = {name: digest(value) for name, value in tensors.items()}
                expected = replace(expected, digests=digests)
        with explain_task_errors(task, "correct the method: the export needs it"):
            write_answer_ends(task, model, folder)
            task.save_processor(str(folder))
        (folder / "README.md").write_text(card, encoding="utf-8")
        if job.is_adapter and job.auto_class:
            return replace(expected, distance=prove(job, model, folder, labels=labels))
        if job.auto_class and job.probe is None and fits_in_memory(model):
            load_trained_weights(model.float(), stored, state, is_adapter=False)
            return replace(expected, distance=prove(job, model, folder, labels=labels))
    return expected


def _write_merged(job: ExportJob, model: Any, folder: Path, expected: ExpectedModel) -> ExpectedModel:
    """Write the base model with its adapter merged; return `expected` with the digest of every weight."""
    import torch

    from ftcli.checkpoint.assemble import merged_weights

    targets, values = merged_weights(model, getattr(torch, job.dtype))
    return _write_model(job, None, model.get_base_model(), targets, values, folder, expected)


def _write_model(
    job: ExportJob,
    task: Any,
    model: Any,
    targets: dict[str, Tensor],
    values: Iterator[tuple[str, Tensor]],
    folder: Path,
    expected: ExpectedModel,
) -> ExpectedModel:
    """Write a whole model; return `expected` with the digest of every weight."""
    digests: dict[str, str] = {}

    def digested() -> Iterator[tuple[str, Tensor]]:
        for name, value in values:
            digests[name] = digest(value)
            yield name, value

    with explain_task_errors(task, "correct the method: the export needs it"):
        save_config(task, model, folder)
    record_cut_tie(model, targets, folder)
    name_dtype(folder / "config.json", job.dtype)
    save_weights(names_in_files(model), targets, digested(), folder, job.most)
    return replace(expected, digests=digests, whole=True)
