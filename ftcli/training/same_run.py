"""Check before the first step that all ranks train the same run.

Each machine reads its own command line, recipe, rows and checkpoint. Ranks that differ would train together without any
error, and the result would belong to no recipe.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ftcli.config.recipe_keys import flatten
from ftcli.config.trust import stored_form
from ftcli.data.cache_key import task_code
from ftcli.runtime.environment import package_versions
from ftcli.runtime.errors import InputError, Problem, RunError
from ftcli.runtime.process import local_world_size
from ftcli.runtime.run_folder import SHARED, explain_disk_errors

if TYPE_CHECKING:
    from ftcli.data.revisions import Resolved
    from ftcli.hardware.collectives import Ranks
    from ftcli.runtime.run_folder import RunFolder

# Keys that may differ: places of files, whose contents are compared, and what concerns one machine only.
OWN_KEYS = re.compile(
    r"task|(output|log|hub)(\..*)?|model\.name|data\.(train|eval)(\.\d+)?(\.path)?|data\.workers|train\.max_minutes"
)
SECONDS_TO_APPEAR = 30.0  # a network file system may show a new file of another machine only after some seconds


class Start(Protocol):
    """What a rank starts from.

    Attributes:
        resolved: The recipe with the commits of names on the hub.
        state: State of the checkpoint, or None.
        base: What the model is; None if that is not known on this machine.
    """

    @property
    def resolved(self) -> Resolved: ...  # noqa: D102

    @property
    def state(self) -> Mapping[str, Any] | None: ...  # noqa: D102

    @property
    def base(self) -> Mapping[str, Any] | None: ...  # noqa: D102


def check_same_run(ranks: Ranks, folder: RunFolder | None, start: Start, *, rows: str, first_step: int) -> None:
    """Check that all ranks have the same recipe, rows, checkpoint and base, and see one run folder. A collective.

    Args:
        ranks: The processes of the run.
        folder: The run folder of this rank, or None.
        start: What this rank starts from.
        rows: Fingerprint of its prepared rows.
        first_step: Step at which it starts.

    Raises:
        InputError: A rank differs from rank 0. It is raised on every rank.
    """
    if ranks.world == 1:
        return
    values = {
        key: repr(value)
        for key, value in flatten(stored_form(start.resolved.recipe).model_dump(mode="json"))
        if not OWN_KEYS.fullmatch(key)
    }
    task = start.resolved.recipe.task
    values |= {"the task": task_code(task) or task, "a run folder": "absent" if folder is None else "given"}
    values |= {"the version of ftcli": package_versions().get("ftcli", "unknown"), "the first step": str(first_step)}
    values |= {"the digest of the prepared rows": rows, "the digest of the checkpoint's state": _digest(start.state)}
    if start.base is not None:
        values["the digest of the model's files"] = _digest({**start.base, "name": None})
    every: list[dict[str, str]] = ranks.collect(values)
    for rank, other in enumerate(every):
        unknown = {"the digest of the model's files"} - (every[0].keys() & other.keys())
        keys = [key for key in dict.fromkeys([*every[0], *other]) if key not in unknown]
        problems = [
            Problem(
                f"rank {rank} is not in the same run as rank 0: {key} is {other.get(key, 'absent')}, "
                f"and {every[0].get(key, 'absent')} on rank 0",
                hint="start all machines with the same command, recipe, rows and checkpoint",
            )
            for key in keys
            if other.get(key) != every[0].get(key)
        ]
        if problems:
            raise InputError(problems)
    if folder is not None and local_world_size(ranks.world) < ranks.world:
        _check_shared(ranks, folder)


def _check_shared(ranks: Ranks, folder: RunFolder) -> None:
    """Raise `InputError` unless all ranks see the folder of rank 0: the first save would fail otherwise.

    Raises `RunError` on every rank if rank 0 cannot write into it.
    """
    path, mark = folder.path / SHARED, os.urandom(8).hex()
    problem = ""
    if ranks.is_main:
        try:
            folder.write_text(SHARED, mark, durable=False)
        except OSError as error:  # other ranks wait for the mark, so they must get the error
            problem = str(error)
    mark, place, problem = ranks.collect((mark, str(folder.path), problem))[0]
    if problem:
        raise RunError(problem)
    seen = ranks.collect(_appears(path, mark))
    if ranks.is_main:
        with explain_disk_errors(path):
            path.unlink(missing_ok=True)
    if not all(seen):
        raise InputError(
            f"rank {seen.index(False)} does not see {place} of rank 0",
            hint="the run folder must lie on a file system that all machines share",
        )


def _appears(path: Path, text: str) -> bool:
    """Return whether a file has a text now or within `SECONDS_TO_APPEAR`."""
    until = time.monotonic() + SECONDS_TO_APPEAR
    while True:
        try:
            if path.read_text(encoding="utf-8") == text:
                return True
        except OSError:
            pass
        if time.monotonic() > until:
            return False
        time.sleep(0.2)


def _digest(values: Mapping[str, Any] | None) -> str:
    """Return a digest of JSON values; "none" without any."""
    if values is None:
        return "none"
    return hashlib.blake2b(json.dumps(values, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()
