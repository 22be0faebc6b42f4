"""Define a fact of a machine: one line with a state and, if something should change, a remedy. Light."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ftcli.runtime.redaction import redact

GIB = 2**30  # bytes
State = Literal["ok", "look", "wrong"]
STATES: tuple[State, ...] = ("ok", "look", "wrong")


@dataclass(frozen=True)
class Fact:
    """One fact of a machine.

    Attributes:
        topic: What the fact is about, such as "/dev/shm".
        state: ok; look: training works, but may be slower or less safe; wrong: training fails or hangs.
        text: What was found.
        remedy: What to do about it; empty for ok.
    """

    topic: str
    state: State
    text: str
    remedy: str = ""

    def __post_init__(self) -> None:
        for name in ("text", "remedy"):
            object.__setattr__(self, name, " ".join(redact(getattr(self, name)).split()))


def ok(topic: str, text: str) -> Fact:
    """Return a fact that needs no change."""
    return Fact(topic, "ok", text)


def look(topic: str, text: str, remedy: str) -> Fact:
    """Return a fact that may need a change."""
    return Fact(topic, "look", text, remedy)


def wrong(topic: str, text: str, remedy: str) -> Fact:
    """Return a fact that makes training fail or hang."""
    return Fact(topic, "wrong", text, remedy)
