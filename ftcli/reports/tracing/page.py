"""Draw the HTML page of a trace. The page is one file, needs no network, and runs the scripts of this module only.

Names of recipes and kernels are text of other people. All of it is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from ftcli._version import __version__
from ftcli.reports.report import draw_document
from ftcli.reports.report_charts import COLOURS, FAINT
from ftcli.reports.tracing.events import PARTS
from ftcli.runtime.terminal import visible

if TYPE_CHECKING:
    from ftcli.reports.tracing.trace import TraceReport

COLOUR_OF = dict(zip(PARTS, (COLOURS[0], COLOURS[5], COLOURS[1], COLOURS[4], COLOURS[2], COLOURS[7]), strict=True))
MEANINGS = {
    "compute": "the device computes, and no collective is under way",
    "hidden": "a collective is under way while the device computes",
    "exposed": "a collective is under way, and the device waits; this includes waiting for a slower rank",
    "data": "waiting for rows",
    "optimizer": "clipping and the update of the weights",
    "idle": "none of these: the host prepares the next operators",
}


def draw_page(report: TraceReport) -> str:
    """Draw the page of a trace.

    Args:
        report: The trace.

    Returns:
        The HTML document.
    """
    from bokeh.embed import components
    from bokeh.resources import Resources

    script, place = components(_bars(report), wrap_script=False)
    library = "\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)
    body = "\n".join(_draw_body(report, str(place)))
    return draw_document(f"Trace of {report.recipe}", body, [library, script])


def _draw_body(report: TraceReport, bars: str) -> Iterator[str]:
    """Yield the sections of the page."""
    from ftcli.reports.tracing.trace import HEADINGS, MERGED

    yield f"<h1>Trace of {_text(report.recipe)}</h1><p>{_text(report.title)}. {_text(report.overhead)}.</p>"
    yield from (f'<p class="error">failed: {_text(failure)}</p>' for failure in report.failures)
    yield "<h2>Where a step goes</h2>"
    keys = (
        f'<span class="key" style="border-top: .7rem solid {COLOUR_OF[part]}"></span>{_text(HEADINGS[part])}'
        for part in PARTS
    )
    yield f"<p>{' &nbsp; '.join(keys)}</p>{bars}"
    yield _draw_table(report.table())
    yield f"<p>Slowest rank: {report.slowest}.</p>" if len(report.ranks) > 1 else ""
    yield "<h2>What would help</h2>"
    remedies = "".join(f"<li>{_text(str(remedy))}</li>" for remedy in report.remedies)
    for number, finding in enumerate(report.findings):
        yield f"<p>{_text(finding)}</p>" + (f"<ol>{remedies}</ol>" if remedies and number == 0 else "")
    kind = "Kernels" if report.ranks[report.slowest].on_gpu else "CPU operators"
    yield f"<h2>{kind} by time</h2>"
    for rank, found in report.ranks.items():
        rows = [["ms per step", "calls", "name"]]
        rows += [[f"{1000 * seconds:.2f}", f"{round(count, 1):g}", name] for name, seconds, count in found.top]
        opened = " open" if rank == report.slowest else ""
        yield f"<details{opened}><summary>Rank {rank}</summary>{_draw_table(rows)}</details>"
    yield "<h2>What the parts mean</h2>"
    yield _draw_table([[HEADINGS[part], MEANINGS[part]] for part in PARTS], has_head=False)
    yield (
        f"<p>To see every operator, open {_text(MERGED)} of {_text(str(report.folder))} in ui.perfetto.dev or in "
        "chrome://tracing. Both read the file on your machine.</p>"
        f'<p class="n">Written by ftcli {__version__}. Charts: Bokeh (BSD 3-Clause).</p>'
    )


def _bars(report: TraceReport) -> Any:
    """Draw one bar for each rank, divided into the parts of a step."""
    from bokeh.models import ColumnDataSource, FactorRange, HoverTool, NumeralTickFormatter, Range1d
    from bokeh.plotting import figure

    from ftcli.reports.tracing.trace import HEADINGS

    names = [f"rank {rank}" for rank in report.ranks]
    drawn: Any = figure(
        y_range=FactorRange(factors=names[::-1]),
        x_range=Range1d(start=0, end=1),
        height=70 + 26 * len(names),
        sizing_mode="stretch_width",
        tools="",
        toolbar_location=None,
        background_fill_alpha=0,
        border_fill_alpha=0,
        outline_line_color=None,
    )
    left = [0.0] * len(names)
    bars = []
    for part in PARTS:
        shares = [found.shares[part] for found in report.ranks.values()]
        right = [start + share for start, share in zip(left, shares, strict=True)]
        values: dict[str, Any] = {"rank": names, "left": left, "right": right, "share": shares}
        source = ColumnDataSource(values | {"part": [HEADINGS[part]] * len(names)})
        bars.append(drawn.hbar(y="rank", left="left", right="right", height=0.7, source=source, color=COLOUR_OF[part]))
        left = right
    drawn.add_tools(HoverTool(tooltips=[("", "@rank"), ("", "@part"), ("", "@share{0.0%}")], renderers=bars))
    drawn.xaxis.formatter = NumeralTickFormatter(format="0%")
    drawn.axis.major_label_text_color = drawn.axis.axis_line_color = FAINT
    drawn.axis.major_tick_line_color = drawn.axis.minor_tick_line_color = FAINT
    drawn.grid.grid_line_color, drawn.grid.grid_line_alpha = FAINT, 0.25
    return drawn


def _draw_table(rows: Sequence[Sequence[str]], *, has_head: bool = True) -> str:
    """Draw rows as a table. The first row has the headings."""
    head = "".join(f"<th>{_text(cell)}</th>" for cell in rows[0]) if has_head else ""
    body = "".join(
        f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows[1 if has_head else 0 :]
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _text(text: str) -> str:
    """Escape text for HTML."""
    return escape(visible(text))
