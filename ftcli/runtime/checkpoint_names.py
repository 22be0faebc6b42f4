"""Names of the checkpoints in a run folder, which are complete, and whether one is newer than the final weights.

Light: never imports torch.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

CHECKPOINTS, STATE, COMPLETE = "checkpoints", "state.json", "COMPLETE"
PROBE = "probe.safetensors"  # in the run folder: inputs and logits of the final weights, with their step
MOST_HEADER = 1 << 20  # bytes of the header of the probe

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


def checkpoint_after_final(run: Path, final: Path) -> Path | None:
    """Return a run's newest checkpoint if it is newer than the final weights; else None.

    It is newer if its step is greater. A checkpoint of another step may also be newer by the times of the files: a run
    that was resumed from an earlier step may have stopped before the step of its final weights. Times alone do not
    suffice, because a copy of the folder may have other ones, and a clock may have gone back.

    Args:
        run: The run folder.
        final: Its folder of final weights.
    """
    newest = checkpoints_of(run)[-1:]
    if not newest or not final.is_dir():
        return None
    step = final_step(run)
    if step is not None and step <= step_of(newest[0]):
        return newest[0] if step < step_of(newest[0]) else None
    return newest[0] if (newest[0] / COMPLETE).stat().st_mtime_ns > final.stat().st_mtime_ns else None


def final_step(run: Path) -> int | None:
    """Return the step of the final weights by the probe beside them; None if that is not known."""
    try:
        with (run / PROBE).open("rb") as file:
            header = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), MOST_HEADER)))
        return int(header["__metadata__"]["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
