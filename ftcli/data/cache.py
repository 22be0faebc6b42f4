"""Prepare the rows of a recipe once per machine, and store them in the cache under a key of their content.

Local rank 0 builds the rows before any process group exists. Other ranks and other jobs wait for the file. A build is
published by a rename, so that no process sees an incomplete one. The task defines the columns of a row.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.config.task_registry import is_custom_task, recording_task
from ftcli.data.cache_key import key_parts, named_paths, possible_paths, rows_folder, store_paths
from ftcli.data.cached_counts import FORMAT, READER, counts_file, data_settings
from ftcli.data.encode import Counts, encode_source, usable_processors
from ftcli.data.fingerprints import digest_rows, file_digest, fingerprint
from ftcli.data.image_folders import folder_digest
from ftcli.data.merge import merge_sources
from ftcli.data.mixture import SourceRows, describe_source, read_sources, survey_sources
from ftcli.data.packing import Bins, lengths_of, pack_rows, row_capacity, typical_lengths
from ftcli.data.paths import local_path
from ftcli.data.sources import check_source
from ftcli.data.streaming.corpus import corpus_digest, stream_content
from ftcli.data.streaming.lanes import BAD_ROW_HINT
from ftcli.runtime.durable_files import sync, sync_tree
from ftcli.runtime.errors import InputError
from ftcli.runtime.opened_files import files_of_task
from ftcli.runtime.process import local_rank
from ftcli.runtime.resources import cache_root, writing_cache
from ftcli.runtime.torn_files import read_object

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from datasets import Dataset
    from numpy.typing import NDArray

    from ftcli.config.recipe import Recipe
    from ftcli.config.recipe_data import Source
    from ftcli.tasks.protocol import Task


MOST_UNTRAINED = 0.01  # fraction of a source's rows that may contain no trainable tokens
SPLITS = ("train", "eval")


@dataclass(frozen=True)
class PreparedRows:
    """Encoded rows, memory-mapped, and data about the training set that the model needs, such as label names.

    For a stream, `train` holds only its first rows. They show the format and are not the rows that are trained.
    """

    train: Dataset
    eval: Dataset | None
    facts: dict[str, Any]
    fingerprint: str = ""  # identifies the rows; see fingerprints.py
    digests: dict[str, str] = field(default_factory=dict)  # split -> digest of its rows, part of the fingerprint
    labels: dict[str, list[str]] = field(default_factory=dict)  # split -> names of its sources, by source number
    log_lines: list[str] = field(default_factory=list)  # numbers of used, shortened and omitted rows
    tokens: int = 0  # number of tokens of all rows
    folder: Path = Path()
    bins: Bins | None = None  # the documents of each packed row; None without packing
    lengths: NDArray[np.int64] | None = None  # `[rows]`, tokens per row of `train`; only for group_by_length

    streamed: bool = False
    # split -> columns by name that the model derives, `[rows, ...]`; filled in once the model is prepared
    derived: dict[str, dict[str, Any]] = field(default_factory=lambda: {split: {} for split in SPLITS})

    @property
    def train_rows(self) -> int | None:
        """Number of training rows of the sampler and the model; None for a stream."""
        if self.streamed:
            return None
        return len(self.train) if self.bins is None else len(self.bins)

    @property
    def sources(self) -> list[str]:
        """Names of the training sources; empty if there is only one source."""
        names = self.labels.get("train", [])
        return names if len(names) > 1 else []


def prepare_rows(recipe: Recipe, task: Task) -> PreparedRows:
    """Return the encoded rows of a recipe. Local rank 0 builds them if they are not in the cache; other ranks wait.

    Args:
        recipe: The recipe, with resolved commits.
        task: The recipe's task, with its tokenizer or processor loaded.

    Raises:
        InputError: More rows than data.max_bad_rows cannot be used, or more than 1 % of the rows of a source contain
            no trainable tokens. The message names the source and the first row.
    """
    from filelock import FileLock

    key, names_files = _content_key(recipe, task), _names_files(recipe, task)
    folder = rows_folder(key, names_files=names_files)
    if local_rank() == 0 and not _is_complete(folder):
        lock = cache_root() / "rows" / f"{key}.lock"
        with writing_cache():
            lock.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(lock):
                folder = rows_folder(key, names_files=names_files)
                if not _is_complete(folder):
                    folder = _build(recipe, task, key, None if is_custom_task(recipe.task) else folder)
    while folder is None or not _is_complete(folder):  # local rank 0 builds; if it fails, the launcher ends all ranks
        time.sleep(0.1)
        if folder is None or is_custom_task(recipe.task):  # which files it reads is known when the rows are built
            folder = rows_folder(key, names_files=names_files)
    rows = _add_order_data(recipe, task, _open(folder), folder)
    if local_rank() == 0:
        _store_counts(recipe, rows, {"key": key, "folder": folder.name} if names_files else {})
    return rows


def _is_complete(folder: Path | None) -> bool:
    """Return whether a folder of the cache exists and is complete."""
    return folder is not None and read_object(folder / "meta.json") is not None


def _names_files(recipe: Recipe, task: Task) -> bool:
    """Return whether rows depend on files that are known only once rows are prepared.

    A custom task may read any file. If all sources are folders of images, the key of the rows has the images' state.
    """
    if is_custom_task(recipe.task):
        return True
    sources = recipe.data.train_sources + recipe.data.eval_sources
    paths = [local_path(source.path) for source in sources]
    return bool(getattr(task, "file_columns", ())) and not all(path is not None and path.is_dir() for path in paths)


def _add_order_data(recipe: Recipe, task: Task, rows: PreparedRows, folder: Path) -> PreparedRows:
    """Return the rows with the data that their order depends on: bins or lengths."""
    if recipe.data.streaming:
        content = [stream_content(source) for source in recipe.data.train_sources]
        return replace(rows, streamed=True, fingerprint=fingerprint(rows.digests, rows.facts, content))
    if recipe.data.packing:
        return replace(rows, bins=pack_rows(rows.train, folder, row_capacity(rows.train, recipe.data.max_length)))
    if not recipe.data.group_by_length:
        return rows
    if "input_ids" not in rows.train.column_names:
        message = f"data.group_by_length: rows of task {recipe.task} have no length in tokens"
        raise InputError(message, hint="set data.group_by_length to false")
    return replace(rows, lengths=lengths_of(rows.train))


def _open(folder: Path) -> PreparedRows:
    """Return the rows of a complete cache folder."""
    from datasets import Dataset

    meta = json.loads((folder / "meta.json").read_text())
    splits = {name: Dataset.from_file(str(folder / f"{name}.arrow")) for name in meta["rows"]}
    return PreparedRows(
        splits["train"],
        splits.get("eval"),
        meta["facts"],
        fingerprint(meta["digests"], meta["facts"]),
        meta["digests"],
        labels=meta["labels"],
        log_lines=meta["log_lines"],
        tokens=meta["tokens"],
        folder=folder,
    )


def _build(recipe: Recipe, task: Task, key: str, folder: Path | None) -> Path:
    """Encode all rows into a temporary folder and rename it. Its meta.json is written last.

    Args:
        recipe: The recipe, with resolved commits.
        task: The recipe's task.
        key: Cache key of the rows.
        folder: The folder to build; None if it depends on files that only the prepared rows name.

    Returns:
        The folder.
    """
    root = cache_root() / "rows"
    for leftover in root.glob(f"{key}.tmp-*"):  # of a process that has ended: we hold the lock
        shutil.rmtree(leftover)
    temporary, columns = root / f"{key}.tmp-{os.getpid()}", getattr(task, "file_columns", ())
    try:
        meta, unusable = _build_in(temporary, recipe, task)
        files = {split: temporary / f"{split}.arrow" for split in meta["rows"]}
        if folder is None:
            paths = (path for file in files.values() for path in named_paths(file, columns))
            store_paths(key, chain(paths, unusable, _read_by_task(recipe)))
            folder = rows_folder(key, names_files=True)
            assert folder is not None
        # The files are read after their state, so that a later change gives another folder.
        meta["digests"] = {split: digest_rows(file, columns) for split, file in files.items()}
        (temporary / "meta.json").write_text(json.dumps(meta))
        sync_tree(temporary)  # before the rename, so that a named folder is complete also after a power cut
        shutil.rmtree(folder, ignore_errors=True)  # an incomplete folder of an older version after a power cut
        temporary.rename(folder)
        sync(root)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _read_by_task(recipe: Recipe) -> Iterable[str]:
    """Return the files that a custom task has read; raise `InputError` for one that has changed since."""
    files = files_of_task(recipe.task)
    if changed := files.changed():
        raise InputError(
            f"{changed[0]} has changed since task {recipe.task} read it",
            hint="start again; in a notebook, restart the kernel, because the task may hold the old contents",
        )
    return files.inputs()


def _build_in(folder: Path, recipe: Recipe, task: Task) -> tuple[dict[str, Any], list[str]]:
    """Write train.arrow and eval.arrow into a new folder.

    Returns:
        The content of its meta.json without digests, and all texts of unusable rows of a task that reads files.
    """
    parts = read_sources(recipe, task)
    with recording_task(recipe.task):
        parts, facts = survey_sources(task, parts)
    meta: dict[str, Any] = {"rows": {}, "facts": facts, "labels": {}, "tokens": 0}
    meta |= {"log_lines": [], "counts": [], "notes": []}
    unusable: list[str] = []
    bad = 0
    for number, part in enumerate(parts):
        counts = _encode(recipe, task, part, facts, folder / f"part-{number}", recipe.data.max_bad_rows - bad)
        bad += len(counts.bad)
        if getattr(task, "file_columns", ()):
            unusable += possible_paths(part.rows, (row for row, _ in counts.bad))
        meta["log_lines"] += describe_source(part, counts, recipe.data)
        numbers = {name: value for name, value in asdict(counts).items() if name != "opened"}
        meta["counts"].append({"of": part.split, "label": part.label, **numbers})
        meta["tokens"] += counts.tokens
        meta["notes"] += [[f"data.{part.split} {part.label}: {what}", hint] for what, hint in part.notes]
    for split in SPLITS:
        sources = {folder / f"part-{n}": part for n, part in enumerate(parts) if part.split == split}
        if sources:
            meta["labels"][split] = [part.label for part in sources.values()]
            meta["rows"][split] = merge_sources(sources, folder / f"{split}.arrow")
    if hasattr(task, "facts_of_rows") and not recipe.data.streaming:
        from datasets import Dataset

        with recording_task(recipe.task):
            meta["facts"] = task.facts_of_rows(Dataset.from_file(str(folder / "train.arrow")), facts)
    for number in range(len(parts)):
        shutil.rmtree(folder / f"part-{number}")
    return meta, unusable


def _encode(recipe: Recipe, task: Task, part: SourceRows, facts: dict[str, Any], folder: Path, most_bad: int) -> Counts:
    """Encode one source into a folder; raise `InputError` for more unusable rows than the recipe allows."""
    counts = encode_source(
        task,
        part.rows,
        part.indices,
        facts,
        folder,
        title=part.path,
        most_bad=most_bad,
        processes=usable_processors(),
        files=files_of_task(recipe.task) if is_custom_task(recipe.task) else None,
    )
    if len(counts.bad) > most_bad:
        number, reason = counts.bad[0]
        allowed = recipe.data.max_bad_rows
        more = f" (more than data.max_bad_rows {allowed} rows cannot be used)" if allowed else ""
        raise InputError(f"row {number + 1} of {part.path}: {part.in_its_words(reason)}{more}", hint=BAD_ROW_HINT)
    length = recipe.data.max_length
    if counts.untrained > max(MOST_UNTRAINED * counts.rows, recipe.data.max_bad_rows):
        or_split = ", or set data.truncation to split" if task.item == "token" else ""  # other rows stay whole
        raise InputError(
            f"data.{part.split}: {counts.untrained:,} of {counts.rows:,} rows of {part.path} contain no trainable "
            f"tokens, {counts.untrained_cut:,} of them because data.max_length is {length}",
            hint=f"raise data.max_length{or_split}" if counts.untrained_cut else "fix or remove these rows",
        )
    if counts.documents == 0:
        raise InputError(f"data.{part.split}: {part.path} has no usable row", hint=counts.why_none(length))
    return counts


def _content_key(recipe: Recipe, task: Task) -> str:
    """Return the cache key of a recipe's rows. It changes whenever a prepared row could change."""
    with recording_task(recipe.task):
        identity = task.fingerprint()
    parts = {
        "format": FORMAT,
        "reader": READER,
        "data": data_settings(recipe),
        "train": [
            corpus_digest(source) if recipe.data.streaming else _source_digest(source, key)
            for key, source in recipe.data.named_sources("train")
        ],
        "eval": [_source_digest(source, key) for key, source in recipe.data.named_sources("eval")],
        "task": identity,
        **key_parts(recipe, task),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _source_digest(source: Source, key: str) -> Any:
    """Return a digest of a source: of the bytes of a file, the paths and times of images, or the name on the hub.

    Files that rows of a table name are not known here; see `rows_folder`.
    """
    check_source(source, {}, key=key)
    path = local_path(source.path)
    if path is None:
        return [source.path, source.name, source.split, source.revision]
    if path.is_dir():
        return folder_digest(path)
    return file_digest(path)


def _store_counts(recipe: Recipe, rows: PreparedRows, place: dict[str, str]) -> None:
    """Write the row counts of a recipe for later calls of `cached_row_counts`.

    Args:
        recipe: The recipe.
        rows: Its rows.
        place: Cache key and name of the folder of rows that name files; otherwise empty.
    """
    path = counts_file(recipe)
    stored = read_object(path)
    if stored is None or stored.get("folder") != place.get("folder"):
        counts = ({} if rows.train_rows is None else {"train": rows.train_rows}) | (
            {} if rows.eval is None else {"eval": len(rows.eval)}
        )
        if rows.bins is not None:
            counts |= {"documents": len(rows.train), "tokens": int(lengths_of(rows.train).sum())}
        lengths = typical_lengths(rows.train, streamed=rows.streamed)
        with suppress(OSError):  # rows of another user, whose folder this one may only read
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps({"rows": counts, "lengths": lengths, **place}))
            temporary.replace(path)
