"""Compute the parts of the cache key that depend on code, versions, tokenizer settings, the date and on named files.

Prepared rows are reused only if their cache key is equal. A key may change although no row changes; the rows are then
prepared again. The data fingerprint (fingerprints.py) identifies the rows of a run instead. Light: never imports torch.

The bytes of a table do not show that a file which its rows name, such as an image, has changed. The paths of the files
are stored with the prepared rows, and their sizes and times are part of the name of the folder. The files are not read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.config.task_files import task_files
from ftcli.config.task_registry import is_custom_task
from ftcli.data.chat.template_variables import date_formats, texts_of
from ftcli.data.fingerprints import file_digest
from ftcli.data.paths import model_folder
from ftcli.runtime.durable_files import sync
from ftcli.runtime.opened_files import files_at_start
from ftcli.runtime.reader_errors import reason
from ftcli.runtime.resources import PACKAGE, cache_root
from ftcli.runtime.torn_files import read_object
from ftcli.tasks.protocol import properties_of

if TYPE_CHECKING:
    from datasets import Dataset

    from ftcli.config.recipe import Recipe
    from ftcli.tasks.protocol import Task


PACKAGES = ("transformers", "tokenizers", "datasets", "jinja2", "pyarrow", "pillow")  # that read or encode rows
PLACES = ("name_or_path", "_name_or_path", "tokenizer_file", "vocab_file", "merges_file")  # paths, not settings


def key_parts(recipe: Recipe, task: Task) -> dict[str, Any]:
    """Return the parts of the cache key besides the recipe, its data and `task.fingerprint()`.

    Args:
        recipe: The recipe, with resolved commits.
        task: The recipe's task, with its tokenizer loaded.

    Returns:
        JSON values: library versions, digests of ftcli and of a custom task's code, settings of the tokenizer, and the
        dates that its chat template writes.
    """
    tokenizer = getattr(task, "tokenizer", None)
    renders = is_custom_task(recipe.task) or "messages" in properties_of(task).formats
    texts = texts_of(getattr(tokenizer, "chat_template", None)) if renders else ()
    return {
        "versions": {name: _version(name) for name in PACKAGES},
        "ftcli": ftcli_digest(),
        "code": task_code(recipe.task),
        "model code": _model_code(recipe),
        "tokenizer": _settings(tokenizer),
        "dates": [datetime.now().strftime(form) for form in date_formats(texts, recipe.data.chat_template_kwargs)],
    }


@cache
def ftcli_digest() -> str:
    """Return a digest of ftcli's own source files; a released version has only one."""
    return _digest_of(PACKAGE, sorted(PACKAGE.rglob("*.py")))


def task_code(name: str) -> str | None:
    """Return a digest of a custom task: its file and the files of its folder that it imports, directly or indirectly.

    The files are found by parsing import statements; nothing is executed. Modules with a computed name are not found.

    Args:
        name: The recipe's `task`.

    Returns:
        A digest; None for a task that ships with ftcli, and for a module that is not found as a file.
    """
    if not is_custom_task(name):
        return None
    root, files = task_files(name)
    return _digest_of(root, files) if files else None


def files_of_start(recipe: Recipe) -> list[str]:
    """Return the digests of the contents of your files that a custom task read while it was imported and created.

    Unlike the key of rows, the key of derived columns is stored in checkpoints, so it has no paths and times. Files of
    the model are left out: harmless edits of them change no column.

    Args:
        recipe: The recipe. A shipped task reads no such files.
    """
    if not is_custom_task(recipe.task):
        return []
    folder = model_folder(recipe.model.name)
    paths = [Path(path) for path in files_at_start(recipe.task).inputs()]
    own = [path for path in paths if folder is None or folder.resolve() not in path.resolve().parents]
    return sorted(file_digest(path) if path.is_file() else "missing" for path in own)


def _model_code(recipe: Recipe) -> Any:
    """Return an identifier of the Python code of a model's tokenizer; None if the recipe does not trust that code."""
    if not recipe.model.trust_remote_code:
        return None
    folder = model_folder(recipe.model.name)
    return recipe.model.revision if folder is None else _digest_of(folder, sorted(folder.glob("*.py")))


def _settings(tokenizer: Any) -> dict[str, str]:
    """Return the settings of a tokenizer that are not part of its serialised form."""
    values = getattr(tokenizer, "init_kwargs", {})
    return {name: repr(value) for name, value in sorted(values.items()) if name not in PLACES}


def _digest_of(root: Path, files: list[Path]) -> str:
    """Return a digest of the contents of files and their paths below a folder."""
    digests = [(os.path.relpath(file, root), file_digest(file)) for file in files]
    return hashlib.blake2b(json.dumps(digests).encode(), digest_size=16).hexdigest()


@cache
def _version(package: str) -> str | None:
    """Return the installed version of a package; None if it is not installed."""
    return next((distribution.version for distribution in metadata.distributions(name=package)), None)


def file_state(path: str | Path) -> tuple[Any, ...]:
    """Return size and times of a file, which differ after any change; for a missing file, the reason.

    A program cannot set the change time of an inode (ctime), so the result also differs for new contents with the same
    size and modification time.
    """
    try:
        stat = os.stat(path)
    except OSError as error:
        return (reason(error),)
    except ValueError:  # a text that is no path
        return ()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def rows_folder(key: str, *, names_files: bool) -> Path | None:
    """Return the folder of prepared rows.

    Args:
        key: Cache key of the rows.
        names_files: Whether the rows name files. The folder then also depends on the present state of these files,
            with one call of `os.stat` per file.

    Returns:
        The folder, which may not exist; None if no rows with this key have been prepared, so the files are not known.
    """
    root = cache_root() / "rows"
    if not names_files:
        return root / key
    stored = read_object(_paths_file(key))
    if stored is None:
        return None
    digest = hashlib.sha256(key.encode())
    for path in stored["paths"]:
        digest.update(json.dumps([path, *file_state(path)]).encode())
    return root / digest.hexdigest()[:32]


def store_paths(key: str, paths: Iterable[str]) -> None:
    """Store the paths of the files that the rows of a cache key name."""
    target = _paths_file(key)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps({"paths": sorted(set(paths))}))
    sync(temporary)
    temporary.replace(target)


def named_paths(rows: Path, columns: Collection[str]) -> Iterator[str]:
    """Yield the paths in prepared rows.

    Args:
        rows: Arrow stream file of prepared rows.
        columns: Columns that contain paths or null.
    """
    import pyarrow as pa

    with pa.memory_map(str(rows)) as file, pa.ipc.open_stream(file) as reader:
        for batch in reader:
            for name in set(columns).intersection(batch.schema.names):
                yield from (path for path in batch.column(name).to_pylist() if path is not None)


def possible_paths(rows: Dataset, numbers: Iterable[int]) -> Iterator[str]:
    """Yield all texts of rows that could not be used: one of them may be the path of a file that is broken now.

    Args:
        rows: Rows of a source.
        numbers: Numbers of the rows.
    """
    for number in numbers:
        for value in rows[number].values():
            path = value.get("path") if isinstance(value, Mapping) else value
            if isinstance(path, str):
                yield path


def _paths_file(key: str) -> Path:
    """Return the file with the paths that the rows of a cache key name."""
    return cache_root() / "rows" / "files" / f"{key}.json"
