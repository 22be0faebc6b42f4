"""Draw the charts of a report with Bokeh. Bokeh is optional: it is the extra `report`.

Bokeh's script is 1.3 MB and part of the page, which therefore needs no network. Colours and lines have half-light
shades that are readable on a light and on a dark page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from ftcli.reports.run_events import KINDS
from ftcli.reports.run_record import RunRecord
from ftcli.reports.run_series import Panel, curve, extremes, smooth, thin
from ftcli.runtime.errors import InputError, shortened
from ftcli.runtime.installed import is_installed
from ftcli.runtime.terminal import visible

# Colours of Okabe and Ito (jfly.uni-koeln.de/color), which people with colour blindness can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#8a8a8a")
DASHES = ("solid", "dashed", "dotdash", "dotted")
FAINT = "#8a94a0"  # axes and grid
HEIGHT = 250  # pixels of a chart
FEW_POINTS = 60  # a curve with fewer has a mark at each point
WIDEST_LABEL = 60


def require_bokeh() -> None:
    """Raise `InputError` if Bokeh is not installed."""
    if not is_installed("bokeh"):
        raise InputError(
            "a report needs bokeh, which is not installed",
            hint="pip install 'ftcli[report]'; `ftcli show` and `ftcli compare` work without it",
        )


def draw_charts(runs: Sequence[RunRecord], panels: Iterable[Panel]) -> tuple[dict[str, Any], str]:
    """Draw the charts of a page.

    Args:
        runs: The runs. Each has the same colour in all charts.
        panels: The values to draw.

    Returns:
        Bokeh's figures by panel key, with the figure of events under "events", and the text of Bokeh's script.
    """
    from bokeh.models import DataRange1d
    from bokeh.resources import Resources

    steps = DataRange1d(range_padding=0.02)  # one range: all charts show the same steps
    figures = {panel.key: _curve_figure(runs, panel, steps) for panel in panels}
    figures["events"] = _event_figure(runs, steps)
    return figures, "\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)


def style_of(index: int) -> tuple[str, str]:
    """Return (colour, dashes) of a run, by its position."""
    return COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]


def _new_figure(steps: Any, **options: Any) -> Any:
    """Return a figure without curves, on a transparent background."""
    from bokeh.plotting import figure

    drawn: Any = figure(
        x_range=steps,
        height=HEIGHT,
        sizing_mode="stretch_width",
        tools="xpan,box_zoom,xwheel_zoom,reset,save",
        active_scroll=None,
        toolbar_location="right",
        background_fill_alpha=0,
        border_fill_alpha=0,
        outline_line_color=None,
        output_backend="canvas",
        **options,
    )
    drawn.toolbar.logo = None
    drawn.toolbar.autohide = True
    drawn.xaxis.axis_label = "step"
    drawn.axis.axis_label_text_color = drawn.axis.major_label_text_color = drawn.axis.axis_line_color = FAINT
    drawn.axis.major_tick_line_color = drawn.axis.minor_tick_line_color = FAINT
    drawn.grid.grid_line_color, drawn.grid.grid_line_alpha = FAINT, 0.25
    drawn.xaxis.ticker.min_interval = 1
    return drawn


def _curve_figure(runs: Sequence[RunRecord], panel: Panel, steps: Any) -> Any:
    """Draw one value of all runs. A smoothed curve has the plain one behind it, in a fainter shade."""
    from bokeh.models import HoverTool

    drawn = _new_figure(steps)
    hovered = []
    for index, run in enumerate(runs):
        xs, ys = curve(run, panel)
        if not xs:
            continue
        colour, dash = style_of(index)
        smoothed = smooth(ys) if panel.is_smoothed else []
        name = _label(run.label)
        hovered.append(_line(drawn, xs, ys, name, color=colour, line_dash=dash, alpha=0.3 if smoothed else 1.0))
        for which, places, values in extremes(run, panel):
            label = f"{name}, {which}"
            hovered.append(_line(drawn, places, values, label, color=colour, line_dash="dotted", alpha=0.6))
        if smoothed:
            _line(drawn, xs, smoothed, name, color=colour, line_dash=dash, width=2)
        if len(xs) < FEW_POINTS:
            drawn.scatter(x="step", y="value", source=hovered[-1].data_source, color=colour, size=6)
    tooltips = [("run", "@run"), ("step", "@step"), ("value", "@value{%.6g}")]
    drawn.add_tools(HoverTool(tooltips=tooltips, formatters={"@value": "printf"}, renderers=hovered, mode="mouse"))
    return drawn


def _line(drawn: Any, steps: Sequence[int], values: Sequence[float], run: str, **style: Any) -> Any:
    """Draw one curve with at most `run_series.MOST_POINTS` points."""
    from bokeh.models import ColumnDataSource

    xs, ys = thin(steps, values)
    source = ColumnDataSource({"step": xs, "value": ys, "run": [run] * len(xs)})
    return drawn.line(x="step", y="value", source=source, **style)


def _event_figure(runs: Sequence[RunRecord], steps: Any) -> Any:
    """Draw the events of all runs over the steps, one line of marks for each kind."""
    from bokeh.models import ColumnDataSource, FactorRange, HoverTool

    present = {event.kind for run in runs for event in run.events}
    kinds = [kind for kind in reversed(KINDS) if kind in present]
    drawn = _new_figure(steps, y_range=FactorRange(factors=kinds))
    marks = []
    for index, run in enumerate(runs):
        height = 0.0 if len(runs) == 1 else 0.5 * index / (len(runs) - 1) - 0.25  # runs are side by side in a line
        values: dict[str, list[Any]] = {
            "step": [event.step for event in run.events],
            "kind": [(event.kind, height) for event in run.events],
            "name": [event.kind for event in run.events],
            "text": [visible(event.text) for event in run.events],
            "run": [_label(run.label)] * len(run.events),
        }
        colour, _ = style_of(index)
        marks.append(
            drawn.scatter(x="step", y="kind", source=ColumnDataSource(values), color=colour, size=9, alpha=0.8)
        )
    tooltips = [("run", "@run"), ("step", "@step"), ("event", "@name"), ("", "@text")]
    drawn.add_tools(HoverTool(tooltips=tooltips, renderers=marks))
    drawn.height = 80 + 26 * max(len(kinds), 1)
    return drawn


def _label(text: str) -> str:
    """Return the name of a run for a chart, without the `$$` that begins a formula for Bokeh."""
    return shortened(visible(text), WIDEST_LABEL).replace("$$", "$ $")


def is_drawable(run: RunRecord, panel: Panel) -> bool:
    """Return whether a run has a finite value for a chart."""
    return any(math.isfinite(value) for value in curve(run, panel)[1])
