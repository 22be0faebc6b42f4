"""Copies of the real run folders in fixtures/, with changes as a fault or another person would make them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from ftcli.runtime.load_monitor import PREFIX
from ftcli.runtime.run_folder import RunFolder

# Keys of rows that depend on the clock or the machine. No checkpoint holds them.
NEVER_IN_A_CHECKPOINT = ("seconds", "tokens_per_second", "rows_per_second", "data_wait_share", "peak_memory_gb")
FOLDERS = Path(__file__).resolve().parents[1] / "fixtures" / "runs" / "folders"
MARKUP = "<img src=x onerror=alert(1)>"  # a name of a folder, which has no slash
SCRIPT = "</script><script>document.title='owned'</script>"


def stable_metrics(run: Path) -> list[dict[str, Any]]:
    """Return a run's metrics but for what depends on the clock or the machine."""
    rows = RunFolder(run).metrics()
    return [
        {k: v for k, v in row.items() if k not in NEVER_IN_A_CHECKPOINT and not k.startswith(PREFIX)} for row in rows
    ]


def copy_run(name: str, target: Path) -> Path:
    """Copy the run folder of a fixture without its weights and return the copy."""
    shutil.copytree(FOLDERS / name, target, ignore=shutil.ignore_patterns("*.safetensors", "tokenizer*"))
    return target


def change_rows(run: Path, changes: dict[int, dict[str, Any]], file: str = "metrics.jsonl") -> None:
    """Add values to the rows of a file, by the position of the row."""
    rows = [json.loads(line) for line in (run / file).read_text().splitlines()]
    for place, values in changes.items():
        rows[place] |= values
    (run / file).write_text("".join(json.dumps(row) + "\n" for row in rows))


def hostile_run(folder: Path) -> Path:
    """Make a run whose name, prompt, answer, recipe, metrics, profile and events hold HTML and scripts."""
    run = copy_run("sft", folder / f"a {MARKUP} run")
    change_rows(
        run, {place: {"prompt": f"prompt {SCRIPT}", "answer": f"answer {SCRIPT}"} for place in (0, 2)}, "samples.jsonl"
    )
    change_rows(run, {0: {f"train/{SCRIPT}/loss": 1.0}, 1: {f"eval/{SCRIPT}": 1.0}})
    recipe = run / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("models/causal", json.dumps(f"model {SCRIPT}")))
    (run / "profile.yaml").write_text(f"# profile {SCRIPT}, source: file\ndistributed_type: MULTI_GPU\n")
    event = {"step": 2, "event": "stall", "text": f"event {SCRIPT}{MARKUP}"}
    (run / "events.jsonl").write_text(json.dumps(event) + "\n")
    return run
