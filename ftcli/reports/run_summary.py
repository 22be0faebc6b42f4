"""Describe a run folder as text, for `ftcli show RUN`. Light: never imports torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ftcli.checkpoint.folder import describe_best, folder_size, unused_entries
from ftcli.reports.run_record import number, usable_rows
from ftcli.reports.text_chart import draw_text_chart
from ftcli.runtime.checkpoint_names import checkpoints_of
from ftcli.runtime.errors import InputError
from ftcli.runtime.run_folder import RunFolder


def show_run(path: str | Path) -> Iterable[str]:
    """Describe a run folder in one line per fact. Incomplete files after a power cut are listed as torn.

    Raises:
        InputError: The folder has no run.
    """
    folder = RunFolder(path)
    if not (folder.path / "recipe.yaml").exists():
        raise InputError(
            f"{folder.path} has no run",
            hint="give the folder of a run, by default runs/<recipe>",
        )
    status = folder.status()
    lines = [f"run      {folder.path}", f"state    {status.get('state', 'unknown')} at step {status.get('step', 0)}"]
    if status.get("state") in ("loading", "running") and folder.is_abandoned():
        lines.append("killed   its processes ended without recording a reason; --resume auto continues")
    lines += [f"torn     {line}" for line in folder.torn()]
    if status.get("error"):
        lines.append(f"error    {status['error']}")
    rows, _ = usable_rows(folder.metrics())
    training = [row for row in rows if number(row.get("loss")) is not None]
    if training:
        steps, losses = _curve(training, "loss")
        lines.append(f"loss     {losses[0]:.4f} at step {steps[0]}, {losses[-1]:.4f} at step {steps[-1]}")
        lines += _further_values(training)
        lines += [f"         {line}" for line in draw_text_chart([(steps, losses)])]
    for row in rows:
        if "loss" not in row:
            numbers = {key: number(value) for key, value in row.items() if key.startswith("eval/")}
            values = ", ".join(f"{key} {value:.4g}" for key, value in numbers.items() if value is not None)
            lines.append(f"eval     step {row['step']}: {values}")
    lines += [f"saved    {path} ({folder_size(path) / 1e6:.1f} MB)" for path in checkpoints_of(folder.path)]
    if best := describe_best(folder.path):
        lines.append(f"best     {best}")
    lines += [f"left     {path} {line}" for path, line in unused_entries(folder.path)]
    if folder.final.is_dir():
        lines.append(f"final    {folder.final} ({folder_size(folder.final) / 1e6:.1f} MB)")
    return lines


def _curve(rows: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Return (steps, values) of the rows in which a value is a number."""
    pairs = [(row["step"], value) for row in rows if (value := number(row.get(name))) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _further_values(training: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line with the first and last loss of each source, and mean of each term and note.

    A value is missing in steps without rows that it is a mean over.
    """
    names = dict.fromkeys(name for row in training for name in row if name.startswith("train/"))
    for name in names:
        steps, values = _curve(training, name)
        if not steps:
            continue
        label = name.removeprefix("train/").removesuffix("/loss")
        kind = "loss " if name.endswith("/loss") else "train"
        yield f"{kind}    {label}: {values[0]:.4f} at step {steps[0]}, {values[-1]:.4f} at step {steps[-1]}"
