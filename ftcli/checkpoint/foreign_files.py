"""Remove folders that ftcli wrote, and keep the entries in them that it did not write.

A user or another program may put files into a checkpoint, into `final/`, or into their temporary folders. When ftcli
replaces such a folder, it moves these files to one whose name begins with `not-by-ftcli-`. Light: never imports torch.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from ftcli.runtime.log import log_line

FOREIGN = "not-by-ftcli-"  # prefix for entries that ftcli did not write
CHECKPOINT_FILES = re.compile(r"rank-\d{5}-\d{4,}\.safetensors|\.?(state\.json|COMPLETE)(\.tmp)?")
WEIGHT_FILES = re.compile(r"(adapter_)?model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint or its temporary folder, which may be missing. Entries of others are moved aside.

    Args:
        folder: The folder. Of its entries, ftcli wrote those that `CHECKPOINT_FILES` matches.
    """
    if not folder.is_dir() or folder.is_symlink():
        return
    for path in folder.iterdir():
        if CHECKPOINT_FILES.fullmatch(path.name) and not (path.is_dir() and not path.is_symlink()):
            path.unlink()
    if any(folder.iterdir()):
        _report(move_aside(folder))
    else:
        folder.rmdir()


def set_aside(folder: Path) -> list[Path]:
    """Rename a folder of final weights before it is written anew, and remove the weights in it.

    Args:
        folder: The folder; it may be missing. A link is not changed.

    Returns:
        The renamed folders for `remove_rewritten`: this one, and those of earlier launches that were killed before they
        called it.
    """
    if folder.is_dir() and not folder.is_symlink():
        move_aside(folder)
    name = re.compile(re.escape(FOREIGN + folder.name) + r"(-\d+)?")
    asides = [path for path in folder.parent.iterdir() if name.fullmatch(path.name) and path.is_dir()]
    for aside in asides:
        for path in aside.iterdir():
            if WEIGHT_FILES.fullmatch(path.name) and path.is_file():
                path.unlink()
    return asides


def remove_rewritten(aside: Path, written: Path) -> None:
    """Remove the files of a folder that `set_aside` returned if the new folder has them too; others stay.

    Args:
        aside: The folder of an earlier launch.
        written: The folder that was written anew.
    """
    _remove_common(aside, written)
    if aside.is_dir():
        _report(aside)


def move_aside(path: Path) -> Path:
    """Rename an entry so that its name begins with `FOREIGN`, with a number if that name is taken; return the path."""
    number, target = 1, path.with_name(FOREIGN + path.name)
    while target.exists() or target.is_symlink():
        number += 1
        target = path.with_name(f"{FOREIGN}{path.name}-{number}")
    path.rename(target)
    return target


def _remove_common(old: Path, new: Path) -> None:
    """Remove the entries of a folder that another folder has too, and the folder itself if nothing is left."""
    for path in old.iterdir():
        other = new / path.name
        if path.is_dir() and not path.is_symlink():
            if path.name == "__pycache__":
                shutil.rmtree(path)
            elif other.is_dir():
                _remove_common(path, other)
        elif other.exists():
            path.unlink()
    if not any(old.iterdir()):
        old.rmdir()


def _report(folder: Path) -> None:
    """Log that a folder holds files that ftcli did not write."""
    names = sorted(path.name for path in folder.iterdir())
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    log_line(f"{', '.join(names[:3])}{more}: ftcli did not write it, so it was moved to {folder}")
