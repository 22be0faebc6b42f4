"""Write a first recipe for a task, a model and data, with every section, the most used keys and their meanings.

The comments come from the declarations in recipe.py and from the task's options. The values are those below, changed by
the task's `starting_recipe`. The model is not read, and of the data only the number of rows, so that a step fits into a
small file, and their size, to propose packing. Light: never imports torch.
"""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ftcli.config.recipe import Recipe
from ftcli.config.recipe_data import Data, Source
from ftcli.config.reference import SCHEMA_FILE
from ftcli.config.task_registry import find_task
from ftcli.config.validation import branches, describe_value, validate
from ftcli.config.yaml_document import dump_document
from ftcli.data.assets.catalogue import PREFIX, find_asset
from ftcli.data.paths import FORMATS, local_path
from ftcli.data.row_counts import count_rows
from ftcli.data.text_files import parse_rows
from ftcli.models.estimates.pass_budget import SHORT_ROW
from ftcli.runtime.errors import InputError
from ftcli.runtime.reader_errors import output_file, writing
from ftcli.runtime.resources import shipped_folder
from ftcli.tasks.protocol import properties_of

WIDTH = 100
LINE_FILES = (".jsonl", ".txt", ".csv", ".tsv")  # one row on a line, more or less
READ_BYTES = 2**20  # of the data, to see how long rows are
BYTES_PER_TOKEN = 4  # of English text; other scripts have fewer
EVALUATION_ROWS = 20  # of data.train, if there is no evaluation set
EVALUATION_SHARE = 5  # of fewer rows than a step and an evaluation need, one in so many is for the evaluation


def write_recipe(
    task: str,
    model: str,
    data: str,
    eval: str | None = None,
    output: str | Path | None = None,
) -> Path:
    """Write a commented recipe that can be trained without changes.

    Args:
        task: Name of the task, or file of your own task.
        model: Name on the hub, or a local folder.
        data: Source of training rows, as in `data.train`.
        eval: Source of evaluation rows, as in `data.eval`. None: a few rows of the training data.
        output: The new file. None: <task>.yaml in the current folder.

    Returns:
        The file.

    Raises:
        InputError: The task or an asset is unknown, a name is empty, or the file exists.
    """
    module = find_task(task)
    for reference in filter(None, (model, data, eval)):
        if reference.startswith(PREFIX):
            find_asset(reference)
    own = Path(task).stem if "/" in task or task.endswith(".py") else task.rpartition(".")[2]
    path = output_file(f"{own}.yaml" if output is None else output, "--output", f"{own}.yaml")
    options, properties = module.Options.model_json_schema(), properties_of(module.Task)
    values = _starting_values(task, properties.starting_recipe, model, data, eval)
    values["task_options"] = {
        key: node.get("default")
        for key, node in options.get("properties", {}).items()
        if "default" in node or key in options.get("required", [])
    }
    if problems := validate(Recipe, values)[1]:
        raise InputError(problems)
    summary = (module.__doc__ or "").strip().split("\n")[0]
    schema = Recipe.model_json_schema()
    schema["properties"]["task_options"] |= options  # the task declares this section
    schema["$defs"] |= options.get("$defs", {})
    packs = getattr(module.Task, "packs", False)
    notes = fit_few_rows(values, splits=properties.default_truncation == "split") + (
        propose_packing(values, data) if packs else []
    )
    values["data"] |= {"packing": False} if packs else {}
    text = "\n".join([*_head(path, summary, notes), *_lines(values, schema, schema)]) + "\n"
    try:
        with writing(path, "--output"), path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise InputError(f"{path} exists already", hint="name another file with --output") from None
    return path


def _starting_values(
    task: str, changes: Mapping[str, Mapping[str, Any]], model: str, data: str, eval: str | None
) -> dict[str, Any]:
    """Return the recipe's values in the order of the file, changed by the task's starting recipe."""
    evaluation = {"eval_rows": EVALUATION_ROWS} if eval is None else {"eval": _source(eval, "test")}
    values: dict[str, Any] = {
        "task": task,
        "seed": 0,
        "precision": "fp32",
        "model": {"name": model, "dropout": 0, "gradient_checkpointing": "auto"},
        "adapter": {"type": "none"},
        "data": {"train": _source(data, "train"), **evaluation, "columns": {}},
        "batch": {"global_size": 32, "micro_size": "auto"},
        "train": {"epochs": 3},
        "optimizer": {"learning_rate": 5e-5, "weight_decay": 0.01, "max_grad_norm": 1.0},
        "schedule": {"name": "linear", "warmup_steps": 0.1},
        "evaluate": {"every_steps": 100, "at_start": True},
        "checkpoint": {"every_steps": 100, "keep": 2},
        "faults": {"non_finite": "stop"},
        "log": {"every_steps": 1, "trackers": []},
        "hub": {"push": None},
    }
    for section, keys in changes.items():
        values[section] |= keys
    return values


def _source(path: str, split: str) -> dict[str, str]:
    """Return a section for rows. A name on the hub has a split, a file has none."""
    on_hub = path != "" and not path.startswith(PREFIX) and local_path(path) is None
    return {"path": path, "split": split} if on_hub else {"path": path}


def fit_few_rows(values: dict[str, Any], *, splits: bool) -> list[str]:
    """Change the evaluation rows and the rows of a step, if a local file has too few for the usual numbers.

    Args:
        values: The values of the recipe.
        splits: Whether the task makes several rows of one that is too long. Few long rows are then enough for a step.

    Returns:
        A comment with the number of rows; empty if nothing is changed.
    """
    data, batch = values["data"], values["batch"]
    train, held_out, usual = Source(**data["train"]), data.get("eval_rows", 0), batch["global_size"]
    path = local_path(train.path)
    if path is None or not (path.is_dir() or (path.is_file() and path.suffix in FORMATS)):
        return []
    try:
        count = count_rows(train, held_out + usual)
    except (InputError, OSError):  # `ftcli check` reports it
        return []
    if count is None or not 1 < count < held_out + usual:  # `ftcli check` reports a file with one row
        return []
    changed = []
    if (fewer := max(1, count // EVALUATION_SHARE)) < held_out:
        data["eval_rows"] = fewer
        changed.append("data.eval_rows")
    left = count - data.get("eval_rows", 0)
    if splits:
        left = _least_rows(_row_bytes(path, count), left, Data.model_validate(data).max_length)
    if left < usual:
        batch["global_size"] = 1 << left.bit_length() - 1  # a power of two, which many numbers of processes divide
        changed.append("batch.global_size")
    text = (
        f"{_shown(path)} has only {count} rows, so this recipe has smaller values than usual: {' and '.join(changed)}."
    )
    return [*textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# "), "#"] if changed else []


def _least_rows(sizes: list[int], left: int, max_length: int) -> int:
    """Return how many rows there are at least after splitting, if the longest ones are held out for the evaluation.

    Args:
        sizes: Bytes of each row.
        left: Number of rows that are not held out.
        max_length: Tokens at which a row is split. The rest of a row, which may be short, is not counted.
    """
    return sum(max(1, size // BYTES_PER_TOKEN // max_length) for size in sorted(sizes)[:left])


def _row_bytes(path: Path, count: int) -> list[int]:
    """Return the bytes of the longest text of each row; of a file that only a library reads, their mean.

    Args:
        path: A file whose rows can be counted.
        count: Their number.
    """
    if path.suffix not in LINE_FILES:
        return [(path.stat().st_size if path.is_file() else 0) // count] * count
    with path.open("rb") as file:
        rows = [row for row in parse_rows(file, path.suffix) if isinstance(row, dict)]
    return [max((len(text.encode()) for text in row.values() if isinstance(text, str)), default=0) for row in rows]


def propose_packing(values: Mapping[str, Any], data: str) -> list[str]:
    """Return a comment that proposes packing, if the rows of a local file are short beside `data.max_length`.

    Args:
        values: The values of the recipe.
        data: Source of training rows.
    """
    length, path = values["data"].get("max_length", 0), local_path(data)
    if path is None or not path.is_file() or path.suffix not in LINE_FILES or not length:
        return []
    with path.open("rb") as file:
        lines = [len(line) for line in file.readlines(READ_BYTES)]
    tokens = sum(lines) / BYTES_PER_TOKEN / max(len(lines), 1)
    if not lines or tokens > SHORT_ROW * length:
        return []
    several, rows = length / max(tokens, 1), values["batch"]["global_size"]
    text = (
        f"Rows of {_shown(path)} are short: about {tokens:.0f} tokens, {100 * tokens / length:.0f} % of max_length. On "
        f"a GPU `packing: true` trains several times as many tokens per second. A row is then about {several:.0f} rows "
        f"of the file, which do not see each other, and global_size counts these: {max(1, round(rows / several))} "
        f"instead of {rows} keeps the batch, and learning rate and steps with it. `ftcli check` says it from the real "
        "lengths, once `ftcli tokenize` has prepared the rows."
    )
    return textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ") + ["#"]


def _shown(path: Path) -> str:
    """Return the name of a file for a comment, which must not contain the end of a line."""
    return "".join(letter if letter.isprintable() else "?" for letter in path.name)


def _head(path: Path, summary: str, notes: list[str]) -> list[str]:
    """Return the comment at the start of the file."""
    file = shlex.quote(str(path))
    return [
        f"# yaml-language-server: $schema={shipped_folder('recipes') / SCHEMA_FILE}",
        f"# {summary}",
        "#",
        f"#     ftcli check {file}                    checks inputs and prints the plan",
        f"#     ftcli train {file}                    trains in one process",
        f"#     ftcli train {file} --profile ddp      trains on all GPUs; see `ftcli show profiles`",
        "#",
        *notes,
        "# These are the most used keys. `ftcli schema` prints all of them.",
        "",
    ]


def _lines(values: dict[str, Any], section: dict[str, Any], schema: dict[str, Any], indent: str = "") -> Iterator[str]:
    """Yield the lines of a section, with the meaning and the choices of each key above it."""
    for key, value in values.items():
        node = section["properties"][key]
        inner = next((branch for branch in branches(node, schema) if branch.get("properties")), None)
        if indent == "" and isinstance(value, dict):
            yield ""
        yield from textwrap.wrap(
            _meaning(node, inner or {}, schema), WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "
        )
        if inner is not None and isinstance(value, dict):
            yield f"{indent}{key}:"
            yield from _lines(value, inner, schema, f"{indent}  ")
        else:
            yield f"{indent}{key}: {_format_value(value)}"


def _meaning(node: dict[str, Any], inner: dict[str, Any], schema: dict[str, Any]) -> str:
    """Return the description of a key or section, and its choices if it has any."""
    must = describe_value(node, schema)
    choices = f" {must[0].upper()}{must[1:]}." if "one of " in must else ""
    return str(node.get("description") or inner.get("description", "")) + choices


def _format_value(value: Any) -> str:
    """Return a value as YAML on one line."""
    if isinstance(value, str):
        text = dump_document({"_": value}).removeprefix("_: ").rstrip("\n")
        if "\n" not in text:  # long text is folded and would need several lines
            return text
    return json.dumps(value, ensure_ascii=False)
