"""Find, read, check and write recipe files. Every mistake of a recipe is reported at once.

Reads the document, applies overrides, checks it against the declarations of recipe.py and the task's `Options`, and
finds a hint for each unknown key. Never imports torch: a custom task is checked in a subprocess.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ftcli.config.aliases import alias_hint
from ftcli.config.ineffective_keys import ineffective_key_problems
from ftcli.config.overrides import apply_overrides, place_at_overrides
from ftcli.config.recipe import Recipe
from ftcli.config.reference import recipe_reference, recipe_schema
from ftcli.config.task_registry import find_task, is_custom_task, recipe_problems, task_class
from ftcli.config.trust import NO_CWD, check_stored
from ftcli.config.validation import branches, validate
from ftcli.config.yaml_document import Document, Keys, by_place, dump_document, read_document
from ftcli.runtime.checkpoint_names import step_of
from ftcli.runtime.errors import CLOSE, InputError, Problem, nearest
from ftcli.runtime.process import has_rank
from ftcli.runtime.reader_errors import missing_folder, user_path
from ftcli.runtime.resources import PACKAGE, find_file, shipped_files

__all__ = [
    "dump_recipe",
    "find_recipe",
    "key_paths",
    "list_recipes",
    "load_recipe",
    "load_run_recipe",
    "read_recipe",
    "recipe_reference",
    "recipe_schema",
    "run_output",
]

EXCLUSIVE_KEYS = {"train.max_steps": "train.epochs", "train.epochs": "train.max_steps"}


def load_recipe(path_or_name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe of a file, or of a shipped recipe, with `--set` overrides applied.

    Args:
        path_or_name: Path of a recipe file, or name of a shipped recipe such as `smoke/sft`.
        overrides: Texts of the form `key.path=value`, applied in order.

    Returns:
        The recipe. It is frozen.

    Raises:
        InputError: The recipe is invalid. The error holds every problem, each with `file:line` or its override.

    Example:
        >>> recipe = ftcli.load_recipe("recipe.yaml", ["optimizer.learning_rate=1e-4"])
        >>> run = ftcli.prepare(recipe)
    """
    file = _read(find_recipe(path_or_name))
    document = apply_overrides(file, overrides, EXCLUSIVE_KEYS)
    task_problems = _task_problems(document)

    def problems_with(others: list[str]) -> list[Problem]:
        other = apply_overrides(file, others, EXCLUSIVE_KEYS)
        own = task_problems if _needs_subprocess(other) else _task_problems(other)  # a subprocess takes seconds
        return _checked(other, own, is_stored=False)[1]

    recipe, problems = _checked(document, task_problems, is_stored=False)
    return _without_problems(recipe, place_at_overrides(problems, overrides, problems_with))


def read_recipe(recipe: str | Path | Recipe, overrides: Sequence[str]) -> Recipe:
    """Return the recipe of a file, or check a Recipe object.

    Args:
        recipe: A recipe file, the name of a shipped recipe, or an object.
        overrides: Texts of the form `key.path=value`, for files and names only.

    Raises:
        InputError: The recipe is invalid, has a key without effect, or is an object with overrides.
    """
    if isinstance(recipe, str | Path):
        return load_recipe(recipe, overrides)
    if overrides:
        raise InputError("overrides need a recipe file", hint="change the Recipe object, or pass its path")
    task = None if is_custom_task(recipe.task) else task_class(recipe.task)
    if problems := [*ineffective_key_problems(recipe, lambda keys: "", task)]:
        raise InputError(problems)
    return recipe


def load_run_recipe(folder: str | Path, *, trust_remote_code: bool = False) -> Recipe:
    """Return the recipe that a run folder stores, without running any code that it names.

    Keys without effect are accepted here, because an earlier version has trained with them.

    Args:
        folder: A run folder.
        trust_remote_code: Whether the user trusts the folder's custom task and its model's code (trust.py). The value
            that the folder stores is ignored.

    Returns:
        The recipe, with `model.trust_remote_code` as the argument says. `build_task` checks its task options.

    Raises:
        InputError: The folder has no run, its recipe is invalid, or it names code that the user does not trust.
    """
    path = Path(folder) / "recipe.yaml"
    if not path.parent.exists():
        raise missing_folder(path.parent)
    if not path.is_file():
        hint = "give the folder of a run, by default runs/<recipe>"
        if step_of(path.parent) >= 0:
            run = path.absolute().parents[2]
            hint = f"it is a checkpoint; export and generate take one, other commands its run {run}"
        raise InputError(f"{folder} has no run", hint=hint)
    recipe = _without_problems(*_checked(_read(path), [], is_stored=True))
    return check_stored(recipe, Path(folder), trusted=trust_remote_code)


def _read(path: Path) -> Document:
    """Return the document of a recipe file; raises `InputError` when it has no key of a recipe."""
    document = read_document(path)
    if document.values and not set(document.values) & set(Recipe.model_fields):
        is_profile = "distributed_type" in document.values or "compute_environment" in document.values
        hint = "it is a profile: --profile takes it" if is_profile else "`ftcli init` writes one to start from"
        raise InputError("this is not a recipe: it has no key of a recipe", where=document.name, hint=hint)
    _expand_sources(document.values)
    return document


def _checked(
    document: Document, task_problems: list[Problem], *, is_stored: bool
) -> tuple[Recipe | None, list[Problem]]:
    """Return (recipe of a document, every problem, including `task_problems`). The recipe is None if it is invalid."""
    recipe, problems = validate(Recipe, document.values, where=document.where, hint_for=unknown_key_hint)
    unread = {problem.where for problem in document.problems}
    problems = [*document.problems, *(item for item in problems if item.where not in unread), *task_problems]
    if recipe is not None and not is_stored:
        task = None if is_custom_task(recipe.task) else task_class(recipe.task)
        problems += ineffective_key_problems(recipe, document.where, task)
        problems += recipe_problems(recipe, task, document.where)
    return recipe, problems


def _without_problems(recipe: Recipe | None, problems: list[Problem]) -> Recipe:
    """Return a recipe; raise `InputError` if it has problems."""
    if recipe is None or problems:
        raise InputError(sorted(problems, key=by_place))
    return recipe


def find_recipe(path_or_name: str | Path) -> Path:
    """Return the file of a recipe.

    Args:
        path_or_name: A path, or the name of a shipped recipe such as `smoke/sft`.

    Raises:
        InputError: There is no such file and no such shipped recipe.
    """
    return find_file(path_or_name, "recipes", "recipe")


def list_recipes() -> dict[str, Path]:
    """Return name -> file of the recipes that come with ftcli."""
    return shipped_files("recipes")


def dump_recipe(recipe: Recipe) -> str:
    """Return a recipe as YAML with every key written out; `load_recipe` reads it back to an equal recipe."""
    return dump_document(recipe.model_dump(mode="json"))


def run_output(path_or_name: str | Path, recipe: Recipe, output: str | Path | None = None) -> Path:
    """Return the run folder: `output`, else the recipe's key `output`, else runs/<file name of the recipe>."""
    return user_path(output or recipe.output or Path("runs") / Path(path_or_name).stem, "output")


@cache
def key_paths() -> list[str]:
    """Return every key of a recipe as a dotted path, sections included, in the order of declaration."""
    schema = Recipe.model_json_schema()

    def below(node: dict[str, Any], prefix: str) -> Iterator[str]:
        for branch in branches(node, schema):
            for key, value in branch.get("properties", {}).items():
                yield prefix + key
                yield from below(value, f"{prefix}{key}.")

    return list(below(schema, ""))


def unknown_key_hint(keys: Keys, known: list[str]) -> str:
    """Return the hint for an unknown key: the name of another tool, a key of another section, or a misspelling.

    Args:
        keys: Path of the unknown key.
        known: Keys of its section.
    """
    name = str(keys[-1])
    paths = key_paths()
    leaves = {path.rpartition(".")[2]: path for path in paths}
    hint = alias_hint(name)
    if not hint and name in leaves:
        homes = [path for path in paths if path.rpartition(".")[2] == name]
        hint = f"it belongs elsewhere: {' or '.join(homes)}"
    hint = hint or nearest(name, known)  # not whole paths: those of one section are always similar
    if not hint and (close := re.search("'(.*)'", nearest(name, leaves, CLOSE))):
        hint = f"did you mean '{leaves[close[1]]}'?"
    return hint


def _expand_sources(values: dict[str, Any]) -> None:
    """Replace a bare path of data.train and data.eval by a section, so that an override can set its keys."""
    data = values.get("data")
    for key in ("train", "eval"):
        if isinstance(data, dict) and isinstance(data.get(key), str):
            data[key] = {"path": data[key]}


def _task_problems(document: Document) -> list[Problem]:
    """Return the problems of the task's name and of task_options, if their types are correct."""
    name, options = document.values.get("task"), document.values.get("task_options", {})
    if not isinstance(name, str) or not name or not isinstance(options, dict):
        return []  # the declarations of the recipe report wrong types
    evaluate = document.values.get("evaluate")
    generates = isinstance(evaluate, dict) and evaluate.get("generate") is not None
    if _needs_subprocess(document):
        return _check_in_subprocess(name, options, document, generates=generates)
    return check_options(name, options, document, generates=generates)


def check_options(name: str, options: dict[str, Any], document: Document, *, generates: bool = False) -> list[Problem]:
    """Return the problems of a task and its options. Imports the task.

    Args:
        name: Name of the task.
        options: The section task_options of the recipe.
        document: The recipe's document, for the places of the problems.
        generates: Whether the recipe has prompts to answer (evaluate.generate), which not every task can do.
    """
    try:
        module = find_task(name)
    except InputError as error:
        return [Problem(item.what, document.where(("task",)), item.hint) for item in error.problems]

    def hint(keys: Keys, known: list[str]) -> str:
        if not known:
            return f"task {name} takes no options"
        return nearest(str(keys[-1]), known) or f"task {name} takes {', '.join(known)}"

    problems = validate(module.Options, options, prefix=("task_options",), where=document.where, hint_for=hint)[1]
    if generates and not hasattr(module.Task, "encode_prompt"):
        message = f"evaluate.generate: task {name} does not generate text"
        problems.append(Problem(message, document.where(("evaluate", "generate")), "delete evaluate.generate"))
    return problems


def _needs_subprocess(document: Document) -> bool:
    """Return whether the task is a custom one that this process must not import, because the task may import torch."""
    name = document.values.get("task")
    return isinstance(name, str) and is_custom_task(name) and "torch" not in sys.modules and not has_rank()


def _check_in_subprocess(name: str, options: dict[str, Any], document: Document, *, generates: bool) -> list[Problem]:
    """Return `check_options` of a custom task, run in a subprocess because the task may import any library."""
    places = [[list(keys), place] for keys, place in document.places.items()]
    path = [str(PACKAGE.parent), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", NO_CWD + "from ftcli.config.load import _print_problems; _print_problems()"],
        input=json.dumps([name, options, document.name, places, generates]),
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
    )
    if done.returncode:
        message = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return [Problem(f"task '{name}' cannot be imported: {message}", document.where(("task",)))]
    return [Problem(*item) for item in json.loads(done.stdout.splitlines()[-1])]


def _print_problems() -> None:
    """Read a task and its options from stdin and print their problems; the program of `_check_in_subprocess`."""
    name, options, document_name, places, generates = json.loads(sys.stdin.read())
    document = Document(document_name, {}, {tuple(keys): place for keys, place in places})
    problems = check_options(name, options, document, generates=generates)
    print("\n" + json.dumps([[problem.what, problem.where, problem.hint] for problem in problems]))
