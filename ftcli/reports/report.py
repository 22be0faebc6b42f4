"""Write the HTML report of one or several runs: `ftcli report`. The page is one file and needs no network.

Names, prompts, answers and recipes may come from other people. All text is escaped, and the page's content security
policy allows only the scripts that this module wrote, by their digests.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ftcli._version import __version__
from ftcli.checkpoint.folder import describe_best
from ftcli.reports.preview_html import STYLE
from ftcli.reports.report_charts import draw_charts, is_drawable, require_bokeh, style_of
from ftcli.reports.report_samples import draw_samples
from ftcli.reports.run_comparison import RunComparison, Table, compare_records
from ftcli.reports.run_record import RunRecord, read_runs
from ftcli.reports.run_series import GROUPS, Panel, find_panels
from ftcli.runtime.errors import InputError
from ftcli.runtime.reader_errors import output_file, writing
from ftcli.runtime.terminal import visible

FILE = "report.html"
MOST_EVENTS = 500  # rows of the table of events of one run
PAGE_STYLE = """
body { margin: 0; background: #ffffff; }
@media (prefers-color-scheme: dark) { body { background: #14181c; } }
.ftcli { max-width: 78rem; } .ftcli th { text-align: left; padding: .15rem 1rem .15rem 0; }
.ftcli td, .ftcli th { overflow-wrap: anywhere; } .ftcli details { margin: .6rem 0; }
.ftcli td:first-child { overflow-wrap: normal; white-space: nowrap; }
.ftcli .charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(24rem, 1fr)); gap: 0 1rem; }
.ftcli .charts h3 { margin-bottom: 0; } .ftcli .chart { min-width: 0; } .ftcli summary { cursor: pointer; }
.ftcli .key { display: inline-block; width: 1.6rem; border-top-width: 4px; margin: 0 .4rem .25rem 0; }
.ftcli .scroll { overflow-x: auto; }
"""


def write_report(*runs: str | Path, output: str | Path | None = None) -> Path:
    """Write the curves, events, answers, recipes and environments of one or several runs into one HTML file.

    Args:
        runs: The run folders. Several runs are drawn on top of each other, with what differs between them.
        output: The file to write. None: report.html, in the run folder of a single run, else in the working folder.

    Returns:
        The file.

    Raises:
        InputError: A folder has no run or was given twice, the file cannot be written, or bokeh is not installed.

    Example:
        >>> ftcli.write_report("runs/my")
        PosixPath('runs/my/report.html')
        >>> ftcli.write_report("runs/a", "runs/b", output="compared.html")
        PosixPath('compared.html')
    """
    if not runs:
        raise InputError("a report needs a run", hint="ftcli report runs/my")
    require_bokeh()
    records = read_runs(runs)
    path = _output_file(records, output)
    page = draw_report(records)
    with writing(path, "--output"):
        if output is None:
            _replace_file(path, page)
        else:
            path.write_text(page, encoding="utf-8")
    return path


def _replace_file(path: Path, text: str) -> None:
    """Write a file whose name the user did not choose. A link of that name is replaced, not followed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _output_file(runs: Sequence[RunRecord], output: str | Path | None) -> Path:
    """Return the file to write; raise `InputError` for a folder, and for a file in a folder that does not exist."""
    if output is None:
        return runs[0].path / FILE if len(runs) == 1 else Path(FILE)
    return output_file(output, "--output", FILE)


def draw_report(runs: Sequence[RunRecord]) -> str:
    """Draw the page of some runs.

    Args:
        runs: The runs.

    Returns:
        The HTML document.
    """
    from bokeh.embed import components

    panels, left_out = find_panels(runs)
    panels = [panel for panel in panels if any(is_drawable(run, panel) for run in runs)]
    figures, library = draw_charts(runs, panels)
    script, places = components(figures, wrap_script=False)
    comparison = compare_records(runs)
    if left_out:
        comparison.notes.append(f"{left_out} further values have no chart, because there are too many")
    body = "\n".join(_draw_body(runs, comparison, panels, places))
    return draw_document(", ".join(run.label for run in runs), body, [library, script])


def draw_document(title: str, body: str, scripts: Sequence[str]) -> str:
    """Return an HTML document that needs no network. It allows the given scripts only, by their digests.

    Args:
        title: The title, as plain text.
        body: The body, as HTML. The caller has escaped all text in it.
        scripts: The scripts, which run after the body was read.
    """
    digests = " ".join(f"'sha256-{_digest(text)}'" for text in scripts)
    policy = f"default-src 'none'; script-src {digests}; style-src 'unsafe-inline'; img-src data: blob:"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(visible(title))}</title><style>{STYLE}{PAGE_STYLE}</style></head>\n"
        f'<body><div class="ftcli">{body}</div>\n'
        + "\n".join(f"<script>{text}</script>" for text in scripts)
        + "</body></html>\n"
    )


def _digest(text: str) -> str:
    """Return the SHA-256 digest of a script as a content security policy names it."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _draw_body(
    runs: Sequence[RunRecord], comparison: RunComparison, panels: Sequence[Panel], places: dict[str, Any]
) -> Iterator[str]:
    """Yield the sections of the page."""
    yield f"<h1>{_text(', '.join(comparison.labels))}</h1>"
    yield from (f'<p class="warning">{_text(note)}</p>' for note in comparison.notes)
    yield _draw_table("", runs, comparison.summary)
    for run in runs:
        if best := describe_best(run.path):
            yield f"<p>Best checkpoint of {_text(run.label)}: {_text(best)}.</p>"
    if len(runs) > 1:
        yield "<h2>Differences</h2>"
        for heading, rows in comparison.differences.items():
            yield f"<h3>{_text(heading.capitalize())}</h3>"
            yield _draw_table("", runs, rows) if rows else "<p>No difference.</p>"
        if comparison.curves:
            yield "<h3>Curves</h3>" + _draw_table("", runs, comparison.curves)
    for group in GROUPS:
        drawn = [panel for panel in panels if panel.group == group]
        if drawn:
            charts = "".join(_draw_chart(panel.title, places[panel.key]) for panel in drawn)
            yield f'<h2>{group}</h2><p>{_legend(runs)}</p>{_smoothing(drawn)}<div class="charts">{charts}</div>'
    yield f"<h2>Events</h2><p>{_legend(runs)}</p>{places['events']}"
    yield from (_draw_events(run) for run in runs)
    yield from draw_samples(runs)
    yield "<h2>Recipe, profile and environment</h2>"
    for run in runs:
        for title, text in run.texts.items():
            summary = f"{title} of {run.label}"
            yield f"<details><summary>{_text(summary)}</summary><pre>{_text(text)}</pre></details>"
    yield f'<p class="n">Written by ftcli {__version__}. Charts: Bokeh (BSD 3-Clause).</p>'


def _text(text: str) -> str:
    """Escape text for HTML."""
    return escape(visible(text))


def _draw_chart(title: str, place: str) -> str:
    """Draw the place of a chart below its title."""
    return f'<div class="chart"><h3>{_text(title)}</h3>{place}</div>'


def _legend(runs: Sequence[RunRecord]) -> str:
    """Draw the line of each run beside its name."""
    names = []
    for index, run in enumerate(runs):
        colour, dash = style_of(index)
        border = "solid" if dash == "solid" else "dotted" if dash == "dotted" else "dashed"
        names.append(f'<span class="key" style="border-top: 4px {border} {colour}"></span>{_text(run.label)}')
    return " &nbsp; ".join(names)


def _smoothing(panels: Sequence[Panel]) -> str:
    """Explain the two curves of a run if a chart has them."""
    text = '<p class="n">Faint: every row of metrics. Bold: moving average, for runs with enough rows.</p>'
    return text if any(panel.is_smoothed for panel in panels) else ""


def _draw_table(corner: str, runs: Sequence[RunRecord], rows: Table) -> str:
    """Draw a table with the runs as columns."""
    head = "".join(f"<th>{_text(run.label)}</th>" for run in runs)
    body = "".join(
        f"<tr><td>{_text(name)}</td>{''.join(f'<td>{_text(value)}</td>' for value in values)}</tr>"
        for name, values in rows
    )
    return f'<div class="scroll"><table><tr><th>{_text(corner)}</th>{head}</tr>{body}</table></div>'


def _draw_events(run: RunRecord) -> str:
    """Draw the events of a run as a table that can be opened."""
    rows = "".join(
        f"<tr><td>{event.step}</td><td>{_text(event.kind)}</td><td>{_text(event.text)}</td></tr>"
        for event in run.events[-MOST_EVENTS:]
    )
    count = f"the last {MOST_EVENTS} of {len(run.events)}" if len(run.events) > MOST_EVENTS else str(len(run.events))
    head = "<tr><th>step</th><th>event</th><th></th></tr>"
    return (
        f"<details><summary>Events of {_text(run.label)}: {count}</summary>"
        f'<div class="scroll"><table>{head}{rows}</table></div></details>'
    )
