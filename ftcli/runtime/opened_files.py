"""Record the files that a user's code reads, with an audit hook: Python calls it before it opens any file.

Only the thread inside of `recording` is watched. Files that a library opens without Python, as pyarrow does, are not
seen. Files of Python itself, of installed packages and of the caches of ftcli and of the hub are left out.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

from ftcli.runtime.resources import PACKAGE, cache_root

INSTALLED = ("site-packages", "dist-packages")
SYSTEM = ("/proc/", "/sys/", "/dev/", "/etc/", "/usr/share/")
State = tuple[int, int] | None  # size and time of change; None: not known


@dataclass
class OpenedFiles:
    """The files that code has opened.

    Attributes:
        read: Absolute path of a file that it read -> its state then.
        written: Absolute paths of files that it wrote.
        relative: Absolute path -> the path in the code, if that depends on the working directory.
    """

    read: dict[str, State] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)
    relative: dict[str, str] = field(default_factory=dict)

    def add(self, other: OpenedFiles) -> None:
        """Add the files that another process or thread has opened."""
        self.read |= other.read
        self.written |= other.written
        self.relative |= other.relative

    def inputs(self) -> dict[str, State]:
        """Return the files of the user that were read and not written; the source of a module for its bytecode.

        Code has no state: the cache key has the contents of the task's own files. Other paths are as in the code, so
        that in another working directory they are those of the files that the code would read there.
        """
        found = {path: state for path, state in self.read.items() if path not in self.written}
        sources = {_source_of(path): None if path.endswith((".py", ".pyc")) else state for path, state in found.items()}
        return {
            path if path.endswith(".py") else self.relative.get(path, path): sources[path]
            for path in sorted(sources)
            if _is_users(path)
        }

    def changed(self) -> list[str]:
        """Return the inputs that have changed since they were read, so that memory may hold their old contents."""
        return [path for path, state in self.inputs().items() if state and (_state(path) or state) != state]


_thread = threading.local()  # `files`: the `OpenedFiles` that receives paths
# By name of a task. A module is imported once, so its files are kept while the process runs.
_by_task: dict[str, OpenedFiles] = {}
_at_import: dict[str, OpenedFiles] = {}
_at_creation: dict[str, OpenedFiles] = {}  # of the newest one


def files_of_task(name: str) -> OpenedFiles:
    """Return the files that a custom task has opened so far.

    Args:
        name: The recipe's `task`.
    """
    return _by_task.setdefault(_full(name), OpenedFiles())


def files_at_start(name: str) -> OpenedFiles:
    """Return the files that a custom task has opened while it was imported, and while it was created last.

    Unlike `files_of_task` they do not depend on what else this process has done, such as encoding rows.

    Args:
        name: The recipe's `task`.
    """
    files = OpenedFiles()
    for part in (_at_import, _at_creation):
        files.add(part.get(_full(name), OpenedFiles()))
    return files


@contextmanager
def recording_import(name: str) -> Iterator[None]:
    """Add every file that is opened inside of the context to those of the import of a custom task."""
    with recording(files_of_task(name)), recording(_at_import.setdefault(_full(name), OpenedFiles())):
        yield


@contextmanager
def recording_creation(name: str, module: ModuleType) -> Iterator[None]:
    """Add every file that is opened inside of the context to those of a custom task's creation, and what it imports.

    Args:
        name: The recipe's `task`.
        module: Its module.
    """
    created = _at_creation[_full(name)] = OpenedFiles()
    with recording(files_of_task(name)), recording(created):
        yield
    imported = imported_files(module)
    for files in (files_of_task(name), created):
        files.read |= dict.fromkeys(imported - files.read.keys())


def _full(name: str) -> str:
    """Return the name of a task that does not depend on the working directory."""
    return os.path.abspath(name) if "/" in name else name


@contextmanager
def recording(files: OpenedFiles) -> Iterator[None]:
    """Add every file that this thread opens inside of the context. A context around it gets them too.

    Args:
        files: Receives the files.
    """
    _install()
    before: OpenedFiles | None = getattr(_thread, "files", None)
    _thread.files = files
    try:
        yield
    finally:
        _thread.files = before
        if before is not None:
            before.add(files)


@cache
def _install() -> None:
    """Add the hook. Python cannot remove one; outside of `recording` it returns at once."""
    sys.addaudithook(_hook)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    """Record one opened file. It must not raise, because the file would not open then."""
    files = getattr(_thread, "files", None)
    if files is None or event != "open":
        return
    path, _, flags = arguments
    if not isinstance(path, str | bytes | os.PathLike):  # a number of an open file
        return
    given = os.fsdecode(path)
    name = os.path.abspath(given)
    if name != given and not os.path.isabs(given):
        files.relative[name] = given
    if (flags or 0) & (os.O_WRONLY | os.O_RDWR):
        files.written.add(name)
    else:
        files.read[name] = _state(name)


def _state(path: str) -> State:
    """Return size and time of change of a file; None if there is none."""
    try:
        stat = os.stat(path)
    except (OSError, ValueError):
        return None
    return stat.st_size, stat.st_ctime_ns


def _source_of(path: str) -> str:
    """Return the source file of a bytecode file in `__pycache__`, and any other path as it is."""
    if not path.endswith(".pyc"):
        return path
    try:
        return importlib.util.source_from_cache(path)
    except ValueError:  # not in a __pycache__ folder
        return path


def _is_users(path: str) -> bool:
    """Return whether a file belongs to neither Python, nor an installed package, nor a cache."""
    folders = {*_library_folders(), str(cache_root()), *_hub_caches()}
    parts = path.split(os.sep)
    return not (
        path.startswith(SYSTEM)
        or any(name in parts for name in INSTALLED)
        or any(path.startswith(os.path.join(folder, "")) for folder in folders)
    )


@cache
def _library_folders() -> tuple[str, ...]:
    """Return the folders of the standard library and of ftcli."""
    paths = sysconfig.get_paths()
    return (paths["stdlib"], paths["platstdlib"], str(PACKAGE))


def _hub_caches() -> list[str]:
    """Return the folders with downloads of the hub, whose commits a recipe names."""
    home = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    return [home, *(os.environ[name] for name in ("HF_HUB_CACHE", "HF_DATASETS_CACHE") if os.environ.get(name))]


def imported_files(module: ModuleType) -> set[str]:
    """Return the user's files that a module was made of: its own, and those of loaded modules that it imports.

    Import statements are read from the files, so modules with a computed name are not found.

    Args:
        module: A loaded module.
    """
    files: set[str] = set()
    pending = [module]
    while pending:
        loaded = pending.pop()
        path = getattr(loaded, "__file__", None)
        if not isinstance(path, str) or path in files or not path.endswith(".py") or not _is_users(path):
            continue
        files.add(path)
        pending += [
            sys.modules[name] for name in _imported_names(path, loaded.__package__ or "") if name in sys.modules
        ]
    return files


def _imported_names(path: str, package: str) -> Iterator[str]:
    """Yield the names of modules that a file imports, and of the packages above them."""
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):  # the file has changed since it was imported
        return
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))
