"""Define the command `ftcli plan`. Nothing heavy is imported before it is called."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ftcli.cli.options import RecipeArgument, SetOption, TrustOption, with_trust
from ftcli.runtime.terminal import print_text


def plan(
    recipe: RecipeArgument,
    profiles: Annotated[
        str,
        typer.Option(
            "--profiles", metavar="all|P,P,...", help="Names or files. all: the shipped profiles for one machine."
        ),
    ] = "all",
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", metavar="N", min=1, help="Number of GPUs. Default: all visible GPUs, else 8."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="NAME", help="Name of the GPU, such as H100. Default: that of this machine."),
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option("--memory", metavar="GB", help="Memory of a GPU (GB of 2^30 bytes), if it is not in the table."),
    ] = None,
    price: Annotated[float | None, typer.Option("--price", metavar="P", help="Price of one GPU for one hour.")] = None,
    set_: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """Plan memory, time and cost for each profile."""
    from ftcli.reports.plan import plan as plan_run

    report = plan_run(
        recipe,
        [] if profiles == "all" else [name.strip() for name in profiles.split(",")],
        gpus=gpus,
        gpu=gpu,
        memory_gb=memory,
        price=price,
        overrides=with_trust(set_, trust_remote_code),
    )
    print_text(json.dumps(report.as_dict(), indent=1) if as_json else "\n".join(report.lines()))
