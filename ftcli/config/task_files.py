"""Find the files of a custom task's code, and those that have changed since a process imported them.

Python imports a module once. A notebook that goes on after an edit would train with the old code, and rows of the old
code would be stored as those of the new one.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

_files: dict[str, list[Path]] = {}  # module of a task -> its files
# File -> digest of its contents, and spec of its module, when this process imported it.
_imported: dict[Path, tuple[str, ModuleSpec | None]] = {}


def task_files(name: str) -> tuple[Path, list[Path]]:
    """Return the file of a custom task and the files of its folder that it imports, directly or indirectly.

    The files are found by parsing import statements; nothing is executed. Modules with a computed name are not found.

    Args:
        name: Name of a custom task: `./my_task.py`, or `package.module`.

    Returns:
        The folder that the files are in, and the files, sorted; no files for a module that is not found as a file.
    """
    folders, roots, pending = _first_files(name)
    files = set(pending)
    while pending:
        for file in _files_imported_by(pending.pop(), roots):
            if file not in files and any(folder in file.parents for folder in folders):
                files.add(file)
                pending.append(file)
    return roots[0], sorted(files)


def remember_code(module: str, name: str) -> None:
    """Remember the contents of a task's files, immediately before its module is imported.

    A file that the process has imported before, as for another task, keeps what is remembered of it.
    """
    files = _files[module] = task_files(name)[1]
    specs = _specs(files)
    for file in files:
        if file not in _imported or specs.get(file) is None or specs[file] is not _imported[file][1]:
            _imported[file] = (_digest(file), specs.get(file))


def note_modules(module: str) -> None:
    """Remember which modules hold the code of a task's files, immediately after its module was imported."""
    for file, spec in _specs(_files[module]).items():
        _imported[file] = (_imported[file][0], spec)


def changed_code(module: str) -> tuple[list[Path], list[Path]]:
    """Return the files of a task whose code in this process is older, and those that were reloaded since.

    Files that this process has not imported are in neither list. `importlib.reload` gives a module a new spec.
    """
    older, reloaded = [], []
    files = _files.get(module, [])
    specs = _specs(files)
    for file in files:
        digest, spec = _imported[file]
        if file not in specs or _digest(file) == digest:
            continue
        if spec is None or specs[file] is spec:
            older.append(file)
        else:
            reloaded.append(file)
            _imported[file] = (_digest(file), specs[file])
    return older, reloaded


def _specs(files: list[Path]) -> dict[Path, ModuleSpec | None]:
    """Return the spec of the module of each of some files that this process has imported."""
    names, found = {file.name for file in files}, {}
    for module in list(sys.modules.values()):
        place = getattr(module, "__file__", None)
        if isinstance(place, str) and os.path.basename(place) in names:
            found[Path(os.path.realpath(place))] = getattr(module, "__spec__", None)
    return {file: found[file] for file in files if file in found}


def _digest(file: Path) -> str:
    """Return a digest of a file's contents; empty if it cannot be read."""
    try:
        return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return ""


def _first_files(name: str) -> tuple[list[Path], list[Path], list[Path]]:
    """Return (folders of a custom task, folders that it imports from, its file and those of its packages)."""
    if name.endswith(".py") or "/" in name:
        path = Path(name).expanduser().resolve()
        roots = [path.parent]
        if Path.cwd() in path.parent.parents:  # on the import path of `python -m ftcli`
            roots.append(Path.cwd())
        return roots, roots, [path] * path.is_file()
    parts = name.split(".")
    for root in map(Path, [os.getcwd(), *sys.path]):
        if _module_file(root, parts) is not None:
            root = root.resolve()
            return [root / parts[0]], [root], list(_files_of([root], parts))
    return [], [Path()], []


def _files_imported_by(file: Path, roots: list[Path]) -> Iterator[Path]:
    """Yield the files below `roots` that a Python file imports."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # importing the task reports it
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files_of(roots, alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            above = [file.parents[node.level - 1]] if 0 < node.level <= len(file.parents) else []
            module = node.module.split(".") if node.module else []
            for alias in node.names:
                yield from _files_of(above if node.level else roots, [*module, alias.name])


def _files_of(roots: list[Path], parts: list[str]) -> Iterator[Path]:
    """Yield the file of a module and those of its parent packages, if they are below one of `roots`."""
    for root in roots:
        for end in range(1, len(parts) + 1):
            if (file := _module_file(root, parts[:end])) is not None:
                yield file.resolve()


def _module_file(root: Path, parts: list[str]) -> Path | None:
    """Return the file of a module or package below a folder; None if there is none."""
    path = root.joinpath(*parts)
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)
