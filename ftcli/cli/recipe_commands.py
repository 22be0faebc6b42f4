"""Define the commands that take a recipe. Each command calls one function of another package.

Nothing heavy is imported before a command is called.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from ftcli.cli.options import (
    AccelerateArguments,
    CpuOption,
    MachineRankOption,
    MachinesOption,
    MainAddressOption,
    MainPortOption,
    ProcessesOption,
    ProfileOption,
    RecipeArgument,
    SetOption,
    TrustOption,
    for_accelerate,
    given_path,
    with_trust,
)
from ftcli.runtime.errors import EXIT_DONE, shortened
from ftcli.runtime.reader_errors import output_file, writing
from ftcli.runtime.terminal import Style, print_text
from ftcli.runtime.whole_numbers import whole_number

TRAIN_CODES = (
    "SIGINT, SIGTERM and SIGUSR1 end the run after the current step with a checkpoint. A second signal ends the run at "
    "once. Exit codes: 0 done; 2 the input is wrong; 75 stopped by a signal or train.max_minutes, --resume auto "
    "continues; 128 + signal: ended at once; 1 any other error."
)


def train(
    recipe: RecipeArgument,
    accelerate_arguments: AccelerateArguments = None,
    profile: ProfileOption = None,
    num_processes: ProcessesOption = None,
    num_machines: MachinesOption = 1,
    machine_rank: MachineRankOption = 0,
    main_process_ip: MainAddressOption = None,
    main_process_port: MainPortOption = None,
    cpu: CpuOption = False,
    set_: SetOption = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", parser=given_path, metavar="DIR", help="Run folder. Default: runs/<recipe's name>."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Test the recipe: two steps, one evaluation, one save.")
    ] = False,
    resume: Annotated[
        str,
        typer.Option(
            "--resume",
            metavar="auto|never|DIR",
            help="auto: resume from the run folder's newest checkpoint. DIR: from this one. never: start anew.",
        ),
    ] = "never",
    resume_anyway: Annotated[
        bool, typer.Option("--resume-anyway", help="Resume also with a recipe or rows that give another loss curve.")
    ] = False,
    trust_remote_code: TrustOption = False,
    record_start: Annotated[bool, typer.Option("--record-start", hidden=True, help="For `ftcli parity`.")] = False,
) -> None:
    """Train a recipe, in one process or with a profile."""
    from ftcli.launch import launcher
    from ftcli.reports.requested_report import write_report_of_failure, write_requested_report

    began = time.time()
    try:
        folder = launcher.train(
            recipe,
            profile,
            num_processes=num_processes,
            num_machines=num_machines,
            machine_rank=machine_rank,
            main_process_ip=main_process_ip,
            main_process_port=main_process_port,
            cpu=cpu,
            overrides=set_ or (),
            output=output,
            dry_run=dry_run,
            record_start=record_start,
            resume=resume,
            resume_anyway=resume_anyway,
            trust_remote_code=trust_remote_code,
            launch_arguments=for_accelerate(accelerate_arguments),
        )
    except Exception:
        if machine_rank == 0 and not dry_run:
            write_report_of_failure(recipe, set_ or (), output, began=began)
        raise
    if machine_rank == 0:
        write_requested_report(folder)
    if not launcher.is_launched():
        print_text(folder.path)
        # A run that was stopped is not done: 75. Without a shared disk, status.json is on the first machine only.
        raise typer.Exit(folder.status().get("exit_code", EXIT_DONE))


def check(
    recipe: RecipeArgument,
    profile: ProfileOption = None,
    num_processes: ProcessesOption = None,
    cpu: CpuOption = False,
    set_: SetOption = None,
    data: Annotated[
        bool, typer.Option("--data", help="Also prepare and check the rows. Loads a tokenizer and no model.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """Check recipe, profile and inputs; print the plan."""
    from ftcli.reports import check

    overrides = with_trust(set_, trust_remote_code)
    report = check.check(recipe, profile, num_processes=num_processes, cpu=cpu, overrides=overrides, data=data)
    lines = [] if as_json else report.lines(Style(unicode=Style.of(sys.stdout).unicode))
    print_text(json.dumps(report.as_dict(), indent=1) if as_json else "\n".join(lines))
    raise typer.Exit(report.exit_code)


def preview(
    recipe: RecipeArgument,
    set_: SetOption = None,
    split: Annotated[
        Literal["train", "eval"],
        typer.Option("--split", metavar="train|eval", help="Show training or evaluation rows."),
    ] = "train",
    rows: Annotated[
        int, typer.Option("--rows", metavar="N", min=0, help="Number of rows, in the order of training.")
    ] = 3,
    row: Annotated[
        int | None, typer.Option("--row", metavar="K", min=1, help="Show row K of the source instead, from 1.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Show long rows completely.")] = False,
    ids: Annotated[bool, typer.Option("--ids", help="Show token ids below each row.")] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", parser=given_path, metavar="FILE", help="Write an HTML page instead, and print its name."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show rows as the model reads them. Exit code 2 if the rows have an error, as with check --data."""
    from ftcli.reports import preview as module

    html = None if html is None else output_file(html, "--html", "rows.html")
    preview = module.preview_data(recipe, rows=rows, row=row, split=split, full=full, overrides=set_ or ())
    if html is not None:
        with writing(html, "--html"):
            html.write_text(preview.as_page(), encoding="utf-8")
    text = (
        json.dumps(preview.as_dict(), indent=1) if as_json else "\n".join(preview.lines(Style.of(sys.stdout), ids=ids))
    )
    print_text(html if html is not None else text)
    raise typer.Exit(preview.exit_code)


def parity(
    recipe: RecipeArgument,
    profiles: Annotated[
        str, typer.Option("--profiles", metavar="P,P,...", help="Names or files. The first is the reference.")
    ] = "single,ddp,fsdp,zero3",
    num_processes: Annotated[
        str | None,
        typer.Option(
            "--num-processes",
            metavar="N,N,...",
            help="Each distributed profile runs with each of these numbers. Default: all visible GPUs.",
        ),
    ] = None,
    micro_sizes: Annotated[
        str | None,
        typer.Option(
            "--micro-sizes",
            metavar="M,M,...",
            help="Numbers or auto. Each profile runs with each. Default: the recipe's, and a smaller one on the first.",
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="K", min=1, help="Length of each run. Default: the recipe's.")
    ] = None,
    cpu: CpuOption = False,
    set_: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", parser=given_path, metavar="DIR", help="New folder. Default: runs/<recipe's name>-parity."
        ),
    ] = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Compare the loss curves of profiles."""
    from ftcli.reports import parity as module

    report = module.compare_profiles(
        recipe,
        profiles.split(","),
        num_processes=_numbers(num_processes),
        micro_sizes=[one for word in (micro_sizes or "").split(",") if word for one in _sizes(word)],
        steps=steps,
        cpu=cpu,
        overrides=with_trust(set_, trust_remote_code),
        output=output,
    )
    print_text(json.dumps(report.as_dict(), indent=1) if as_json else "\n".join(report.lines()))
    raise typer.Exit(report.exit_code)


def init(
    task: Annotated[str, typer.Argument(metavar="TASK", help="Name in `ftcli show tasks`, or a file of your own.")],
    model: Annotated[str, typer.Option("--model", metavar="M", help="Name on the hub, or a local folder.")],
    data: Annotated[str, typer.Option("--data", metavar="D", help="File, image folder, or name on the hub.")],
    eval_: Annotated[
        str | None,
        typer.Option("--eval", metavar="E", help="Rows to evaluate on. Default: a few rows of the data."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", parser=given_path, metavar="FILE", help="New file. Default: <task>.yaml.")
    ] = None,
) -> None:
    """Write a commented recipe to start from."""
    from ftcli.cli import init

    print_text(init.write_recipe(task, model, data, eval_, output))


def fetch(recipe: RecipeArgument, set_: SetOption = None) -> None:
    """Download a recipe's model and data."""
    from ftcli.cli import prepare_data

    prepare_data.fetch(recipe, set_ or ())


def tokenize(recipe: RecipeArgument, set_: SetOption = None) -> None:
    """Prepare a recipe's rows ahead of a job."""
    from ftcli.cli import prepare_data

    print_text("\n".join(prepare_data.tokenize(recipe, set_ or ())))


def schema() -> None:
    """Print the JSON Schema of recipes, for an editor."""
    from ftcli.config import load

    print_text(json.dumps(load.recipe_schema(), indent=1))


def quickstart() -> None:
    """Train a small model; print answers before and after."""
    from ftcli.cli import quickstart as module

    folder = module.quickstart()
    raise typer.Exit(folder.status().get("exit_code", EXIT_DONE))


def _sizes(word: str) -> list[int | str]:
    """Return one micro size: auto, or a positive whole number."""
    return ["auto"] if word.strip() == "auto" else [*_numbers(word)]


def _numbers(text: str | None) -> list[int]:
    """Return the positive whole numbers in a list with commas."""
    words = [] if text is None else text.split(",")
    numbers = [whole_number(word) or 0 for word in words]
    if 0 in numbers:
        wrong = shortened(words[numbers.index(0)], 60)
        raise typer.BadParameter(f"'{wrong}' is not a whole number of 1 or more")
    return numbers
