"""Options of commands on runs that have no effect or miss something."""

from __future__ import annotations

import pytest

from ...support.runner import RunCli


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("runs/my", "exported", "--private"), "--private has no effect without --push"),
        (("runs/my",), "there is no folder to export into"),
    ],
)
def test_export_with_an_incomplete_command_line_is_refused(
    arguments: tuple[str, ...], message: str, run_cli: RunCli
) -> None:
    ended = run_cli("export", *arguments)
    assert ended.code == 2 and message in ended.text
