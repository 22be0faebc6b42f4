"""Find the files of a streamed source: a file, a pattern, a folder or an address.

Hidden files of a folder are left out, as in folders of images: notebooks and file managers copy rows into them.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ftcli.data.assets.catalogue import asset_path
from ftcli.data.paths import FORMATS
from ftcli.data.streaming.line_reader import COMPRESSED, suffix_of
from ftcli.data.streaming.remote_files import is_address, is_visible, list_address
from ftcli.runtime.errors import InputError
from ftcli.runtime.reader_errors import user_path

if TYPE_CHECKING:
    from ftcli.config.recipe_data import Source


def format_of(name: str) -> str | None:
    """Return the name of a file's format in `datasets`, ignoring the suffix of a compression; None if unknown."""
    return FORMATS.get(suffix_of(name))


def data_files(names: Iterable[str]) -> list[str]:
    """Return the files of a folder that have a known format, sorted.

    Args:
        names: Paths or addresses of the visible files.

    Raises:
        InputError: The suffix of a file is a known one in upper case.
    """
    others, found = [], []
    for name in sorted(names):
        if format_of(name):
            found.append(name)
        elif format_of(name.lower()):
            others.append(name)
    if others:
        raise InputError(f"data.train: {others[0]}: the suffix is in upper case", hint="rename the file")
    return found


def local_files(source: Source) -> list[str] | None:
    """Return the local files of a source, sorted by name.

    Args:
        source: A source whose path is a file, a pattern, a folder, an address or a name on the hub.

    Returns:
        Paths of the files; None for an address or a name on the hub.

    Raises:
        InputError: There is no such file, or the files have several formats.
    """
    name = source.path
    if is_address(name):
        return None
    path = asset_path(name) if name.startswith("asset:") else user_path(name)
    if path.is_dir():
        inside = [str(file) for file in path.rglob("*") if is_visible(str(file), str(path)) and file.is_file()]
        files = data_files(inside)
        if not files:
            raise InputError(
                f"data.train: {path.absolute()} contains no data files", hint=f"known: {', '.join(FORMATS)}"
            )
    elif glob.has_magic(str(path)):
        files = sorted(file for file in glob.glob(str(path), recursive=True) if os.path.isfile(file))
        if not files:
            raise InputError(
                f"data.train: no file matches {path.absolute()}", hint="a relative path starts at the current folder"
            )
    elif path.exists() or format_of(name) or name.startswith((".", "/", "~", "asset:")):
        files = [str(path)]
    else:
        return None
    require_one_format(files, name)
    return files


def list_files(source: Source) -> tuple[list[str], list[int | None]] | None:
    """List the files of a source, which may be an address.

    Args:
        source: The source.

    Returns:
        (files, their sizes in bytes); None for a name on the hub. A size is None if the server does not send it.

    Raises:
        InputError: There is no such file, or the files have several formats.
    """
    files = local_files(source)
    if files is not None:
        return files, [os.path.getsize(file) for file in files]
    if not is_address(source.path):
        return None
    files, sizes = list_address(source.path, data_files)
    require_one_format(files, source.path)
    return files, sizes


def require_one_format(files: list[str], name: str) -> None:
    """Raise `InputError` if a file has no known format, or if files have different formats."""
    kinds = {format_of(file) for file in files}
    if None in kinds:
        known = ", ".join(FORMATS)
        other = next(file for file in files if format_of(file) is None)
        raise InputError(
            f"data.train: {other} has no known data format", hint=f"known: {known}, also with {', '.join(COMPRESSED)}"
        )
    if len(kinds) > 1:
        names = ", ".join(sorted(map(str, kinds)))
        raise InputError(
            f"data.train: {name} has files of several formats: {names}", hint="select one with a pattern: *.jsonl"
        )
