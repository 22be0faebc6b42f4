"""What a stream can show: its width, colours, and letters beyond ASCII; and text made harmless for it.

Knows no rows, no models and no commands; who draws decides what is drawn.
"""

from __future__ import annotations

import os
import shutil
import textwrap
from dataclasses import dataclass
from typing import TextIO

from .spans import visible

RESET = "\x1b[0m"
BOLD, DIM = "1", "2"


@dataclass(frozen=True)
class Style:
    """How text is drawn: columns (None: no terminal), colours or brackets, and whether it may leave ASCII."""

    width: int | None = None
    colour: bool = False
    unicode: bool = True

    @classmethod
    def of(cls, stream: TextIO) -> Style:
        """Return what a stream can show. NO_COLOR (no-color.org) and TERM=dumb mean no colours."""
        is_terminal = stream.isatty()
        colour = is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        unicode = (stream.encoding or "").lower().replace("-", "").startswith("utf")
        return cls(shutil.get_terminal_size().columns if is_terminal else None, colour, unicode)

    def paint(self, text: str, code: str) -> str:
        """Return text in a colour; each line by itself, so that a pager may cut anywhere between lines."""
        if not self.colour or not code or not text:
            return text
        return "\n".join(f"\x1b[{code}m{line}{RESET}" if line else "" for line in text.split("\n"))

    def safe(self, text: str) -> str:
        """Return text as this stream can take it."""
        return text if self.unicode else text.encode("ascii", "backslashreplace").decode("ascii")

    def wrap(self, text: str) -> list[str]:
        """Return a line as lines no wider than the terminal, the later ones indented; what is none gets it whole."""
        if self.width is None:
            return [text]
        indent = " " * (len(text) - len(text.lstrip()))
        return textwrap.wrap(text, self.width, subsequent_indent=indent or "  ", break_on_hyphens=False)

    @property
    def brackets(self) -> tuple[str, str]:
        """Return what stands around trained text where there is no colour."""
        return ("", "") if self.colour else ("⟦", "⟧") if self.unicode else ("[[", "]]")

    @property
    def newline(self) -> str:
        """Return the mark of a newline, which it then makes."""
        return "↵\n" if self.unicode else "\\n\n"


def said(text: str, stream: TextIO) -> str:
    """Return text of a model as a stream can take it: on a terminal nothing in it is an order, but tabs stay tabs.

    Elsewhere it stays as it is, but for letters that the stream's encoding does not have.
    """
    if stream.isatty():
        text = "\t".join(map(visible, text.split("\t")))
    letters = stream.encoding or "utf-8"
    return text.encode(letters, "backslashreplace").decode(letters)
