"""The command line: parses, calls the function of the same name, prints. No logic, and no heavy import.

Data goes to stdout, everything else to stderr. Exit codes are made in __main__.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .errors import EXIT_DONE

app = typer.Typer(
    name="ftcli",
    help="Fine-tune a model: a recipe says what is trained, a profile says on which hardware.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="Recipe file, or the name of a shipped one.")]
ProfileOption = Annotated[
    str | None,
    typer.Option("--profile", metavar="NAME|PATH", help="Accelerate config: single, ddp, fsdp, zero3, or a file."),
]
ProcessesOption = Annotated[
    int | None,
    typer.Option("--num-processes", metavar="N", help="Processes over all machines. Default: all visible GPUs."),
]
CpuOption = Annotated[bool, typer.Option("--cpu", help="Use the CPU, whatever GPUs there are; rehearses any profile.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one key of the recipe, as optimizer.learning_rate=1e-4."),
]
AccelerateArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="ACCELERATE_ARGUMENT", help="After --: passed on to `accelerate launch`."),
]

Split = Literal["train", "eval"]
TextModelArgument = Annotated[
    str, typer.Argument(metavar="RUN|CHECKPOINT|MODEL", help="Run, checkpoint or model folder, or hub name.")
]
SystemOption = Annotated[
    str | None, typer.Option("--system", metavar="TEXT", help="A system turn before each conversation.")
]
MaxNewTokensOption = Annotated[
    int, typer.Option("--max-new-tokens", metavar="N", min=1, help="Longest answer, in tokens.")
]
TemperatureOption = Annotated[
    float, typer.Option("--temperature", metavar="T", min=0, help="0: the likeliest token; above: drawn.")
]
TopPOption = Annotated[
    float, typer.Option("--top-p", metavar="P", min=0, max=1, help="Draw from this share of the probability.")
]
TemplateOption = Annotated[
    list[str] | None,
    typer.Option(
        "--chat-template-kwargs",
        metavar="K=V",
        help="Variable of the chat template, as enable_thinking=false. Default: those of a run's recipe.",
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", metavar="S", min=0, help="Seeds what is drawn.")]

TRAIN_CODES = (
    "SIGINT, SIGTERM and SIGUSR1 end the run after the current step with a checkpoint, a second one at once. "
    "Exit codes: 0 done; 2 the input is wrong; 75 stopped by a signal or train.max_minutes, --resume auto goes on; "
    "128 + signal: ended at once; 1 anything else."
)


@app.command(epilog=TRAIN_CODES)
def train(
    recipe: RecipeArgument,
    accelerate_arguments: AccelerateArguments = None,
    profile: ProfileOption = None,
    num_processes: ProcessesOption = None,
    num_machines: Annotated[int, typer.Option("--num-machines", metavar="M", help="Machines that take part.")] = 1,
    machine_rank: Annotated[
        int, typer.Option("--machine-rank", metavar="R", help="Which machine this is, from 0.")
    ] = 0,
    main_process_ip: Annotated[
        str | None, typer.Option("--main-process-ip", metavar="A", help="Address of machine 0.")
    ] = None,
    main_process_port: Annotated[
        int | None, typer.Option("--main-process-port", metavar="P", help="Free port on machine 0.")
    ] = None,
    cpu: CpuOption = False,
    set_: SetOption = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="DIR", help="Run folder. Default: runs/<recipe's name>."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Two steps, one evaluation, one save: does all of it work?")
    ] = False,
    resume: Annotated[
        str,
        typer.Option(
            "--resume", metavar="auto|never|DIR", help="Go on: from the run folder's newest checkpoint, or DIR."
        ),
    ] = "never",
    resume_anyway: Annotated[
        bool, typer.Option("--resume-anyway", help="Resume with a recipe that gives another curve.")
    ] = False,
    record_start: Annotated[bool, typer.Option("--record-start", hidden=True, help="For `ftcli parity`.")] = False,
) -> None:
    """Train a recipe; with a profile, on several processes."""
    from . import launcher

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
        launch_arguments=_for_accelerate(accelerate_arguments),
    )
    if not launcher.is_launched():
        print(folder.path)
        # A run that was stopped is not done: 75. Without a shared disk, status.json is on the first machine only.
        raise typer.Exit(folder.status().get("exit_code", EXIT_DONE))


@app.command()
def check(
    recipe: RecipeArgument,
    profile: ProfileOption = None,
    num_processes: ProcessesOption = None,
    cpu: CpuOption = False,
    set_: SetOption = None,
    data: Annotated[
        bool, typer.Option("--data", help="Prepare the rows and check them too; loads a tokenizer, no model.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Validate recipe and profile, print the plan."""
    from . import planning

    report = planning.check(recipe, profile, num_processes=num_processes, cpu=cpu, overrides=set_ or (), data=data)
    print(json.dumps(report.as_dict(), indent=1) if as_json else "\n".join(report.lines()))
    raise typer.Exit(report.exit_code)


@app.command()
def preview(
    recipe: RecipeArgument,
    set_: SetOption = None,
    split: Annotated[
        Split, typer.Option("--split", metavar="train|eval", help="Show training or evaluation rows.")
    ] = "train",
    rows: Annotated[int, typer.Option("--rows", metavar="N", min=0, help="Rows to show, the first that are read.")] = 3,
    row: Annotated[
        int | None, typer.Option("--row", metavar="K", min=1, help="Show row K of the source instead, from 1.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Show long rows whole.")] = False,
    ids: Annotated[bool, typer.Option("--ids", help="Show token ids below each row.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page instead, and print its name.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show rows as the model reads them."""
    from . import preview as module
    from .terminal import Style

    found = module.preview_data(recipe, rows=rows, row=row, split=split, full=full, overrides=set_ or ())
    if html is not None:
        html.write_text(found.as_page(), encoding="utf-8")
    shown = json.dumps(found.as_dict(), indent=1) if as_json else "\n".join(found.lines(Style.of(sys.stdout), ids=ids))
    print(html if html is not None else shown)


@app.command()
def parity(
    recipe: RecipeArgument,
    profiles: Annotated[
        str, typer.Option("--profiles", metavar="P,P,...", help="Names or files; the first is the reference.")
    ] = "single,ddp,fsdp,zero3",
    num_processes: Annotated[
        str | None,
        typer.Option(
            "--num-processes",
            metavar="N,N,...",
            help="Processes of every profile that is distributed; each with all of them. Default: all visible GPUs.",
        ),
    ] = None,
    micro_sizes: Annotated[
        str | None,
        typer.Option(
            "--micro-sizes",
            metavar="M,M,...",
            help="Each with every profile. Default: the recipe's, and a smaller one on the first profile.",
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="K", min=1, help="Length of each run. Default: the recipe's.")
    ] = None,
    cpu: CpuOption = False,
    set_: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="DIR", help="New folder. Default: runs/<recipe's name>-parity.")
    ] = None,
) -> None:
    """Show that profiles give the same curve."""
    from . import parity as module

    report = module.compare_profiles(
        recipe,
        profiles.split(","),
        num_processes=_numbers(num_processes),
        micro_sizes=_numbers(micro_sizes),
        steps=steps,
        cpu=cpu,
        overrides=set_ or (),
        output=output,
    )
    print(json.dumps(report.as_dict(), indent=1) if as_json else "\n".join(report.lines()))
    raise typer.Exit(report.exit_code)


@app.command()
def init(
    task: Annotated[str, typer.Argument(metavar="TASK", help="Task, as `ftcli show tasks` names it, or a file.")],
    model: Annotated[str, typer.Option("--model", metavar="M", help="Name on the hub, or a local folder.")],
    data: Annotated[str, typer.Option("--data", metavar="D", help="File, image folder, or name on the hub.")],
    eval_: Annotated[
        str | None,
        typer.Option("--eval", metavar="E", help="Rows to evaluate on. Default: a few rows of the data."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="New file. Default: <task>.yaml.")
    ] = None,
) -> None:
    """Write a commented recipe to start from."""
    from . import new_recipe

    print(new_recipe.write_recipe(task, model, data, eval_, output))


@app.command()
def fetch(recipe: RecipeArgument, set_: SetOption = None) -> None:
    """Bring a recipe's model and data onto this machine."""
    from . import fetching

    fetching.fetch(recipe, set_ or ())


@app.command()
def tokenize(recipe: RecipeArgument, set_: SetOption = None) -> None:
    """Prepare a recipe's rows ahead of a job."""
    from . import tokenizing

    print("\n".join(tokenizing.tokenize(recipe, set_ or ())))


@app.command()
def evaluate(
    target: Annotated[str, typer.Argument(metavar="RUN", help="Run folder.")],
    accelerate_arguments: AccelerateArguments = None,
    profile: ProfileOption = None,
    num_processes: ProcessesOption = None,
    cpu: CpuOption = False,
) -> None:
    """Measure a run's weights on its evaluation rows."""
    from . import launcher

    metrics = launcher.evaluate_target(
        target,
        profile,
        num_processes=num_processes,
        cpu=cpu,
        launch_arguments=_for_accelerate(accelerate_arguments),
    )
    if not launcher.is_launched():
        print(json.dumps(metrics, indent=1))


@app.command()
def export(
    source: Annotated[Path, typer.Argument(metavar="RUN|CHECKPOINT", help="Run folder, or one of its checkpoints.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="New folder for the weights.")],
    merge: Annotated[bool, typer.Option("--merge", help="Merge a LoRA adapter into its base model.")] = False,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="D", help="float32, bfloat16 or float16. Default: as trained."),
    ] = None,
    shard_size: Annotated[str, typer.Option("--shard-size", metavar="SIZE", help="Most of one file.")] = "5GB",
) -> None:
    """Write trained weights for transformers, checked."""
    from . import exports

    print(exports.export(source, directory, merge=merge, dtype=dtype, shard_size=shard_size))


@app.command()
def generate(
    target: TextModelArgument,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", metavar="TEXT", help="May be given several times.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", metavar="FILE", help="More prompts: .txt, one a line, or .jsonl with messages."),
    ] = None,
    system: SystemOption = None,
    max_new_tokens: MaxNewTokensOption = 128,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    chat_template_kwargs: TemplateOption = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", metavar="N", min=1, help="Prompts that are answered at a time.")
    ] = 8,
    cpu: CpuOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line for each prompt.")] = False,
) -> None:
    """Answer prompts with a run's weights or any model."""
    from . import generation, terminal
    from .template_variables import parse_variables

    asked: dict[str, Any] = {
        "file": file,
        "system": system,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "batch_size": batch_size,
        "cpu": cpu,
        "chat_template_kwargs": parse_variables(chat_template_kwargs or ()),
    }
    if as_json:
        for row in generation.generate_rows(target, prompt or (), **asked):
            print(json.dumps(row, ensure_ascii=False), flush=True)
    elif sys.stdout.isatty() and len(prompt or ()) == 1 and file is None:
        generation.generate(target, prompt or (), stream=sys.stdout, **asked)
    else:
        for number, row in enumerate(generation.generate_rows(target, prompt or (), **asked)):
            print(("\n" if number else "") + terminal.said(row["answer"], sys.stdout), flush=True)


@app.command()
def chat(
    target: TextModelArgument,
    system: SystemOption = None,
    max_new_tokens: MaxNewTokensOption = 512,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    chat_template_kwargs: TemplateOption = None,
    cpu: CpuOption = False,
) -> None:
    """Talk with a run's model, or any, in the terminal."""
    from . import conversation
    from .template_variables import parse_variables

    conversation.converse(
        target,
        system=system,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        cpu=cpu,
        chat_template_kwargs=parse_variables(chat_template_kwargs or ()),
    )


@app.command()
def show(
    what: Annotated[str, typer.Argument(metavar="recipes|profiles|tasks|RUN|CHECKPOINT", help="A list, or a folder.")],
) -> None:
    """List what there is; describe a run or checkpoint."""
    from . import listing

    print("\n".join(listing.lines_about(what)))


@app.command()
def schema() -> None:
    """Print the JSON Schema of recipes, for an editor."""
    from . import recipe_file

    print(json.dumps(recipe_file.recipe_schema(), indent=1))


@app.command()
def quickstart() -> None:
    """Train a small real model, show before and after."""
    from . import quickstart as module

    folder = module.quickstart()
    raise typer.Exit(folder.status().get("exit_code", EXIT_DONE))


@app.command()
def version() -> None:
    """Print versions, for a report of a problem."""
    from . import listing

    print("\n".join(listing.versions()))


def _for_accelerate(arguments: list[str] | None) -> list[str]:
    """Return what stood after `--`; a stray word before it must not reach accelerate."""
    if arguments and not arguments[0].startswith("-"):
        raise typer.BadParameter(f"unexpected argument '{arguments[0]}'; those for accelerate start with a dash")
    return arguments or []


def _numbers(text: str | None) -> list[int]:
    """Return the whole numbers of a list with commas; none of nothing."""
    words = [] if text is None else text.split(",")
    if wrong := [word for word in words if not word.strip().isdigit() or int(word) < 1]:
        raise typer.BadParameter(f"'{wrong[0]}' is not a whole number of 1 or more")
    return [int(word) for word in words]


def _print_result(result: Any) -> None:
    if result is not None:
        print(result, file=sys.stdout)
