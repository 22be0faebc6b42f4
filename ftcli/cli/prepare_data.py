"""Download the model and data of a recipe, and prepare its rows before a run: `ftcli fetch`, `ftcli tokenize`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from ftcli.config.load import load_recipe
from ftcli.config.recipe import Recipe
from ftcli.config.recipe_model import NO_MODEL
from ftcli.data.assets.catalogue import fetch_asset
from ftcli.data.cache import prepare_rows
from ftcli.data.paths import MODEL_KEY, local_path
from ftcli.data.revisions import resolve
from ftcli.models.helper_models import helper_names
from ftcli.runtime.errors import InputError
from ftcli.runtime.log import log_line


def fetch(recipe: str | Path, overrides: Sequence[str] = ()) -> None:
    """Download the model and the data of a recipe, and prepare its rows.

    Args:
        recipe: A recipe file, or the name of a shipped recipe.
        overrides: Changes of the recipe, applied in order.

    Raises:
        InputError: A name is unknown, or rows cannot be used.
    """
    from ftcli.hardware.environment import quiet_libraries

    quiet_libraries()
    loaded = load_recipe(recipe, overrides)
    for name in _names(loaded):
        if name.startswith("asset:"):
            fetch_asset(name.removeprefix("asset:").partition("/")[0], report=log_line)
    for key, name in {MODEL_KEY: loaded.model.name, **helper_names(loaded)}.items():
        _fetch_model(key, name, loaded.model.revision if key == MODEL_KEY else None)
    from ftcli.data.revisions import resolve
    from ftcli.tasks.build import build_task

    resolved = resolve(loaded)
    loaded = resolved.recipe
    for line in resolved.lines():
        log_line(line)

    rows = prepare_rows(loaded, build_task(loaded))
    train = "a stream" if rows.streamed else len(rows.train)
    log_line(f"rows are ready: {train} to train on, {len(rows.eval) if rows.eval is not None else 0} to evaluate")


def _names(recipe: Recipe) -> list[str]:
    """Return the names of the model, of its helper models and of all sources."""
    return [
        recipe.model.name,
        *helper_names(recipe).values(),
        *(source.path for source in recipe.data.train_sources + recipe.data.eval_sources),
    ]


def _fetch_model(key: str, name: str, revision: str | None) -> None:
    """Download the model that a key names, if it is a name on the hub."""
    if name == NO_MODEL or local_path(name) is not None:
        return
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            name,
            revision=revision,
            ignore_patterns=["*.gguf", "*.onnx", "*.h5", "*.msgpack", "*.tflite", "original/*"],
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, ConnectionError) as error:
        raise InputError(
            f"{key}: {name} is neither on this machine nor reachable on the hub",
            hint="check the spelling and the network",
        ) from error
    log_line(f"model is ready: {name} in {folder}")


def tokenize(recipe: str | Path, overrides: Sequence[str] = ()) -> list[str]:
    """Encode the rows of a recipe into the cache, unless they are there. Jobs with the same FTCLI_CACHE use them.

    Args:
        recipe: A recipe file, or the name of a shipped recipe.
        overrides: Changes of the recipe, applied in order.

    Returns:
        One line per fact: folder, rows, tokens and seconds.

    Raises:
        InputError: Rows cannot be used.
    """
    from ftcli.hardware.environment import quiet_libraries
    from ftcli.tasks.build import build_task

    quiet_libraries()
    resolved = resolve(load_recipe(recipe, overrides))
    loaded = resolved.recipe
    task = build_task(loaded)
    started = time.time()
    rows = prepare_rows(loaded, task)
    for line in [*resolved.lines(), *rows.log_lines]:
        log_line(line)
    is_new = (rows.folder / "meta.json").stat().st_mtime >= started
    facts = {
        "folder": rows.folder,
        "training rows": "a stream, tokenized while it is read" if rows.streamed else f"{len(rows.train):,}",
        "evaluation rows": f"{0 if rows.eval is None else len(rows.eval):,}",
        **({"tokens": f"{rows.tokens:,}"} if rows.tokens and not rows.streamed else {}),
        "seconds": f"{time.time() - started:.1f}" if is_new else "0 (from the cache)",
    }
    return [f"{name:<15}  {value}" for name, value in facts.items()]
