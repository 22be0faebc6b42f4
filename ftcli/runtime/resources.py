"""Find the files that come with ftcli (recipes/ and accelerate_configs/) by name, and the cache folder.

An installed wheel contains both folders inside the package. In a checkout they are beside the package.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

from ftcli.runtime.errors import InputError, nearest
from ftcli.runtime.reader_errors import reason, user_path

PACKAGE = Path(str(files("ftcli"))).resolve()  # the folder of the package ftcli
MOST_LISTED = 12  # names in a message


def shipped_folder(kind: str) -> Path:
    """Return the folder `recipes` or `accelerate_configs` of this installation."""
    inside = PACKAGE / kind
    return inside if inside.is_dir() else PACKAGE.parent / kind


def shipped_files(kind: str) -> dict[str, Path]:
    """Return name -> file of all shipped files of one kind; names include sub-folders: `smoke/sft`."""
    folder = shipped_folder(kind)
    paths = sorted(folder.rglob("*.yaml"))
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in paths}


def find_file(name: str | Path, kind: str, word: str) -> Path:
    """Return the file with this path, or the shipped file with this name.

    Args:
        name: A path, or the name of a shipped file.
        kind: Folder of shipped files: `recipes` or `accelerate_configs`.
        word: The noun for error messages: `recipe` or `profile`.

    Raises:
        InputError: There is neither such a file nor a shipped file of this name.
    """
    path, shipped = user_path(name), shipped_files(kind)
    if path.is_file():
        return path
    if str(name) in shipped:
        return shipped[str(name)]
    listed = ", ".join(shipped) if len(shipped) <= MOST_LISTED else f"those that `ftcli show {word}s` lists"
    give = f"give a file, or one of {listed}"
    if path.is_dir():
        raise InputError(f"'{name}' is a folder, not a {word}", hint=give)
    beside = [str(other) for other in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    hint = nearest(str(name), [*shipped, *beside]) or give
    raise InputError(f"'{name}' is neither a {word} file nor the name of a shipped {word}", hint=hint)


def cache_root() -> Path:
    """Return ftcli's cache folder: FTCLI_CACHE, else ftcli/ under XDG_CACHE_HOME or ~/.cache."""
    folder = os.environ.get("FTCLI_CACHE")
    if folder:
        return Path(folder).expanduser().absolute()
    parent = os.environ.get("XDG_CACHE_HOME")
    return (Path(parent) if parent else Path.home() / ".cache").absolute() / "ftcli"


# Errors of a folder that cannot be created or written, whatever is written.
_UNWRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOSPC, errno.EDQUOT}


@contextmanager
def writing_cache() -> Iterator[None]:
    """Convert errors of a cache folder that cannot be written, or is full, inside this block.

    Raises:
        InputError: The message names the folder, the reason and FTCLI_CACHE. Other errors pass unchanged.
    """
    try:
        yield
    except OSError as error:
        root, named = cache_root(), error.filename
        is_inside = named is None or Path(os.fsdecode(named)).is_relative_to(root)
        if not is_inside or not (error.errno in _UNWRITABLE or (error.errno == errno.ENOENT and not root.exists())):
            raise
        raise InputError(
            f"the cache folder {root} cannot be written: {reason(error)}",
            hint="set the environment variable FTCLI_CACHE to a folder that you may write, on a disk with room",
        ) from error
