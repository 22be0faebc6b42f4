"""Whether a run continued after its final weights. Light: never imports torch."""

from __future__ import annotations

import json
import math
from pathlib import Path

from ftcli.runtime.checkpoint_names import COMPLETE, checkpoints_of, step_of
from ftcli.runtime.run_folder import PROBE, RunFolder

MOST_HEADER = 1 << 20  # bytes of the header of the probe


def checkpoint_after_final(run: RunFolder) -> Path | None:
    """Return the newest checkpoint if it is newer than the final weights; else None.

    It is newer by the times of the files or by its step, because a copy of the folder may have other times, and a clock
    may have gone back. Without a probe the step of the final weights is not known.
    """
    newest = checkpoints_of(run.path)[-1:]
    if not newest or not run.final.is_dir():
        return None
    is_newer = (newest[0] / COMPLETE).stat().st_mtime_ns > run.final.stat().st_mtime_ns
    return newest[0] if is_newer or step_of(newest[0]) > _final_step(run) else None


def _final_step(run: RunFolder) -> float:
    """Return the step of the final weights by the probe beside them; infinite if that is not known."""
    try:
        with (run.path / PROBE).open("rb") as file:
            header = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), MOST_HEADER)))
        return int(header["__metadata__"]["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return math.inf
