"""Check for consent to run Python code that a folder names: a custom task, the model's code, an attention kernel.

A run, a checkpoint or a model folder may come from another person. A consent that such a folder stores is ignored. Only
`--trust-remote-code` of the command that opens the folder counts. A recipe that the user names on the command line is
trusted and not checked here. Light: never imports torch.
"""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ftcli.config.recipe import Recipe
from ftcli.config.task_registry import is_custom_task
from ftcli.runtime.errors import InputError, Problem
from ftcli.runtime.redaction import redact

FLAG = "--trust-remote-code"
CONFIGS = ("config.json", "adapter_config.json", "base_config/config.json")  # the last one: adapter_folder.py
# Keys of config.json that name a kernel. transformers stores every key as an attribute, also its internal ones.
FORMS = ("{}_implementation", "_{}_implementation", "_{}_implementation_internal")
KERNEL_KEYS = tuple(form.format(part) for part in ("attn", "experts") for form in FORMS)
REFUSAL = "trust_remote_code=True"  # in the message of transformers when it refuses to run a model's code
# First line of a program for `python -c`, whose import path begins with the current folder.
NO_CWD = "import sys\nsys.path[:] = [entry for entry in sys.path if entry]\n"


def check_stored(recipe: Recipe, where: Path, *, trusted: bool) -> Recipe:
    """Return the recipe of a run or checkpoint with the caller's consent in place of the stored one.

    Args:
        recipe: What the folder stores. Its `model.trust_remote_code` is ignored.
        where: The folder, for the message.
        trusted: Whether the user gave `--trust-remote-code` to this command.

    Returns:
        The recipe with `model.trust_remote_code` set to `trusted`.

    Raises:
        InputError: If the recipe names code and `trusted` is false: a task that ftcli does not ship, or an attention
            kernel that is downloaded.
    """
    problems = []
    if is_custom_task(recipe.task):
        message = f"{where} names the task {recipe.task}, which is Python code that ftcli would run"
        file = _file_of(recipe.task)
        hint = f"read {file} first; if you trust it, add {FLAG}"
        problems.append(Problem(message, hint=hint))
    if is_kernel(recipe.model.attn_implementation):
        message = f"{where} names the attention kernel {recipe.model.attn_implementation}, which is downloaded code"
        problems.append(Problem(message, hint=f"if you trust its authors, add {FLAG}"))
    if problems and not trusted:
        raise InputError(problems)
    return with_consent(recipe, trusted=trusted)


def with_consent(recipe: Recipe, *, trusted: bool) -> Recipe:
    """Return a recipe whose `model.trust_remote_code` is `trusted`."""
    if recipe.model.trust_remote_code == trusted:
        return recipe
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"trust_remote_code": trusted})})


def stored_form(recipe: Recipe) -> Recipe:
    """Return the form of a recipe for run folders and checkpoints: without the user's consent and without credentials.

    Recipes that differ only in consent and credentials have equal stored forms. A run can therefore resume after a
    signed address was renewed.
    """
    recipe = with_consent(recipe, trusted=False)
    values = recipe.model_dump(mode="json")
    return recipe if redact(values) == values else Recipe.model_validate(redact(values))


def check_configs(folder: Path, *, trusted: bool) -> None:
    """Refuse a local model folder that names a kernel to download, or weights outside of the folder.

    transformers asks for consent to run a model's own code (`auto_map`), but not for these kernels.

    Args:
        folder: A local folder of a model or an adapter.
        trusted: Whether the user consented to its code.

    Raises:
        InputError: If there is such a kernel and `trusted` is false, or if a shard lies elsewhere.
    """
    _check_shards(folder)
    for path in (folder / name for name in CONFIGS):
        if trusted or not path.is_file():
            continue
        try:
            config = json.loads(path.read_bytes())
        except ValueError:  # loading the model reports it
            continue
        if names := list(_kernels(config)):
            raise InputError(
                f"{path} names the kernel {names[0]}, which is downloaded code", hint=f"if you trust it, add {FLAG}"
            )


def _check_shards(folder: Path) -> None:
    """Refuse an index of weights that names a file outside of its folder."""
    for path in sorted(folder.glob("*.index.json")):
        try:
            index = json.loads(path.read_bytes())
        except ValueError:  # loading the model reports it
            continue
        shards = index.get("weight_map") if isinstance(index, dict) else None
        names = shards.values() if isinstance(shards, dict) else ()
        for name in names:
            if isinstance(name, str) and (Path(name).is_absolute() or ".." in Path(name).parts):
                raise InputError(f"{path} names {name}, which lies outside of the folder", hint="do not use this model")


def is_kernel(name: str | None) -> bool:
    """Return whether the name of an attention implementation is that of a repository of kernels."""
    return name is not None and re.search(r"[^\s/]/[^\s/]", name) is not None


@contextmanager
def code_refused(name: str) -> Iterator[None]:
    """Convert refusals of a model's code and of pickled objects into an `InputError` with a hint.

    transformers refuses code without consent, and PyTorch refuses weight files that hold more than tensors.

    Args:
        name: The model, for the message.

    Raises:
        InputError: The block raised such a refusal.
    """
    try:
        yield
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{name} has a weights file that holds pickled objects besides tensors; these are never loaded",
            hint="get its weights as safetensors; such a file may be an attack",
        ) from error
    except ValueError as error:
        if REFUSAL not in str(error):
            raise
        raise consent_needed(name) from error


def consent_needed(name: str) -> InputError:
    """Return the error for a model with Python code that the user has not consented to run."""
    return InputError(
        f"{name} comes with Python code of its own, which loading it would run",
        hint=f"read its .py files first; if you trust them, add {FLAG} (or model.trust_remote_code in your recipe)",
    )


def check_links(folder: Path) -> None:
    """Refuse links that lead out of a folder. A copy of the folder would contain other files of this machine.

    Args:
        folder: A folder that is to be copied. The folder itself may be a link.

    Raises:
        InputError: A link leads out of the folder. The message names the first one.
    """
    target = folder.resolve()
    for parent, folders, files in os.walk(folder):
        for name in sorted([*folders, *files]):
            path = Path(parent) / name
            if path.is_symlink() and target not in path.resolve().parents:
                raise InputError(
                    f"{path} is a link to {path.resolve()}, outside of the folder",
                    hint="remove the link, or put the file itself there",
                )


def _kernels(value: object) -> list[str]:
    """Return the names of kernel repositories in a configuration and its nested sections."""
    if isinstance(value, list):
        return [name for item in value for name in _kernels(item)]
    if not isinstance(value, dict):
        return []
    names = []
    for key, item in value.items():
        texts = [item] if isinstance(item, str) else list(item.values()) if isinstance(item, dict) else []
        if key in KERNEL_KEYS:
            names += [text for text in texts if isinstance(text, str) and is_kernel(text)]
        names += _kernels(item)
    return names


def _file_of(task: str) -> str:
    """Return the file or the module of a custom task, for the hint to read it."""
    return str(Path(task).expanduser().resolve()) if task.endswith(".py") or "/" in task else f"the module {task}"
