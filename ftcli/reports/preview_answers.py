"""Draw several answers to one prompt: side by side on a terminal, one below the other elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from ftcli.runtime.terminal import BOLD, Style
from ftcli.tasks.protocol import Span

if TYPE_CHECKING:
    from ftcli.reports.survey_types import ShownAnswer

NARROWEST = 24  # columns of an answer; on narrower terminals the answers stand one below the other
BETWEEN = 3  # columns between two answers

Cell = tuple[str, str]  # one character and its colour


def draw_answers(
    answers: Sequence[ShownAnswer], style: Style, cells_of: Callable[[Sequence[Span]], list[Cell]]
) -> list[str]:
    """Return the lines of several answers, each under its name.

    Args:
        answers: The answers.
        style: The style of the stream.
        cells_of: Returns the characters of spans with their colours, newlines included.
    """
    if not answers:
        return []
    columns = 0 if style.width is None else (style.width - BETWEEN * (len(answers) - 1)) // len(answers)
    texts = [cells_of(answer.spans) for answer in answers]
    if columns < NARROWEST:
        lines = []
        for answer, text in zip(answers, texts, strict=True):
            lines += [style.paint(f"{answer.name}:", BOLD), *(_paint(line, style) for line in _wrap(text, None))]
        return lines
    heads = [[(letter, BOLD) for letter in answer.name[:columns]] for answer in answers]
    wrapped = [[head, *_wrap(text, columns)] for head, text in zip(heads, texts, strict=True)]
    return [
        "".join(_paint(line, style) + " " * (columns + BETWEEN - len(line)) for line in row).rstrip()
        for row in zip_longest(*wrapped, fillvalue=[])
    ]


def _wrap(cells: Sequence[Cell], columns: int | None) -> list[list[Cell]]:
    """Return the lines of a text, at most `columns` characters each, broken at spaces where there are some."""
    lines: list[list[Cell]] = [[]]
    for cell in cells:
        if cell[0] == "\n":
            lines.append([])
            continue
        line = lines[-1]
        if columns is not None and len(line) == columns:
            space = max((place for place, (letter, _) in enumerate(line) if letter == " "), default=-1)
            rest = line[space + 1 :] if space > columns // 2 else []
            del line[len(line) - len(rest) :]
            lines.append([*rest])
        lines[-1].append(cell)
    return lines[:-1] if len(lines) > 1 and not lines[-1] else lines


def _paint(cells: Sequence[Cell], style: Style) -> str:
    """Return one line, with neighbours of one colour painted together."""
    text, run, colour = "", "", ""
    for letter, code in cells:
        if code != colour:
            text, run, colour = text + style.paint(run, colour), "", code
        run += letter
    return text + style.paint(run, colour)
