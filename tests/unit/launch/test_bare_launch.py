"""A bare `accelerate launch`: what it does not start is refused, and a mistake is printed by one rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# Stands in for accelerate's launcher of a single process, which sets these variables.
LAUNCHER = """
import os, subprocess, sys
own = {"ACCELERATE_USE_CPU": "True", "ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}
own |= {word[4:]: "x" for word in sys.argv if word.startswith("set:")}
command = [sys.executable, "-m", "ftcli", "train", "x.yaml"]
sys.exit(subprocess.run(command, env=os.environ | own).returncode)
"""
REFUSED = "error: accelerate launch has started one process instead of {}"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    (tmp_path / "x.yaml").write_text(
        "task: sft\nmodel: {name: nothing-here}\ndata: {train: rows.jsonl}\ntrain: {max_steps: 1}\n"
        "batch: {global_size: 1, micro_size: 1}\noptimizer: {learning_rate: 0.1}\nlog: {trackers: [mlflow]}\n"
    )
    return tmp_path


def run(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MASTER_", "FTCLI_L"))}
    environment = inherited | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"} | variables
    command = [sys.executable, "-c", LAUNCHER, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("words", "number"),
    [
        (("--cpu", "--num_processes", "2"), "2"),
        (("--cpu", "--num-processes=8"), "8"),
        (("--config_file", "four.yaml", "set:MASTER_ADDR"), "several"),
        (("--cpu", "--num_processes", "1"), None),
        (("--cpu", "--num_processes", "2", "set:OMPI_COMM_WORLD_SIZE"), None),
    ],
)
def test_bare_launch_of_one_of_several_processes_is_refused(
    words: tuple[str, ...], number: str | None, recipe: Path
) -> None:
    done = run(recipe, *words)
    assert done.returncode == 2, done.stderr
    message = REFUSED.format(number) if number else "error: log.trackers: mlflow is not installed"
    assert done.stderr.startswith(message), done.stderr


def test_ranks_of_one_launch_print_the_same_mistake_once(recipe: Path) -> None:
    stderr = ""
    for rank in range(3):
        (recipe / "attempt_0" / str(rank)).mkdir(parents=True)
        done = run(recipe, TORCHELASTIC_ERROR_FILE=str(recipe / "attempt_0" / str(rank) / "error.json"))
        assert done.returncode == 2
        stderr += done.stderr
    assert stderr.count("log.trackers: mlflow is not installed") == 1
