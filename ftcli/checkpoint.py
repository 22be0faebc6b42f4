"""Saving and loading a run: weights, optimizer state and buffers by parameter name, in no backend's own form.

The format is our own, on safetensors: each rank writes the stretches of flattened parameters that it holds, under
keys `kind/name@start`, and the headers of the files are the index. Any number of readers picks the stretches that
overlap their own. torch.distributed.checkpoint does the same, but its index is a pickle (its safetensors writer cuts
only where DTensors are cut), and DeepSpeed's flat partitions, which fit no DTensor, would have to be gathered first.
Here nothing is gathered, a rank holds no more on the host than one part file twice, and nothing is unpickled.

This module knows neither backends nor when a recipe may be resumed (resumption.py), nor what makes a folder a
checkpoint (checkpoint_folder.py).
"""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .checkpoint_folder import (
    CHECKPOINTS,
    FORMAT,
    checkpoint_path,
    prune,
    publish,
    read_state,
    size_of,
    write_durably,
)
from .errors import InputError
from .run_folder import package_versions

if TYPE_CHECKING:
    from torch import Tensor

    from .hardware.state import Piece
    from .recipe import Checkpoint
    from .run import Run

PART_BYTES = 256 * 2**20  # most bytes of one file, and of what a rank holds on the host while it saves
BYTES_PER_ELEMENT = 12  # a weight and two moments, float32


@torch.no_grad()
def save(run: Run, step: int, metrics: dict[str, float] | None = None) -> Path | None:
    """Write the checkpoint of `step` into the run's folder, then remove old ones; a collective, every rank calls it.

    `metrics` are those of an evaluation at this very step; `checkpoint.keep_best` chooses by them. Returns the folder;
    None when the run has none, or when the newest step was bad and will be undone. Raises `InputError` when ranks do
    not share the run folder.
    """
    if run.folder is None or not run.flags.settle():
        return None
    run.heart.beat("saving", step)
    ranks, section = run.hardware.ranks, run.recipe.checkpoint
    _check_metric(section, metrics)
    folder = checkpoint_path(run.folder.path, step)
    temporary = folder.with_name(f"{folder.name}.tmp")
    if ranks.is_main:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    state = _state(run, step, metrics or {})
    ranks.barrier()
    if not temporary.is_dir():
        raise InputError(
            f"rank {ranks.rank} does not see {temporary}",
            hint="the run folder must lie on a file system that all machines share",
        )
    files = ranks.collect(_write(run, temporary))
    if ranks.is_main:
        state["files"] = {name: record for part in files for name, record in part.items()}
        publish(temporary, folder, state)
        prune(run.folder.path, section.keep, section.keep_best)
    ranks.barrier()
    return folder


@torch.no_grad()
def load(run: Run, folder: Path) -> None:
    """Put weights, optimizer state and buffers of a prepared run to what `folder` holds; every rank calls it.

    The folder may have been written by any backend on any number of ranks. The caller has checked its files
    (`damage`). Raises `InputError` when it holds other parameters than the run trains.
    """
    state = read_state(folder)
    _check_names(state["parameters"], run.hardware.trained_shapes(run.model), folder)
    run.hardware.start_from_update(run.model, run.optimizer, state["optimizer_updates"])
    with Stored(folder, list(state["files"])) as stored:
        for piece in run.hardware.pieces(run.model, run.optimizer):
            for kind, tensor in piece.tensors.items():
                if kind in ("weight", "buffer") or stored.has(kind, piece.name):
                    values = stored.read(kind, piece.name, piece.start, tensor.numel())
                    tensor.copy_(values.view(tensor.shape))
                else:  # the moment of what never had a gradient, or had none yet where a run goes back to
                    tensor.zero_()
    if run.hardware.loss_scale is not None and state["loss_scale"] is not None:
        run.hardware.loss_scale.restore(state["loss_scale"])


class Stored:
    """The tensors of a checkpoint, by kind and name; reads any stretch of one, and nothing else, from its files."""

    def __init__(self, folder: Path, files: list[str]) -> None:
        from safetensors import safe_open

        self.folder, self._open = folder, ExitStack()
        self._stretches: dict[str, list[tuple[int, int, Any]]] = {}  # kind/name -> (start, end, slice of a file)
        for file in files:
            content = self._open.enter_context(safe_open(folder / file, framework="pt"))
            for key in content.keys():  # noqa: SIM118 - no mapping
                tensor, _, start = key.rpartition("@")
                stretch = content.get_slice(key)
                end = int(start) + stretch.get_shape()[0]
                self._stretches.setdefault(tensor, []).append((int(start), end, stretch))

    def __enter__(self) -> Stored:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stretches.clear()
        self._open.close()

    def has(self, kind: str, name: str) -> bool:
        """Say whether anything of a tensor is stored."""
        return f"{kind}/{name}" in self._stretches

    def read(self, kind: str, name: str, start: int, length: int) -> Tensor:
        """Return elements [start, start + length) of a flattened tensor, `[length]`, on the host.

        Raises `InputError` when some of them are not stored.
        """
        found, at, end = [], start, start + length
        for first, last, stretch in sorted(self._stretches.get(f"{kind}/{name}", []), key=lambda item: item[:2]):
            if first <= at < min(last, end):
                found.append(stretch[at - first : min(last, end) - first])
                at = min(last, end)
        if at != end:
            raise InputError(
                f"{self.folder} lacks elements from {at} on of {kind} {name}", hint="it was not saved whole"
            )
        return torch.cat(found) if found else torch.empty(0)


def check_disk(run: Run) -> None:
    """Raise `InputError` when the checkpoints that will stand at the same time do not fit on the disk."""
    if run.folder is None:
        return
    elements = sum(torch.Size(shape).numel() for shape in run.hardware.trained_shapes(run.model).values())
    count, path = standing(run.recipe.checkpoint, run.first_step, run.steps), run.folder.path
    needed = BYTES_PER_ELEMENT * elements * count
    free = shutil.disk_usage(next(item for item in (path, *path.absolute().parents) if item.exists())).free
    if needed > free + size_of(path / CHECKPOINTS):
        raise InputError(
            f"{count} checkpoints of {BYTES_PER_ELEMENT * elements / 1e9:.3g} GB do not fit into {path}: "
            f"{free / 1e9:.3g} GB are free",
            hint="free some space, choose another disk with --output, or lower checkpoint.keep",
        )


def standing(section: Checkpoint, first_step: int, steps: int) -> int:
    """Return how many checkpoints can stand at the same time, the one that is being written included."""
    saves = 1 if section.every_steps is None else -(-steps // section.every_steps) - first_step // section.every_steps
    most = saves if section.keep is None else section.keep + 1 + (section.keep_best is not None)
    return min(max(saves, 1), most)


def _state(run: Run, step: int, metrics: dict[str, float]) -> dict[str, Any]:
    """Return state.json but for its files."""
    profile = os.environ.get("FTCLI_PROFILE")
    return {
        "format": FORMAT,
        "step": step,
        "steps": run.steps,
        "seed": run.recipe.seed,
        "optimizer_updates": run.hardware.updates(run.model, run.optimizer),
        "loss_scale": None if run.hardware.loss_scale is None else run.hardware.loss_scale.state(),
        "not_finite": run.flags.record,
        "metrics": metrics,
        "written_by": {
            "profile": "no profile" if profile is None else Path(profile).stem,
            "distributed_type": run.hardware.distributed_type,
            "processes": run.plan.processes,
        },
        "data": {"fingerprint": run.rows.fingerprint, "rows": run.plan.rows},
        "versions": package_versions(),
        "parameters": run.hardware.trained_shapes(run.model),
        "buffers": [piece.name for piece in run.hardware.pieces(run.model, run.optimizer) if "buffer" in piece.tensors],
        "recipe": run.recipe.model_dump(mode="json"),
    }


def _write(run: Run, folder: Path) -> dict[str, Any]:
    """Write what this rank saves into part files; return file name -> its record."""
    from safetensors.torch import save as serialize

    files: dict[str, Any] = {}
    part: dict[str, Tensor] = {}

    def close_part() -> None:
        if part:
            name = f"rank-{run.hardware.ranks.rank:05d}-{len(files):04d}.safetensors"
            files[name] = write_durably(folder / name, serialize(part))
            part.clear()

    size = 0
    for piece in run.hardware.pieces(run.model, run.optimizer):
        for key, values in _stretches(piece):
            if size + values.nbytes > PART_BYTES:
                close_part()
                size = 0
            part[key] = values.to("cpu", copy=True)
            size += values.nbytes
    close_part()
    return files


def _stretches(piece: Piece) -> list[tuple[str, Tensor]]:
    """Return (key, live values `[n]`) of what this rank saves of a piece, cut so that each fits into one file."""
    found = []
    for kind, tensor in piece.tensors.items():
        most = PART_BYTES // tensor.element_size()
        flat = tensor.detach().reshape(-1)
        for first in range(piece.kept.start, piece.kept.stop, most):
            values = flat[first : min(first + most, piece.kept.stop)]
            found.append((f"{kind}/{piece.name}@{piece.start + first}", values))
    return found


def _check_metric(section: Checkpoint, metrics: dict[str, float] | None) -> None:
    if metrics and section.keep_best is not None and section.keep_best.metric not in metrics:
        raise InputError(
            f"checkpoint.keep_best.metric: this task has no metric {section.keep_best.metric}",
            hint=f"one of {', '.join(metrics)}",
        )


def _check_names(stored: dict[str, list[int]], wanted: dict[str, list[int]], folder: Path) -> None:
    """Raise for the first parameter that the run trains and the checkpoint has not, or the other way round."""
    for name in [*wanted, *stored]:
        if stored.get(name) != wanted.get(name):
            raise InputError(
                f"{folder} is of another model: {name} is {stored.get(name, 'not there')}, "
                f"and {wanted.get(name, 'not trained')} in this run",
                hint="resume with the recipe that wrote it: `ftcli show CHECKPOINT` prints it",
            )
