"""Record some steps of a recipe on every rank, and explain where their time went: `ftcli trace`.

The ranks write their traces (launch/trace_rank.py). This module then reads them: events.py divides the steps of a rank,
verdict.py says what would help, and page.py draws the page. Light: never imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from ftcli.launch.supervisor import LaunchError
from ftcli.launch.trace_files import COOL_DOWN, WARM_UP, facts_name, trace_name
from ftcli.launch.trace_launch import trace_ranks
from ftcli.reports.tracing.events import PARTS, Breakdown, break_down, read_events
from ftcli.reports.tracing.verdict import Remedy, Setting, slowest, verdict
from ftcli.runtime.errors import EXIT_DONE, InputError
from ftcli.runtime.failures import failure_records
from ftcli.runtime.installed import is_installed
from ftcli.runtime.reader_errors import user_path
from ftcli.runtime.run_folder import RunFolder

if TYPE_CHECKING:
    from ftcli.config.profile import Profile
    from ftcli.config.recipe import Recipe

HEADINGS = {
    "compute": "compute",
    "hidden": "comm. hidden",
    "exposed": "comm. exposed",
    "data": "data",
    "optimizer": "optimizer",
    "idle": "host-bound idle",
}
PAGE, MERGED, RESULT = "trace.html", "all-ranks.trace.json.gz", "trace.json"
NO_PAGE = "not written, because bokeh is not installed (pip install 'ftcli[report]')"
LISTED = 10  # kernels in the text


@dataclass(frozen=True)
class TraceReport:
    """Where the time of the recorded steps went.

    Attributes:
        recipe: The recipe.
        profile: The profile; "none" without one.
        processes: Number of ranks.
        steps: Recorded steps.
        facts: What each rank wrote about itself, by rank.
        ranks: The breakdown of each rank that wrote a trace.
        findings: What limits the steps.
        remedies: Remedies for exposed communication, the largest gain first.
        failures: Ranks without a complete trace, and why.
        folder: The folder with all files.
        exit_code: 0, or that of the run if it failed.
    """

    recipe: str
    profile: str
    processes: int
    steps: int
    facts: dict[int, dict[str, Any]]
    ranks: dict[int, Breakdown]
    findings: list[str]
    remedies: list[Remedy]
    failures: list[str]
    folder: Path
    exit_code: int

    @property
    def slowest(self) -> int:
        """The rank with the most work of its own."""
        return slowest({rank: found.shares for rank, found in self.ranks.items()})[0]

    @property
    def title(self) -> str:
        """One line about the run."""
        device = next(iter(self.facts.values()))["device"]
        named = "without a profile" if self.profile == "none" else f"profile {self.profile}"
        count = f"{self.processes} process" + "es" * (self.processes > 1)
        return f"{self.recipe}: {named}, {count} on {device}, {self.steps} recorded steps"

    @property
    def overhead(self) -> str:
        """How long a step takes with and without the profiler."""
        plain = [seconds for facts in self.facts.values() for seconds in facts["plain_step_seconds"]]
        recorded = [seconds for facts in self.facts.values() for seconds in facts["step_seconds"]]
        text = f"A recorded step takes {_duration(median(recorded))} in the median"
        return text + (f"; a step without the profiler {_duration(median(plain))}" if plain else "")

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain values, for `--json` and trace.json."""
        return {
            "recipe": self.recipe,
            "profile": self.profile,
            "processes": self.processes,
            "steps": self.steps,
            "slowest_rank": self.slowest,
            "ranks": {str(rank): asdict(found) | self.facts[rank] for rank, found in self.ranks.items()},
            "findings": self.findings,
            "remedies": [asdict(remedy) for remedy in self.remedies],
            "failures": self.failures,
            "output": str(self.folder),
        }

    def table(self) -> list[list[str]]:
        """Return the shares of each rank as rows of text, the headings first."""
        head = ["rank", "step", *HEADINGS.values()]
        rows = [
            [str(rank), _duration(found.seconds), *(f"{found.shares[part]:.1%}" for part in PARTS)]
            for rank, found in self.ranks.items()
        ]
        return [head, *rows]

    def lines(self) -> list[str]:
        """Return tables and findings as text."""
        first, page = self.ranks[self.slowest], self.folder / PAGE
        kind = "kernels" if first.on_gpu else "CPU operators"
        calls = [["ms per step", "calls", f"{kind} of rank {self.slowest}"]]
        calls += [
            [f"{1000 * seconds:.2f}", f"{round(count, 1):g}", name[:90]] for name, seconds, count in first.top[:LISTED]
        ]
        return [
            self.title,
            self.overhead,
            *(f"failed: {text}" for text in self.failures),
            "",
            *_aligned(self.table()),
            "",
            *self.said(),
            "",
            *_aligned(calls, left=(2,)),
            "",
            f"page: {page if page.is_file() else NO_PAGE}",
            f"trace for ui.perfetto.dev: {self.folder / MERGED}",
        ]

    def said(self) -> list[str]:
        """Return the findings, with the remedies below that on communication."""
        numbered = [f"  {number}. {remedy}" for number, remedy in enumerate(self.remedies, start=1)]
        return [*self.findings[:1], *numbered, *self.findings[1:]] if numbered else self.findings


def trace(
    recipe: str | Path | Recipe,
    profile: str | Path | None = None,
    *,
    num_processes: int | None = None,
    steps: int = 3,
    cpu: bool = False,
    overrides: Sequence[str] = (),
    output: str | Path | None = None,
    trust_remote_code: bool = False,
    launch_arguments: Sequence[str] = (),
) -> TraceReport:
    """Record some steps with PyTorch's profiler on every rank, and explain where their time went.

    The recorded steps come after six others. Nothing is saved or evaluated, and the folder of the run is not
    used. The traces, trace.json and, if bokeh is installed, trace.html are written into a new folder.

    Args:
        recipe: A recipe file, the name of a shipped recipe, or a `Recipe`.
        profile: Name or path of an Accelerate config. None: train in this process.
        num_processes: Number of processes. None: the profile's number, else one for each GPU.
        steps: Number of recorded steps.
        cpu: Train on the CPU, also on a machine with GPUs.
        overrides: Changes of a recipe file such as "batch.micro_size=2", applied in order.
        output: The new folder. None: runs/<recipe name>-trace.
        trust_remote_code: Run Python code of the model or the task.
        launch_arguments: Further arguments for `accelerate launch`.

    Returns:
        The shares of a step by rank, the slowest rank, the longest kernels, and what would help. If a rank failed, the
        others are explained, and `exit_code` is that of the run.

    Raises:
        InputError: The recipe, the profile or the folder is wrong.
        LaunchError: The run failed before a step was recorded.

    Example:
        >>> report = ftcli.trace("recipe.yaml", "fsdp", num_processes=8)
        >>> report.ranks[0].shares["exposed"]
        0.12
    """
    from ftcli.config.load import read_recipe, run_output
    from ftcli.config.profile import load_profile
    from ftcli.config.trust import with_consent
    from ftcli.reports.tracing.merge import merge_traces
    from ftcli.reports.tracing.page import draw_page
    from ftcli.runtime.process import is_launched

    if is_launched():
        raise InputError("trace launches its own processes", hint="start it without accelerate launch or torchrun")
    if steps < 1:
        raise InputError(f"steps={steps}: at least one step must be recorded")
    config = read_recipe(recipe, overrides)
    if not isinstance(recipe, str | Path):
        trust_remote_code |= config.model.trust_remote_code
    if trust_remote_code:
        config = with_consent(config, trusted=True)
    own = run_output(recipe if isinstance(recipe, str | Path) else config.task, config)
    folder = RunFolder(user_path(output or own.with_name(f"{own.name}-trace"), "--output"))
    hardware = None if profile is None else load_profile(profile)
    code = EXIT_DONE
    try:
        trace_ranks(
            recipe,
            shorten(config, steps),
            profile,
            overrides=overrides,
            folder=folder,
            steps=steps,
            num_processes=num_processes,
            cpu=cpu,
            trust_remote_code=trust_remote_code,
            launch_arguments=launch_arguments,
        )
    except LaunchError as error:
        if not any(folder.path.glob("rank-*.trace.json.gz")):
            raise
        code = error.exit_code
    name = str(recipe) if isinstance(recipe, str | Path) else config.task
    report = explain(name, config, hardware, folder, code)
    (folder.path / RESULT).write_text(json.dumps(report.as_dict(), indent=1) + "\n", encoding="utf-8")
    merge_traces(folder.path, list(report.ranks), folder.path / MERGED)
    if is_installed("bokeh"):
        (folder.path / PAGE).write_text(draw_page(report), encoding="utf-8")
    return report


def trace_worker(recipe: str | Path, *, steps: int, cpu: bool, overrides: Sequence[str], output: Path) -> None:
    """Record the trace of this rank, as a process that `trace` has launched. A collective."""
    from ftcli.config.load import read_recipe
    from ftcli.launch.launcher import find_profile
    from ftcli.launch.trace_rank import trace_rank

    config = shorten(read_recipe(recipe, overrides), steps)
    trace_rank(config, find_profile(None), output=output, steps=steps, cpu=cpu)


def shorten(recipe: Recipe, steps: int) -> Recipe:
    """Return a recipe with the length of a trace: without a limit of time, and without answers."""
    length = WARM_UP + steps + COOL_DOWN
    train = recipe.train.model_copy(update={"max_steps": length, "epochs": None, "max_minutes": None})
    schedule = recipe.schedule.model_copy(update={"warmup_steps": min(recipe.schedule.warmup_steps, length)})
    evaluate = recipe.evaluate.model_copy(update={"generate": None})
    return recipe.model_copy(update={"train": train, "schedule": schedule, "evaluate": evaluate})


def explain(name: str, recipe: Recipe, profile: Profile | None, folder: RunFolder, exit_code: int) -> TraceReport:
    """Read the traces of a folder.

    Args:
        name: The recipe's name.
        recipe: The recipe.
        profile: The profile; None without one.
        folder: The folder.
        exit_code: That of the run.

    Returns:
        The report.

    Raises:
        LaunchError: No rank has a complete trace.
    """
    facts, ranks, failures = read_ranks(folder)
    if not ranks:
        raise LaunchError("; ".join(failures) or "no rank wrote a trace", exit_code or 1)
    first = next(iter(facts[rank] for rank in ranks))
    setting = _setting(recipe, profile, first, on_gpu=any(found.on_gpu for found in ranks.values()))
    gather = fmean(found.gather for found in ranks.values())
    findings, remedies = verdict({rank: found.shares for rank, found in ranks.items()}, gather, setting)
    return TraceReport(
        recipe=name,
        profile="none" if profile is None else profile.name,
        processes=first["processes"],
        steps=first["steps"],
        facts={rank: facts[rank] for rank in ranks},
        ranks=ranks,
        findings=findings,
        remedies=remedies,
        failures=failures,
        folder=folder.path,
        exit_code=exit_code,
    )


def read_ranks(folder: RunFolder) -> tuple[dict[int, dict[str, Any]], dict[int, Breakdown], list[str]]:
    """Return facts and breakdown of each rank with a complete trace, and why other ranks have none."""
    facts: dict[int, dict[str, Any]] = {}
    ranks: dict[int, Breakdown] = {}
    failures = [f"rank {record['rank']}: {record['message']}" for record in failure_records(folder)]
    files = (json.loads(path.read_text(encoding="utf-8")) for path in folder.path.glob("rank-*.json"))
    for found in sorted(files, key=lambda found: found["rank"]):
        rank = found["rank"]
        try:
            events = read_events(folder.path / trace_name(rank))
            ranks[rank] = break_down(events, is_alone=found["processes"] == 1)
            facts[rank] = found
        except ValueError as error:
            failures.append(f"rank {rank}: {error}")
    world = next((found["processes"] for found in facts.values()), 0)
    absent = [rank for rank in range(world) if rank not in ranks]
    for rank in absent:
        if not any(text.startswith(f"rank {rank}:") for text in failures):
            failures.append(f"rank {rank}: it ended without {facts_name(rank)}")
    return facts, ranks, failures


def _setting(recipe: Recipe, profile: Profile | None, facts: dict[str, Any], *, on_gpu: bool) -> Setting:
    """Return the settings that remedies depend on."""
    adapter = None if recipe.adapter.type in (None, "none") else recipe.adapter.type
    gathers = profile is not None and profile.gathers_weights and not facts.get("replaces_shards")
    return Setting(
        gathers_weights=gathers,
        change_to_gather_once=profile.change_to_gather_once if profile is not None and gathers else None,
        processes=facts["processes"],
        accumulation=facts["accumulation"],
        micro_size=facts["micro_size"],
        precision=recipe.precision,
        adapter=adapter,
        evens_rows=recipe.data.packing or recipe.data.group_by_length,
        workers=recipe.data.workers,
        compiled=facts["compiled"],
        on_gpu=on_gpu,
    )


def _duration(seconds: float) -> str:
    """Return a duration with a unit that fits."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def _aligned(rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> list[str]:
    """Return rows as lines with aligned columns; those in `left` begin at the same place."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            text.ljust(width) if column in left else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
