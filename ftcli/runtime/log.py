"""Log lines of ftcli on standard error, through Python's `logging` (logger "ftcli").

A notebook can raise the logger's level or add handlers. Errors that end a command are not log lines: `__main__` prints
them.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress

from ftcli.runtime.process import current_rank
from ftcli.runtime.redaction import redact
from ftcli.runtime.terminal import print_text

LOGGER = logging.getLogger("ftcli")


class _Stderr(logging.Handler):
    """Writes each line to the current `sys.stderr`, because notebooks and tests replace it, and flushes the line."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line. If the reader of a pipe is gone, as after `| head`, the line is lost and the run goes on."""
        with suppress(BrokenPipeError):
            print_text(self.format(record), file=sys.stderr)


class _Line(logging.Formatter):
    """Puts the name of the program before the text, and removes secrets from it."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return ("ftcli: " if getattr(record, "prefix", True) else "") + redact(record.getMessage())


def _is_for_this_rank(record: logging.LogRecord) -> bool:
    """Return whether this process writes the line: the main rank writes all lines, others those with `every_rank`."""
    return getattr(record, "every_rank", False) or current_rank() == 0


def log_line(text: str, *, every_rank: bool = False, prefix: bool = True) -> None:
    """Write one line to the log, without secrets.

    Args:
        text: The line.
        every_rank: Write it on each rank that calls; without it only the main rank writes.
        prefix: Put `ftcli: ` before the line.
    """
    LOGGER.info("%s", text, extra={"every_rank": every_rank, "prefix": prefix})


def _configure() -> None:
    """Attach the handler for standard error to ftcli's logger."""
    handler = _Stderr()
    handler.setFormatter(_Line())
    handler.addFilter(_is_for_this_rank)
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False  # a handler of the root logger would write each line again


_configure()
