"""Lock a run folder, so that one process at a time trains into it. Light: never imports torch."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ftcli.runtime.errors import InputError

LOCK = ".lock"  # locked by the process that trains into the folder or has launched the ranks that do

# Folders that this process reserves -> descriptor of the lock file; None before the file is locked.
_LOCKS: dict[Path, int | None] = {}
_BLOCKS: Counter[Path] = Counter()  # how many blocks of `locked` are open; runs of one notebook may share a folder


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Prevent other processes from training into a folder inside the block. Blocks of one process may overlap.

    The folder is locked at once if it exists, else when `lock` is called. Has no effect on file systems without locks.

    Args:
        folder: The run folder.

    Raises:
        InputError: Another process trains into the folder.
    """
    key, process = _real(folder), os.getpid()
    opened = _LOCKS.setdefault(key, None)
    if opened is not None and is_replaced(folder, opened):  # of an earlier run, whose folder was deleted or renamed
        os.close(opened)
        _LOCKS[key] = None
    _BLOCKS[key] += 1
    try:
        if folder.is_dir():
            lock(folder)
        yield
    finally:
        _BLOCKS[key] -= 1
        opened = None if _BLOCKS[key] else _LOCKS.pop(key)
        if opened is not None:
            with suppress(OSError):  # the error of a full or failing disk is raised elsewhere
                if os.getpid() == process and not is_replaced(folder, opened):  # not in a fork of that process
                    (folder / LOCK).unlink(missing_ok=True)
            os.close(opened)


def lock(folder: Path) -> None:
    """Lock a folder inside of `locked`; do nothing elsewhere. The system unlocks it when this process dies.

    Raises:
        InputError: Another process trains into the folder.
    """
    key, path = _real(folder), folder / LOCK
    while key in _LOCKS and _LOCKS[key] is None and os.access(folder, os.W_OK):
        opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(opened, 200).decode(errors="replace")
            os.close(opened)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise InputError(
                    f"another process trains into {folder}: {holder or 'it has just begun'}",
                    hint="wait for it, stop it, or choose another folder with --output",
                ) from None
            return
        if path.exists() and path.stat().st_ino == os.fstat(opened).st_ino:
            os.ftruncate(opened, 0)
            os.write(opened, f"process {os.getpid()} on {socket.gethostname()}".encode())
            _LOCKS[key] = opened
        else:  # the previous process has removed the file between our open and our lock
            os.close(opened)


def is_abandoned(folder: Path) -> bool:
    """Return whether the process that trained into a folder has certainly ended.

    Returns False when that process ran on another machine.
    """
    path = folder / LOCK
    if _LOCKS.get(_real(folder)) is not None:
        return False
    if not path.exists():  # a process removes the lock file last
        return True
    opened = os.open(path, os.O_RDONLY)
    try:
        holder = os.read(opened, 200).decode(errors="replace")
        fcntl.lockf(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # the process still runs, or the file system has no locks
        return False
    finally:
        os.close(opened)
    return holder.endswith(f" on {socket.gethostname()}")


def is_gone(folder: Path) -> bool:
    """Return whether a folder does not exist, was emptied, or another process has replaced the folder and its lock."""
    try:
        os.stat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:  # the next write raises the error of a failing disk
        return False
    opened = _LOCKS.get(_real(folder))
    return opened is not None and is_replaced(folder, opened)


def is_replaced(folder: Path, opened: int) -> bool:
    """Return whether the lock file of a folder is missing, or differs from the lock file that this process has open.

    It is missing after `rm -r`, which leaves the folder if the run writes into it meanwhile.

    Args:
        folder: The run folder.
        opened: Descriptor of the open lock file.
    """
    try:
        return os.stat(folder / LOCK).st_ino != os.fstat(opened).st_ino
    except OSError as error:  # the next write raises the error of a failing disk
        return isinstance(error, FileNotFoundError)


def _real(path: Path) -> Path:
    """Return a path with links resolved. Unlike `Path.resolve` it accepts links that form a circle."""
    return Path(os.path.realpath(path))
