"""Prepare the curves of runs for charts: which values there are, smoothing, and thinning of long runs.

Light: never imports torch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ftcli.reports.run_record import RunRecord, number
from ftcli.runtime.load_monitor import PREFIX

TITLES = {
    "loss": "Loss per item",
    "grad_norm": "Gradient norm before clipping",
    "learning_rate": "Learning rate",
    "data_wait_share": "Share of the time that process 0, on a GPU its device, waited for rows",
    "peak_memory_gb": "Highest memory use of process 0 so far in its launch, in GB",
    "rows_per_second": "Rows per second",
    "tokens_per_second": "Tokens per second",
    "samples_per_second": "Samples per second",
    "load/gpu_utilisation_percent": "Time in which a kernel ran on the GPU, in percent",
    "load/gpu_memory_gb": "Memory of the GPU in use, in GB",
    "load/gpu_power_watts": "Power of the GPU, in watts",
    "load/gpu_temperature_celsius": "Temperature of the GPU, in degrees Celsius",
    "load/gpu_throttled_percent": "Time in which the GPU was slowed down, in percent",
    "load/gpu_power_limited_percent": "Time in which the GPU was at its power limit, in percent",
    "load/cpu_percent": "CPU time of a process, in percent of one core",
    "load/process_memory_gb": "Host memory of a process, in GB",
    "load/host_memory_available_gb": "Host memory that is left, in GB",
    "epoch": "Passes over the training rows",
    "items": "Items in the global batch",
    "seconds": "Seconds of training in this launch",
}
GROUPS = (
    "Training",
    "Sources, terms and notes",
    "Evaluation",
    "Speed and memory",
    "Devices and host",
    "Further values",
)
TRAINING = ("loss", "grad_norm", "learning_rate")
SPEED = ("_per_second", "data_wait_share", "peak_memory_gb")  # parts of names
DEVICES = ("device", "gpu", "host", "cpu", "power", "temperature", "utilization", "throttl")
NO_CURVE = ("step", "samples")  # samples is a digest
SMOOTHED = TRAINING[:2]
MOST_POINTS = 1500  # of one curve in the page; a screen has fewer columns
MOST_PANELS = 80
WINDOW_SHARE = 0.04  # window of the smoothing as a share of the rows
SHORTEST_SMOOTHED = 20  # rows of a curve; shorter curves are not smoothed


@dataclass(frozen=True)
class Panel:
    """One chart: a value of rows, drawn for every run that has it.

    Attributes:
        key: Name of the value; of a load without its rank.
        group: Heading, one of `GROUPS`.
        columns: The names in rows: several if ranks have a value each.
    """

    key: str
    group: str
    columns: tuple[str, ...]

    @property
    def title(self) -> str:
        """Heading of the chart."""
        return TITLES.get(self.key, self.key)

    @property
    def is_smoothed(self) -> bool:
        """Whether single steps are noisy, so that a smoothed curve is drawn over them."""
        return self.key in SMOOTHED or self.group == GROUPS[1]


def find_panels(runs: Iterable[RunRecord]) -> tuple[list[Panel], int]:
    """Find the charts that the rows of some runs need.

    Args:
        runs: The runs.

    Returns:
        The charts by group, and the number of further values that have none because there are too many.
    """
    columns: dict[str, None] = {}
    for run in runs:
        for row in (*run.training, *run.evaluations):
            columns |= {key: None for key, value in row.items() if number(value) is not None and key not in NO_CURVE}
    keys: dict[str, list[str]] = {}
    for column in columns:
        keys.setdefault(column.partition("/rank-")[0] if column.startswith(PREFIX) else column, []).append(column)
    panels = [Panel(key, _group(key), tuple(names)) for key, names in keys.items()]
    known = [*TITLES]
    places = {panel: known.index(panel.key) if panel.key in known else len(known) for panel in panels}
    panels.sort(key=lambda panel: (GROUPS.index(panel.group), places[panel]))
    return panels[:MOST_PANELS], len(panels[MOST_PANELS:])


def _group(key: str) -> str:
    """Return the group of a value."""
    if key in TRAINING:
        return GROUPS[0]
    if key.startswith("train/"):
        return GROUPS[1]
    if key.startswith("eval/"):
        return GROUPS[2]
    if key.startswith(PREFIX):
        return GROUPS[4]
    if any(part in key for part in SPEED):
        return GROUPS[3]
    return GROUPS[4] if any(part in key.lower() for part in DEVICES) else GROUPS[5]


def points(run: RunRecord, key: str) -> tuple[list[int], list[float]]:
    """Return (steps, values) of one value, as they stand in the rows.

    Args:
        run: The run.
        key: Name of the value in rows.
    """
    rows = run.evaluations if key.startswith("eval/") else run.training
    pairs = [(row["step"], value) for row in rows if (value := number(row.get(key))) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def curve(run: RunRecord, panel: Panel) -> tuple[list[int], list[float]]:
    """Return (steps, values) of a chart; for a load of several ranks their mean. A chart leaves NaN out.

    Args:
        run: The run.
        panel: The chart.
    """
    if len(panel.columns) == 1:
        steps, values = points(run, panel.columns[0])
        return steps, [value if math.isfinite(value) else math.nan for value in values]
    steps, ranks = _by_rank(run, panel)
    return steps, [statistics.fmean(values) for values in ranks]


def extremes(run: RunRecord, panel: Panel) -> list[tuple[str, list[int], list[float]]]:
    """Return the lowest and the highest value of all ranks as curves (name, steps, values).

    Args:
        run: The run.
        panel: The chart. The result is empty unless the chart shows several ranks of the run.
    """
    steps, ranks = _by_rank(run, panel) if len(panel.columns) > 1 else ([], [])
    if not any(len(values) > 1 for values in ranks):
        return []
    lowest, highest = [min(values) for values in ranks], [max(values) for values in ranks]
    return [("lowest rank", steps, lowest), ("highest rank", steps, highest)]


def _by_rank(run: RunRecord, panel: Panel) -> tuple[list[int], list[list[float]]]:
    """Return the steps whose rows have a load, and its finite values of all ranks at each of them."""
    columns, steps, ranks = frozenset(panel.columns), [], []
    for row in run.training:
        numbers = (number(row[name]) for name in row.keys() & columns)
        values = [value for value in numbers if value is not None and math.isfinite(value)]
        if values:
            steps.append(row["step"])
            ranks.append(values)
    return steps, ranks


def smooth(values: Sequence[float]) -> list[float]:
    """Return the exponential moving average of a curve; an empty list for a curve that is too short to need one.

    The average is divided by the sum of its weights, as Adam does (arXiv:1412.6980, section 3), so that the first
    values are not drawn towards zero. Values that are not finite are skipped.

    Args:
        values: The curve.
    """
    if len(values) < SHORTEST_SMOOTHED:
        return []
    decay = 1 - 2 / (max(2.0, WINDOW_SHARE * len(values)) + 1)
    mean, weight, smoothed = 0.0, 0.0, []
    for value in values:
        if math.isfinite(value):
            mean, weight = decay * mean + (1 - decay) * value, decay * weight + (1 - decay)
        smoothed.append(mean / weight if weight and math.isfinite(value) else math.nan)
    return smoothed


def thin(steps: Sequence[int], values: Sequence[float], most: int = MOST_POINTS) -> tuple[list[int], list[float]]:
    """Return a curve with fewer points: the lowest and the highest of each interval, so that peaks stay.

    Args:
        steps: Steps of the curve.
        values: Values of the curve; NaN for a gap.
        most: Number of points to keep.
    """
    if len(values) <= most:
        return list(steps), list(values)
    indices_kept = {0, len(values) - 1}
    intervals = most // 3
    for interval in range(intervals):
        indices = range(interval * len(values) // intervals, (interval + 1) * len(values) // intervals)
        finite = [index for index in indices if math.isfinite(values[index])]
        indices_kept |= (
            {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)} if finite else {indices[0]}
        )
    return [steps[index] for index in sorted(indices_kept)], [values[index] for index in sorted(indices_kept)]
