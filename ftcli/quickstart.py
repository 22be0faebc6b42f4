"""The command behind `make quickstart`: one ordinary recipe, and three answers before and after it.

It uses public verbs only (fetch, generate, train), so all that it shows can be repeated by hand. It must not
know how they work.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from .run_folder import RunFolder

RECIPE = "quickstart"
FUNCTIONS = (
    "gzip.decompress_file(path, mode='rb')",
    "collections.Stack.push(self, item)",
    "shutil.copy_folder(src, dst, overwrite=False)",
)
"""Functions that do not exist, so that no answer can have been learnt by heart."""
MAX_NEW_TOKENS = 48
WIDEST_ANSWER = 240
"""Characters of an answer that are shown."""


def quickstart() -> RunFolder:
    """Fetch what recipes/quickstart.yaml needs, train it, print what changed, and return the run folder.

    A run that was stopped before is gone on with; one that is stopped now is returned as it stands.
    """
    from .fetching import fetch
    from .generation import generate
    from .launcher import train
    from .recipe_file import load_recipe

    fetch(RECIPE)
    prompts = [f"Document this Python function: {function}" for function in FUNCTIONS]
    before = generate(load_recipe(RECIPE).model.name, prompts, max_new_tokens=MAX_NEW_TOKENS)
    started = time.monotonic()
    run = train(RECIPE, output=next_folder(Path("runs") / Path(RECIPE).stem), resume="auto")
    seconds = time.monotonic() - started
    if run.status()["state"] == "stopped":
        print(f"ftcli: the same command goes on with {run.path}", file=sys.stderr)
        return run
    after = generate(run.path, prompts, max_new_tokens=MAX_NEW_TOKENS)
    from rich.console import Console

    print_story(Console(), run.metrics(), before, after, seconds=seconds, folder=run.path)
    return run


def next_folder(wanted: Path) -> Path:
    """Return the first of `wanted`, wanted-2, wanted-3, ... that does not exist or was stopped: others are kept."""
    from .run_folder import RunFolder

    folder, number = wanted, 1
    while folder.exists() and RunFolder(folder).status().get("state") != "stopped":
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    return folder


def print_story(
    console: Console,
    metrics: Sequence[dict[str, Any]],
    before: Sequence[str],
    after: Sequence[str],
    *,
    seconds: float,
    folder: Path,
) -> None:
    """Print held-out perplexity and the answers to `FUNCTIONS`, before and after `seconds` of training."""
    from rich.table import Table
    from rich.text import Text

    evaluations = [row for row in metrics if "eval/perplexity" in row]
    first, last = evaluations[0], evaluations[-1]
    title = "SmolLM2-135M-Instruct documents functions that do not exist"
    table = Table(title=title, show_lines=True, expand=True)
    table.add_column("Document this Python function", ratio=7, overflow="fold")
    table.add_column("before", ratio=8, overflow="fold")
    table.add_column(f"after {last['step']} steps", ratio=6, overflow="fold")
    for function, old, new in zip(FUNCTIONS, before, after, strict=True):
        # Text, because an answer may hold square brackets, which rich would read as mark-up.
        table.add_row(Text(function), Text(shorten(old)), Text(shorten(new)))
    console.print(table)
    console.print(
        f"Perplexity on held-out functions: {first['eval/perplexity']:.1f} before, "
        f"{last['eval/perplexity']:.1f} after {last['step']} steps ({seconds:.0f} s with both evaluations)",
        style="bold",
        highlight=False,
    )
    more = f"The run is in {folder}. Ask it more: ftcli generate {folder} --prompt '...'"
    console.print(Text(more), soft_wrap=True)


def shorten(answer: str) -> str:
    """Return an answer on one line, cut at a word when it is longer than a table's cell should be."""
    line = " ".join(answer.split())
    if len(line) <= WIDEST_ANSWER:
        return line or "(nothing)"
    return line[:WIDEST_ANSWER].rsplit(" ", 1)[0] + " ..."
