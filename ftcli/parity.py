"""One recipe under several profiles and micro sizes: does the curve stay? What `ftcli parity` does.

Every combination is an ordinary run with a folder of its own; the first is the reference. How two runs are compared
is comparison.py's. Light: never imports torch.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checks import check_inputs
from .comparison import TOLERANCES, Comparison, Curve, Tolerance, compare
from .curves import draw_curves
from .devices import check_devices, count_processes
from .errors import EXIT_DONE, EXIT_FAILED, InputError, Problem
from .planning import derive_batches, derive_plan, rows_at_once
from .run_folder import RunFolder
from .supervision import LaunchError, say

if TYPE_CHECKING:
    from .profiles import Profile
    from .recipe import Recipe


SIZE = "batch.micro_size="


@dataclass(frozen=True)
class Combination:
    """One run of a comparison. `rows` is what a forward really holds: the largest divisor within `micro_size`."""

    profile: Profile
    processes: int
    micro_size: int
    rows: int

    @property
    def label(self) -> str:
        """What tables and sentences call it."""
        return f"{self.profile.name} x{self.processes}, micro {self.micro_size}"

    @property
    def folder(self) -> str:
        """Name of its run folder."""
        return f"{self.profile.name}-x{self.processes}-micro-{self.micro_size}"


@dataclass(frozen=True)
class Parity:
    """What a comparison showed."""

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
        """0 when everything that is held, holds."""
        return EXIT_FAILED if any(found.departure for found in self.comparisons) else EXIT_DONE

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for `--json` and parity.json."""
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
        """Return the table, the tolerances, and where each curve leaves them, as text."""
        limit = self.tolerance
        head = [
            f"{self.recipe}: {self.steps} steps in {self.precision}; the reference is {self.reference}",
            f"tolerances of {self.precision}: loss and evaluation {limit.loss:g}, gradient norm {limit.grad_norm:g}, "
            f"relative; final weights {limit.weights:g} of the way the learning rates allow",
            "identical must be: initial weights, rows (digest of their ids), items and learning rate of every step",
            "",
        ]
        found = [comparison.departure for comparison in self.comparisons if comparison.departure]
        free = sum(not comparison.is_held for comparison in self.comparisons)
        stays = "the curve stays" + (f" where it can; {free} of {len(self.comparisons)} not held" if free else "")
        return [
            *head,
            *_table(self.reference, self.comparisons),
            "",
            *(f"note: {note}" for note in self.notes),
            *map(str, found),
            f"{len(found)} of {len(self.comparisons)} leave the curve" if found else stays,
            f"curves: {self.picture}",
        ]


COLUMNS = (
    "combination",
    "loss",
    "drift",
    "gradient norm",
    "rates",
    "rows",
    "items",
    "initial",
    "final",
    "evaluation",
    "holds",
)


def _table(reference: str, comparisons: Sequence[Comparison]) -> list[str]:
    """Return the comparisons as aligned columns: largest relative differences, mean drift, identities."""
    rows = [COLUMNS, (reference, *("reference" if name == "loss" else "" for name in COLUMNS[1:]))]
    for found in comparisons:
        same = (found.learning_rates, found.samples, found.items, found.start)
        holds = "no" if found.departure else "yes" if found.is_held else "not held"
        rows.append(
            (
                found.label,
                f"{found.loss:.1e}",
                f"{found.drift:+.1e}",
                f"{found.grad_norm:.1e}",
                *("same" if item else "DIFFER" for item in same),
                "DIFFER" if found.weights is None else f"{found.weights:.1e}",
                "none" if found.evaluation is None else f"{found.evaluation:.1e}",
                holds,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def compare_profiles(
    recipe: str | Path,
    profiles: Sequence[str | Path],
    *,
    num_processes: Sequence[int] = (),
    micro_sizes: Sequence[int] = (),
    steps: int | None = None,
    cpu: bool = False,
    overrides: Sequence[str] = (),
    output: str | Path | None = None,
) -> Parity:
    """Train a recipe under every profile and micro size, and return how far each curve is from the first one's.

    Without `micro_sizes` every profile runs at the recipe's, and the first once more at a smaller one: a loss that is
    a mean where a sum is due shows nowhere else. Every profile that is distributed runs on each of `num_processes`.
    Writes the runs, parity.json, parity.txt and curves.png into `output`, a new folder (default:
    runs/<recipe>-parity). Raises `InputError` before anything runs for what the user can mend, and `LaunchError`
    when a run fails.
    """
    from .launcher import is_launched
    from .recipe_file import load_recipe, run_output

    if is_launched():
        raise InputError("parity launches its own processes", hint="start it without accelerate launch or torchrun")
    given = [*overrides, "log.every_steps=1", "log.trackers=[]"]
    given += [] if steps is None else [f"train.max_steps={steps}"]
    loaded = load_recipe(recipe, given)
    path = run_output(recipe, loaded)
    folder = Path(output or path.with_name(f"{path.name}-parity"))
    given, named = [item for item in given if not item.startswith(SIZE)], given
    if micro_sizes and given != named:
        raise InputError(f"--micro-sizes and --set {SIZE} exclude each other", hint="keep one of the two")
    planned = combinations(loaded, profiles, num_processes, micro_sizes, cpu=cpu)
    _claim(folder)
    curves: list[Curve] = []
    with contextlib.redirect_stdout(sys.stderr):  # what a run prints must not stand among the data
        for number, combination in enumerate(planned, start=1):
            say(f"ftcli: parity, run {number} of {len(planned)}: {combination.label}")
            curves.append(_run(recipe, given, combination, folder / combination.folder, cpu=cpu))
    found = _judge(str(recipe), loaded, planned, curves, folder)
    (folder / "parity.json").write_text(json.dumps(found.as_dict(), indent=1) + "\n", encoding="utf-8")
    (folder / "parity.txt").write_text("\n".join(found.lines()) + "\n", encoding="utf-8")
    return found


def combinations(
    recipe: Recipe,
    profiles: Sequence[str | Path],
    num_processes: Sequence[int],
    micro_sizes: Sequence[int],
    *,
    cpu: bool,
) -> list[Combination]:
    """Return the runs to make, the reference first; raises `InputError` for all that cannot be run."""
    from .profiles import check_pair, load_profile

    check_inputs(recipe, cpu=cpu)
    problems: list[Problem] = []
    planned: list[Combination] = []
    for profile in map(load_profile, profiles):
        problems += check_pair(recipe, profile)
        wanted = () if profile.distributed_type == "NO" else num_processes
        for world in [count_processes(profile, count, cpu=cpu) for count in wanted or (None,)]:
            problems += check_devices(profile, world, cpu=cpu)
            for size in micro_sizes or (rows_at_once(recipe),):
                batch = recipe.batch.model_copy(update={"micro_size": size})
                plan = derive_plan(recipe.model_copy(update={"batch": batch}), world)
                planned.append(Combination(profile, world, size, plan.micro_size))
    labels = [combination.folder for combination in planned]
    if twice := {label for label in labels if labels.count(label) > 1}:
        problems.append(Problem(f"{', '.join(sorted(twice))} would run twice", hint="name each profile and size once"))
    first = planned[0]
    if not micro_sizes and first.rows > 1:
        smaller = derive_batches(recipe.batch.global_size, first.rows - 1, first.processes)[0]
        planned.append(Combination(first.profile, first.processes, smaller, smaller))
    if len(planned) < 2:
        problems.append(Problem("one run cannot be compared", hint="name two profiles, or two micro sizes"))
    if problems:
        raise InputError(problems)
    return planned


def _claim(folder: Path) -> None:
    """Refuse a folder that holds something: an earlier comparison is never written over."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} already holds something", hint="choose a new folder with --output, or remove it")
    RunFolder(folder).claim()


def _run(recipe: str | Path, given: Sequence[str], wanted: Combination, path: Path, *, cpu: bool) -> Curve:
    """Run one combination by an ordinary launch and return its curve."""
    from .launcher import train

    alone = wanted.profile.distributed_type == "NO"
    folder = train(
        recipe,
        wanted.profile.path,
        num_processes=None if alone else wanted.processes,
        cpu=cpu,
        overrides=[*given, f"{SIZE}{wanted.micro_size}"],
        output=path,
        record_start=True,
    )
    if folder.status()["state"] != "done":
        say(f"parity ends here: {wanted.label} was {folder.status()['state']} at step {folder.status()['step']}")
        raise LaunchError(f"{wanted.label} was {folder.status()['state']}")
    return Curve.of(wanted.label, folder)


def _judge(name: str, recipe: Recipe, planned: Sequence[Combination], curves: Sequence[Curve], folder: Path) -> Parity:
    """Compare every run with the first, or with the first that it can equal, and draw them."""
    tolerance = TOLERANCES[recipe.precision]
    reasons = _reasons(recipe, RunFolder(folder / planned[0].folder).start()["dropout"])
    firsts: dict[tuple[int, int], Curve] = {}  # what can be equal: everything, or one world and micro-batch only
    comparisons = []
    for combination, curve in zip(planned, curves, strict=True):
        kind = (combination.processes, combination.rows) if reasons else (0, 0)
        wanted = firsts.setdefault(kind, curve)
        if wanted is not curve:
            comparisons.append(compare(curve, wanted, tolerance))
        elif curve is not curves[0]:
            comparisons.append(compare(curve, curves[0], tolerance, is_held=False))
    return Parity(
        recipe=name,
        precision=recipe.precision,
        tolerance=tolerance,
        reference=curves[0].label,
        steps=len(curves[0].training),
        notes=reasons + _pairings(comparisons, curves[0].label),
        comparisons=comparisons,
        folder=folder,
        picture=draw_curves(curves, tolerance, folder / "curves.png"),
    )


def _reasons(recipe: Recipe, dropout: float) -> list[str]:
    """Return why runs on other worlds or with other micro-batches cannot be equal, in words."""
    held = "loss, gradient norm and weights are held only between runs with equal processes and micro-batches"
    found = [f"dropout is {dropout:g}: every process draws its own, so {held}"] if dropout else []
    if recipe.model.batch_norm == "train":
        found.append(f"batch_norm: train: statistics are those of each micro-batch, so {held}")
    return found


def _pairings(comparisons: Sequence[Comparison], reference: str) -> list[str]:
    return [f"{found.label} is compared with {found.against}" for found in comparisons if found.against != reference]
