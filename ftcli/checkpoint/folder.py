"""Publish, find, check and remove the checkpoint folders of a run.

`checkpoints/step-000120/` contains safetensors files (see checkpointing.py). `state.json` has the size and sha256 of
each file. `COMPLETE` is written last and has the sha256 of state.json. Checkpoints are published atomically.

The launching parent and `ftcli show` use the module, so it never imports torch. Nothing that it reads can run code.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shlex
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ftcli.checkpoint.foreign_files import CHECKPOINT_FILES, move_aside, remove_checkpoint
from ftcli.config.recipe import Recipe
from ftcli.runtime.checkpoint_names import CHECKPOINTS, COMPLETE, STATE, checkpoints_of, step_of
from ftcli.runtime.durable_files import sync, write_durably
from ftcli.runtime.errors import InputError

if TYPE_CHECKING:
    from ftcli.config.recipe_training import Best


LISTINGS = 3  # of the checkpoints of a run in progress, which may delete all of an earlier listing
FORMAT = 1  # increased when older versions of ftcli can no longer read a checkpoint
ABANDONED = "abandoned-"  # prefix of checkpoints after the step of a resume; removed after the next complete checkpoint
_TEMPORARY = re.compile(r"step-\d{6,}\.tmp")
_ABANDONED_NAME = re.compile(rf"{ABANDONED}step-\d{{6,}}")


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint, intact or damaged."""
    return (folder / STATE).exists() or (folder / COMPLETE).exists() or step_of(folder) >= 0


def read_state(folder: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's state.json. Keys that older versions did not write are None or empty."""
    state: dict[str, Any] = json.loads((folder / STATE).read_bytes())
    state.setdefault("not_finite", [])
    state.get("data", {}).setdefault("facts", None)
    return state


def find_damage(folder: Path, *, hashes: bool = True) -> str:
    """Check the files of a checkpoint.

    Args:
        folder: The checkpoint.
        hashes: Whether to read every byte and compare hashes. Otherwise only names and sizes are compared.

    Returns:
        The first problem, with the name of the file; "" if the checkpoint is intact.
    """
    try:
        return _find_damage(folder, hashes=hashes)
    except FileNotFoundError as error:
        return f"{folder} was deleted while it was read: {Path(error.filename or folder).name} is missing"


def _find_damage(folder: Path, *, hashes: bool) -> str:
    """Return the first problem of a checkpoint's files; raises `FileNotFoundError` if they are deleted meanwhile."""
    if not folder.exists():
        others = ", ".join(other.name for other in checkpoints_of(folder.parent.parent))
        return f"there is no such checkpoint{f'; {folder.parent} has {others}' if others else ''}"
    for path in (folder / COMPLETE, folder / STATE):
        if problem := _file_problem(path):
            return problem
    content = (folder / STATE).read_bytes()
    if hashlib.sha256(content).hexdigest() not in _state_digests(folder):
        return f"{folder / STATE} is damaged: its sha256 is not the one in {COMPLETE}"
    state = json.loads(content)
    if state["format"] != FORMAT:
        writer = state.get("versions", {}).get("ftcli", "of another version")
        return f"{folder} has format {state['format']}, but this ftcli reads format {FORMAT}: use ftcli {writer}"
    for name, record in state["files"].items():
        path = folder / name
        if Path(name).name != name:
            return f"{path} is missing: its name leads outside the checkpoint"
        if problem := _file_problem(path):
            return problem
        if path.stat().st_size != record["size"]:
            return f"{path} is damaged: {path.stat().st_size} bytes, not {record['size']}"
    for path in sorted(folder.glob("*.safetensors")):
        if path.name not in state["files"]:
            return f"{path} does not belong to this checkpoint: move it away"
    if hashes:
        with ThreadPoolExecutor() as pool:  # hashing releases Python's global lock
            digests = dict(
                zip(state["files"], pool.map(_sha256, (folder / name for name in state["files"])), strict=True)
            )
        for name, record in state["files"].items():
            if digests[name] != record["sha256"]:
                return f"{folder / name} is damaged: its sha256 is not the one in {STATE}"
    return ""


def _file_problem(path: Path) -> str:
    """Return why a path is not a regular file; "" if it is one."""
    if path.is_symlink():
        return f"{path} is damaged: a link, not a file"
    return "" if path.is_file() else f"{path} is missing"


def newest_intact(run: Path, *, hashes: bool = True) -> tuple[Path | None, list[str]]:
    """Find the newest intact checkpoint of a run.

    Args:
        run: The run folder.
        hashes: Whether to compare the hashes of files.

    Returns:
        The checkpoint, or None, and the problem of each newer checkpoint.
    """
    for _ in range(LISTINGS):
        problems: list[str] = []
        listed = checkpoints_of(run)
        for folder in reversed(listed):
            if not (problem := find_damage(folder, hashes=hashes)):
                return folder, problems
            problems.append(problem)
        if checkpoints_of(run) == listed:
            break
    return None, problems


def publish(temporary: Path, folder: Path, state: dict[str, Any]) -> None:
    """Publish a checkpoint: write state.json, then COMPLETE, then rename the folder. Each is on disk before the next.

    Args:
        temporary: Folder with the written files.
        folder: Name of the checkpoint.
        state: Content of state.json.
    """
    record = write_durably(temporary / STATE, json.dumps(state, indent=1).encode())
    write_durably(temporary / COMPLETE, f"{record['sha256']}\n".encode())
    sync(temporary)
    _remove_earlier(folder)  # a user's own loop may save twice at one step
    temporary.rename(folder)
    sync(folder.parent)


def update_state(folder: Path, **changes: Any) -> None:
    """Change keys of a checkpoint's state.json atomically: a killed process leaves the old or the new state.

    COMPLETE contains the sha256 of both states meanwhile.

    Args:
        folder: The checkpoint.
        **changes: New values by key.
    """
    old = (folder / STATE).read_bytes()
    new = json.dumps(json.loads(old) | changes, indent=1).encode()
    before, after = (hashlib.sha256(content).hexdigest() for content in (old, new))
    for name, content in ((COMPLETE, f"{before}\n{after}\n".encode()), (STATE, new), (COMPLETE, f"{after}\n".encode())):
        write_durably(folder / f".{name}.tmp", content)
        (folder / f".{name}.tmp").replace(folder / name)
        sync(folder)


def _state_digests(folder: Path) -> list[str]:
    """Return the valid sha256 of a checkpoint's state.json: one, or two if `update_state` was interrupted."""
    lines = (folder / COMPLETE).read_text(encoding="utf-8", errors="replace").split()
    return lines if len(lines) < 3 and all(re.fullmatch("[0-9a-f]{64}", line) for line in lines) else []


def abandon(run: Path, step: int) -> None:
    """Rename the checkpoints after `step`, so that no later resume uses them, and remove incomplete ones.

    Entries that ftcli did not write stay. If they are inside of a folder that is removed, they are moved aside.

    Args:
        run: The run folder.
        step: The step from which the run resumes.
    """
    for folder in incomplete_checkpoints(run):
        remove_checkpoint(folder)
    for folder in list((run / CHECKPOINTS).glob("*")):
        if step_of(folder) > step and _is_ours(folder):
            target = folder.with_name(ABANDONED + folder.name)
            remove_checkpoint(target)
            folder.rename(target)


def incomplete_checkpoints(run: Path) -> list[Path]:
    """Return the folders of checkpoints that were not written to the end. A resumed run removes them."""
    return [path for path in (run / CHECKPOINTS).glob("*") if _TEMPORARY.fullmatch(path.name) and _is_folder(path)]


def unused_entries(run: Path) -> list[tuple[Path, str]]:
    """Return the entries of a run's `checkpoints/` that are neither complete checkpoints nor renamed by ftcli.

    Args:
        run: The run folder.

    Returns:
        Pairs of a path and the reason why it is not used.
    """
    entries = []
    for path in sorted((run / CHECKPOINTS).glob("*")):
        if not _is_ours(path):
            entries.append((path, "was not written by ftcli and is not used or removed"))
        elif step_of(path) >= 0 and not (path / COMPLETE).exists():
            entries.append((path, f"has no {COMPLETE} and is not used; the next saved checkpoint removes it"))
    return entries


def _is_folder(path: Path) -> bool:
    """Return whether a path is a folder and not a link."""
    return path.is_dir() and not path.is_symlink()


def _is_ours(path: Path) -> bool:
    """Return whether ftcli wrote an entry of `checkpoints/`, by its name and, without COMPLETE, by its files."""
    if not _is_folder(path):
        return False
    if step_of(path) >= 0 and not (path / COMPLETE).exists():
        return all(CHECKPOINT_FILES.fullmatch(item.name) for item in path.iterdir())
    return step_of(path) >= 0 or any(pattern.fullmatch(path.name) for pattern in (_TEMPORARY, _ABANDONED_NAME))


def _remove_earlier(folder: Path) -> None:
    """Remove an earlier checkpoint of the same step; an entry that ftcli did not write is renamed instead."""
    if _is_ours(folder):
        _remove(folder)
    elif folder.exists() or folder.is_symlink():
        move_aside(folder)


def prune(run: Path, keep: int | None, keep_best: Best | None) -> None:
    """Remove old checkpoints. Call it after a checkpoint is complete.

    Args:
        run: The run folder.
        keep: How many of the newest checkpoints remain; None for all.
        keep_best: The metric by which the best checkpoint remains too; None for no metric.
    """
    folders = checkpoints_of(run)
    best = None if keep_best is None else find_best(folders, keep_best)
    for folder in [] if keep is None else folders[:-keep]:
        if folder != best:
            _remove(folder)
    newest = step_of(folders[-1]) if folders else -1
    for folder in list((run / CHECKPOINTS).glob("*")):
        is_half_removed = 0 <= step_of(folder) < newest and not (folder / COMPLETE).exists()
        if (is_half_removed or _ABANDONED_NAME.fullmatch(folder.name)) and _is_ours(folder):
            _remove(folder)


def find_best(folders: list[Path], keep_best: Best) -> Path | None:
    """Return the checkpoint with the best value of a metric; the oldest of equal ones.

    Args:
        folders: Checkpoints, oldest first.
        keep_best: The metric and its direction.

    Returns:
        The checkpoint, or None if none has a finite value.
    """
    sign = 1 if keep_best.direction == "min" else -1
    scores = {}
    for folder in folders:
        value = None if find_damage(folder, hashes=False) else read_state(folder)["metrics"].get(keep_best.metric)
        if value is not None and math.isfinite(value):
            scores[folder] = sign * value
    return min(scores, key=lambda folder: scores[folder]) if scores else None


def describe_best(run: Path) -> str:
    """Return the best checkpoint of a run with its value and the command that exports it.

    Args:
        run: The run folder.

    Returns:
        The text; "" if the recipe of the newest checkpoint has no `keep_best`, or if no checkpoint was evaluated.
    """
    newest = newest_intact(run, hashes=False)[0]
    try:
        keep_best = None if newest is None else stored_recipe(newest).checkpoint.keep_best
    except InputError:  # another version of ftcli wrote it
        return ""
    best = None if keep_best is None else find_best(checkpoints_of(run), keep_best)
    if keep_best is None or best is None:
        return ""
    kind, value = "smallest" if keep_best.direction == "min" else "largest", read_state(best)["metrics"]
    return (
        f"step {step_of(best)} has the {kind} {keep_best.metric} of the checkpoints that were evaluated, "
        f"{value[keep_best.metric]:.6g}; `ftcli export {shlex.quote(str(best))} FOLDER` exports it"
    )


def folder_size(folder: Path) -> int:
    """Return the total size of a folder's files in bytes. Another process may remove some of them meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):  # skips folders that no longer exist
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _remove(folder: Path) -> None:
    """Remove a checkpoint, COMPLETE first, so that a killed process leaves no folder that looks complete."""
    (folder / COMPLETE).unlink(missing_ok=True)
    remove_checkpoint(folder)


def _sha256(path: Path) -> str:
    """Return the sha256 of a file, read in blocks."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def stored_recipe(checkpoint: Path) -> Recipe:
    """Return the recipe of a checkpoint.

    Raises:
        InputError: This version of ftcli cannot read it.
    """
    state = read_state(checkpoint)
    try:
        return Recipe.model_validate(state.get("recipe"))
    except ValidationError as error:
        keys = ", ".join(dict.fromkeys(".".join(map(str, problem["loc"])) for problem in error.errors()))
        raise InputError(
            f"this version of ftcli cannot read the recipe of {checkpoint} (keys: {keys})",
            hint=f"use the version that wrote it: {state.get('versions', {}).get('ftcli', 'see state.json')}",
        ) from error
