"""Train a small real model and print three answers before and after: `ftcli quickstart`.

It calls public functions only (fetch, generate, train), so a user can repeat everything by hand.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.runtime.log import log_line

if TYPE_CHECKING:
    from rich.console import Console

    from ftcli.runtime.run_folder import RunFolder


RECIPE = "quickstart"
FUNCTIONS = (
    "gzip.decompress_file(path, mode='rb')",
    "collections.Stack.push(self, item)",
    "shutil.copy_folder(src, dst, overwrite=False)",
)
"""Functions that do not exist, so that the model cannot have memorised the answers."""
MAX_NEW_TOKENS = 48
WIDEST_ANSWER = 240
"""Characters of an answer."""


def quickstart() -> RunFolder:
    """Download what recipes/quickstart.yaml needs, train it, and print answers before and after.

    A run that was stopped before is resumed.

    Returns:
        The run folder.
    """
    from ftcli.cli.prepare_data import fetch
    from ftcli.config.load import load_recipe
    from ftcli.inference.generate import generate
    from ftcli.launch.launcher import train

    fetch(RECIPE)
    prompts = [f"Document this Python function: {function}" for function in FUNCTIONS]
    before = generate(load_recipe(RECIPE).model.name, prompts, max_new_tokens=MAX_NEW_TOKENS)
    started = time.monotonic()
    run = train(RECIPE, output=choose_run_folder(Path("runs") / Path(RECIPE).stem), resume="auto")
    seconds = time.monotonic() - started
    if run.status()["state"] == "stopped":
        log_line(f"run the same command again to continue {run.path}")
        return run
    after = generate(run.path, prompts, max_new_tokens=MAX_NEW_TOKENS)
    from rich.console import Console

    print_results(Console(), run.metrics(), before, after, seconds=seconds, folder=run.path)
    return run


def choose_run_folder(first: Path) -> Path:
    """Return the first of NAME, NAME-2, NAME-3, ... that does not exist or was stopped. Other runs are kept."""
    from ftcli.runtime.run_folder import RunFolder

    folder, number = first, 1
    while folder.exists() and RunFolder(folder).status().get("state") != "stopped":
        number += 1
        folder = first.with_name(f"{first.name}-{number}")
    return folder


def print_results(
    console: Console,
    metrics: Sequence[dict[str, Any]],
    before: Sequence[str],
    after: Sequence[str],
    *,
    seconds: float,
    folder: Path,
) -> None:
    """Print the held-out perplexity and the answers to `FUNCTIONS` before and after training.

    Args:
        console: Where to print.
        metrics: Rows of metrics of the run.
        before: Answers before training.
        after: Answers after training.
        seconds: Duration of the training.
        folder: The run folder.
    """
    from rich.table import Table
    from rich.text import Text

    evaluations = [row for row in metrics if "eval/perplexity" in row]
    initial, last = evaluations[0], evaluations[-1]
    title = "SmolLM2-135M-Instruct documents functions that do not exist"
    table = Table(title=title, show_lines=True, expand=True)
    table.add_column("Document this Python function", ratio=7, overflow="fold")
    table.add_column("before", ratio=8, overflow="fold")
    table.add_column(f"after {last['step']} steps", ratio=6, overflow="fold")
    for function, old, new in zip(FUNCTIONS, before, after, strict=True):
        # Text, because rich interprets square brackets in strings as mark-up.
        table.add_row(Text(function), Text(shorten(old)), Text(shorten(new)))
    console.print(table)
    console.print(
        f"Perplexity on held-out functions: {initial['eval/perplexity']:.1f} before, "
        f"{last['eval/perplexity']:.1f} after {last['step']} steps ({seconds:.0f} s with both evaluations)",
        style="bold",
        highlight=False,
    )
    more = f"The run is in {folder}. Ask more questions: ftcli generate {folder} --prompt '...'"
    console.print(Text(more), soft_wrap=True)


def shorten(answer: str) -> str:
    """Return an answer on one line, cut at a word if it is longer than `WIDEST_ANSWER`."""
    line = " ".join(answer.split())
    if len(line) <= WIDEST_ANSWER:
        return line or "(nothing)"
    return line[:WIDEST_ANSWER].rsplit(" ", 1)[0] + " ..."
