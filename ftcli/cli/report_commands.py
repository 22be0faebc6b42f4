"""Define `ftcli report` and `ftcli compare`. Nothing heavy is imported before a command is called."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ftcli.cli.options import given_path
from ftcli.runtime.terminal import print_text

RunsArgument = Annotated[list[str], typer.Argument(metavar="RUN", help="Run folders.")]


def report(
    runs: RunsArgument,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            parser=given_path,
            metavar="FILE.html",
            help="File to write. Default: report.html, for one run in its folder, else in the working folder.",
        ),
    ] = None,
) -> None:
    """Write curves and events of runs as one HTML page."""
    from ftcli.reports.report import write_report

    print_text(write_report(*runs, output=output))


def compare(
    runs: RunsArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare recipes, profiles, versions, curves of runs."""
    from ftcli.reports.run_comparison import compare_runs
    from ftcli.runtime import terminal

    comparison = compare_runs(*runs)
    text = json.dumps(comparison.as_dict(), indent=1) if as_json else "\n".join(comparison.lines())
    print_text(terminal.printable(text, sys.stdout))
