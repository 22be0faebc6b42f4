"""Write a report of `ftcli plan` as text and as JSON. Light: never imports torch."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ftcli.config.plan import pluralise
from ftcli.reports.forecast import PARTS
from ftcli.runtime.machine.facts import GIB
from ftcli.runtime.redaction import redact

if TYPE_CHECKING:
    from ftcli.config.plan import Plan
    from ftcli.reports.forecast import Forecast
    from ftcli.reports.plan import PlanReport


SHORT = {"communication buffers": "buffers", "activations": "activ.", "gradients": "gradients", "optimizer": "optim."}
RECOMPUTED = {"none": "nothing", "selective": "less", "full": "everything", "tiled": "everything"}
MOST_COLUMNS = 100  # columns
SAME = 0.03  # relative difference below which two step times are the same
# Part of a step in which the GPU waits for the host, above which it is named: where a step has several passes, and
# where it has one, so that only twice as many rows in it bring anything.
WAITING_OF_PASSES, WAITING_OF_ONE = 0.1, 0.5


def lines(report: PlanReport) -> list[str]:
    """Return a report as text: the run, three tables, a verdict for each profile, and what was assumed.

    Args:
        report: The report.
    """
    text = [*_head(report), ""]
    usable = [one for one in report.forecasts if one.memory is not None]
    if usable:
        text += ["memory of a GPU at its peak, in GiB", *_memory_table(usable), ""]
        text += ["time of a step, in milliseconds", *_time_table(usable), ""] if any(one.time for one in usable) else []
        text += ["the whole run", *_run_table(report, usable), ""]
    names = max(len(one.profile) for one in report.forecasts)
    for one in report.forecasts:
        text += _wrapped(f"{one.profile:<{names}}  {verdict(one, report)}", names + 2)
    text += [""] * bool(report.missing or report.notes or usable)
    remarks = [f"hint: {line}" for line in hints(report)]
    remarks += [f"not known: {line}" for line in report.missing] + [f"note: {line}" for line in report.notes]
    if usable:
        remarks.append("note: the packages of `ftcli[kernels]` and flash-attn 4 are assumed on the GPUs")
        remarks.append("note: evaluations, checkpoints, compilation and passes before training are not counted")
    for line in remarks:
        text += _wrapped(line, 2)
    return [redact(line) for line in text]


def _wrapped(line: str, indent: int) -> list[str]:
    """Return a line as lines of at most `MOST_COLUMNS` columns, unless a word is longer; all but the first indented."""
    if len(line) <= MOST_COLUMNS:
        return [line]
    more = " " * indent
    return textwrap.wrap(line, MOST_COLUMNS, subsequent_indent=more, break_long_words=False, break_on_hyphens=False)


def _head(report: PlanReport) -> list[str]:
    """Return the facts of the run and of the GPUs, one a line."""
    target, recipe = report.target, report.target.recipe
    facts = {"recipe": report.recipe, "model": recipe.model.name}
    if target.size is not None:
        facts["trained"] = f"{target.size.trained / 1e6:,.2f} million weights, precision {recipe.precision}"
        if target.size.frozen_bytes:
            facts["frozen"] = f"{target.size.frozen_bytes / GIB:.2f} GiB of weights"
    unit = "patches" if target.size and target.size.shape and target.size.shape.patches else "tokens"
    facts["rows per step"] = f"{recipe.batch.global_size} of at most {target.longest:,} {unit}"
    kind = "of unknown rates" if target.gpu is None else f"x {target.gpu.name} ({target.gpu.source})"
    facts["GPUs"] = f"{target.gpus} {kind}"
    if target.capacity is not None and target.usable is not None:
        facts["memory of a GPU"] = (
            f"{target.capacity / GIB:.1f} GiB, of which tensors may take {target.usable / GIB:.1f}"
        )
    width = max(map(len, facts))
    return [f"{key:<{width}}  {value}" for key, value in facts.items()]


def _memory_table(forecasts: Sequence[Forecast]) -> list[str]:
    """Return the table of memory by part."""
    shown = [part for part in PARTS if any(one.parts[part] for one in forecasts)]
    head = ["profile", *(SHORT.get(part, part) for part in shown), "total"]
    rows = [[one.profile, *(_gb(one.parts[part]) for part in shown), _gb(sum(one.parts.values()))] for one in forecasts]
    return _table(head, rows)


def _time_table(forecasts: Sequence[Forecast]) -> list[str]:
    """Return the table of times: computation, what communication adds, waiting for rows, and their sum."""
    head = ["profile", "compute", "exposed communication", "data", "total", "communication share"]
    rows = []
    for one in forecasts:
        if (time := one.time) is not None:
            seconds = (time.compute, time.communication, time.data, time.total)
            share = 100 * time.communication / time.total
            rows.append([one.profile, *(f"{1000 * part:,.0f}" for part in seconds), f"{share:.0f} %"])
    return _table(head, rows)


def _run_table(report: PlanReport, forecasts: Sequence[Forecast]) -> list[str]:
    """Return the table of batch sizes, recomputation, speed, hours and cost."""
    head = ["profile", "GPUs", "rows x micro-batches", "recomputed", "tokens/s", "steps", "hours"]
    head += ["cost"] * (report.price is not None)
    rows = []
    for one in forecasts:
        assert one.plan is not None
        speed, hours, cost = one.tokens_per_second, one.hours, one.cost(report.price)
        row = [one.profile, str(one.gpus), _division(one.plan), one.mode]
        row += ["-" if speed is None else f"{speed:,.0f}", "-" if one.plan.steps is None else f"{one.plan.steps:,}"]
        row += ["-" if hours is None else f"{hours:,.2f}" if hours >= 1 else f"{hours:.2g}"]
        rows.append(row + ["-" if cost is None else f"{cost:,.2f}"] * (report.price is not None))
    return _table(head, rows)


def _division(plan: Plan) -> str:
    """Return how the rows of a process are divided: `4 x 2` by number, `8 in 1 to 2 passes` by tokens."""
    if plan.passes is None:
        return f"{plan.micro_size} x {plan.accumulation}"
    few, most = plan.passes.fewest, plan.passes.most
    count = pluralise(most, "pass", "es") if few == most else f"{few} to {most} passes"
    return f"{plan.global_size // plan.processes} in {count}"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Return a table: the first column begins at the left, the others end at the right."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    cells = [
        [f"{row[0]:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))]
        for row in [head, *rows]
    ]
    return ["  " + "  ".join(row).rstrip() for row in cells]


def _gb(size: int) -> str:
    """Return bytes as GiB; a dash for nothing."""
    return f"{size / GIB:,.2f}" if size else "-"


def verdict(one: Forecast, report: PlanReport) -> str:
    """Return what is to be said about a profile, in words.

    Args:
        one: The forecast of the profile.
        report: The report with the others.
    """
    found = _verdict(one, report)
    on_host = one.saving.on_host if one.saving is not None and one.memory is not None else ""
    return f"{found}; {on_host}" if on_host else found


def _verdict(one: Forecast, report: PlanReport) -> str:
    """Return what is to be said about a profile, but for what is in host memory."""
    usable, fastest = report.target.usable, report.fastest
    if one.problem:
        return f"cannot run this recipe: {one.problem}"
    if one.memory is None:
        steps = "" if one.plan is None or one.plan.steps is None else f", {pluralise(one.plan.steps, 'step')}"
        return f"not known; rows per step: {one.plan.batch_layout if one.plan else '-'}{steps}"
    if one.fits is None:
        return f"needs {one.memory.total / GIB:.1f} GiB of each GPU"
    if not one.fits and usable is not None:
        part, size = max(one.parts.items(), key=lambda item: item[1])
        rest = f"the largest part is {part} with {size / GIB:.1f}"
        return f"does not fit: needs {one.memory.total / GIB:.1f} GiB of {usable / GIB:.1f}; {rest}"
    if fastest is None or one.tokens_per_second is None or fastest.tokens_per_second is None:
        return "fits"
    if one is fastest:
        return f"fits; the fastest of the profiles that fit, with {pluralise(one.gpus, 'GPU')}"
    ratio = fastest.tokens_per_second / one.tokens_per_second - 1
    if ratio < SAME:
        return f"fits; as fast as {fastest.profile} within {100 * SAME:.0f} %"
    return f"fits; {_slower(ratio)} {fastest.profile}: {_reason(one, fastest)}"


def hints(report: PlanReport) -> list[str]:
    """Return the smaller micro sizes that are faster, and where the GPU waits for the host.

    Args:
        report: The report.
    """
    return _faster_sizes(report) + _waits_for_host(report)


def _faster_sizes(report: PlanReport) -> list[str]:
    """Return the smaller micro sizes that are faster, grouped by what they gain."""
    profiles_by_gain: dict[str, list[str]] = {}
    for one in report.forecasts:
        if (other := one.faster) is not None and one.time and other.time and one.plan and other.plan:
            gain = 100 * (one.time.total / other.time.total - 1)
            key = f"batch.micro_size={other.plan.micro_size} is {gain:.0f} % faster, because {_why_faster(one, other)}"
            profiles_by_gain.setdefault(key, []).append(one.profile)
    return [f"{', '.join(names)}: {key}" for key, names in profiles_by_gain.items()]


def _waits_for_host(report: PlanReport) -> list[str]:
    """Return in which profiles that may fit the GPU waits for the host, and what shortens it, grouped by that."""
    waiting_by_remedy: dict[str, dict[str, float]] = {}
    for one in report.forecasts:
        if (time := one.time) is None or one.fits is False:
            continue
        least, remedy = _remedy(one)
        if time.waiting > least * time.total:
            waiting_by_remedy.setdefault(remedy, {})[one.profile] = 100 * time.waiting / time.total
    return [
        f"{', '.join(waiting)}: the GPU waits for the host for {_range(waiting.values())} % of a step, because its "
        f"kernels take less time than the host needs to launch them; {remedy}"
        for remedy, waiting in waiting_by_remedy.items()
    ]


def _remedy(one: Forecast) -> tuple[float, str]:
    """Return the least part of waiting that is worth a change, and what shortens it, in words."""
    assert one.plan is not None
    if one.plan.passes is None and one.plan.accumulation > 1:
        return WAITING_OF_PASSES, "a larger batch.micro_size makes fewer passes"
    if one.gpus > 1:
        return WAITING_OF_ONE, "fewer GPUs with more rows in a pass are nearly as fast"
    return WAITING_OF_ONE, "more rows in a step take little longer, with another loss curve"


def _range(shares: Collection[float]) -> str:
    """Return numbers as `41`, or `41 to 57`."""
    low, high = (f"{limit(shares):.0f}" for limit in (min, max))
    return low if low == high else f"{low} to {high}"


def _why_faster(one: Forecast, other: Forecast) -> str:
    """Return what another micro size spares, in words."""
    if one.mode != other.mode:
        return f"{RECOMPUTED[other.mode]} is recomputed"
    return "less is copied between host and GPU"


def _slower(ratio: float) -> str:
    """Return how much slower something is, in words, before the name of the faster."""
    return f"{100 * ratio:.0f} % slower than" if ratio < 1 else f"{1 + ratio:.1f} times as slow as"


def _reason(one: Forecast, fastest: Forecast) -> str:
    """Return the largest difference of a forecast to the fastest one, in words."""
    if one.gpus < fastest.gpus:
        return f"it uses {pluralise(one.gpus, 'GPU')} of {fastest.gpus}"
    assert one.time is not None and fastest.time is not None
    more = {
        "communication that is not hidden": one.time.communication - fastest.time.communication,
        "computation and launches": one.time.compute - fastest.time.compute,
    }
    part, seconds = max(more.items(), key=lambda item: item[1])
    recomputes = one.mode != fastest.mode and part == "computation and launches"
    because = f", because {RECOMPUTED[one.mode]} is recomputed" if recomputes else ""
    return f"{1000 * seconds:,.0f} ms more of {part}{because}"


def as_dict(report: PlanReport) -> dict[str, Any]:
    """Return a report as plain values. Sizes are bytes, times seconds; null stands for what is not known.

    Args:
        report: The report.
    """
    target, fastest = report.target, report.fastest
    gpu = None if target.gpu is None else {"name": target.gpu.name, "source": target.gpu.source}
    return {
        "recipe": report.recipe,
        "gpus": target.gpus,
        "gpu": gpu,
        "memory_bytes": target.capacity,
        "usable_bytes": None if target.usable is None else int(target.usable),
        "profiles": [_profile(one, report) for one in report.forecasts],
        "fastest": None if fastest is None else fastest.profile,
        "hints": hints(report),
        "missing": [redact(line) for line in report.missing],
        "notes": [redact(line) for line in report.notes],
    }


def _profile(one: Forecast, report: PlanReport) -> dict[str, Any]:
    """Return the values of one profile."""
    plan, time, memory = one.plan, one.time, one.memory
    parts = {part.replace(" ", "_"): size for part, size in one.parts.items()}
    seconds = None
    if time is not None:
        seconds = {"compute": time.compute, "communication": time.communication, "data": time.data, "total": time.total}
        seconds["waiting_for_host"] = time.waiting
    return {
        "profile": one.profile,
        "gpus": one.gpus,
        "fits": one.fits,
        "verdict": verdict(one, report),
        "micro_size": None if plan is None or memory is None else plan.micro_size,
        "accumulation": None if plan is None or memory is None else plan.accumulation,
        "passes": None if plan is None or plan.passes is None else asdict(plan.passes),
        "gradient_checkpointing": one.mode or None,
        "activation_offloading": one.saving and one.saving.offloads,
        "embeddings_on_host": one.saving and one.saving.embeddings_on_host,
        "torch_compile": None if memory is None else one.compiled,
        "memory_bytes": None if memory is None else parts | {"total": memory.total},
        "step_seconds": seconds,
        "tokens_per_second": one.tokens_per_second,
        "steps": None if plan is None else plan.steps,
        "hours": one.hours,
        "cost": one.cost(report.price),
    }
