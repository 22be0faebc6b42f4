"""Training processes that SIGKILL themselves, and all ranks with them, at a chosen operation on the run's files.

Python tells an audit hook of each file that is opened, renamed or removed before it happens: killing there hits every
window between two operations on purpose, however short. Processes fork from a server that has imported everything,
so that a run of a few tiny steps takes about a second.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from ftcli.testing import ON_CPU, PRELOADED, environment, fork_context, meeting_point, profile_environment

OPERATIONS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree")
HIDDEN = ON_CPU | {"HF_HUB_OFFLINE": "1"}

Moment = tuple[str, int]  # an operation as `_kind` names it, and which of its occurrences


def train(
    recipe: Path, output: Path, profile: str, kill: Moment | None, *, after: float = 0.0
) -> tuple[list[int], Counter[str]]:
    """Run `ftcli train --resume auto` on one process, or two under a profile, until it ends or is killed.

    `after`: seconds that the operation takes the disk before the kill, on the thread that it stands in.
    Returns (exit code of each rank, how often each operation happened on the main rank if it ended by itself). Raises
    `RuntimeError` when a rank is still there after two minutes.
    """
    context = fork_context(PRELOADED)
    world = 1 if profile == "single" else 2
    store, shared = meeting_point(world)  # the store lives as long as this name
    shared = {} if world == 1 else shared | profile_environment(profile, world)
    with environment(**HIDDEN):
        seen: Any = context.SimpleQueue()
        pids = context.Array("i", world)
        ranks = [
            context.Process(target=_rank, args=(rank, shared, recipe, output, kill, after, pids, seen))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
    try:
        for process in ranks:
            process.join(timeout=250)
        codes = [process.exitcode for process in ranks if process.exitcode is not None]
        if len(codes) < world:
            raise RuntimeError(f"of {world} ranks only {len(codes)} ended, with {codes}")
    finally:
        for process in ranks:
            process.kill()
    return codes, Counter() if any(codes) else seen.get()


def _rank(
    rank: int,
    shared: dict[str, str],
    recipe: Path,
    output: Path,
    kill: Moment | None,
    after: float,
    pids: Any,
    seen: Any,
) -> None:
    os.environ.update(shared)
    if shared:
        os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)})
    pids[rank] = os.getpid()
    counts: Counter[str] = Counter()

    def before(event: str, arguments: tuple[Any, ...]) -> None:
        if event in OPERATIONS and (kind := _kind(event, arguments, output)):
            counts[kind] += 1
            if kill is not None and kill[0] == kind and kill[1] == counts[kind]:
                while 0 in pids[:]:  # a rank that comes later than this would wait for the others forever
                    time.sleep(0.001)
                time.sleep(after)
                for pid in [pid for pid in pids if pid not in (0, os.getpid())]:
                    with suppress(ProcessLookupError):  # a rank that has ended by itself
                        os.kill(pid, signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)

    if rank == 0:
        sys.addaudithook(before)
    import torch

    from ftcli.launch import launcher

    torch.set_num_threads(1)
    output.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout = sys.stderr = (output.parent / f"rank-{rank}.log").open("a", buffering=1)
    launcher.train(recipe, output=output, resume="auto", cpu=True)
    if rank == 0:
        seen.put(counts)


def _kind(event: str, arguments: tuple[Any, ...], output: Path) -> str:
    """Return an operation on the run's files with numbers taken out of names, or nothing for any other."""
    if not isinstance(arguments[0], str | bytes | os.PathLike):
        return ""
    path = os.fsdecode(arguments[0])
    inside_a_tree = event == "os.remove" and path.endswith((".safetensors", ".json"))  # rmtree names entries alone
    reads = event == "open" and not (arguments[1] and set(str(arguments[1])) & set("wax"))
    if reads or not (path.startswith(str(output)) or inside_a_tree):
        return ""
    return re.sub(r"\d+", "N", f"{event} {os.path.relpath(path, output) if path.startswith(str(output)) else path}")
