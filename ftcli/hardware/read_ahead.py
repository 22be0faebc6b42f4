"""Read the weight files of a model into the page cache of this machine, while the run still imports its libraries.

The run later maps these files. Without the cache, its first access to each page would wait for the disk. The module
never imports torch, so that the process that starts the ranks can use it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from threading import Lock, Thread
from typing import TYPE_CHECKING

from ftcli.config.profile import profile_of_process
from ftcli.models.files import weight_files
from ftcli.models.frozen_weights import model_files_folder
from ftcli.runtime.errors import InputError
from ftcli.runtime.machine.host_memory import HostMemoryReader
from ftcli.runtime.process import current_rank, has_ftcli_parent, local_rank

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe


THREADS = 4  # a disk of a server reads several requests at once
BLOCK_BYTES = 4 << 20
LEAST_BYTES = 256 << 20  # of all files; smaller models are read within a fraction of a second
_begun: set[Path] = set()  # folders; trial runs that look for the largest micro-batch read the same one again


def reads_ahead() -> bool:
    """Return whether this process reads weight files ahead: the first of each machine on which a process reads them.

    A parent process has begun to read before it started this process.
    """
    if local_rank() != 0 or has_ftcli_parent():
        return False
    return current_rank() == 0 or not profile_of_process(os.environ).reads_weights_once


def read_ahead(recipe: Recipe) -> list[Thread]:
    """Start to read the weight files of a recipe's model in the background, in the order in which they are loaded.

    Nothing is read for a model that is not on this machine, is small, or is larger than the free memory, from which its
    first pages would be removed again. A process reads a folder once. A file that cannot be read is left to the run,
    which reports it.

    Args:
        recipe: The recipe, with resolved commits.

    Returns:
        The threads, which end with the process.
    """
    try:
        folder = model_files_folder(recipe)
        files = [] if folder is None or folder in _begun else weight_files(folder)
        total = sum(path.stat().st_size for path in files)
        if folder is None or not files or not LEAST_BYTES <= total <= HostMemoryReader().read().available:
            return []
    except (InputError, OSError, ValueError, TypeError, AttributeError):  # an index that is no index, among others
        return []
    _begun.add(folder)
    blocks, lock = chain.from_iterable(map(_blocks, files)), Lock()
    threads = [Thread(target=_read, args=(blocks, lock), name="read-ahead", daemon=True) for _ in range(THREADS)]
    try:
        for thread in threads:
            thread.start()
    except RuntimeError:  # no more threads are allowed; the others read everything
        pass
    return [thread for thread in threads if thread.ident is not None]


def _blocks(path: Path) -> Iterator[tuple[Path, int]]:
    """Yield the file and the position of each block."""
    yield from ((path, start) for start in range(0, path.stat().st_size, BLOCK_BYTES))


def _read(blocks: Iterator[tuple[Path, int]], lock: Lock) -> None:
    """Read blocks until none is left. Python's lock is free meanwhile."""
    buffer = bytearray(BLOCK_BYTES)
    try:
        while True:
            with lock:
                block = next(blocks, None)
            if block is None:
                return
            path, start = block
            with path.open("rb", buffering=0) as file:
                file.seek(start)
                file.readinto(buffer)
    except OSError:  # loading the model reports it
        return
