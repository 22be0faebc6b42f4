"""Define the commands that take a run, a checkpoint or a model. Each command calls one function of another package.

Nothing heavy is imported before a command is called.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ftcli.cli.options import (
    AccelerateArguments,
    CpuOption,
    MaxNewTokensOption,
    ProcessesOption,
    ProfileOption,
    SeedOption,
    SystemOption,
    TemperatureOption,
    TemplateOption,
    TextModelArgument,
    TopPOption,
    TrustOption,
    for_accelerate,
    given_path,
)
from ftcli.runtime.errors import InputError
from ftcli.runtime.terminal import print_text


def evaluate(
    target: Annotated[str, typer.Argument(metavar="RUN", help="Run folder.")],
    accelerate_arguments: AccelerateArguments = None,
    profile: ProfileOption = None,
    num_processes: ProcessesOption = None,
    cpu: CpuOption = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """Evaluate a run's weights on its evaluation rows."""
    from ftcli.launch import launcher

    metrics = launcher.evaluate_target(
        target,
        profile,
        num_processes=num_processes,
        cpu=cpu,
        trust_remote_code=trust_remote_code,
        launch_arguments=for_accelerate(accelerate_arguments),
    )
    if not launcher.is_launched():
        print_text(json.dumps(metrics, indent=1))


def export(
    source: Annotated[
        Path,
        typer.Argument(parser=given_path, metavar="RUN|CHECKPOINT", help="Run folder, or one of its checkpoints."),
    ],
    directory: Annotated[
        Path | None,
        typer.Argument(parser=given_path, metavar="[DIR]", help="New folder for the weights; not needed with --push."),
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge a LoRA adapter into its base model.")] = False,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="D", help="float32, bfloat16 or float16. Default: as trained."),
    ] = None,
    shard_size: Annotated[str, typer.Option("--shard-size", metavar="SIZE", help="Largest size of one file.")] = "5GB",
    push: Annotated[
        str | None, typer.Option("--push", metavar="NAME", help="Upload to this repository, with a model card.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="With --push: to a private repository.")] = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """Export weights for transformers, verify, upload."""
    options: dict[str, Any] = {
        "merge": merge,
        "dtype": dtype,
        "shard_size": shard_size,
        "trust_remote_code": trust_remote_code,
    }
    if push is not None:
        from ftcli.reports import push as upload

        print_text(upload.push(source, push, directory, private=private, **options))
        return
    if private:
        raise InputError("--private has no effect without --push", hint="add --push NAME, or remove --private")
    if directory is None:
        raise InputError("there is no folder to export into", hint="name a new one, or upload with --push NAME")
    from ftcli.checkpoint import export

    print_text(export.export(source, directory, **options))


def generate(
    target: TextModelArgument,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", metavar="TEXT", help="A prompt. May be given several times.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            parser=given_path,
            metavar="FILE",
            help="More prompts: .txt with one per line, or .jsonl with messages.",
        ),
    ] = None,
    system: SystemOption = None,
    max_new_tokens: MaxNewTokensOption = 128,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    chat_template_kwargs: TemplateOption = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", metavar="N", min=1, help="Number of prompts in one batch.")
    ] = 8,
    cpu: CpuOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line for each prompt.")] = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """Answer prompts with a run's weights or any model."""
    from ftcli.data.chat.template_variables import parse_variables
    from ftcli.inference import generate
    from ftcli.runtime import terminal

    options: dict[str, Any] = {
        "file": file,
        "system": system,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "batch_size": batch_size,
        "cpu": cpu,
        "chat_template_kwargs": parse_variables(chat_template_kwargs or ()),
        "trust_remote_code": trust_remote_code,
    }
    if as_json:
        for row in generate.generate_rows(target, prompt or (), **options):
            print_text(json.dumps(row, ensure_ascii=not terminal.Style.of(sys.stdout).unicode))
    elif sys.stdout.isatty() and len(prompt or ()) == 1 and file is None:
        generate.generate(target, prompt or (), stream=sys.stdout, **options)
    else:
        for number, row in enumerate(generate.generate_rows(target, prompt or (), **options)):
            print_text(("\n" if number else "") + terminal.printable(row["answer"], sys.stdout))


def chat(
    target: TextModelArgument,
    system: SystemOption = None,
    max_new_tokens: MaxNewTokensOption = 512,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    chat_template_kwargs: TemplateOption = None,
    cpu: CpuOption = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """Chat with a model in the terminal."""
    from ftcli.cli import chat
    from ftcli.data.chat.template_variables import parse_variables

    chat.converse(
        target,
        system=system,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        cpu=cpu,
        chat_template_kwargs=parse_variables(chat_template_kwargs or ()),
        trust_remote_code=trust_remote_code,
    )


def show(
    what: Annotated[
        str,
        typer.Argument(
            metavar="recipes|profiles|tasks|RUN|CHECKPOINT",
            help="What to list, or the folder of a run or checkpoint.",
        ),
    ],
) -> None:
    """List recipes, profiles or tasks; describe a run."""
    from ftcli.reports import show
    from ftcli.runtime import terminal

    print_text(terminal.printable("\n".join(show.lines_about(what)), sys.stdout))


def version() -> None:
    """Print versions of ftcli and its packages."""
    from ftcli.reports import show

    print_text("\n".join(show.versions()))
