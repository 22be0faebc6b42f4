"""Convert errors of readers, parsers and decoders of other libraries, and check paths that a user gives.

An exception for a user's file becomes one `InputError` that names the file. `__main__` reports every other exception as
a bug. Imports the standard library only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ftcli.runtime.errors import InputError, RunError, nearest, shortened


def reason(error: BaseException) -> str:
    """Return a short reason for an exception: the first line of its message, or its type if it has no message.

    Args:
        error: An exception that a reader, a parser or a decoder raised.
    """
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 text: byte {error.start} cannot be decoded"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return shortened(first_line(error))


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its type if it has no message.

    Row numbers in messages of pyarrow are converted to count from 1.
    """
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    line = lines[0].strip()
    if type(error).__module__.partition(".")[0] == "pyarrow":  # it counts rows from 0
        line = re.sub(r"\bin row (\d{1,18})\b", lambda match: f"in row {int(match[1]) + 1}", line)
    return line


@contextmanager
def reading(where: object, hint: str = "") -> Iterator[None]:
    """Convert every exception that a reader raises inside this block into an `InputError` at `where`.

    Put only calls into this block that read a user's file. A bug of ftcli in the block would be reported as a mistake
    of the user.

    Args:
        where: The file, with `:row` if the row is known.
        hint: What to do about the error.

    Raises:
        InputError: A reader, parser or decoder failed. `InputError`, `RunError` and `MemoryError` pass unchanged.
    """
    try:
        yield
    except (InputError, RunError, MemoryError):
        raise
    except Exception as error:
        cause = error.__cause__ or error
        raise InputError(f"cannot be read: {reason(cause)}", where=str(where), hint=hint) from error


def path_problem(name: str) -> str | None:
    """Return why no file can have this path; None for a possible path.

    Does not access the file. Looks up only the user name after a leading `~`.

    Args:
        name: The path as the user wrote it.
    """
    if "\0" in name:
        return "contains a NUL character"
    try:
        Path(name).expanduser()
        encoded = os.fsencode(name)
    except UnicodeEncodeError:
        return "contains half of a surrogate pair, which is not text"
    except RuntimeError:
        return f"names a user who does not exist: {shortened(name.partition('/')[0], 60)}"
    if any(len(part) > 255 for part in encoded.split(b"/")):
        return "contains a name of more than 255 bytes"
    return "is longer than 4,095 bytes" if len(encoded) > 4095 else None


def output_file(name: str | os.PathLike[str], key: str, example: str) -> Path:
    """Return the path of a file to write that a user gave, with `~` expanded.

    Args:
        name: The path as the user wrote it.
        key: The option of the path, for messages.
        example: Name of a file, for messages.

    Raises:
        InputError: It is a folder, or in a folder that does not exist.
    """
    path = user_path(name, key)
    if path.is_dir():
        raise InputError(f"{key}: {path} is a folder", hint=f"give a file, such as {path / example}")
    if not path.parent.is_dir():
        raise InputError(f"{key}: the folder {path.parent} for {path.name} does not exist")
    return path


@contextmanager
def writing(path: Path, key: str) -> Iterator[None]:
    """Convert errors of the system inside the block, which writes a file of the user's choice.

    Args:
        path: The file.
        key: The option that names it, for messages.

    Raises:
        InputError: The file cannot be written.
    """
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        raise InputError(f"{path} cannot be written: {reason(error)}", hint=f"choose a file with {key}") from None


def user_path(name: str | os.PathLike[str], key: str = "") -> Path:
    """Return a path that a user gave, with `~` expanded.

    Args:
        name: The path as the user wrote it.
        key: The option or key of the path for messages, for instance `--profile`.

    Raises:
        InputError: No file can have this path, or the system refuses access to it.
    """
    text = os.fspath(name)
    where = key or shortened(text, 80)
    if problem := path_problem(text):
        raise InputError(f"this path {problem}", where=where)
    path = Path(text).expanduser()
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return path
    except OSError as error:
        message = f"{shortened(text, 200)} cannot be read: {reason(error)}"
        raise InputError(message, where=key, hint="check the path and its permissions") from None
    return path


def missing_folder(path: Path) -> InputError:
    """Return the error for a run, checkpoint or model folder that does not exist, with a similar name as its hint."""
    names = os.listdir(path.parent) if path.parent.is_dir() else []
    hint = nearest(path.name, names) or "give the folder of a run; a relative path starts at the current folder"
    return InputError(f"there is no folder {path}", hint=hint)
