"""A first recipe for a task, a model and data: every section, its most used keys, and what each of them means.

The words are drawn from the declarations in recipe.py and from the task's own options; only the starting
values stand here. Light: never imports torch, and looks at neither the model nor the data.
"""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .documents import dump_document
from .errors import InputError
from .recipe import Recipe
from .recipe_docs import SCHEMA_FILE
from .rows import local_path
from .shipped import shipped_folder
from .tasks import find_task
from .validation import branches, validate, words

WIDTH = 100
HELD_OUT_ROWS = 20  # of data.train when there is no evaluation set; few, so that a first small file will do

# Where the tasks differ: whole models of classifiers are small enough to train, language models get an adapter.
_STARTS: dict[str, dict[str, dict[str, Any]]] = {
    "sft": {
        "adapter": {"type": "lora", "r": 16, "lora_alpha": 32, "target_modules": "all-linear"},
        "data": {"max_length": 1024},
        "batch": {"global_size": 16, "micro_size": 4},
        "train": {"epochs": 1},
        "optimizer": {"learning_rate": 2e-4},
        "schedule": {"name": "cosine", "warmup_steps": 0.05},
    },
    "pretrain": {
        "data": {"max_length": 1024},
        "batch": {"global_size": 32, "micro_size": 4},
        "train": {"epochs": 1},
        "optimizer": {"learning_rate": 2e-5},
        "schedule": {"name": "cosine", "warmup_steps": 0.05},
    },
    "text_classification": {"data": {"max_length": 256}, "optimizer": {"learning_rate": 5e-5}},
    "image_classification": {"model": {"batch_norm": "frozen"}, "optimizer": {"learning_rate": 2e-4}},
}


def write_recipe(
    task: str,
    model: str,
    data: str,
    eval: str | None = None,
    output: str | Path | None = None,
) -> Path:
    """Write a commented recipe that trains as it stands, and return its file (default: <task>.yaml, here).

    `data` and `eval` are sources of rows as `data.train` and `data.eval` take them. Raises `InputError` for an
    unknown task, an empty name, or a file that is there already.
    """
    module = find_task(task)
    own = Path(task).stem if "/" in task or task.endswith(".py") else task.rpartition(".")[2]
    path = Path(f"{own}.yaml" if output is None else output)
    options = module.Options.model_json_schema()
    values = _starting_values(task, model, data, eval)
    values["task_options"] = {
        key: node.get("default")
        for key, node in options.get("properties", {}).items()
        if "default" in node or key in options.get("required", [])
    }
    if problems := validate(Recipe, values)[1]:
        raise InputError(problems)
    told = (module.__doc__ or "").strip().split("\n")[0]
    schema = Recipe.model_json_schema()
    schema["properties"]["task_options"] |= options  # a section like the others, declared by the task
    schema["$defs"] |= options.get("$defs", {})
    text = "\n".join([*_head(path, told), *_lines(values, schema, schema)]) + "\n"
    if not path.parent.is_dir():
        raise InputError(f"no folder {path.parent} to write {path.name} into")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise InputError(f"{path} is there already", hint="name another file with --output") from None
    return path


def _starting_values(task: str, model: str, data: str, eval: str | None) -> dict[str, Any]:
    """Return the recipe's values in the order they are written, what the task asks for put in."""
    held_out = {"eval_rows": HELD_OUT_ROWS} if eval is None else {"eval": _source(eval, "test")}
    values: dict[str, Any] = {
        "task": task,
        "seed": 0,
        "precision": "fp32",
        "model": {"name": model, "dropout": 0, "gradient_checkpointing": False},
        "adapter": {"type": "none"},
        "data": {"train": _source(data, "train"), **held_out, "columns": {}},
        "batch": {"global_size": 32, "micro_size": 16},
        "train": {"epochs": 3},
        "optimizer": {"learning_rate": 5e-5, "weight_decay": 0.01, "max_grad_norm": 1.0},
        "schedule": {"name": "linear", "warmup_steps": 0.1},
        "evaluate": {"every_steps": 100, "at_start": True},
        "checkpoint": {"every_steps": 100, "keep": 2},
        "faults": {"non_finite": "stop"},
        "log": {"every_steps": 1, "trackers": []},
    }
    for section, changes in _STARTS.get(task, {}).items():
        values[section] |= changes
    return values


def _source(path: str, split: str) -> dict[str, str]:
    """Return a section for rows; a name on the hub is written with its split, which files do not have."""
    on_hub = path != "" and not path.startswith("asset:") and local_path(path) is None
    return {"path": path, "split": split} if on_hub else {"path": path}


def _head(path: Path, told: str) -> list[str]:
    file = shlex.quote(str(path))
    return [
        f"# yaml-language-server: $schema={shipped_folder('recipes') / SCHEMA_FILE}",
        f"# {told}",
        "#",
        f"#     ftcli check {file}                    is everything there, and what will it do?",
        f"#     ftcli train {file}                    in one process",
        f"#     ftcli train {file} --profile ddp      the same curve on every GPU; `ftcli show profiles`",
        "#",
        "# These are the keys used most; `ftcli schema` prints all of them.",
        "",
    ]


def _lines(values: dict[str, Any], section: dict[str, Any], schema: dict[str, Any], indent: str = "") -> Iterator[str]:
    """Yield the lines of a section: above each key what it means and which words it may be."""
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
            yield f"{indent}{key}: {_written(value)}"


def _meaning(node: dict[str, Any], inner: dict[str, Any], schema: dict[str, Any]) -> str:
    """Return the description of a key, or of the section it holds, and its choices when it has any."""
    must = words(node, schema)
    choices = f" {must[0].upper()}{must[1:]}." if "one of " in must else ""
    return str(node.get("description") or inner.get("description", "")) + choices


def _written(value: Any) -> str:
    """Return a value as YAML on one line."""
    if isinstance(value, str):
        text = dump_document({"_": value}).removeprefix("_: ").rstrip("\n")
        if "\n" not in text:  # long text would be folded over lines
            return text
    return json.dumps(value, ensure_ascii=False)
