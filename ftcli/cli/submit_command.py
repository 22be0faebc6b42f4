"""Define the command `ftcli submit`. Nothing heavy is imported before it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ftcli.cli.options import CpuOption, ProfileOption, RecipeArgument, SetOption, TrustOption, given_path
from ftcli.runtime.log import log_line
from ftcli.runtime.terminal import print_text


def submit(
    recipe: RecipeArgument,
    slurm: Annotated[bool, typer.Option("--slurm", help="Submit to Slurm, with sbatch.")] = False,
    kubernetes: Annotated[bool, typer.Option("--kubernetes", help="Submit to Kubernetes, with kubectl.")] = False,
    profile: ProfileOption = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", metavar="N", help="Number of machines. Default: the profile's.")
    ] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option("--gpus-per-node", metavar="G", help="GPUs of each machine, one process for each.")
    ] = None,
    time: Annotated[
        str | None,
        typer.Option("--time", metavar="H:MM", help="Time limit. Slurm: of each launch. Kubernetes: of the whole job."),
    ] = None,
    cpu: CpuOption = False,
    set_: SetOption = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", parser=given_path, metavar="DIR", help="Run folder. Default: runs/<recipe's name>."),
    ] = None,
    template: Annotated[
        Path | None, typer.Option("--template", parser=given_path, metavar="FILE", help="Your own template of the job.")
    ] = None,
    placeholder: Annotated[
        list[str] | None,
        typer.Option("--placeholder", metavar="NAME=VALUE", help="Value in the template, such as partition=gpu."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the job, and write and submit nothing.")] = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """Submit a run to Slurm or Kubernetes."""
    from ftcli.launch import submit as module
    from ftcli.launch.job_scripts import parse_placeholders

    if slurm == kubernetes:
        raise typer.BadParameter("give --slurm or --kubernetes")
    submission = module.submit(
        recipe,
        profile,
        system="slurm" if slurm else "kubernetes",
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        time=time,
        cpu=cpu,
        overrides=set_ or (),
        output=output,
        template=template,
        placeholders=parse_placeholders(placeholder or ()),
        trust_remote_code=trust_remote_code,
        dry_run=dry_run,
    )
    if submission.job is None:
        print_text(submission.script, end="")
    else:
        log_line(f"written: {submission.path}")
        print_text(submission.job)
