"""Prepared rows on disk: encoded once per machine, named by their content, published whole or not at all.

Built before any process group exists, by local rank 0; other ranks, and other jobs, wait on the file. What a row
holds is the task's affair; this module knows only how to build once, find again and never show half a build.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .assets import cache_root
from .errors import InputError
from .packing import Bins, lengths_of, pack_rows
from .rows import check_source, image_files, local_path, model_folder, read_rows
from .sampling import held_out

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from numpy.typing import NDArray

    from .recipe import Recipe, Source
    from .tasks.protocol import Task

FORMAT = 1  # raised when the layout of prepared rows changes
ARRANGEMENT = ("packing", "padding_free", "group_by_length")  # keys of data that change no prepared row
PARALLEL_FROM = 20_000  # rows from which several processes encode; below, starting them costs more than it saves


@dataclass(frozen=True)
class PreparedRows:
    """Encoded rows, memory-mapped, and the facts of the training set (label names) that the model needs."""

    train: Dataset
    eval: Dataset | None
    facts: dict[str, Any]
    fingerprint: str = ""  # changes whenever a row could
    bins: Bins | None = None  # which documents of `train` share a row; None: each is one
    lengths: NDArray[np.int64] | None = None  # tokens of every row of `train`, where their order depends on them

    @property
    def train_rows(self) -> int:
        """Number of training rows as the sampler orders and the model sees them."""
        return len(self.train) if self.bins is None else len(self.bins)


def prepare_rows(recipe: Recipe, task: Task) -> PreparedRows:
    """Return the rows of `recipe` as `task` encodes them, building the cache if this is the first time.

    Raises `InputError` naming source and row number for a row that the task cannot encode.
    """
    from filelock import FileLock

    folder = cache_root() / "rows" / _content_key(recipe, task)
    complete = folder / "meta.json"
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not complete.exists():
            with FileLock(f"{folder}.lock"):
                if not complete.exists():
                    _build(recipe, task, folder)
    while not complete.exists():  # local rank 0 is building; if it dies the launcher ends this process too
        time.sleep(0.1)
    rows = _arrange(recipe, _open(folder), folder)
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        _remember(recipe, rows)
    return rows


def _arrange(recipe: Recipe, rows: PreparedRows, folder: Path) -> PreparedRows:
    """Return the rows with what their order depends on: bins, or lengths."""
    if recipe.data.packing:
        return replace(rows, bins=pack_rows(rows.train, folder, recipe.data.max_length))
    if not recipe.data.group_by_length:
        return rows
    if "input_ids" not in rows.train.column_names:
        told = f"data.group_by_length: rows of task {recipe.task} have no length in tokens"
        raise InputError(told, hint="set data.group_by_length to false")
    return replace(rows, lengths=lengths_of(rows.train))


def known_rows(recipe: Recipe) -> dict[str, int] | None:
    """Return {"train": rows, "eval": rows} if these rows were prepared on this machine before, without torch.

    Packed training rows also have {"documents", "tokens"}.
    """
    pointer = _pointer(recipe)
    return json.loads(pointer.read_text())["rows"] if pointer.exists() else None


def _open(folder: Path) -> PreparedRows:
    from datasets import load_from_disk

    meta = json.loads((folder / "meta.json").read_text())
    splits = {name: load_from_disk(str(folder / name)) for name in meta["rows"]}
    return PreparedRows(splits["train"], splits.get("eval"), meta["facts"], folder.name)


def _build(recipe: Recipe, task: Task, folder: Path) -> None:
    """Encode all rows into a folder beside and rename it into place; its meta.json exists only when all is there."""
    for dead in folder.parent.glob(f"{folder.name}.tmp-*"):  # we hold the lock: whoever wrote it is gone
        shutil.rmtree(dead)
    temporary = folder.parent / f"{folder.name}.tmp-{os.getpid()}"
    raw = _read_splits(recipe, task)
    facts = task.survey(raw["train"][1])
    rows = {}
    for name, (source, part) in raw.items():
        encoded = _encode(task, part, source, facts)
        if len(encoded) == 0:
            raise InputError(f"data.{name}: no row of {source} is left to use")
        if "items" in encoded.column_names and not any(encoded["items"]):
            hint = f"are all rows cut before their answer? data.max_length is {recipe.data.max_length}"
            raise InputError(f"data.{name}: no row of {source} has anything to measure a loss on", hint=hint)
        encoded.save_to_disk(str(temporary / name))
        rows[name] = len(encoded)
    (temporary / "meta.json").write_text(json.dumps({"rows": rows, "facts": facts}))
    temporary.rename(folder)


def _read_splits(recipe: Recipe, task: Task) -> dict[str, tuple[str, Dataset]]:
    """Return split -> (name of its source, raw rows with their number in the source as `id`)."""
    data = recipe.data
    columns = {name: data.columns.get(name, name) for name in task.columns} | data.columns
    train = _numbered(read_rows(data.train, _wanted(columns, task, data.train)))
    splits = {"train": (data.train.path, train)}
    if data.eval is not None:
        rows = _numbered(read_rows(data.eval, _wanted(columns, task, data.eval)))
        splits["eval"] = (data.eval.path, rows)
    elif data.eval_rows:
        if data.eval_rows >= len(train):
            raise InputError(f"data.eval_rows {data.eval_rows} leaves no rows of {data.train.path} to train on")
        kept, held = held_out(len(train), data.eval_rows, recipe.seed)
        splits = {"train": (data.train.path, train.select(kept)), "eval": (data.train.path, train.select(held))}
    return splits


def _wanted(columns: dict[str, str], task: Task, source: Source) -> dict[str, str]:
    """Return the columns to insist on: a task that reads several formats picks them from the names there are."""
    return columns if task.columns else {name: there for name, there in columns.items() if name in columns}


def _numbered(rows: Dataset) -> Dataset:
    if "id" in rows.column_names:  # the source's own numbering; ours must be unique and tell the row
        rows = rows.remove_columns(["id"])
    return rows.add_column("id", list(range(len(rows))))


def _encode(task: Task, rows: Dataset, source: str, facts: dict[str, Any]) -> Dataset:
    from .tasks.protocol import RowError

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        try:
            return task.encode(row, facts) | {"id": row["id"]}
        except RowError as error:
            raise RowError(f"row {row['id'] + 1} of {source}: {error}") from None

    workers = min(os.cpu_count() or 1, 16) if len(rows) >= PARALLEL_FROM else None
    fingerprint = hashlib.sha256(f"{source}{os.getpid()}{time.time_ns()}".encode()).hexdigest()[:16]
    try:
        return rows.map(
            encode,
            remove_columns=rows.column_names,
            num_proc=workers,
            desc=f"preparing {source}",
            new_fingerprint=fingerprint,
            keep_in_memory=workers is None,
        )
    except RowError as error:
        raise InputError(str(error), hint="mend that row, or take it out") from None


def _content_key(recipe: Recipe, task: Task) -> str:
    """Return a name that changes whenever a prepared row could: data, processor, task and options."""
    parts = {
        "format": FORMAT,
        "data": _data_settings(recipe),
        "train": _source_digest(recipe.data.train),
        "eval": None if recipe.data.eval is None else _source_digest(recipe.data.eval),
        "task": task.fingerprint(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _data_settings(recipe: Recipe) -> dict[str, Any]:
    settings = recipe.data.model_dump(exclude={"workers", *ARRANGEMENT})
    return settings | {"task": recipe.task, "options": recipe.task_options, "seed": recipe.seed}


def _source_digest(source: Source) -> Any:
    """Return a digest of a source's content: of the bytes of a file, of names and sizes of images, of a hub name."""
    check_source(source, {})
    path = local_path(source.path)
    if path is None:
        return [source.path, source.name, source.split]
    if path.is_dir():
        listing = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file, _ in image_files(path)]
        return hashlib.sha256(json.dumps(listing).encode()).hexdigest()
    with path.open("rb") as file:
        return _file_digest(file)


def _file_digest(file: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def _pointer(recipe: Recipe) -> Path:
    """Return the small file that tells `check` the counts, named by what can be seen without reading the data."""
    seen: list[Any] = [FORMAT, _data_settings(recipe), recipe.data.packing, recipe.model.name, recipe.model.revision]
    for source in (recipe.data.train, recipe.data.eval):
        path = None if source is None else local_path(source.path)
        if path is not None and path.is_file():
            seen.append((str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns))
    if (folder := model_folder(recipe.model.name)) is not None:
        seen.append(str(folder.absolute()))
    name = hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()[:32]
    return cache_root() / "rows" / "counts" / f"{name}.json"


def _remember(recipe: Recipe, rows: PreparedRows) -> None:
    pointer = _pointer(recipe)
    if not pointer.exists():
        counts = {"train": rows.train_rows} | ({} if rows.eval is None else {"eval": len(rows.eval)})
        if rows.bins is not None:
            counts |= {"documents": len(rows.train), "tokens": int(lengths_of(rows.train).sum())}
        pointer.parent.mkdir(parents=True, exist_ok=True)
        temporary = pointer.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({"rows": counts}))
        temporary.replace(pointer)
