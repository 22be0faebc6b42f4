"""Detect the width, colours and encoding of a stream, and escape text that a terminal would interpret.

rich only draws the progress bar. Its escape function leaves escape sequences in the text
(docs/explanation/our-own-code.md).
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import textwrap
import unicodedata
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress

JOINERS = "\u200c\u200d"  # without width, and part of how Persian words and composed emoji are written


RESET = "\x1b[0m"
BOLD, DIM = "1", "2"


@dataclass(frozen=True)
class Style:
    """How text is drawn: columns (None: not a terminal), colours or brackets, and whether it may contain non-ASCII."""

    width: int | None = None
    colour: bool = False
    unicode: bool = True

    @classmethod
    def of(cls, stream: TextIO) -> Style:
        """Return the style of a stream. NO_COLOR (no-color.org) and TERM=dumb mean no colours."""
        is_terminal = stream.isatty()
        colour = is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        unicode = (stream.encoding or "").lower().replace("-", "").startswith("utf")
        return cls(shutil.get_terminal_size().columns if is_terminal else None, colour, unicode)

    def paint(self, text: str, code: str) -> str:
        """Return text in a colour. Each line has its own codes, so that a pager may cut between any two lines."""
        if not self.colour or not code or not text:
            return text
        return "\n".join(f"\x1b[{code}m{line}{RESET}" if line else "" for line in text.split("\n"))

    def safe(self, text: str) -> str:
        """Return text in the characters of this stream: ASCII with escapes if it is not UTF-8."""
        return text if self.unicode else text.encode("ascii", "backslashreplace").decode("ascii")

    def wrap(self, text: str) -> list[str]:
        """Wrap a line to the width of the terminal, with later lines indented. Without a terminal it stays one line."""
        if self.width is None:
            return [text]
        indent = " " * (len(text) - len(text.lstrip()))
        return textwrap.wrap(text, self.width, subsequent_indent=indent or "  ", break_on_hyphens=False)

    @property
    def brackets(self) -> tuple[str, str]:
        """Return the brackets around trained text; empty if colours mark it."""
        return ("", "") if self.colour else ("⟦", "⟧") if self.unicode else ("[[", "]]")

    @property
    def newline(self) -> str:
        """Return the visible mark of a newline, followed by a newline."""
        return "↵\n" if self.unicode else "\\n\n"


def print_text(text: object = "", *, file: TextIO | None = None, end: str = "\n") -> None:
    """Print text, with characters that the encoding of the stream lacks as escapes, and flush it.

    Args:
        text: The text, or an object with a text.
        file: The stream; None is `sys.stdout`.
        end: What follows the text.
    """
    stream = file or sys.stdout
    letters = stream.encoding or "utf-8"
    print(str(text).encode(letters, "backslashreplace").decode(letters), end=end, file=stream, flush=True)


def replace_what_cannot_be_shown() -> None:
    """Make the streams of this process escape characters that their encoding lacks, also in texts of libraries.

    A stream that was closed before the start (`>&-`) is None in Python. It becomes one that drops what is written.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (open until the process ends)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not the stream of a notebook
            with suppress(OSError):  # a stream that was put in the place of another one, and cannot be sought
                stream.reconfigure(errors="backslashreplace")


def printable(text: str, stream: IO[str]) -> str:
    """Return the output of a model for a stream.

    On a terminal, control characters are escaped except tabs and newlines. On all streams, characters that the encoding
    lacks are escaped.
    """
    if stream.isatty():
        text = "\t".join(map(visible, text.split("\t")))
    letters = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(letters, "backslashreplace").decode(letters)


def visible(text: str) -> str:
    r"""Escape control and format characters, such as \x1b and \u202e, so that a terminal or a page shows them.

    Newlines stay, and so do the two joiners that words and emoji are composed with.
    """
    if text.isprintable():
        return text
    return "".join(char if char == "\n" or _is_harmless(char) else _escape(char) for char in text)


def _is_harmless(char: str) -> bool:
    return char in JOINERS or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp")


def _escape(char: str) -> str:
    short = {"\t": r"\t", "\r": r"\r"}
    code = ord(char)
    return short.get(char) or (
        f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    )


def shortened(text: str, most: int) -> str:
    """Return a text on one line in quotes, shortened to `most` characters."""
    line = " ".join(text.split())
    return json.dumps(line if len(line) <= most else line[: most - 1] + "\u2026", ensure_ascii=False)


def progress_bar(steps: int) -> Progress:
    """Return a bar on standard error with finished steps, remaining time and the field `line` of its task.

    Args:
        steps: Number of steps of the run.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    return Progress(
        BarColumn(bar_width=None),  # the remaining width, so that numbers fit into 80 columns
        MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=2 * len(str(steps)) + 1)),
        TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7)),
        TextColumn("{task.fields[line]}", table_column=Column(no_wrap=True)),
        console=Console(stderr=True),
        expand=True,
    )
