"""Define arguments and options that several commands share, each with one help text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def given_path(value: str) -> Path:
    """Return a path of the command line; raise `BadParameter` for an empty one, which `Path` takes as this folder."""
    if not value:
        raise typer.BadParameter("is empty")
    return Path(value)


RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="Recipe file, or the name of a shipped one.")]
ProfileOption = Annotated[
    str | None,
    typer.Option("--profile", metavar="NAME|PATH", help="Accelerate config: single, ddp, fsdp, zero3, or a file."),
]
ProcessesOption = Annotated[
    int | None,
    typer.Option("--num-processes", metavar="N", help="Processes over all machines. Default: all visible GPUs."),
]
MachinesOption = Annotated[int, typer.Option("--num-machines", metavar="M", min=1, help="Number of machines.")]
MachineRankOption = Annotated[
    int, typer.Option("--machine-rank", metavar="R", min=0, help="Number of this machine, from 0.")
]
MainAddressOption = Annotated[str | None, typer.Option("--main-process-ip", metavar="IP", help="Address of machine 0.")]
MainPortOption = Annotated[
    int | None, typer.Option("--main-process-port", metavar="PORT", help="Free port on machine 0.")
]
CpuOption = Annotated[
    bool, typer.Option("--cpu", help="Use the CPU, even on a machine with GPUs. Works with every profile.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override one key of the recipe, such as optimizer.learning_rate=1e-4."
    ),
]
AccelerateArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="ACCELERATE_ARGUMENT", help="After --: arguments for `accelerate launch`."),
]

TextModelArgument = Annotated[
    str, typer.Argument(metavar="RUN|CHECKPOINT|MODEL", help="Run, checkpoint or model folder, or hub name.")
]
SystemOption = Annotated[
    str | None, typer.Option("--system", metavar="TEXT", help="A system turn before each conversation.")
]
MaxNewTokensOption = Annotated[
    int, typer.Option("--max-new-tokens", metavar="N", min=1, help="Largest length of an answer, in tokens.")
]
TemperatureOption = Annotated[
    float, typer.Option("--temperature", metavar="T", min=0, help="0: the most likely token. Above 0: sampled.")
]
TopPOption = Annotated[
    float,
    typer.Option(
        "--top-p",
        metavar="P",
        help="Sample from the most likely tokens with this total probability, above 0 and at most 1.",
    ),
]
TemplateOption = Annotated[
    list[str] | None,
    typer.Option(
        "--chat-template-kwargs",
        metavar="K=V",
        help="Variable of the chat template, such as enable_thinking=false. Default: those of a run's recipe.",
    ),
]
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run Python code of the task or model. Not stored, so repeat it for each command."
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", metavar="S", min=0, help="Seed for sampling.")]


def with_trust(overrides: list[str] | None, trusted: bool) -> list[str]:
    """Return the overrides of a recipe, with `model.trust_remote_code=true` if the option was given."""
    return [*(overrides or ()), *["model.trust_remote_code=true"] * trusted]


def for_accelerate(arguments: list[str] | None) -> list[str]:
    """Return the arguments after `--`. An unexpected word before it is an error."""
    if arguments and not arguments[0].startswith("-"):
        raise typer.BadParameter(f"unexpected argument '{arguments[0]}'; arguments for accelerate start with a dash")
    return arguments or []
