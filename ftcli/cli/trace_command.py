"""Define the command `ftcli trace`. Nothing heavy is imported before it is called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ftcli.cli.options import (
    AccelerateArguments,
    CpuOption,
    ProcessesOption,
    ProfileOption,
    RecipeArgument,
    SetOption,
    TrustOption,
    for_accelerate,
    given_path,
    with_trust,
)
from ftcli.runtime.terminal import print_text


def trace(
    recipe: RecipeArgument,
    accelerate_arguments: AccelerateArguments = None,
    profile: ProfileOption = None,
    num_processes: ProcessesOption = None,
    steps: Annotated[int, typer.Option("--steps", metavar="K", min=1, help="Number of recorded steps.")] = 3,
    cpu: CpuOption = False,
    set_: SetOption = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", parser=given_path, metavar="DIR", help="New folder. Default: runs/<recipe's name>-trace."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """Record steps of a recipe; explain where time goes."""
    from ftcli.reports.tracing.trace import trace as trace_run
    from ftcli.reports.tracing.trace import trace_worker
    from ftcli.runtime.process import has_ftcli_parent

    if has_ftcli_parent() and output is not None:  # a rank of the command
        overrides = with_trust(set_, trust_remote_code)
        trace_worker(recipe, steps=steps, cpu=cpu, overrides=overrides, output=output)
        return
    report = trace_run(
        recipe,
        profile,
        num_processes=num_processes,
        steps=steps,
        cpu=cpu,
        overrides=set_ or (),
        output=output,
        trust_remote_code=trust_remote_code,
        launch_arguments=for_accelerate(accelerate_arguments),
    )
    print_text(json.dumps(report.as_dict(), indent=1) if as_json else "\n".join(report.lines()))
    raise typer.Exit(report.exit_code)
