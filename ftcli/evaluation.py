"""Evaluation rows through the model, each counted exactly once on any number of processes.

The task says what a row's values are and what they amount to; here they are only brought together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from .faults import Stopped
from .sampling import PADDING

if TYPE_CHECKING:
    from .run import Run


def evaluate(run: Run) -> dict[str, float]:
    """Return the task's metrics over every evaluation row, each counted exactly once, equal on every rank.

    Raises `Stopped` on all ranks, after the same batch, when the run was asked to stop meanwhile.
    """
    assert run.eval_loader is not None and run.rows.eval is not None
    run.model.eval()
    collected: dict[str, list[np.ndarray]] = {}
    with torch.no_grad():
        for batch in run.eval_loader:
            run.heart.beat("evaluating", run.heart.now.step)
            asked = run.hardware.ranks.sum_later([int(run.stop.requested())])
            ids = batch.pop("sample_ids")
            values = run.task.eval_step(run.model, run.to_device(batch)) | {"id": ids}
            for name, value in values.items():
                collected.setdefault(name, []).append(value.cpu().numpy())
            if asked()[0]:
                raise Stopped
    gathered = {name: run.hardware.ranks.gather(np.concatenate(parts)) for name, parts in collected.items()}
    real = gathered["id"] != PADDING
    order = np.argsort(gathered["id"][real], kind="stable")
    rows = {name: values[real][order] for name, values in gathered.items()}
    if len(rows["id"]) != len(run.rows.eval) or len(np.unique(rows["id"])) != len(rows["id"]):
        raise RuntimeError(f"evaluated {len(rows['id'])} rows of {len(run.rows.eval)}: a row is missing or double")
    labels = run.rows.labels.get("eval", [])
    return run.task.metrics(rows) | source_losses(rows, np.asarray(run.rows.eval["source"]), labels)


def source_losses(rows: dict[str, np.ndarray], sources: np.ndarray, labels: list[str]) -> dict[str, float]:
    """Return {"<label>/loss": loss per item} of the rows of each source; nothing when there is but one.

    `rows` are values `[N]` as the task's `metrics` takes them, `sources [N]` the numbers of their sources.
    """
    if len(labels) < 2:
        return {}
    losses = np.bincount(sources, rows["loss"], len(labels))
    items = np.bincount(sources, rows["items"], len(labels))  # none in a dry run that has no row of a source
    return {f"{label}/loss": float(losses[n] / items[n]) for n, label in enumerate(labels) if items[n]}
