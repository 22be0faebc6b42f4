"""Columns that the model computes from each row before training, for instance log-probabilities of a reference.

A task with `derive` gets further columns in its prepared rows. The prepared model computes them with the starting
weights, on any profile. They are stored beside the prepared rows, under a key of the rows, the weights, the precision
and the task. So another run, profile or number of processes finds them. A checkpoint names the key, and a resumed run
must come to the same one. The log states whether columns were found or computed, and why those of the cache did not
fit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ftcli.checkpoint.folder import newest_intact, read_state
from ftcli.config.plan import pluralise
from ftcli.data.cache_key import files_of_start, task_code
from ftcli.data.packing import longest_documents
from ftcli.data.sampler import EvalOrder
from ftcli.models.kernels.padding_masks import padding_of, use_padding
from ftcli.models.weight_files_digest import settings_of_model, weight_files_digest
from ftcli.runtime.durable_files import sync, sync_tree
from ftcli.runtime.errors import InputError
from ftcli.runtime.log import log_line
from ftcli.runtime.process import local_rank
from ftcli.runtime.resources import cache_root, writing_cache
from ftcli.runtime.seeds import PADDING
from ftcli.training.batches.dataloaders import Collate, Rows
from ftcli.training.out_of_memory import explain_out_of_memory
from ftcli.training.run_description import describe_hardware

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from ftcli.training.run import Run

COLUMNS_FORMAT = 3  # raised when the same rows and weights give other columns
META = "meta.json"  # file of a folder of columns: their shapes, the parts of their key, and the hardware
DIFFERENCES = {  # part of a key -> what is different about columns under another key
    "weights": "other weights",
    "model": "other settings of the model",
    "precision": "another precision",
    "adapter": "another type of adapter",
    "task": "another task, other files that it reads, or other options",
    "format": "another version of ftcli",
}


def add_columns(run: Run, *, weights: Path | None = None, state: dict[str, Any] | None = None, anyway: bool) -> None:
    """Add the columns that the task derives to the rows of a prepared run. A collective.

    The model still has its starting weights: call this function before a checkpoint is loaded.

    Args:
        run: The run. `run.rows.derived` gets the columns.
        weights: Folder of finished weights that the model was loaded from, or None. They are not the starting weights,
            so the columns of their run are looked up.
        state: state.json of the checkpoint that the run resumes from, or None.
        anyway: Accept other columns than those of the checkpoint.

    Raises:
        InputError: Rows are streamed, those of `weights` are not in the cache, the checkpoint was trained on other
            columns, or a column has a wrong name or shape.
    """
    if run.rows.streamed:
        raise InputError(
            f"task {run.recipe.task} derives columns before training, which rows of a stream cannot have",
            hint="set data.streaming to false",
        )
    parts = key_parts(run) if weights is None else {}
    key = columns_key(parts) if weights is None else _key_of(weights)
    before = (state or {}).get("derived")
    if before not in (None, key) and before in _keys_of_earlier_versions(run, parts):
        key = before
    if before not in (None, key) and not anyway:
        raise InputError(
            f"the columns that the model derives are not those that the checkpoint was trained on: {before} then, "
            f"{key} now; the model's weights, the rows, the precision or the task has changed",
            hint="bring the old model back, or accept another curve with --resume-anyway",
        )
    folder, started = cache_root() / "derived" / key, time.perf_counter()
    computed_in: float | None = None
    if run.hardware.ranks.any(not (folder / META).is_file()):
        if weights is not None:
            raise InputError(
                f"the derived columns of {weights} are not in the cache ({folder}), and this command cannot compute "
                "them: that needs the weights at the start of the training",
                hint="resume the run, or train its recipe again for one step: both compute the columns",
            )
        log_line(_describe_computation(run, parts, folder.parent))
        origin = {"parts": parts, "hardware": describe_hardware(run.hardware, run.plan.processes)}
        with explain_out_of_memory(run):
            columns = {split: _compute(run, split) for split in _splits(run)}
        with writing_cache():
            _publish(folder, columns, origin)
        run.hardware.ranks.wait_for_slowest()
        computed_in = time.perf_counter() - started
    known = _splits(run) if weights is None else _same_splits(run, folder, weights)
    run.lacks_columns = "train" not in known
    for split in known:
        for path in sorted((folder / split).glob("*.npy")):
            run.rows.derived[split][path.stem] = np.load(path, mmap_mode="r")
    run.derived = key
    run.log_lines.append(_describe_columns(run, folder, computed_in))


def _same_splits(run: Run, folder: Path, weights: Path) -> list[str]:
    """Return the splits whose rows are those of stored columns: columns belong to a row by its number.

    Raises:
        InputError: The evaluation rows are others. Other training rows matter only to `check_columns`.
    """
    parts = json.loads((folder / META).read_text()).get("parts")
    now = json.loads(json.dumps(_row_parts(run)["rows"]))
    if parts is None:  # columns of an older version: their number is all that is known
        lengths = {
            split: {len(np.load(path, mmap_mode="r")) for path in (folder / split).glob("*.npy")} for split in now
        }
        same = [split for split in now if lengths[split] <= {now[split][1]}]
    else:
        has_columns = any(folder.glob("*/*.npy"))
        is_same = lambda split: parts["rows"].get(split) == now[split] or not has_columns  # noqa: E731
        same = [split for split in now if is_same(split)]
    if "eval" in now and "eval" not in same:
        raise InputError(
            f"the evaluation rows are not those of the run of {weights}, so their derived columns are not known: "
            "they need the weights at the start of the training",
            hint="bring the old rows back, or train the recipe with these rows",
        )
    return same


def check_columns(run: Run) -> None:
    """Raise `InputError` if the derived columns of the training rows are not known."""
    if run.lacks_columns:
        raise InputError(
            "the training rows are not those of the run of the given weights, so their derived columns are not known",
            hint="evaluate only, or train from model.name instead",
        )


def key_parts(run: Run) -> dict[str, Any]:
    """Return what the columns of a prepared run at its starting weights depend on, as JSON values. A collective.

    The weights are identified by their files where these determine the columns. Otherwise every weight is gathered.
    """
    ranks = run.hardware.ranks
    digests = (weight_files_digest, settings_of_model, files_of_start)
    here = [digest(run.recipe) for digest in digests] if ranks.is_main else None
    files, settings, of_task = ranks.collect(here)[0]
    weights = f"files {files}" if files is not None else f"values {_values_digest(run)}"
    parts = {"format": COLUMNS_FORMAT, "weights": weights, "model": settings} | _row_parts(run)
    return parts | {"task": [*parts["task"], *([of_task] if of_task else [])]}


def _keys_of_earlier_versions(run: Run, parts: dict[str, Any]) -> Iterator[str]:
    """Yield the keys that earlier versions of ftcli gave the same columns, and checkpoints name. A collective.

    First those with sums in float32, also without the files of a custom task, then that before the digest of the
    weights' files.
    """
    in_float32 = parts | {"format": 2}
    yield columns_key(in_float32)
    yield columns_key(in_float32 | _row_parts(run))
    yield columns_key({"format": 1, "weights": _values_digest(run)} | _row_parts(run))


def _values_digest(run: Run) -> str:
    """Return a digest of the value of every weight, equal on every rank. A collective."""
    digest = hashlib.sha256()
    for name, value in run.hardware.parameters(run.model, trained_only=False):
        if value is not None:  # on the main process only
            digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
            digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().data)
    digest_of_main: str = run.hardware.ranks.collect(digest.hexdigest())[0]
    return digest_of_main


def _row_parts(run: Run) -> dict[str, Any]:
    """Return what the columns of a run depend on beside its model."""
    return {
        "rows": {split: [run.rows.digests[split], len(part)] for split, part in _splits(run).items()},
        "precision": run.recipe.precision,
        "adapter": run.recipe.adapter.type,
        "task": [task_code(run.recipe.task) or run.recipe.task, _options(run)],
    }


def columns_key(parts: dict[str, Any]) -> str:
    """Return the key of columns that depend on these parts."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _describe_computation(run: Run, parts: dict[str, Any], cache: Path) -> str:
    """Return a log line about columns that are computed, and how columns of the same rows in the cache differ."""
    rows = " and ".join(pluralise(len(part), f"{name} row") for name, part in _splits(run).items())
    line = f"computing the derived columns of {rows} with the starting weights"
    current = json.loads(json.dumps(parts))
    differences = []
    for file in sorted(cache.glob(f"*/{META}")):
        with contextlib.suppress(OSError, ValueError):  # another run may remove it; a damaged one is not read
            stored = json.loads(file.read_text()).get("parts", {})
            if stored.get("rows") == current["rows"]:
                differences.append([words for name, words in DIFFERENCES.items() if stored.get(name) != current[name]])
    fewest = min(filter(None, differences), key=len, default=None)
    if fewest is None:
        return line
    return f"{line}; those of these rows in the cache belong to {' and '.join(fewest)}"


def _describe_columns(run: Run, folder: Path, computed_in: float | None) -> str:
    """Return a log line about the columns of a run: computed in so many seconds, or read from the cache (None)."""
    derived = {split: columns for split, columns in run.rows.derived.items() if columns}
    names = sorted({name for columns in derived.values() for name in columns})
    rows = sum(len(_splits(run)[split]) for split in derived)
    hardware = json.loads((folder / META).read_text()).get("hardware")  # absent in columns of older versions
    computed_on = f", computed on {hardware}" if hardware else ""
    origin = f"read from the cache{computed_on}" if computed_in is None else f"computed in {computed_in:.1f} s"
    return f"derived columns {', '.join(names)} of {rows:,} rows: {origin} (key {folder.name[:8]})"


def _options(run: Run) -> Any:
    """Return the options of the task that its columns depend on: all of them, unless the task names some."""
    task: Any = run.task
    return task.derived_from() if hasattr(task, "derived_from") else run.recipe.task_options


def _splits(run: Run) -> dict[str, Any]:
    """Return the prepared rows of each split that a run has."""
    parts = {"train": run.rows.train, "eval": run.rows.eval}
    return {split: part for split, part in parts.items() if part is not None}


def _key_of(weights: Path) -> str:
    """Return the key that the run of some finished weights recorded in its checkpoints."""
    checkpoint = newest_intact(weights.parent, hashes=False)[0]
    key = None if checkpoint is None else read_state(checkpoint).get("derived")
    if key is None:
        raise InputError(
            f"{weights} belongs to no run that recorded its derived columns",
            hint="name the final/ folder of a run that has a checkpoint",
        )
    return str(key)


@torch.no_grad()
def _compute(run: Run, split: str) -> dict[str, np.ndarray]:
    """Return the columns of one split, `[rows, ...]` by name, equal on every rank. A collective."""
    task: Any = run.task
    rows, collate = Rows(_splits(run)[split], run.task, training=False), Collate(run.task)
    first = rows[(0, 0)][0]
    collected: dict[str, list[np.ndarray]] = {}
    was_training = run.model.training
    run.model.eval()
    for keys in _own_batches(run, _by_length(_splits(run)[split])):
        run.heartbeat.beat("deriving columns", 0)
        batch = collate([rows[key] for key in keys])
        ids = batch.pop("sample_ids")
        there = run.to_device(batch)
        padding: AbstractContextManager[None] = use_padding(padding_of(batch), there.get("attention_mask"))
        with padding:
            columns = task.derive(run.model, there)
        _check(columns, first, len(ids))
        places = np.array([index for _, index in keys])
        for name, value in (columns | {"": torch.from_numpy(places)}).items():
            host = value.float() if value.dtype in (torch.bfloat16, torch.float16) else value  # numpy has no bfloat16
            collected.setdefault(name, []).append(host.cpu().numpy())
    run.model.train(was_training)
    gathered = {name: run.hardware.ranks.gather(np.concatenate(values)) for name, values in collected.items()}
    places = gathered.pop("")
    real = places != PADDING
    order = np.argsort(places[real], kind="stable")
    return {name: values[real][order] for name, values in gathered.items()}


def _own_batches(run: Run, order: NDArray[np.int64]) -> Iterator[list[tuple[int, int]]]:
    """Yield the keys of the rows of each batch of this rank, in the given order. Every rank has as many batches."""
    ranks = run.hardware.ranks
    for number, keys in enumerate(EvalOrder(len(order), micro_size=run.plan.micro_size, processes=ranks.world)):
        if number % ranks.world == ranks.rank:
            yield [(epoch, place if place == PADDING else int(order[place])) for epoch, place in keys]


def _by_length(rows: Any) -> NDArray[np.int64]:
    """Return the numbers of rows from the longest to the shortest, so that batches have next to no padding."""
    if "input_ids" not in rows.column_names:
        return np.arange(len(rows))
    return np.argsort(-longest_documents(rows), kind="stable")


def _check(columns: dict[str, torch.Tensor], row: dict[str, Any], rows: int) -> None:
    for name, value in columns.items():
        if not name.isidentifier() or name in row:
            raise InputError(f"the task's `derive` returned '{name}', which cannot be a new column")
        if value.dim() == 0 or len(value) != rows:
            shape = list(value.shape)
            raise InputError(f"the task's `derive` returned {shape} for {name}, but the batch has {rows} rows")


def _publish(folder: Path, columns: dict[str, dict[str, np.ndarray]], origin: dict[str, Any]) -> None:
    """Write the columns into a folder beside and rename the folder into place, once for each machine.

    If another run published them meanwhile, its columns are kept.

    Args:
        folder: The folder.
        columns: Columns by split and name.
        origin: What meta.json has besides the shapes.
    """
    if local_rank() != 0 or (folder / META).is_file():
        return
    temporary = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    for split, values in columns.items():
        (temporary / split).mkdir(parents=True)
        for name, column in values.items():
            np.save(temporary / split / f"{name}.npy", column)
    shapes = {split: {name: list(column.shape) for name, column in values.items()} for split, values in columns.items()}
    (temporary / META).write_text(json.dumps({"columns": shapes, **origin}))
    sync_tree(temporary)
    try:
        temporary.rename(folder)
    except OSError:
        if not (folder / META).is_file():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync(folder.parent)
