"""Check before the first step that the checkpoints of a run can be written and fit on the disk."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import torch

from ftcli.checkpoint.folder import folder_size, incomplete_checkpoints
from ftcli.runtime.checkpoint_names import CHECKPOINTS, checkpoints_of, step_of
from ftcli.runtime.errors import InputError

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe
    from ftcli.config.recipe_training import Checkpoint
    from ftcli.training.run import Run


def bytes_per_element(recipe: Recipe) -> int:
    """Return the bytes of a checkpoint per trained element: a weight and its moments in float32."""
    if recipe.optimizer.name == "sgd":
        return 8 if recipe.optimizer.momentum else 4
    return 12


def check_disk(run: Run) -> None:
    """Raise `InputError` if checkpoints cannot be written, or if all that exist at the same time do not fit on disk."""
    if run.folder is None:
        return
    checkpoints = run.folder.path / CHECKPOINTS  # may be a link to another disk
    if (checkpoints.exists() or checkpoints.is_symlink()) and not (
        checkpoints.is_dir() and os.access(checkpoints, os.W_OK)
    ):
        raise InputError(
            f"{checkpoints} is not a writable folder",
            hint="make the folder writable, or choose another folder with --output",
        )
    if run.first_step >= run.steps:
        return  # only the final weights remain to be written
    elements = sum(torch.Size(shape).numel() for shape in run.hardware.trained_shapes(run.model).values())
    complete = checkpoints_of(run.folder.path)
    later = [folder for folder in complete if step_of(folder) > run.first_step]
    stored = len(complete) - len(later)
    count = max_stored_checkpoints(run.recipe.checkpoint, run.first_step, run.steps, stored)
    path = checkpoints if checkpoints.is_dir() else run.folder.path
    size = bytes_per_element(run.recipe) * elements
    present = folder_size(checkpoints)
    # Stored checkpoints count with their real size, which may be less, and 0 for links to another disk.
    lasting = present - sum(map(folder_size, incomplete_checkpoints(run.folder.path)))  # until the next is complete
    needed = lasting + max(size, size * (count - stored) - sum(map(folder_size, later)))
    free = shutil.disk_usage(next(item for item in (path, *path.absolute().parents) if item.exists())).free
    if needed > free + present:
        raise InputError(
            f"{count} checkpoints of {size / 1e9:.3g} GB do not fit into {path}: {free / 1e9:.3g} GB are free",
            hint="free some space, choose another disk with --output, or lower checkpoint.keep",
        )


def max_stored_checkpoints(section: Checkpoint, first_step: int, steps: int, stored: int = 0) -> int:
    """Return the largest number of checkpoints that exist at the same time, including the one being written.

    Args:
        section: When checkpoints are saved, and how many are kept.
        first_step: The step at which the run starts.
        steps: Length of the run.
        stored: Number of checkpoints that the run folder holds up to that step.
    """
    saves = 1 if section.every_steps is None else -(-steps // section.every_steps) - first_step // section.every_steps
    total = stored + max(saves, 1)
    return total if section.keep is None else min(total, section.keep + 1 + (section.keep_best is not None))
