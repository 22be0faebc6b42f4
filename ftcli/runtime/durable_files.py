"""Write files so that they survive a power cut: first the contents of a file, then the entry in its folder.

A rename makes a file visible under its name at once, but neither the name nor the contents are on the disk before
both are synced. After a power cut a file that was renamed without a sync may be empty. Light: never imports torch.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ftcli.runtime.errors import InputError, RunError


def write_durably(path: Path, *contents: bytes | memoryview) -> dict[str, Any]:
    """Write one file and sync it to the disk.

    Args:
        path: The file; its folder exists. The folder's entry is not synced.
        contents: Parts of the file, in order; memoryviews are of single bytes.

    Returns:
        The file's record for state.json: `size` in bytes and `sha256`.
    """
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for content in contents:
            file.write(content)
            digest.update(content)
        file.flush()
        os.fsync(file.fileno())
    return {"size": sum(map(len, contents)), "sha256": digest.hexdigest()}


def sync(path: Path) -> None:
    """Sync a file's contents, or the names of a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Sync all files and folders below `folder`, the innermost first, and then `folder` itself."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(parent, name))
        sync(Path(parent))


def make_folder(folder: Path) -> None:
    """Create a folder with its parents, and sync the entry of each new folder. Does nothing if the folder exists.

    Args:
        folder: The folder.

    Raises:
        OSError: The folder cannot be created. It is a `NotADirectoryError` if the path is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    missing = [item for item in (folder, *folder.parents) if not item.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for item in missing:
        sync(item.parent)


@contextmanager
def explain_full_disk(target: Path) -> Iterator[None]:
    """Raise `RunError` instead of the error of a full disk, which shutil and safetensors wrap in errors of their own.

    Args:
        target: The file or folder that the block writes, for the message.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        full = os.strerror(errno.ENOSPC)
        if full not in str(error) or isinstance(error, RunError | InputError):
            raise
        raise RunError(f"{target} could not be written: {full}. Free some space, or name another folder") from error
