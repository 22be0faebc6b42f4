"""Define the command `ftcli doctor`. Nothing heavy is imported before it is called."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ftcli.cli.options import (
    CpuOption,
    MachineRankOption,
    MachinesOption,
    MainAddressOption,
    MainPortOption,
    ProfileOption,
)
from ftcli.runtime.terminal import print_text


def doctor(
    profile: ProfileOption = None,
    num_processes: Annotated[
        int | None,
        typer.Option(
            "--num-processes",
            metavar="N",
            min=1,
            help="Processes over all machines, which try each collective. Default: with a profile, all visible GPUs.",
        ),
    ] = None,
    num_machines: MachinesOption = 1,
    machine_rank: MachineRankOption = 0,
    main_process_ip: MainAddressOption = None,
    main_process_port: MainPortOption = None,
    cpu: CpuOption = False,
    bench: Annotated[
        bool, typer.Option("--bench", help="Measure device, disk and collectives too; `ftcli plan` uses the results.")
    ] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=1, help="How long machines and processes may take.")
    ] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check this machine and the other ones of a run. Exit code 2 if something is wrong."""
    from ftcli.reports.doctor import doctor as check_machines

    report = check_machines(
        profile,
        num_processes=num_processes,
        num_machines=num_machines,
        machine_rank=machine_rank,
        main_process_ip=main_process_ip,
        main_process_port=main_process_port,
        cpu=cpu,
        bench=bench,
        timeout=timeout,
    )
    print_text(json.dumps(report.as_dict(), indent=1) if as_json else "\n".join(report.lines()))
    raise typer.Exit(report.exit_code)
