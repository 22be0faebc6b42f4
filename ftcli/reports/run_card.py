"""Write the model card of an upload: recipe, data, curve, evaluation, versions and compute of a run.

The head of the card is that of the export (checkpoint/final.py). This module adds what the run folder knows. Nothing
is estimated: a value that the folder does not hold is left out. Light: never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.runtime.checkpoint_names import step_of
from ftcli.runtime.redaction import redact
from ftcli.runtime.run_folder import RunFolder
from ftcli.runtime.torn_files import read_object

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe


MOST_ROWS = 20  # rows of the curve and of the evaluations
BARS = "▁▂▃▄▅▆▇█"


def complete_card(head: str, recipe: Recipe, folder: RunFolder, checkpoint: Path | None) -> str:
    """Return a model card with everything that a run folder knows, without credentials.

    Args:
        head: The card of the export.
        recipe: The recipe of the run.
        folder: The run folder.
        checkpoint: The checkpoint that was exported; None for the final weights.
    """
    from huggingface_hub import ModelCard

    from ftcli.config.load import dump_recipe
    from ftcli.config.recipe_model import NO_MODEL
    from ftcli.config.trust import stored_form
    from ftcli.data.revisions import is_data_set, is_on_hub

    last = None if checkpoint is None else step_of(checkpoint)
    rows = [row for row in folder.metrics() if last is None or row["step"] <= last]
    environment = read_object(folder.path / "environment.json") or {}
    sections = {
        "Data": _describe_data(recipe, environment),
        "Training curve": _describe_curve([row for row in rows if "loss" in row]),
        "Evaluation": _describe_evaluations([row for row in rows if "loss" not in row]),
        "Compute": list(_describe_compute(rows, environment)),
        "Versions": [f"- {name} {version}" for name, version in environment.get("packages", {}).items()],
        "Recipe": ["```yaml", dump_recipe(stored_form(recipe)).rstrip(), "```"],
    }
    card: Any = ModelCard(head, ignore_metadata_errors=True)
    if recipe.model.name != NO_MODEL and is_on_hub(recipe.model.name):
        card.data.base_model = recipe.model.name
    if names := [source.path for source in recipe.data.train_sources if is_data_set(source)]:
        card.data.datasets = list(dict.fromkeys(names))
    body = [str(card).rstrip()]
    if last is not None:
        body += ["", f"These are the weights of a checkpoint after step {last}."]
    for title, lines in sections.items():
        if lines:
            body += ["", f"## {title}", "", *lines]
    return redact("\n".join(body) + "\n")


def _describe_data(recipe: Recipe, environment: dict[str, Any]) -> list[str]:
    """Return a table of the sources of rows, with the commits that the run has read."""
    commits = {entry["name"]: entry["commit"] for entry in environment.get("resolution") or [] if entry["commit"]}
    lines = ["| rows | source | split | commit or revision |", "|---|---|---|---|"]
    for kind, sources in (("training", recipe.data.train_sources), ("evaluation", recipe.data.eval_sources)):
        for source in sources:
            revision = commits.get(source.path) or source.revision or "-"
            lines.append(f"| {kind} | {_cell(source.path)} | {_cell(source.split)} | {_cell(revision)} |")
    if recipe.data.eval_rows:
        lines.append(f"| evaluation | {recipe.data.eval_rows} rows held back from training | - | - |")
    return lines


def _describe_curve(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the loss over the steps: a line of bars, and a table of at most `MOST_ROWS` steps."""
    if not rows:
        return []
    losses = [row["loss"] for row in rows]
    drawn = _thinned(losses, 60)
    low, high = min(drawn), max(drawn)
    bars = "".join(BARS[int((value - low) / ((high - low) or 1) * (len(BARS) - 1))] for value in drawn)
    lines = [f"Loss: `{bars}` from {losses[0]:.4f} to {losses[-1]:.4f}.", ""]
    lines += ["| step | loss | gradient norm | learning rate |", "|---|---|---|---|"]
    for row in _thinned(rows, MOST_ROWS):
        lines.append(f"| {row['step']} | {row['loss']:.4f} | {row['grad_norm']:.4g} | {row['learning_rate']:.3g} |")
    return lines


def _describe_evaluations(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table of the evaluations, at most `MOST_ROWS` of them."""
    names = list(dict.fromkeys(name for row in rows for name in row if name.startswith("eval/")))
    if not names:
        return []
    head = " | ".join(_cell(name.removeprefix("eval/")) for name in names)
    lines = [f"| step | {head} |", "|---" * (len(names) + 1) + "|"]
    for row in _thinned(rows, MOST_ROWS):
        values = " | ".join(f"{row[name]:.4f}" if name in row else "-" for name in names)
        lines.append(f"| {row['step']} | {values} |")
    return lines


def _describe_compute(rows: Sequence[dict[str, Any]], environment: dict[str, Any]) -> Iterator[str]:
    """Yield what an estimate of the energy needs: device, processes, hours of the training steps, and memory."""
    if not environment.get("device"):
        return
    processes, device = environment.get("processes", 1), environment["device"].partition(":")[0]
    unit = "CPU process" if device == "cpu" else "GPU"
    yield f"- device: {device}, {processes} process{'es' * (processes > 1)}"
    seconds = training_seconds(rows)
    if seconds:
        hours = seconds * processes / 3600
        yield f"- {unit} hours: {hours:.3g} for the training steps, without loading, evaluations and checkpoints"
    peaks = [row["peak_memory_gb"] for row in rows if "peak_memory_gb" in row]
    if peaks:
        yield f"- peak memory of one process: {max(peaks):.2f} GB"


def training_seconds(rows: Sequence[dict[str, Any]]) -> float:
    """Return the seconds of all training steps of a run. The clock of the rows starts again at each launch.

    Args:
        rows: Rows of metrics.jsonl, in their order.
    """
    clock = [row["seconds"] for row in rows if "seconds" in row]
    ends = [now for now, after in zip(clock, clock[1:], strict=False) if after < now]
    return float(sum(ends) + sum(clock[-1:]))


def _thinned(values: Sequence[Any], most: int) -> list[Any]:
    """Return at most `most` values at even distances, with the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[round(index * (len(values) - 1) / (most - 1))] for index in range(most)]


def _cell(text: str) -> str:
    """Return a text that cannot end a cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ")
