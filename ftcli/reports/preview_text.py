"""Draw a preview as lines of text, with colours on a colour terminal and with brackets otherwise.

Text from data passes `terminal.visible` first. On a stream that is not UTF-8, all text becomes ASCII.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ftcli.data.chat.text_spans import joined
from ftcli.reports.preview_answers import draw_answers
from ftcli.runtime.terminal import BOLD, DIM, Style, visible
from ftcli.tasks.protocol import Span

if TYPE_CHECKING:
    from ftcli.reports.survey_types import Finding, ShownRow


RED, YELLOW = "31", "33"
TRAINED, SPECIAL = "1;32", "36"  # green is also bold, for readers who do not see it as a colour
COUNTS = {"train": "trained", "eval": "measured"}  # split -> word for tokens with a loss
LONGEST_BAR = 50
PLAIN = 80  # columns without a terminal
COUNTED = {
    "cut": "cut off at the end",
    "dropped": "left out, too long",
    "split": "split, too long",
    "weightless": "left out, weight 0",
    "untrained": "left out, untrained",
    "bad": "left out, unusable",
}


def draw_findings(findings: Sequence[Finding], style: Style) -> list[str]:
    """Draw findings, each with its hint on the next line.

    Args:
        findings: The findings.
        style: Style of the stream.
    """
    colours = {"error": RED, "warning": YELLOW, "note": ""}
    lines = []
    for finding in findings:
        head, *rest = _wrapped(f"{finding.level}: {finding.what}", style)
        level = f"{finding.level}:"
        lines += [style.paint(level, colours[finding.level]) + head.removeprefix(level), *rest]
        lines += _wrapped(f"    {finding.hint}", style) if finding.hint else []
    return [*lines, ""] if lines else []


def _wrapped(text: str, style: Style) -> list[str]:
    """Wrap text to the width of the terminal. Without a terminal it stays one line, for grep."""
    return style.wrap(style.safe(visible(text)))


def draw_rows(rows: Sequence[ShownRow], style: Style, *, ids: bool) -> list[str]:
    """Draw rows, each below its title.

    Args:
        rows: The rows.
        style: Style of the stream.
        ids: Whether to list the token ids below each row.
    """
    if not rows:
        return []
    start, end = style.brackets
    lines = []
    if any(row.trained for row in rows):
        sample = style.paint(f"{start}{counted(rows[0])}{end}", TRAINED)
        lines += [f"{sample}, {style.paint('<special token>', SPECIAL)}, read only", ""]
    for row in rows:
        lines.append(style.paint(style.safe(visible(title(row))), BOLD))
        text = _draw_spans(row.head, style)
        if row.left_out:
            gap = f"... {row.left_out} tokens not shown, {row.left_out_trained} of them {counted(row)} (--full) ..."
            text += "\n" + style.paint(gap, DIM) + "\n"
        text += _draw_spans(row.tail, style)
        lines += text.removesuffix("\n").split("\n") if text else []
        lines += draw_answers(row.answers, style, partial(_cells, style=style))
        lines += [f"{style.safe(visible(name))}: {style.safe(visible(value))}" for name, value in row.facts.items()]
        if ids:
            answers = [span for answer in row.answers for span in answer.spans]
            lines += _draw_ids([*row.head, *row.tail, *answers], style)
        lines.append("")
    return lines


def title(row: ShownRow) -> str:
    """Return the title of a row: its number, source, step and tokens.

    Args:
        row: The row.
    """
    when = "not in the first epoch" if row.step is None else f"step {row.step}" if row.step else "not yet shuffled"
    when = "evaluation" if row.split == "eval" else when
    size = f", {row.tokens} tokens" if row.tokens else ""
    trained = f", {row.trained} {counted(row)}" if row.trained else ""
    return f"row {row.number} of {row.source}, {when}{size}{trained}"


def counted(row: ShownRow) -> str:
    """Return the word for tokens of a row with a loss: trained or measured.

    Args:
        row: The row.
    """
    return COUNTS[row.split]


def _draw_spans(spans: Iterable[Span], style: Style) -> str:
    """Draw the text of spans."""
    start, end = style.brackets
    parts, is_open = [], False
    for span in joined(list(spans)):
        if span.is_trained != is_open:
            parts.append(start if span.is_trained else end)
            is_open = span.is_trained
        text = style.safe(_bracketed(visible(span.text), style))
        parts.append(style.paint(text.replace("\n", style.newline), _code(span)))
    return "".join(parts) + (end if is_open else "")


def _cells(spans: Sequence[Span], style: Style) -> list[tuple[str, str]]:
    """Return the characters of spans with their colours; trained text is in brackets where there are no colours."""
    start, end = style.brackets
    cells: list[tuple[str, str]] = []
    is_open = False
    for span in joined(list(spans)):
        if span.is_trained != is_open:
            cells += [(letter, "") for letter in (start if span.is_trained else end)]
            is_open = span.is_trained
        text = style.safe(_bracketed(visible(span.text), style)).replace("\n", style.newline)
        cells += [(letter, _code(span)) for letter in text]
    return cells + [(letter, "") for letter in end * is_open]


def _code(span: Span) -> str:
    """Return the terminal code for the colour of a span."""
    codes = [code for code, holds in ((TRAINED, span.is_trained), (SPECIAL, span.is_special)) if holds]
    return "1;4;32" if len(codes) == 2 else "".join(codes)  # trained and special: underlined as well


def _bracketed(text: str, style: Style) -> str:
    """Escape brackets in a text by a backslash, to distinguish them from the brackets of trained text."""
    for bracket in filter(None, style.brackets):
        text = text.replace(bracket, f"\\{bracket}")
    return text


def _draw_ids(spans: Sequence[Span], style: Style) -> list[str]:
    """Draw `"text" id` of each span, several on a line."""
    lines, line, used = [], "", 0
    start, end = style.brackets
    for span in spans:
        if not span.ids:
            continue
        text = visible(span.text).replace("\n", "\\n").replace('"', '\\"')
        plain = style.safe(f'"{text}" {"+".join(map(str, span.ids))}')
        entry = f"{start}{plain}{end}" if span.is_trained else plain
        if line and used + 2 + len(entry) > (style.width or PLAIN) - 4:
            lines.append(f"    {line}")
            line, used = "", 0
        line += ("  " if line else "") + style.paint(entry, _code(span))
        used += len(entry) + (2 if used else 0)
    return [*lines, f"    {line}"] if line else lines


def draw_statistics(statistics: dict[str, Any], style: Style) -> list[str]:
    """Draw the numbers of every split, one on a line, and the histogram of lengths.

    Args:
        statistics: Split -> its numbers.
        style: Style of the stream.
    """
    lines: list[str] = []
    for name, values in statistics.items():
        facts = split_facts(name, values)
        width = max(len(fact) for fact, _ in facts)
        lines.append(style.paint({"train": "training rows", "eval": "evaluation rows"}[name], BOLD))
        lines += [f"  {fact:<{width}}  {style.safe(visible(text))}" for fact, text in facts]
        if len(values.get("answers", {})) > 0:
            bars = [(label, count) for label, count in values["answers"].items()]
            lines += ["  answers", *_draw_bars(bars, style)]
        if values.get("histogram"):
            lines += ["  lengths in tokens", *_draw_bars(histogram_bars(values["histogram"]), style)]
        lines.append("")
    return lines[:-1]


def histogram_bars(histogram: Sequence[tuple[int, int, int]]) -> list[tuple[str, int]]:
    """Return (name, count) of each bar of a histogram.

    Args:
        histogram: (smallest length, largest length, count) of each bar.
    """
    return [(f"{low}-{high}" if high > low else str(low), count) for low, high, count in histogram]


def split_facts(split: str, values: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (name, value) of each number of a split as text.

    Args:
        split: "train" or "eval".
        values: Numbers of the split.
    """
    facts = [("rows", f"{values['rows']:,}")]
    if "tokens" in values:
        facts.append(("tokens", _tokens(split, values)))
    if len(values["sources"]) > 1:
        facts += [(f"of {label}", _source(split, numbers)) for label, numbers in values["sources"].items()]
    if "lengths" in values:
        facts.append(("lengths", ", ".join(f"{name} {value:,}" for name, value in values["lengths"].items())))
        facts.append(("at data.max_length", _if_any(values["at_max_length"], "cut, or of exactly this length")))
    facts += [(COUNTED[name], f"{count_rows(count)} of the source") for name, count in values.get("counts", {}).items()]
    facts.append(("exact duplicates", _if_any(values["duplicates"], "equal to an earlier row")))
    if "contradictions" in values:
        contradictions = _if_any(values["contradictions"], "with the input of another row and a different answer")
        facts.append(("contradictions", contradictions))
    if "overlap" in values:
        facts.append(("also trained on", _if_any(values["overlap"]["exact"], "equal to a training row")))
        same_prompt = _if_any(values["overlap"]["same_prompt"], "with a training row's prompt and a different answer")
        facts.append(("same prompt", same_prompt))
    if "epoch" in values:
        facts += _epoch_facts(values["epoch"])
    return facts


def count_rows(count: int) -> str:
    """Return a number of rows as text: "1 row", "2 rows".

    Args:
        count: The number.
    """
    return f"{count:,} row{'' if count == 1 else 's'}"


def _if_any(count: int, description: str) -> str:
    """Return a number of rows with its description; "none" for 0."""
    return f"{count_rows(count)}, {description}" if count else "none"


def _epoch_facts(epoch: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (name, value) of each number of an epoch."""
    unit = ("packed row" if "bins" in epoch else "row") + ("" if epoch["left_over"] == 1 else "s")
    facts = [("an epoch", f"{epoch['steps']:,} steps, {epoch['left_over']:,} {unit} left over")]
    if "bins" in epoch:
        facts.append(("packing", f"{epoch['bins']:,} packed rows, {100 * epoch['fill']:.1f} % full"))
    if "padding_share" in epoch:
        share = f"{100 * epoch['padding_share']:.1f} % in micro-batches of {epoch['micro_size']}"
        facts.append(("padding", share if epoch["is_padded"] else f"none; {share} if each row were padded"))
    return facts


def _source(split: str, values: dict[str, Any]) -> str:
    """Return the rows and tokens of a source as text."""
    return count_rows(values["rows"]) + (f", tokens {_tokens(split, values)}" if "tokens" in values else "")


def _tokens(split: str, values: dict[str, Any]) -> str:
    """Return the number of tokens and of trained or measured tokens as text."""
    if "trained_tokens" not in values:
        return f"{values['tokens']:,}"
    share = f"{COUNTS[split]} ({100 * values['trained_share']:.1f} %)"
    return f"{values['tokens']:,}, {values['trained_tokens']:,} {share}"


def _draw_bars(bars: Sequence[tuple[str, int]], style: Style) -> list[str]:
    """Draw a bar for each (name, count)."""
    names = [style.safe(visible(name)) for name, _ in bars]
    name_width = min(max(len(name) for name in names), (style.width or PLAIN) // 3)
    most = max(max(count for _, count in bars), 1)
    count_width = len(str(most))
    room = max(min(LONGEST_BAR, (style.width or PLAIN) - name_width - count_width - 8), 10)
    mark = "█" if style.unicode else "#"
    lines = []
    for name, (_, count) in zip(names, bars, strict=True):
        bar = mark * max(round(room * count / most), 1 if count else 0)
        lines.append(f"    {name[:name_width]:>{name_width}}  {count:>{count_width}}  {bar}".rstrip())
    return lines
