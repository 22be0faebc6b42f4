"""Read the rows of text files, compressed or not, from a disk or an address, starting at any row.

A line that is not a row becomes a `RowError` in its place, so that every row keeps its number. A file behind an
address is opened again at the same row when the connection breaks, or ends before the size that is known. The order
of files is decided in corpus.py.
"""

from __future__ import annotations

import gzip
import importlib
import io
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from ftcli.data.text_files import ONE_A_LINE, PLAIN, EmptyLine, Layout, UnreadableRow, parse_rows, reader_of
from ftcli.runtime.errors import InputError, RowError, RunError

STANDARD = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma"}  # suffix -> module of the standard library
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
BUFFER = 2**20  # bytes per read
RETRIES = 5  # failures in a row after which an address is given up
FIRST_WAIT = 1.0  # seconds before the first retry; each further retry waits twice as long
UNREADABLE = "is the file complete, and compressed as its name says?"
TRUNCATED = "Truncated compressed stream"  # pyarrow's message, an OSError like all others of pyarrow

Row = dict[str, Any]


class _Version(NamedTuple):
    """What an answer of a server says of the version of a file; None: nothing."""

    modified: datetime | None
    tag: str | None
    answered: datetime | None

    @property
    def has_own_time(self) -> bool:
        """Whether the time of the modification may be that of the answer."""
        if self.modified is None or self.answered is None:
            return False
        return abs(self.answered - self.modified) <= OWN_TIME


OWN_TIME = timedelta(seconds=60)  # a modification so shortly before an answer may be the time of the answer itself
_versions: dict[str, _Version] = {}  # address -> what its first answer said of its version


def suffix_of(name: str) -> str:
    """Return the suffix of a file's format, such as .jsonl for rows.jsonl.gz; a query of an address is ignored."""
    path = PurePosixPath(name.partition("?")[0])
    return PurePosixPath(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def text_rows(name: str | os.PathLike[str], where: str = "", layout: Layout = PLAIN) -> Iterator[Row]:
    """Yield the rows of a local text file.

    Args:
        name: Path of the file.
        where: Name of the file in messages; default: its path.
        layout: Separator of a table, or key of a JSON file, where the suffix does not determine it.

    Raises:
        InputError: A line of the file is not a row. The message contains the line's number.
    """
    path = os.fspath(name)
    suffix = suffix_of(path)
    with _opened(path, None) as file:
        filled = (row for row in parse_rows(file, suffix, layout) if not isinstance(row, EmptyLine))
        for count, row in enumerate(filled, start=1):
            if isinstance(row, RowError):
                raise unreadable_row(where or path, suffix, row, count)
            yield row


def unreadable_row(where: str, suffix: str, error: RowError, count: int) -> InputError:
    """Return the error for an unreadable row.

    Args:
        where: Name of the file in messages.
        suffix: Suffix of the file's format.
        error: The reason.
        count: Number of the row, counted from 1.
    """
    line = error.line if isinstance(error, UnreadableRow) else 0
    # An error in a .json file is one of the whole text, so the row's number means nothing.
    which = f"line {line}" if line and suffix == ".json" else f"row {count}"
    hint = ONE_A_LINE if suffix == ".jsonl" else "fix or delete that row"
    hint = "is it the right file?" if "UTF-8" in str(error) else hint
    return InputError(f"{which} {error}", where=f"{where}:{line}" if line else where, hint=hint)


def read_lines(name: str, skip: int, *, size: int | None = None, layout: Layout = PLAIN) -> Iterator[Row | RowError]:
    """Yield the rows of a text file, starting at row `skip`.

    Args:
        name: Path or address of the file.
        skip: Number of rows to leave out.
        size: Size of the file in bytes when the run began; None: unknown.
        layout: Separator of a table, or key of a JSON file, where the suffix does not determine it.

    Yields:
        A row, or a `RowError` for a line that is not a row. An empty line of a .txt file is an `EmptyLine`.

    Raises:
        InputError: A file on a disk has truncated or otherwise compressed data.
        RunError: The file has another size than `size`, or a file at an address has truncated data.
    """
    reader, failures, done = reader_of(suffix_of(name), layout), 0, skip
    while True:
        try:
            with _opened(name, size) as file:
                for number, unit in enumerate(reader.split(file)):
                    if number >= done:
                        done, failures = number + 1, 0
                        yield reader.parse(unit)
                require_size(name, size, local_size(name))
            return
        except _reading_errors() as error:
            if isinstance(error, EOFError) or TRUNCATED in str(error):
                message = f"{name} is truncated: the end of its compressed data is missing"
                raise RunError(message) if "://" in name else InputError(message, hint=UNREADABLE) from None
            if isinstance(error, gzip.BadGzipFile) and "://" not in name:
                raise InputError(f"{name} is not compressed as its name says: {error}", hint=UNREADABLE) from None
            failures += 1
            if failures > RETRIES or not _is_transient(name, error):
                raise
            time.sleep(FIRST_WAIT * 2 ** (failures - 1))


@contextmanager
def _opened(name: str, size: int | None) -> Iterator[Any]:
    """Open a file for reading decompressed bytes; raise `RunError` if its size is not `size`."""
    with ExitStack() as stack:
        if "://" in name:
            raw = stack.enter_context(_opened_address(name))
            actual = getattr(raw, "size", None)
            headers = getattr(getattr(raw, "r", None), "headers", {})  # of an HTTP answer
            _check_version(name, headers)
            is_encoded = headers.get("Content-Encoding", "identity") not in ("", "identity")
            whole = None if is_encoded else actual or size
            file: Any = stack.enter_context(io.BufferedReader(_Whole(name, raw, whole), BUFFER))
        else:
            plain = stack.enter_context(open(name, "rb", buffering=0))
            actual = os.fstat(plain.fileno()).st_size
            file = stack.enter_context(io.BufferedReader(_Bounded(plain, actual), BUFFER))
        require_size(name, size, actual)
        yield stack.enter_context(_decompressed(file, PurePosixPath(name.partition("?")[0]).suffix))


class _Whole(io.RawIOBase):
    """A file behind an address. Its end before `size` bytes is an error of the connection; None: size unknown."""

    def __init__(self, name: str, file: Any, size: int | None) -> None:
        self.name, self.file, self.size, self.count = name, file, size, 0

    def readable(self) -> bool:
        """Return True, as `io.BufferedReader` requires."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer and return the number of bytes; 0 at the end."""
        content = self.file.read(len(buffer))
        if not content and self.size is not None and self.count < self.size and len(buffer):
            raise ConnectionError(f"{self.name} ended after {self.count:,} of {self.size:,} bytes")
        buffer[: len(content)] = content
        self.count += len(content)
        return len(content)


class _Bounded(io.RawIOBase):
    """The first `size` bytes of a file, so that bytes which another program appends are not read."""

    def __init__(self, file: Any, size: int) -> None:
        self.file, self.left = file, size

    def readable(self) -> bool:
        """Return True, as `io.BufferedReader` requires."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer and return the number of bytes; 0 at the end."""
        count: int = self.file.readinto(memoryview(buffer)[: self.left])
        self.left -= count
        return count


def local_size(name: str) -> int | None:
    """Return the bytes that a local file has now; None for an address."""
    return None if "://" in name else os.stat(name).st_size


def require_size(name: str, size: int | None, actual: int | None) -> None:
    """Check that the size of a file has not changed since the run began.

    Args:
        name: Name of the file in messages.
        size: Bytes when the run began; None: unknown.
        actual: Bytes now; None: unknown.

    Raises:
        RunError: The sizes differ.
    """
    if size is not None and actual is not None and size != actual:
        message = f"{name} has {actual:,} bytes and had {size:,} when the run began: a stream's files must not change"
        raise RunError(message)


def forget_versions() -> None:
    """Accept any version of each file behind an address from now on, because a run begins."""
    _versions.clear()


def _check_version(name: str, headers: Any) -> None:
    """Raise `RunError` if the file behind an address is not the one that this process has opened before.

    ETags may differ between servers of the same file, and some servers send the time of the answer as that of the
    modification, so both have to differ. A modification after the first answer is one of the file that was read.
    """
    now = _version_of(headers)
    first = _versions.setdefault(name, now)
    differs = []
    if now.modified is not None and first.modified is not None and not first.has_own_time:
        differs.append(now.modified != first.modified)
    elif now.modified is not None and first.answered is not None and not now.has_own_time:
        differs.append(now.modified > first.answered and now.modified != first.modified)
    if now.tag is not None and first.tag is not None:
        differs.append(now.tag != first.tag)
    if differs and all(differs):
        raise RunError(f"{name} was replaced since the run began: a stream's files must not change")


def _version_of(headers: Any) -> _Version:
    """Return what the headers of an answer say."""
    modified, answered = (_time_of(headers.get(key)) for key in ("Last-Modified", "Date"))
    tag = headers.get("ETag")
    return _Version(modified, None if tag is None else tag.removeprefix("W/"), answered)


def _time_of(header: str | None) -> datetime | None:
    """Return the time in a header; None without one, or if it cannot be read."""
    try:
        time_of_header = None if header is None else parsedate_to_datetime(header)
    except ValueError:
        return None
    if time_of_header is not None and time_of_header.tzinfo is None:
        return time_of_header.replace(tzinfo=timezone.utc)
    return time_of_header


def _opened_address(name: str) -> Any:
    """Open the file behind an address for reading bytes."""
    from fsspec.core import url_to_fs

    if name.partition("://")[0] not in ("http", "https"):
        system, path = url_to_fs(name)
        return system.open(path, "rb")
    # One request for the whole file, because not every server supports ranges. Proxies come from the environment.
    system, path = url_to_fs(name, client_kwargs={"trust_env": True})
    return system.open(path, "rb", block_size=0)


def _decompressed(file: Any, suffix: str) -> Any:
    """Return a reader of the decompressed bytes; `file` itself if the suffix is not one of a compression."""
    if suffix in STANDARD:
        return importlib.import_module(STANDARD[suffix]).open(file)
    if suffix == ".zst":
        import pyarrow as pa

        # The stream reader of zstandard, which fsspec uses too, reports no error for a truncated file.
        return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd"), BUFFER)
    return file


def _reading_errors() -> tuple[type[Exception], ...]:
    """Return the exception types of truncated files and broken connections."""
    try:
        from aiohttp import ClientError
    except ImportError:
        return (EOFError, OSError)
    return (EOFError, OSError, ClientError)


def _is_transient(name: str, error: Exception) -> bool:
    """Return whether opening the file again may succeed: only for addresses, and not for a missing file."""
    return "://" in name and not isinstance(error, (FileNotFoundError, PermissionError, IsADirectoryError))
