"""Read a run folder for `ftcli report` and `ftcli compare`. Light: never imports torch.

The folder may be incomplete, may belong to a run in progress, or may come from another person. A note tells what is
missing. Values are converted or left out here, so that other modules need not check them again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftcli.config.yaml_document import dump_document, parse_document
from ftcli.reports.run_events import Event, find_events
from ftcli.runtime.checkpoint_names import CHECKPOINTS, step_of
from ftcli.runtime.errors import InputError, Problem
from ftcli.runtime.reader_errors import user_path
from ftcli.runtime.run_folder import RunFolder
from ftcli.runtime.torn_files import read_object, read_rows

SHOWS_A_RUN = ("recipe.yaml", "metrics.jsonl", "status.json", "environment.json")
LARGEST_STEP = 2**53  # the largest integer that JavaScript and a float represent exactly


@dataclass(frozen=True)
class RunRecord:
    """Everything that reports show of one run.

    Attributes:
        label: Name of the run. No other run of the report has it.
        path: The run folder.
        recipe: Values of recipe.yaml; empty if the file is missing or cannot be read.
        profile: Values of profile.yaml; empty for a run without a profile.
        profile_name: Name of the profile, or "no profile".
        environment: Values of environment.json; empty if it is missing or incomplete.
        status: Values of status.json; empty if it is missing or incomplete.
        training: Rows of optimizer steps in the order of steps.
        evaluations: Rows of evaluations in the order of steps.
        samples: Rows of samples.jsonl.
        events: What happened, in the order of steps.
        notes: One sentence for each file that is missing or incomplete.
    """

    label: str
    path: Path
    recipe: dict[str, Any]
    profile: dict[str, Any]
    profile_name: str
    environment: dict[str, Any]
    status: dict[str, Any]
    training: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    events: list[Event]
    notes: list[str] = field(default_factory=list)

    @property
    def texts(self) -> dict[str, str]:
        """Return title -> YAML text of the recipe, the profile and the environment, without those that are empty."""
        values = {"Recipe": self.recipe, "Profile": self.profile, "Environment": self.environment}
        return {title: dump_document(value) for title, value in values.items() if value}


def read_runs(paths: Sequence[str | Path]) -> list[RunRecord]:
    """Read run folders.

    Args:
        paths: The folders.

    Returns:
        The records in the same order, each with a label of its own.

    Raises:
        InputError: A folder has no run, or was given twice. It lists all of them at once.
    """
    folders = [user_path(str(path), "run folder") for path in paths]
    problems = [problem for folder in folders if (problem := _why_no_run(folder)) is not None]
    resolved = [folder.resolve() for folder in folders]
    twice = dict.fromkeys(
        str(folder) for folder, real in zip(folders, resolved, strict=True) if resolved.count(real) > 1
    )
    if twice and not problems:
        problems.append(Problem(f"{', '.join(twice)}: the same run twice", hint="give each run once"))
    if problems:
        raise InputError(problems)
    names = [folder.name or str(folder) for folder in resolved]
    labels = [name if names.count(name) == 1 else str(folder) for name, folder in zip(names, folders, strict=True)]
    labels = [label if label.isprintable() else ascii(label)[1:-1] for label in labels]
    return [_read_run(label, RunFolder(folder)) for label, folder in zip(labels, folders, strict=True)]


def _why_no_run(folder: Path) -> Problem | None:
    """Return why a folder is not that of a run; None if it is."""
    hint = "give the folder of a run, by default runs/<recipe>"
    if not folder.exists():
        return Problem(f"{folder} does not exist", hint=hint)
    if not folder.is_dir():
        return Problem(f"{folder} is a file, not a run folder", hint=hint)
    if any((folder / name).is_file() for name in SHOWS_A_RUN):
        return None
    if step_of(folder) >= 0 and folder.resolve().parent.name == CHECKPOINTS:
        return Problem(f"{folder} is a checkpoint, not a run folder", hint=f"give {folder.resolve().parents[1]}")
    return Problem(f"{folder} has no run: it has none of {', '.join(SHOWS_A_RUN)}", hint=hint)


def _read_run(label: str, folder: RunFolder) -> RunRecord:
    """Read one run folder."""
    notes = [f"{label}: {line}" for line in folder.torn()]
    rows, dropped = usable_rows(folder.metrics())
    if dropped:
        notes.append(f"{label}: {dropped} rows of metrics.jsonl without a usable step are left out")
    training = [row for row in rows if "loss" in row]
    if not training:
        notes.append(f"{label}: metrics.jsonl has no training row, so there is no curve")
    recipe = _read_yaml(folder.path / "recipe.yaml", label, notes)
    profile = _read_yaml(folder.path / "profile.yaml", label, notes)
    environment = read_object(folder.path / "environment.json")
    if environment is None:
        notes.append(f"{label}: environment.json is missing or incomplete, so versions are not known")
    samples, _ = usable_rows([row for *_, row in read_rows(folder.samples) if row is not None])
    return RunRecord(
        label=label,
        path=folder.path,
        recipe=recipe,
        profile=profile,
        profile_name=_profile_name(folder.path / "profile.yaml", profile),
        environment=environment or {},
        status=folder.status(),
        training=training,
        evaluations=[row for row in rows if "loss" not in row],
        samples=[row for row in samples if "answer" in row],
        events=find_events(folder, rows),
        notes=notes,
    )


def usable_rows(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """Return (rows with a whole step in the order of steps, number of other rows).

    Args:
        rows: Rows of metrics.jsonl or samples.jsonl.
    """
    usable = [row for row in rows if abs(row["step"]) <= LARGEST_STEP and int(row["step"]) == row["step"] >= 0]
    ordered = sorted((row | {"step": int(row["step"])} for row in usable), key=lambda row: int(row["step"]))
    return ordered, len(rows) - len(usable)


def _read_yaml(path: Path, label: str, notes: list[str]) -> dict[str, Any]:
    """Return the values of a YAML file; an empty dictionary and a note if it is missing or cannot be read."""
    try:
        return parse_document(path.read_text(encoding="utf-8"), path.name).values
    except FileNotFoundError:
        notes.append(f"{label}: {path.name} is missing")
    except (OSError, UnicodeDecodeError, InputError):
        notes.append(f"{label}: {path.name} cannot be read")
    return {}


def _profile_name(path: Path, values: dict[str, Any]) -> str:
    """Return the name in the head comment of profile.yaml, or else the distributed type."""
    head = path.read_text(encoding="utf-8", errors="replace").partition("\n")[0] if path.is_file() else ""
    if not values:
        return "no profile" if head.startswith("# trained without") else "unknown"
    named = head.removeprefix("# profile ").partition(", source: ")[0] if head.startswith("# profile ") else ""
    return named or str(values.get("distributed_type", "unknown"))


def number(value: Any) -> float | None:
    """Return a value of a row as a float, which may be NaN or infinite; None if it is no number.

    Args:
        value: Any value that JSON can hold.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if isinstance(value, float) or abs(value) <= LARGEST_STEP else math.nan
