"""A preview as lines of text: with colours on a terminal that has them, with brackets anywhere else.

What comes from data passes `spans.visible` first, and where the stream is not UTF-8 everything becomes ASCII.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .spans import Span, joined, visible
from .terminal import BOLD, DIM, Style

if TYPE_CHECKING:
    from .data_findings import Finding
    from .preview import ShownRow

RED, YELLOW = "31", "33"
TRAINED, SPECIAL = "1;32", "36"  # green and bold: also without telling green from other colours
COUNTS = {"train": "trained", "eval": "measured"}  # what is done with the tokens that the loss is on
LONGEST_BAR = 50
PLAIN = 80  # columns of what is no terminal
COUNTED = {
    "cut": "cut off at the end",
    "dropped": "left out, too long",
    "split": "split, too long",
    "untrained": "left out, untrained",
    "bad": "left out, unusable",
}


def draw_findings(findings: Sequence[Finding], style: Style) -> list[str]:
    """Return each finding with its hint below."""
    colours = {"error": RED, "warning": YELLOW, "note": ""}
    lines = []
    for finding in findings:
        head, *rest = _wrapped(f"{finding.level}: {finding.what}", style)
        level = f"{finding.level}:"
        lines += [style.paint(level, colours[finding.level]) + head.removeprefix(level), *rest]
        lines += _wrapped(f"    {finding.hint}", style) if finding.hint else []
    return [*lines, ""] if lines else []


def _wrapped(text: str, style: Style) -> list[str]:
    """Return text in lines no wider than a terminal; what is no terminal gets one line, for grep."""
    return style.wrap(style.safe(visible(text)))


def draw_rows(rows: Sequence[ShownRow], style: Style, *, ids: bool) -> list[str]:
    """Return the rows, each under a line that says which it is."""
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
            gap = f"... {row.left_out} tokens left out here, {row.left_out_trained} of them {counted(row)} (--full) ..."
            text += "\n" + style.paint(gap, DIM) + "\n"
        text += _draw_spans(row.tail, style)
        lines += text.removesuffix("\n").split("\n") if text else []
        lines += [f"{style.safe(visible(name))}: {style.safe(visible(value))}" for name, value in row.facts.items()]
        if ids:
            lines += _draw_ids([*row.head, *row.tail], style)
        lines.append("")
    return lines


def title(row: ShownRow) -> str:
    """Return the line that says which row it is."""
    when = "not in the first epoch" if row.step is None else f"step {row.step}" if row.step else "not yet shuffled"
    when = "evaluation" if row.split == "eval" else when
    size = f", {row.tokens} tokens" if row.tokens else ""
    trained = f", {row.trained} {counted(row)}" if row.trained else ""
    return f"row {row.number} of {row.source}, {when}{size}{trained}"


def counted(row: ShownRow) -> str:
    """Return what is done with the tokens of a row that its loss is on."""
    return COUNTS[row.split]


def _draw_spans(spans: Iterable[Span], style: Style) -> str:
    start, end = style.brackets
    pieces, is_open = [], False
    for span in joined(list(spans)):
        if span.is_trained != is_open:
            pieces.append(start if span.is_trained else end)
            is_open = span.is_trained
        text = style.safe(_bracketed(visible(span.text), style))
        pieces.append(style.paint(text.replace("\n", style.newline), _code(span)))
    return "".join(pieces) + (end if is_open else "")


def _code(span: Span) -> str:
    codes = [code for code, holds in ((TRAINED, span.is_trained), (SPECIAL, span.is_special)) if holds]
    return "1;4;32" if len(codes) == 2 else "".join(codes)  # trained and special: underlined as well


def _bracketed(text: str, style: Style) -> str:
    """Return text whose own brackets cannot be taken for ours: they get a backslash."""
    for bracket in filter(None, style.brackets):
        text = text.replace(bracket, f"\\{bracket}")
    return text


def _draw_ids(spans: Sequence[Span], style: Style) -> list[str]:
    """Return `"text" id` of each span, several to a line."""
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
    """Return the numbers of every split, one fact a line, and the histogram of lengths."""
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
    """Return (name, count) of each bar of a histogram of lengths."""
    return [(f"{low}-{high}" if high > low else str(low), count) for low, high, count in histogram]


def split_facts(split: str, values: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (name, value) of each fact of a split, for any drawing."""
    facts = [("rows", f"{values['rows']:,}")]
    if "tokens" in values:
        facts.append(("tokens", _tokens(split, values)))
    if len(values["sources"]) > 1:
        facts += [(f"of {label}", _source(split, of)) for label, of in values["sources"].items()]
    if "lengths" in values:
        facts.append(("lengths", ", ".join(f"{name} {value:,}" for name, value in values["lengths"].items())))
        facts.append(("at data.max_length", _if_any(values["at_max_length"], "cut or just fitting")))
    facts += [(COUNTED[name], f"{count_rows(count)} of the source") for name, count in values.get("counts", {}).items()]
    facts.append(("exact duplicates", _if_any(values["duplicates"], "repeating an earlier one")))
    if "contradictions" in values:
        facts.append(("contradictions", _if_any(values["contradictions"], "like another, with another answer")))
    if "overlap" in values:
        facts.append(("also trained on", _if_any(values["overlap"]["exact"], "equal to a training row")))
        told = "with a training row's prompt and another answer"
        facts.append(("same prompt", _if_any(values["overlap"]["same_prompt"], told)))
    if "epoch" in values:
        facts += _epoch_facts(values["epoch"])
    return facts


def count_rows(count: int) -> str:
    """Return "1 row", "2 rows"."""
    return f"{count:,} row{'' if count == 1 else 's'}"


def _if_any(count: int, told: str) -> str:
    return f"{count_rows(count)}, {told}" if count else "none"


def _epoch_facts(epoch: dict[str, Any]) -> list[tuple[str, str]]:
    unit = ("packed row" if "bins" in epoch else "row") + ("" if epoch["left_over"] == 1 else "s")
    facts = [("an epoch", f"{epoch['steps']:,} steps, {epoch['left_over']:,} {unit} left over")]
    if "bins" in epoch:
        facts.append(("packing", f"{epoch['bins']:,} packed rows, {100 * epoch['fill']:.1f} % full"))
    if "padding_share" in epoch:
        what = f"{100 * epoch['padding_share']:.1f} % in micro-batches of {epoch['micro_size']}"
        facts.append(("padding", what if epoch["is_padded"] else f"none; {what} if each row were padded"))
    return facts


def _source(split: str, values: dict[str, Any]) -> str:
    return count_rows(values["rows"]) + (f", tokens {_tokens(split, values)}" if "tokens" in values else "")


def _tokens(split: str, values: dict[str, Any]) -> str:
    if "trained_tokens" not in values:
        return f"{values['tokens']:,}"
    share = f"{COUNTS[split]} ({100 * values['trained_share']:.1f} %)"
    return f"{values['tokens']:,}, {values['trained_tokens']:,} {share}"


def _draw_bars(bars: Sequence[tuple[str, int]], style: Style) -> list[str]:
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
