"""Draw a preview as HTML: a page, or an element for a notebook, without scripts and external files.

The page has a light and a dark style. Trained text is coloured and underlined. A tooltip shows the ids of a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from ftcli.reports.preview_text import counted, histogram_bars, split_facts, title
from ftcli.runtime.terminal import visible
from ftcli.tasks.protocol import Span

if TYPE_CHECKING:
    from ftcli.reports.preview import Preview
    from ftcli.reports.survey_types import ShownRow


STYLE = """
.ftcli { color-scheme: light dark; --ink: #1d2329; --faint: #5f6b76; --paper: #ffffff; --card: #f4f6f8;
  --trained: #0b5d2a; --trained-paper: #d3f2dc; --special: #6a3fa0; --bar: #3f7fbf;
  --error: #b3261e; --warning: #7a5200;
  color: var(--ink); background: var(--paper); font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 0 auto;
  padding: 1rem; }
@media (prefers-color-scheme: dark) { .ftcli { --ink: #e4e8ec; --faint: #9aa6b2; --paper: #14181c; --card: #1f252b;
  --trained: #9be8b4; --trained-paper: #143d24; --special: #c9a9f5; --bar: #6ca6dd; --error: #ff8a80;
  --warning: #ffcc66; } }
.ftcli h1 { font-size: 1.3rem; } .ftcli h2 { font-size: 1.1rem; margin-top: 2rem; }
.ftcli h3 { font-size: .95rem; margin: 1.2rem 0 .3rem; }
.ftcli pre { background: var(--card); color: var(--ink); padding: .8rem; border-radius: .4rem; margin: 0;
  white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.6 ui-monospace, monospace; }
.ftcli .t { color: var(--trained); background: var(--trained-paper); text-decoration: underline; }
.ftcli .s { color: var(--special); font-style: italic; } .ftcli .t.s { font-weight: bold; }
.ftcli pre span { unicode-bidi: isolate; } .ftcli pre span:hover { outline: 1px solid currentColor; }
.ftcli .n { color: var(--faint); } .ftcli .error { color: var(--error); } .ftcli .warning { color: var(--warning); }
.ftcli table { border-collapse: collapse; } .ftcli td { padding: .15rem 1rem .15rem 0; vertical-align: top; }
.ftcli td:first-child { color: var(--faint); }
.ftcli .answers { width: 100%; table-layout: fixed; } .ftcli .answers td:first-child { color: inherit; }
.ftcli svg { max-width: 100%; height: auto; margin-top: .6rem; }
.ftcli svg rect { fill: var(--bar); } .ftcli svg text { fill: var(--ink); font: 11px system-ui, sans-serif; }
"""
BAR_WIDTH, BAR_HEIGHT = 380, 20


def draw_page(preview: Preview) -> str:
    """Draw a preview as an HTML document.

    Args:
        preview: The preview.
    """
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    page = "@media (prefers-color-scheme: dark) { body { background: #14181c } } body { margin: 0 }"
    name = escape(visible(preview.recipe))
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<title>{name}: rows</title><style>{page}</style></head>\n'
        f"<body>{draw_part(preview)}</body></html>\n"
    )


def draw_part(preview: Preview) -> str:
    """Draw a preview as an HTML element with its style: findings, rows and statistics.

    Args:
        preview: The preview.
    """
    parts = [f"<style>{STYLE}</style>", '<div class="ftcli">', f"<h1>{escape(visible(preview.recipe))}</h1>"]
    for finding in preview.findings:
        hint = f'<br><span class="n">{_text(finding.hint)}</span>' if finding.hint else ""
        parts.append(f'<p><b class="{finding.level}">{finding.level}:</b> {_text(finding.what)}{hint}</p>')
    if preview.rows:
        legend = f'<span class="t">{counted(preview.rows[0])}</span>, <span class="s">special token</span>, read only'
        parts.append(f"<h2>Rows</h2><p>{legend}. Point at a token to see its ids.</p>")
    parts += [_draw_row(row) for row in preview.rows]
    for name, values in preview.statistics.items():
        parts += [f"<h2>{'Training' if name == 'train' else 'Evaluation'} rows</h2>", *_draw_split(name, values)]
    return "\n".join([*parts, "</div>"])


def _text(text: str) -> str:
    """Escape text for HTML."""
    return escape(visible(text))


def _draw_row(row: ShownRow) -> str:
    """Draw a row below its title."""
    text = _draw_spans(row.head, counted(row))
    if row.left_out:
        gap = f"{row.left_out} tokens not shown, {row.left_out_trained} of them {counted(row)}"
        text += f'\n<span class="n">... {gap} ...</span>\n'
    text += _draw_spans(row.tail, counted(row))
    columns = "".join(
        f"<td><b>{_text(answer.name)}</b><pre>{_draw_spans(answer.spans, counted(row))}</pre></td>"
        for answer in row.answers
    )
    facts = "".join(f"<tr><td>{_text(name)}</td><td>{_text(value)}</td></tr>" for name, value in row.facts.items())
    shown = f"<pre>{text}</pre>" if text else ""
    shown += f'<table class="answers"><tr>{columns}</tr></table>' if columns else ""
    return f"<h3>{_text(title(row))}</h3>{shown}" + (f"<table>{facts}</table>" if facts else "")


def _draw_spans(spans: Iterable[Span], use: str) -> str:
    """Draw spans; `use` is the word for trained tokens."""
    elements = []
    for span in spans:
        kinds = " ".join(kind for kind, holds in (("t", span.is_trained), ("s", span.is_special)) if holds)
        text = _text(span.text).replace("\n", '<i class="n">↵</i>\n')
        ids = " ".join(map(str, span.ids))
        tooltip = f' title="{ids}{f", {use}" if span.is_trained else ""}"' if span.ids else ""
        elements.append(f'<span class="{kinds}"{tooltip}>{text}</span>')
    return "".join(elements)


def _draw_split(split: str, values: dict[str, Any]) -> Iterable[str]:
    """Draw the numbers of a split."""
    rows = "".join(
        f"<tr><td>{_text(name)}</td><td>{_text(value)}</td></tr>" for name, value in split_facts(split, values)
    )
    yield f"<table>{rows}</table>"
    if values.get("answers"):
        yield _draw_bars("answers", list(values["answers"].items()))
    if values.get("histogram"):
        yield _draw_bars("lengths in tokens", histogram_bars(values["histogram"]))


def _draw_bars(caption: str, bars: Sequence[tuple[str, int]]) -> str:
    """Draw horizontal bars with their counts as inline SVG."""
    most = max(max(count for _, count in bars), 1)
    drawn = []
    for index, (name, count) in enumerate(bars):
        top = index * BAR_HEIGHT
        width = max(round(BAR_WIDTH * count / most), 1 if count else 0)
        drawn.append(
            f'<text x="150" y="{top + 14}" text-anchor="end">{_text(name[:24])}</text>'
            f'<rect x="158" y="{top + 3}" width="{width}" height="{BAR_HEIGHT - 6}"/>'
            f'<text x="{164 + width}" y="{top + 14}">{count}</text>'
        )
    height = len(bars) * BAR_HEIGHT
    size = f'width="{BAR_WIDTH + 230}" height="{height}" viewBox="0 0 {BAR_WIDTH + 230} {height}"'
    return f'<h3>{_text(caption)}</h3><svg role="img" aria-label="{_text(caption)}" {size}>{"".join(drawn)}</svg>'
