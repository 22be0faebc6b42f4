"""Exceptions and exit codes of ftcli. Each message has three parts: what is wrong, where, and what to do.

An `InputError` is a mistake in the user's input and ends a command with exit code 2. Every other exception ends it
with 1. A run that stopped on request ends with 75, the code of sysexits for "try again". A batch system may then start
it again with --resume auto. The message of a `RunError` is complete, so it is shown without a stack trace.
"""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ftcli.runtime.redaction import redact

MOST_PROBLEMS = 50  # problems that one InputError shows
MOST_TEXT = 1000  # characters of a problem's text or hint
MOST_WORD = 64  # characters of a word that gets a suggestion: the time of the search grows with the square
CLOSE = 0.75  # similarity of a suggestion from all keys or commands: at 0.6 `predict` gave `parity`

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_INPUT = 2
EXIT_RESUME = 75
EXIT_SIGNAL = 128  # plus the number of the signal, as in shells: a second signal ended the process at once


@dataclass(frozen=True)
class Problem:
    """One mistake: what is wrong, where it is (`file:line`, or a key), and a hint what to do."""

    what: str
    where: str = ""
    hint: str = ""

    def __post_init__(self) -> None:
        for name in ("what", "where", "hint"):
            object.__setattr__(self, name, redact(getattr(self, name)))

    def __str__(self) -> str:
        where, what, hint = (_shown(text) for text in (self.where, self.what, self.hint))
        head = f"{where}: {what}" if where else what
        return f"{head}\n    {hint}" if hint else head


class InputError(Exception):
    """The user's input is wrong. Holds all problems that were found, at most `MOST_PROBLEMS`.

    Args:
        problems: The problems, or the text of a single one.
        where: Place of a single problem: `file:line` or a key.
        hint: What to do about a single problem.
    """

    def __init__(self, problems: Iterable[Problem] | str, where: str = "", hint: str = "") -> None:
        items = [Problem(problems, where, hint)] if isinstance(problems, str) else list(problems)
        if len(items) > MOST_PROBLEMS:
            items[MOST_PROBLEMS:] = [Problem("more mistakes are not shown", items[MOST_PROBLEMS].where)]
        self.problems = items
        super().__init__("\n".join(str(problem) for problem in self.problems))


def collect_problems(checks: Iterable[Callable[[], object]]) -> list[Problem]:
    """Run all checks and return the problems of those that raise an `InputError`, each problem once.

    Args:
        checks: Functions without arguments. Their results are ignored.
    """
    problems: list[Problem] = []
    for check in checks:
        try:
            check()
        except InputError as error:
            problems += error.problems
    return list(dict.fromkeys(problems))


class RowError(ValueError):
    """A row cannot be used. The code that reads rows adds the source and the row number to the message."""


class RunError(Exception):
    """The training failed for a reason outside of the code, such as a non-finite loss or a full disk."""


class ExportError(RunError, RuntimeError):
    """An export does not load, or is not the trained model. The export is removed."""


class DiskError(RunError, OSError):
    """A file of the run could not be written, because its disk is full or accepts no more files.

    Args:
        what: The file and the reason.
        has_checkpoints: Whether the run has a checkpoint to resume from.
    """

    def __init__(self, what: str, *, has_checkpoints: bool = True) -> None:
        self.what = what
        remedy = "Saved checkpoints are complete; when the disk accepts files again, resume with --resume auto"
        if not has_checkpoints:
            remedy = "No checkpoint was saved yet; when the disk accepts files again, start the run again"
        super().__init__(f"{what}. {remedy}")


class RunFolderGoneError(RunError, OSError):
    """The run folder was deleted, renamed or replaced during the run."""

    def __init__(self, path: object) -> None:
        super().__init__(
            f"the run folder {path} is gone: it was deleted or renamed during the run. The run has ended "
            "and writes nothing more. If the folder was renamed, resume with --output NEW_NAME --resume auto; if it "
            "was deleted, its checkpoints are lost"
        )


def shortened(text: str, most: int = MOST_TEXT) -> str:
    """Return a text as it is up to `most` characters; replace the middle of a longer one and append its length.

    Args:
        text: Any text.
        most: Number of characters to keep.
    """
    if len(text) <= most:
        return text
    head = most * 2 // 3
    return f"{text[:head]} ... {text[head - most :]} ({len(text):,} characters)"


def _shown(text: str) -> str:
    """Return a shortened text with control characters and lone surrogates escaped; newlines and tabs stay."""
    text = shortened(text)
    if text.isprintable():
        return text
    return "".join(char if _is_harmless(char) else ascii(char)[1:-1] for char in text)


def _is_harmless(char: str) -> bool:
    """Return whether a character may be printed as it is."""
    return char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cs")


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a "did you mean" sentence for a misspelt word; an empty string when no known word is close.

    Args:
        word: The word that was written.
        known: The words that exist.
        cutoff: Least similarity of a suggestion, from 0 to 1, as in `difflib`.
    """
    if len(word) > MOST_WORD:
        return ""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f"did you mean '{close[0]}'?" if close else ""
