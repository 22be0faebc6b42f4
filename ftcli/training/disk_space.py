"""Check before the first step that the checkpoints of a run can be written and fit on the disk."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import torch

from ftcli.checkpoint.folder import folder_size
from ftcli.runtime.checkpoint_names import CHECKPOINTS
from ftcli.runtime.errors import InputError

if TYPE_CHECKING:
    from ftcli.config.recipe_training import Checkpoint
    from ftcli.training.run import Run


BYTES_PER_ELEMENT = 12  # a weight and two moments in float32


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
    elements = sum(torch.Size(shape).numel() for shape in run.hardware.trained_shapes(run.model).values())
    count = max_stored_checkpoints(run.recipe.checkpoint, run.first_step, run.steps)
    path = checkpoints if checkpoints.is_dir() else run.folder.path
    needed = BYTES_PER_ELEMENT * elements * count
    free = shutil.disk_usage(next(item for item in (path, *path.absolute().parents) if item.exists())).free
    if needed > free + folder_size(checkpoints):
        raise InputError(
            f"{count} checkpoints of {BYTES_PER_ELEMENT * elements / 1e9:.3g} GB do not fit into {path}: "
            f"{free / 1e9:.3g} GB are free",
            hint="free some space, choose another disk with --output, or lower checkpoint.keep",
        )


def max_stored_checkpoints(section: Checkpoint, first_step: int, steps: int) -> int:
    """Return the largest number of checkpoints that exist at the same time, including the one being written."""
    saves = 1 if section.every_steps is None else -(-steps // section.every_steps) - first_step // section.every_steps
    most = saves if section.keep is None else section.keep + 1 + (section.keep_best is not None)
    return min(max(saves, 1), most)
