"""Find the events of a run in its folder: launches, checkpoints, bad steps, stalls, failures, what its load showed.

Checkpoints that were deleted since are found in events.jsonl only. Runs of earlier versions have no such file. Their
resumes are found where the seconds of a launch begin anew. Light: never imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ftcli.runtime.checkpoint_names import STATE, checkpoints_of, step_of
from ftcli.runtime.load_findings import KINDS as LOAD_KINDS
from ftcli.runtime.run_folder import EVENTS, ORIGIN, RunFolder
from ftcli.runtime.torn_files import read_object, read_rows

KINDS = (
    "launch",
    "checkpoint",
    "evaluation",
    "answers",
    "skipped step",
    "not finite",
    "trained again",
    "stall",
    *LOAD_KINDS,
    "failure",
    "end",
)
MOST_TEXT = 300  # characters of an event


@dataclass(frozen=True)
class Event:
    """Something that happened to a run.

    Attributes:
        kind: One of `KINDS`.
        step: Number of optimizer steps that were done.
        text: A short description; may be empty.
    """

    kind: str
    step: int
    text: str = ""


def find_events(folder: RunFolder, rows: list[dict[str, Any]]) -> list[Event]:
    """Return the events of a run in the order of steps.

    Args:
        folder: The run folder.
        rows: The usable rows of its metrics.jsonl.
    """
    training = [row for row in rows if "loss" in row]
    recorded = list(_recorded(folder))
    events = [*recorded]
    states = [(step_of(path), read_object(path / STATE) or {}) for path in checkpoints_of(folder.path)]
    saved = {event.step for event in recorded if event.kind == "checkpoint"}
    events += [Event("checkpoint", step, _writer(state)) for step, state in states if step not in saved]
    if not any(event.kind == "launch" for event in recorded):
        events += _launches_by_seconds(folder, training, states)
    events += [Event("evaluation", row["step"], _metrics(row)) for row in rows if "loss" not in row]
    events += _bad_steps(training, states[-1][1] if states else {})
    events += _abandoned(folder.path / "metrics.abandoned.jsonl")
    events += _end(folder)
    shortened = [Event(event.kind, event.step, event.text[:MOST_TEXT]) for event in dict.fromkeys(events)]
    return sorted(shortened, key=lambda event: (event.step, KINDS.index(event.kind)))


def _recorded(folder: RunFolder) -> Iterator[Event]:
    """Yield the events that the run itself recorded in events.jsonl."""
    for *_, row in read_rows(folder.path / EVENTS):
        if row is not None and row.get("event") in KINDS and 0 <= row["step"] < math.inf:
            yield Event(row["event"], int(row["step"]), str(row.get("text", "")))


def _writer(state: dict[str, Any]) -> str:
    """Return by what a checkpoint was written: profile and number of processes."""
    writer = state.get("written_by")
    if not isinstance(writer, dict):
        return ""
    return f"{writer.get('profile')}, processes: {writer.get('processes')}"


def _launches_by_seconds(
    folder: RunFolder, training: list[dict[str, Any]], states: list[tuple[int, dict[str, Any]]]
) -> Iterator[Event]:
    """Yield a launch where the seconds of training begin anew, with the profile of the next checkpoint."""
    origin = read_object(folder.path / ORIGIN) or {}
    if origin.get("checkpoint"):
        yield Event(
            "launch", int(origin["step"]) if _is_step(origin.get("step")) else 0, f"from {origin['checkpoint']}"
        )
    timed = [row for row in training if isinstance(row.get("seconds"), int | float)]
    for before, row in pairwise(timed):
        if row["seconds"] < before["seconds"]:
            writers = (_writer(state) for step, state in states if step >= row["step"])
            yield Event("launch", before["step"], f"resumed; {next(writers, '')}".rstrip("; "))


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and value >= 0


def _metrics(row: dict[str, Any]) -> str:
    """Return the first metrics of an evaluation as text."""
    values = [(name.removeprefix("eval/"), value) for name, value in row.items() if name.startswith("eval/")]
    return ", ".join(f"{name} {value:.4g}" for name, value in values[:4] if isinstance(value, int | float))


def _bad_steps(training: list[dict[str, Any]], newest: dict[str, Any]) -> Iterator[Event]:
    """Yield steps whose loss is not finite, steps that faults.non_finite skipped, and overflows under fp16."""
    for row in training:
        bad = [
            name for name in ("loss", "grad_norm") if isinstance(row.get(name), float) and not math.isfinite(row[name])
        ]
        if bad:
            yield Event("not finite", row["step"], ", ".join(f"{name} is {row[name]}" for name in bad))
    record = newest.get("not_finite")
    for entry in record if isinstance(record, list) else ():
        if isinstance(entry, dict) and _is_step(entry.get("step")):
            yield Event("skipped step", entry["step"], f"faults.non_finite: {entry.get('policy')}")
    counted = [row for row in training if _is_step(row.get("skipped_steps"))]
    for before, row in pairwise([{"skipped_steps": 0}, *counted]):
        if (more := row["skipped_steps"] - before["skipped_steps"]) > 0:
            yield Event("skipped step", row["step"], f"{more} updates skipped since the row before: overflow in fp16")


def _abandoned(path: Path) -> Iterator[Event]:
    """Yield one event for the steps that were trained again after a resume."""
    rows = [row for *_, row in read_rows(path) if row is not None and "loss" in row]
    steps = [int(row["step"]) for row in rows if 0 <= row["step"] < math.inf]
    if steps:
        yield Event(
            "trained again", min(steps), f"{len(steps)} rows of steps {min(steps)} to {max(steps)}: {path.name}"
        )


def _end(folder: RunFolder) -> Iterator[Event]:
    """Yield how the run ended, and what ended each rank that failed."""
    status = folder.status()
    step = status["step"] if _is_step(status.get("step")) else 0
    for path in sorted(folder.errors.glob("rank-*.json")):
        record = read_object(path) or {}
        yield Event("failure", step, f"{path.stem}: {record.get('message', path.name)}")
    if status.get("state") in ("done", "stopped", "failed"):
        yield Event("end", step, ": ".join(filter(None, (str(status["state"]), str(status.get("error") or "")))))
