"""Text for streams whose encoding lacks some of its characters."""

from __future__ import annotations

import io
import sys

import pytest

from ftcli.runtime.terminal import print_text, replace_what_cannot_be_shown


@pytest.mark.parametrize(("encoding", "expected"), [("latin-1", "é \\u2588"), ("ascii", "\\xe9 \\u2588")])
def test_print_text_to_a_stream_without_a_character_escapes_it(encoding: str, expected: str) -> None:
    # A notebook or a program that calls ftcli's functions has made its own stream, which the command line has not.
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    print_text("é █", file=stream)
    stream.seek(0)
    assert stream.read() == f"{expected}\n"


def test_print_text_to_a_stream_that_was_closed_before_the_start_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    replace_what_cannot_be_shown()
    print_text("one")
    assert not sys.stdout.isatty()
    sys.stdout.close()
