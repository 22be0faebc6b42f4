"""Log lines: which ranks write them, what stands before them, and that no secret is in them."""

from __future__ import annotations

import logging
import sys

import pytest

from ftcli.runtime.log import LOGGER, log_line


def test_log_line_on_the_main_rank_has_the_name_of_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    log_line("step 1 of 2: 50 %s")
    log_line("Traceback", prefix=False)
    assert capsys.readouterr() == ("", "ftcli: step 1 of 2: 50 %s\nTraceback\n")


def test_log_line_on_another_rank_is_written_only_if_every_rank_writes_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    log_line("the same on all ranks")
    log_line("rank 1 ends", every_rank=True)
    assert capsys.readouterr().err == "ftcli: rank 1 ends\n"


def test_log_line_with_a_token_is_redacted(capsys: pytest.CaptureFixture[str]) -> None:
    log_line("pushed with hf_" + "a" * 34)
    assert "aaaa" not in capsys.readouterr().err


def test_log_line_follows_the_level_of_its_logger_and_reaches_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler()])
    log_line("written once")
    LOGGER.setLevel(logging.WARNING)
    log_line("quiet")
    LOGGER.setLevel(logging.INFO)
    assert capsys.readouterr().err == "ftcli: written once\n"


def test_log_line_without_a_reader_is_lost_and_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        encoding = "utf-8"

        def write(self, text: str) -> int:
            raise BrokenPipeError

        def flush(self) -> None: ...

    monkeypatch.setattr(sys, "stderr", Closed())
    log_line("one")
