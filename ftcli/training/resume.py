"""Find the checkpoint that a run starts from, and check that it fits the recipe and the rows.

All decisions are made from files, so every process of a run decides the same. checkpointing.py loads the weights.
Light: never imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.checkpoint.background import wait_for_unfinished
from ftcli.checkpoint.folder import find_damage, is_checkpoint, newest_intact, read_state, stored_recipe
from ftcli.config.plan import Plan, derive_plan, require_later_end
from ftcli.config.recipe import Recipe
from ftcli.config.recipe_keys import flatten, format_value, machine_hints
from ftcli.config.trust import stored_form
from ftcli.data.fingerprints import FORMULA, legacy_fingerprints
from ftcli.data.hub_files import find_hub_files
from ftcli.data.label_names import same_labels
from ftcli.data.revisions import READER, is_data_set, resolve
from ftcli.data.streaming.samples import changed_streams, is_same_stream
from ftcli.models.trained_on import is_same_base
from ftcli.runtime.checkpoint_names import CHECKPOINTS, checkpoints_of
from ftcli.runtime.errors import InputError, Problem, shortened
from ftcli.runtime.log import log_line
from ftcli.runtime.process import current_rank, has_ftcli_parent
from ftcli.runtime.reader_errors import user_path
from ftcli.runtime.run_folder import RunFolder
from ftcli.training.optim.schedule import learning_rate

if TYPE_CHECKING:
    from ftcli.training.prepared_data import PreparedData


CHANGED = "older versions read it through `datasets`, which changes NULL, NA, None, 007 and text that looks like a date"
AUTO, NEVER = "auto", "never"
VALUES = "auto, never, a run folder, or one of its checkpoints/step-NNNNNN"  # of --resume
ANYWAY = "--resume-anyway (in Python resume_anyway=True)"
LENGTH = ("train.max_steps", "train.epochs")
PATHS = re.compile(r"data\.(train|eval)(\.\d+)?\.path")
# Sections that do not change what is trained. Of `faults`: all steps of a checkpoint were good.
FREE_SECTIONS = ("output", "log", "hub", "evaluate", "checkpoint", "faults")


def find_start(folder: RunFolder, recipe: Recipe, resume: str, *, anyway: bool = False) -> Path | None:
    """Find the checkpoint that a run starts from.

    Args:
        folder: The run folder.
        recipe: The recipe.
        resume: "never"; "auto" for the newest intact checkpoint of the folder, if there is one; or the path of a
            checkpoint or a run, which may be another run.
        anyway: Accept a recipe that gives another loss curve.

    Returns:
        The checkpoint; None if the run starts at step 0.

    Raises:
        InputError: Files are damaged, or the recipe was changed in a way that affects the loss.
    """
    if resume == NEVER:
        return None
    wait_for_unfinished()
    if not resume:  # a variable of the shell that is not set
        raise InputError("--resume is empty", hint=VALUES)
    origin = folder.origin() if resume == AUTO else resume
    checkpoint = _newest_checkpoint(folder.path) if resume == AUTO else None
    if checkpoint is None and origin:  # auto: a run that started from a checkpoint of another run
        checkpoint = _named_checkpoint(user_path(origin, "--resume"))
    if checkpoint is None:
        return None
    stored_recipe(checkpoint)
    state = read_state(checkpoint)
    # Checkpoints without commits store revisions as the user wrote them.
    resolved = resolve(recipe, state).recipe if "resolution" in state else recipe
    changes, harmless = recipe_changes(state, resolved)
    moved = _moved(changes, state, resolved)
    harmless, changes = harmless + moved, [change for change in changes if change not in moved]
    if changes and not anyway:
        problems = [Problem(f"resuming {checkpoint}: {change}", hint=_hint(change, recipe)) for change in changes]
        raise InputError(problems)
    if _logs():
        for change in [*harmless, *changes]:
            log_line(f"resuming with a changed recipe: {change}")
    return checkpoint


def _moved(changes: list[str], state: dict[str, Any], recipe: Recipe) -> list[str]:
    """Return those changes that name the same model, or the same files of a stream, at another place."""
    models = [change for change in changes if change.startswith(("model.name:", "model.revision:"))]
    if not models or not is_same_base(state.get("frozen"), recipe):
        models = []
    paths = [change for change in changes if PATHS.fullmatch(change.partition(":")[0])]
    return models + (paths if paths and is_same_stream(state["data"].get("streams"), recipe) else [])


def _hint(change: str, recipe: Recipe) -> str:
    """Return what to do about a change of the recipe."""
    if change.startswith("model.revision:") and recipe.model.trust_remote_code:
        return (
            "with trust_remote_code a checkpoint does not choose the commit, whose code runs; if you trust the code of "
            f"the checkpoint's commit, name it in model.revision, or accept another loss curve with {ANYWAY}"
        )
    return f"set it back, or accept another loss curve with {ANYWAY}"


def is_done(folder: RunFolder, recipe: Recipe, checkpoint: Path) -> bool:
    """Return whether the run is done: it has ended, and at the last step of `recipe`."""
    has_ended = folder.status().get("state") == "done" and folder.final.is_dir()
    state = read_state(checkpoint)
    return has_ended and belongs_to(folder, checkpoint) and state["step"] == _last_step(recipe, state)


def belongs_to(folder: RunFolder, checkpoint: Path) -> bool:
    """Return whether a checkpoint is in a run folder."""
    return checkpoint.parent.resolve() == (folder.path / CHECKPOINTS).resolve()  # may be a link


def recipe_changes(state: dict[str, Any], recipe: Recipe) -> tuple[list[str], list[str]]:
    """Compare a checkpoint's recipe with another one.

    A changed length does not affect the loss if all learning rates of the steps already done stay the same. Another
    path of prepared rows does not affect it either: the fingerprint shows whether the rows are the same. The checkpoint
    has the values of an adapter in `adapter.path`.

    Args:
        state: The checkpoint's state.json.
        recipe: The new recipe.

    Returns:
        Changes that affect the loss, and other changes, each as `key: old -> new`.

    Raises:
        InputError: The new recipe ends before the checkpoint.
    """
    stored = Recipe.model_validate(state["recipe"])  # keys of newer versions have their defaults
    old, new = (dict(flatten(stored_form(each).model_dump(mode="json"))) for each in (stored, recipe))
    harmless_keys = set(machine_hints(Recipe))
    if recipe.model.batch_norm == "train":  # for sync, `prepare` compares the rows of all processes
        harmless_keys.remove("batch.micro_size")  # statistics are those of the rows of a forward pass
    require_later_end(state["step"], _last_step(recipe, state))
    if _has_same_rates(state, recipe):
        harmless_keys |= set(LENGTH)
    if recipe.data.streaming:  # the limit was not reached; for prepared rows it is part of the fingerprint
        harmless_keys.add("data.max_bad_rows")
    moving, harmless = list[str](), list[str]()
    for key in dict.fromkeys([*old, *new]):
        both = (old.get(key), new.get(key))
        if both[0] != both[1]:
            is_harmless = key in harmless_keys or key.partition(".")[0] in FREE_SECTIONS
            is_harmless = is_harmless or (not recipe.data.streaming and PATHS.fullmatch(key) is not None)
            is_harmless = is_harmless or (key == "adapter.path" and None not in both)
            (harmless if is_harmless else moving).append(f"{key}: {format_value(old, key)} -> {format_value(new, key)}")
    return moving, harmless


def check_rows(
    state: dict[str, Any],
    fingerprint: str,
    *,
    anyway: bool,
    legacy: Callable[[], list[str]] = list,
    digests: Mapping[str, str] | None = None,
    facts: Mapping[str, Any] | None = None,
    reread: Callable[[], list[str]] = list,
) -> None:
    """Check that a run's rows are those that a checkpoint was trained on.

    Args:
        state: The checkpoint's state.json.
        fingerprint: Data fingerprint of the run's rows.
        anyway: Accept other rows.
        legacy: Returns the fingerprints of the rows by the formula of 2f09857, for a checkpoint without a formula name.
        digests: Digest of the run's rows by split, for the message.
        facts: Facts that the task read from the run's training rows. The formula of 2f09857 does not cover them.
        reread: Returns the hub datasets that an older version read through `datasets`, and that ftcli reads now.

    Raises:
        InputError: The rows differ, or the checkpoint uses an unknown formula.
    """
    data = state["data"]
    formula, stored = data.get("formula"), data["fingerprint"]
    if anyway:
        return
    if formula not in (None, FORMULA):
        raise InputError(
            f"the checkpoint uses the data fingerprint formula {formula}, but this version of ftcli uses {FORMULA}",
            hint=f"use the version of ftcli that wrote it: {state['versions'].get('ftcli', 'see state.json')}",
        )
    before, now = ((each or {}).get("labels") for each in (data.get("facts"), facts))
    if before and now and not same_labels(before, now):
        raise InputError(
            f"the checkpoint's labels are {shortened(str(before))}, but those of the rows are {shortened(str(now))}",
            hint=f"restore the old data, or accept another loss curve with {ANYWAY}",
        )
    if stored == fingerprint or (formula is None and stored in legacy()):
        return
    written = data.get("digests") or {}
    changed = [split for split, digest in (digests or {}).items() if written and written.get(split) != digest]
    where = f"in {' and '.join(changed)} rows " if changed else ""
    if names := reread():
        raise InputError(
            f"the prepared rows are not those that the checkpoint was trained on: {where}values of "
            f"{', '.join(names)} are now those of its files; {CHANGED}; fingerprint {stored} then, {fingerprint} now",
            hint=f"start a new run, or continue with the values of the files with {ANYWAY}",
        )
    raise InputError(
        f"the prepared rows are not those that the checkpoint was trained on: {where}a source, the tokenizer, the "
        f"task's code or ftcli's own encoding has changed; fingerprint {stored} then, {fingerprint} now",
        hint=f"restore the old data, or accept another loss curve with {ANYWAY}",
    )


def checked_step(checkpoint: Path, recipe: Recipe, data: PreparedData, *, anyway: bool) -> int:
    """Check a checkpoint against the rows of a run, and return its step.

    Args:
        checkpoint: The checkpoint folder.
        recipe: The run's recipe as the user wrote it, without resolved commits.
        data: The run's task, rows and plan.
        anyway: Accept other rows than those of the checkpoint.

    Returns:
        The number of optimizer steps that are done.

    Raises:
        InputError: The checkpoint is damaged, was trained on other rows, or is of a step after the run's last.
    """
    task, rows = data.task, data.rows
    if problem := find_damage(checkpoint, hashes=False):
        raise InputError(problem)
    state = read_state(checkpoint)
    legacy = partial(legacy_fingerprints, recipe, task)
    reread = partial(reread_sets, state, recipe)
    check_rows(
        state, rows.fingerprint, anyway=anyway, legacy=legacy, digests=rows.digests, facts=rows.facts, reread=reread
    )
    if rows.streamed and not anyway and (changed := changed_streams(state["data"].get("streams"), recipe)):
        raise InputError(
            f"the files of {', '.join(changed)} are not those that the checkpoint was trained on",
            hint=f"restore the old data, or accept another loss curve with {ANYWAY}",
        )
    if rows.streamed and _logs():  # the fingerprint of a stream covers the values of its first rows only
        for name in reread():
            log_line(f"from here on, rows of {name} hold the values of its files; {CHANGED}")
    return require_later_end(state["step"], data.plan.steps)


def reread_sets(state: Mapping[str, Any], recipe: Recipe) -> list[str]:
    """Return the hub datasets that ftcli reads itself, but did not when the checkpoint was written.

    Args:
        state: The checkpoint's state.json.
        recipe: The run's recipe.
    """
    entries = [entry for entry in state.get("resolution") or [] if entry["key"] != "model"]
    read_by_ftcli = {entry["name"] for entry in entries if entry.get("reader") == READER}
    commits = {entry["name"]: entry["commit"] for entry in entries}
    reread = []
    for source in recipe.data.train_sources + recipe.data.eval_sources:
        if is_data_set(source) and source.path not in read_by_ftcli:
            commit = commits.get(source.path) or source.revision
            files = find_hub_files(source.model_copy(update={"revision": commit}))
            if files is not None and not files.why_not:
                reread.append(source.path)
    return list(dict.fromkeys(reread))


def _newest_checkpoint(run: Path) -> Path | None:
    """Return the newest intact checkpoint of a run, and log damaged ones; None if the run has no checkpoint."""
    checkpoint, problems = newest_intact(run, hashes=_checks_hashes())
    if checkpoint is None and problems:
        hint = "no intact checkpoint is left; move the run folder, or train into another one with --output"
        raise InputError([Problem(problem, hint=hint) for problem in problems])
    if _logs():
        for problem in problems:
            log_line(f"{problem}; falling back to {checkpoint}")
    return checkpoint


def _named_checkpoint(path: Path) -> Path:
    """Return a checkpoint folder itself, or the newest intact checkpoint of a run folder."""
    if not is_checkpoint(path):
        if not checkpoints_of(path):
            raise InputError(f"--resume {path}: not a checkpoint, and not a run with checkpoints", hint=VALUES)
        checkpoint = _newest_checkpoint(path)
        assert checkpoint is not None  # there are checkpoints, and damaged ones raise
        return checkpoint
    if problem := find_damage(path, hashes=_checks_hashes()):
        raise InputError(f"--resume {path}: {problem}", hint="name another checkpoint, or let --resume auto find one")
    return path


def _checks_hashes() -> bool:
    """Return whether this process verifies hashes. An ftcli parent has already done it."""
    return not has_ftcli_parent()


def _logs() -> bool:
    """Return whether this process logs: rank 0 without an ftcli parent."""
    return current_rank() == 0 and not has_ftcli_parent()


def _plan(recipe: Recipe, state: dict[str, Any]) -> Plan:
    """Return the plan of a recipe for the rows of a checkpoint, on one process."""
    return derive_plan(recipe, 1, state["data"]["rows"])


def _last_step(recipe: Recipe, state: dict[str, Any]) -> int:
    """Return the number of steps of a recipe for the rows of a checkpoint."""
    steps = _plan(recipe, state).steps
    if steps is None:  # the checkpoint's rows were a stream, those of the recipe are not
        raise InputError(
            "the checkpoint's rows were a stream, so the number of steps of train.epochs is unknown",
            hint="set train.max_steps",
        )
    return steps


def _has_same_rates(state: dict[str, Any], recipe: Recipe) -> bool:
    """Return whether a recipe with another length gives the same learning rates for the steps already done."""
    before = Recipe.model_validate(state["recipe"])
    rates = []
    for length in (before.train, recipe.train):
        changed = before.model_copy(update={"train": length})
        plan = _plan(changed, state)
        assert plan.steps is not None and plan.warmup_steps is not None  # `_last_step` has checked it
        rates.append(
            [
                learning_rate(
                    step,
                    peak=before.optimizer.learning_rate,
                    name=before.schedule.name,
                    steps=plan.steps,
                    warmup_steps=plan.warmup_steps,
                    min_ratio=before.schedule.min_ratio,
                )
                for step in range(state["step"])
            ]
        )
    return rates[0] == rates[1]
