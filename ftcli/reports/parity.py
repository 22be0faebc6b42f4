"""Train one recipe under several profiles and micro-batch sizes, and compare the loss curves: `ftcli parity`.

Every combination is an ordinary run with its own folder. The first one is the reference. comparison.py compares two
runs. Light: never imports torch.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.config.plan import derive_batches, derive_plan
from ftcli.launch.preflight import check_inputs
from ftcli.launch.processes import check_devices, count_processes
from ftcli.launch.supervisor import LaunchError
from ftcli.reports.comparison import TOLERANCES, Comparison, Curve, Tolerance, compare, comparison_table
from ftcli.reports.curves import draw_curves
from ftcli.runtime.errors import EXIT_DONE, EXIT_FAILED, InputError, Problem
from ftcli.runtime.log import log_line
from ftcli.runtime.reader_errors import user_path
from ftcli.runtime.run_folder import RunFolder

if TYPE_CHECKING:
    from ftcli.config.profile import Profile
    from ftcli.config.recipe import Recipe


SIZE = "batch.micro_size="


@dataclass(frozen=True)
class Combination:
    """One run of a comparison.

    Attributes:
        profile: The profile.
        processes: Number of processes.
        micro_size: `batch.micro_size` of the run.
        rows: Rows in one forward pass of a process, the largest divisor that is not above `micro_size`; of a run under
            auto, where tokens decide, as many as without tokens.
    """

    profile: Profile
    processes: int
    micro_size: int | str
    rows: int

    @property
    def label(self) -> str:
        """Name of the run in tables and messages."""
        return f"{self.profile.name} x{self.processes}, micro {self.micro_size}"

    @property
    def folder(self) -> str:
        """Name of the run folder."""
        return f"{self.profile.name}-x{self.processes}-micro-{self.micro_size}"


@dataclass(frozen=True)
class Parity:
    """Result of comparing one recipe on several profiles.

    Attributes:
        recipe: The recipe.
        precision: Its precision.
        tolerance: Tolerances of this precision.
        reference: Label of the first run.
        steps: Length of each run.
        notes: Limits of exactness, and runs that are compared with another one than the reference.
        comparisons: One comparison for each other run.
        folder: Folder of the runs.
        picture: Path of the drawing, or why there is none.
    """

    recipe: str
    precision: str
    tolerance: Tolerance
    reference: str
    steps: int
    notes: list[str]
    comparisons: list[Comparison]
    folder: Path
    picture: str

    @property
    def exit_code(self) -> int:
        """0 if no run departs from the reference, else 1."""
        return EXIT_FAILED if any(comparison.departure for comparison in self.comparisons) else EXIT_DONE

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain values, for `--json` and parity.json."""
        return {
            "recipe": self.recipe,
            "precision": self.precision,
            "steps": self.steps,
            "tolerance": asdict(self.tolerance),
            "reference": self.reference,
            "notes": self.notes,
            "comparisons": [comparison.as_dict() for comparison in self.comparisons],
            "holds": self.exit_code == EXIT_DONE,
            "output": str(self.folder),
            "curves": self.picture,
        }

    def lines(self) -> list[str]:
        """Return tolerances, the table and all departures as text."""
        limit = self.tolerance
        head = [
            f"{self.recipe}: {self.steps} steps in {self.precision}; the reference is {self.reference}",
            f"tolerances of {self.precision}: loss and evaluation {limit.loss:g}, gradient norm {limit.grad_norm:g}, "
            f"relative; final weights {limit.weights:g} of the sum of learning rates",
            "must be identical: initial weights, rows (digest of their ids), items and learning rate of every step",
            "",
        ]
        departures = [comparison.departure for comparison in self.comparisons if comparison.departure]
        unchecked = sum(not comparison.is_held for comparison in self.comparisons)
        stays = "the curve stays" + (
            f"; tolerances were not checked for {unchecked} of {len(self.comparisons)} runs" if unchecked else ""
        )
        return [
            *head,
            *comparison_table(self.reference, self.comparisons),
            "",
            *(f"note: {note}" for note in self.notes),
            *map(str, departures),
            f"{len(departures)} of {len(self.comparisons)} leave the curve" if departures else stays,
            f"curves: {self.picture}",
        ]


def compare_profiles(
    recipe: str | Path,
    profiles: Sequence[str | Path],
    *,
    num_processes: Sequence[int] = (),
    micro_sizes: Sequence[int | str] = (),
    steps: int | None = None,
    cpu: bool = False,
    overrides: Sequence[str] = (),
    output: str | Path | None = None,
) -> Parity:
    """Train a recipe with every profile and micro-batch size, and compare the loss curves with the first one.

    The runs, parity.json, parity.txt and curves.png are written into a new folder.

    Args:
        recipe: A recipe file, or the name of a shipped recipe.
        profiles: Names or paths of Accelerate configs. The first is the reference.
        num_processes: Numbers of processes. Each distributed profile runs with each of them. Empty: all visible GPUs.
        micro_sizes: Values of `batch.micro_size`, numbers or "auto". Each profile runs with each of them. Empty: the
            recipe's value, and a smaller one on the first profile, which shows a loss that is a mean instead of a sum.
        steps: Length of each run. None: the recipe's.
        cpu: Train on the CPU, even on a machine with GPUs.
        overrides: Changes of the recipe such as "train.max_steps=10", applied in order.
        output: The new folder. None: runs/<recipe name>-parity.

    Returns:
        The comparisons. `lines()` is the table, `exit_code` is 0 if all curves agree.

    Raises:
        InputError: The recipe, a profile or the folder is wrong. It is raised before the first run.
        LaunchError: A run failed.

    Example:
        >>> parity = ftcli.compare_profiles("recipe.yaml", ["single", "ddp", "fsdp"], num_processes=[2])
        >>> for line in parity.lines():
        ...     print(line)
    """
    from ftcli.config.load import load_recipe, run_output
    from ftcli.runtime.process import is_launched

    if is_launched():
        raise InputError("parity launches its own processes", hint="start it without accelerate launch or torchrun")
    settings = [*overrides, "log.every_steps=1", "log.trackers=[]"]
    settings += [] if steps is None else [f"train.max_steps={steps}"]
    loaded = load_recipe(recipe, settings)
    path = run_output(recipe, loaded)
    folder = user_path(output or path.with_name(f"{path.name}-parity"), "--output")
    settings, with_sizes = [item for item in settings if not item.startswith(SIZE)], settings
    if micro_sizes and settings != with_sizes:
        raise InputError(f"--micro-sizes and --set {SIZE} exclude each other", hint="keep one of the two")
    planned = combinations(loaded, profiles, num_processes, micro_sizes, cpu=cpu)
    _claim_folder(folder)
    curves: list[Curve] = []
    with contextlib.redirect_stdout(sys.stderr):  # standard output is for the report
        for number, combination in enumerate(planned, start=1):
            log_line(f"parity, run {number} of {len(planned)}: {combination.label}")
            curves.append(_train_combination(recipe, settings, combination, folder / combination.folder, cpu=cpu))
    parity = _compare_runs(str(recipe), loaded, planned, curves, folder)
    (folder / "parity.json").write_text(json.dumps(parity.as_dict(), indent=1) + "\n", encoding="utf-8")
    (folder / "parity.txt").write_text("\n".join(parity.lines()) + "\n", encoding="utf-8")
    return parity


def combinations(
    recipe: Recipe,
    profiles: Sequence[str | Path],
    num_processes: Sequence[int],
    micro_sizes: Sequence[int | str],
    *,
    cpu: bool,
) -> list[Combination]:
    """Return the runs of a comparison, the reference first.

    Raises:
        InputError: All reasons why runs are not possible.
    """
    from ftcli.config.compatibility import check_pair
    from ftcli.config.profile import load_profile

    check_inputs(recipe, cpu=cpu)
    problems: list[Problem] = []
    planned: list[Combination] = []
    for profile in map(load_profile, profiles):
        problems += check_pair(recipe, profile)
        counts = () if profile.distributed_type == "NO" else num_processes
        for world in [count_processes(profile, count, cpu=cpu) for count in counts or (None,)]:
            problems += check_devices(profile, world, cpu=cpu)
            for size in micro_sizes or (recipe.batch.micro_size,):
                batch = recipe.batch.model_copy(update={"micro_size": size})
                plan = derive_plan(recipe.model_copy(update={"batch": batch}), world)
                planned.append(Combination(profile, world, size, plan.micro_size))
    labels = [combination.folder for combination in planned]
    if repeated := {label for label in labels if labels.count(label) > 1}:
        problems.append(
            Problem(f"{', '.join(sorted(repeated))} would run twice", hint="name each profile and size once")
        )
    first = planned[0]
    if not micro_sizes and first.rows > 1:
        smaller = derive_batches(recipe.batch.global_size, first.rows - 1, first.processes)[0]
        planned.append(Combination(first.profile, first.processes, smaller, smaller))
    if len(planned) < 2:
        problems.append(Problem("one run cannot be compared", hint="name two profiles, or two micro sizes"))
    if problems:
        raise InputError(problems)
    return planned


def _claim_folder(folder: Path) -> None:
    """Claim a folder, which must be new or empty, so that no earlier comparison is overwritten."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(
            f"{folder} exists and is not an empty folder", hint="name another folder with --output, or remove it"
        )
    RunFolder(folder).claim()


def _train_combination(
    recipe: str | Path, settings: Sequence[str], combination: Combination, path: Path, *, cpu: bool
) -> Curve:
    """Train one combination by an ordinary launch and return its curve."""
    from ftcli.launch.launcher import train

    is_single = combination.profile.distributed_type == "NO"
    folder = train(
        recipe,
        combination.profile.path,
        num_processes=None if is_single else combination.processes,
        cpu=cpu,
        overrides=[*settings, f"{SIZE}{combination.micro_size}"],
        output=path,
        record_start=True,
    )
    if folder.status()["state"] != "done":
        log_line(
            f"parity ends here: {combination.label} was {folder.status()['state']} at step {folder.status()['step']}",
            prefix=False,
        )
        raise LaunchError(f"{combination.label} was {folder.status()['state']}")
    return Curve.of(combination.label, folder)


def _compare_runs(
    name: str, recipe: Recipe, planned: Sequence[Combination], curves: Sequence[Curve], folder: Path
) -> Parity:
    """Compare every run with the first one, or with the first one that it can equal, and draw the curves."""
    tolerance = TOLERANCES[recipe.precision]
    dropout = RunFolder(folder / planned[0].folder).start()["dropout"]
    reasons = _inexactness_reasons(recipe, dropout)
    references: dict[tuple[int, ...], Curve] = {}  # one for all runs, or for each group of runs that can be equal
    comparisons = []
    for combination, curve in zip(planned, curves, strict=True):
        reference = references.setdefault(_group(recipe, dropout, combination), curve)
        if reference is not curve:
            comparisons.append(compare(curve, reference, tolerance))
        elif curve is not curves[0]:
            comparisons.append(compare(curve, curves[0], tolerance, is_held=False))
    return Parity(
        recipe=name,
        precision=recipe.precision,
        tolerance=tolerance,
        reference=curves[0].label,
        steps=len(curves[0].training),
        notes=reasons + _describe_pairings(comparisons, curves[0].label),
        comparisons=comparisons,
        folder=folder,
        picture=draw_curves(curves, tolerance, folder / "curves.png"),
    )


def _group(recipe: Recipe, dropout: float, combination: Combination) -> tuple[int, ...]:
    """Return what a combination must have in common with another one for equal curves; empty: nothing."""
    mode = recipe.model.batch_norm
    if dropout or mode == "train":
        return combination.processes, combination.rows
    return (combination.processes * combination.rows,) if mode == "sync" else ()


def _inexactness_reasons(recipe: Recipe, dropout: float) -> list[str]:
    """Return why runs with other numbers of processes or micro-batch sizes cannot be equal."""
    limit = "loss, gradient norm and weights are compared only between runs with equal"
    worlds, mode = f"{limit} processes and micro-batches", recipe.model.batch_norm
    reasons = [f"dropout is {dropout:g}: every process draws its own mask, so {worlds}"] if dropout else []
    if mode == "train":
        reasons.append(f"batch_norm: train: statistics are those of each forward pass, so {worlds}")
    if mode == "sync":
        passes = f"{limit} rows in a forward pass of all processes"
        reasons.append(f"batch_norm: sync: statistics are those of a forward pass of all processes, so {passes}")
    return reasons


def _describe_pairings(comparisons: Sequence[Comparison], reference: str) -> list[str]:
    """Return a note for each run that is not compared with the reference."""
    others = [comparison for comparison in comparisons if comparison.against != reference]
    return [f"{comparison.label} is compared with {comparison.against}" for comparison in others]
