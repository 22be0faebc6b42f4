"""Names of the checkpoints in a run folder, and which of them are complete."""

from __future__ import annotations

import re
from pathlib import Path

CHECKPOINTS, STATE, COMPLETE = "checkpoints", "state.json", "COMPLETE"

_NAME = re.compile(r"step-(\d{6,})")


def checkpoint_path(run: Path, step: int) -> Path:
    """Return the folder of a run's checkpoint after `step` optimizer steps."""
    return run / CHECKPOINTS / f"step-{step:06d}"


def step_of(folder: Path) -> int:
    """Return the step number in the name of a checkpoint folder; -1 for any other folder."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else -1


def checkpoints_of(run: Path) -> list[Path]:
    """Return the complete checkpoints of a run folder, the oldest first. Does not verify their files."""
    complete = [folder for folder in (run / CHECKPOINTS).glob("step-*") if (folder / COMPLETE).exists()]
    return sorted((folder for folder in complete if step_of(folder) >= 0), key=step_of)
