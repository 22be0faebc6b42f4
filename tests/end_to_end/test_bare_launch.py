"""The README's bare `accelerate launch` line, our own launcher and no launcher at all: one and the same training.

Every test starts real processes, so there are few of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ftcli.runtime.run_folder import RunFolder

from ..support.recipes import recipe_values
from ..support.runner import MakeInputs

ROOT = Path(__file__).resolve().parents[2]
RECIPE = recipe_values(train={"max_steps": 3})
KILLED_BY_TORCHRUN = "forcefully exiting via"  # what torchrun logs of ranks that it kills after 30 seconds
MARKS = ("FTCLI_LAUNCHED", "FTCLI_PROFILE", "RANK", "WORLD_SIZE", "LOCAL_RANK")
FAILING_TASK = """
import os
from ftcli.tasks import sft

Options = sft.Options
calls = 0

class Task(sft.Task):
    def loss(self, model, batch):
        global calls
        calls += 1
        if calls == 2 and os.environ.get("RANK") == "1":  # a step has one micro-batch on two processes
            raise ArithmeticError("a fault of rank 1 at step 2")
        return super().loss(model, batch)
"""


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    return make_inputs(
        {"recipe.yaml": RECIPE, "failing.yaml": RECIPE | {"task": "./failing_task.py"}, "failing_task.py": FAILING_TASK}
    )


def start(inputs: Path, *command: object) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in MARKS}
    added = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    added["OMP_DISPLAY_ENV"] = "VERBOSE"
    line = [sys.executable, "-m", *map(str, command)]
    return subprocess.run(line, cwd=inputs, env=inherited | added, capture_output=True, text=True)


def bare(*arguments: object) -> tuple[object, ...]:
    """Return the README's bare line with our arguments, as a module: the script may not be on the path."""
    lines = [line.split() for line in (ROOT / "README.md").read_text().splitlines()]
    (printed,) = [line for line in lines if line[:2] == ["accelerate", "launch"]]
    assert printed[-4:] == ["-m", "ftcli", "train", "my.yaml"]
    options = [ROOT / word if word.startswith("accelerate_configs/") else word for word in printed[2:-2]]
    return ("accelerate.commands.launch", "--main_process_port", 0, *options, *arguments)


@pytest.mark.slow
def test_train_by_accelerate_by_our_launcher_and_without_gives_the_same_losses(inputs: Path, tmp_path: Path) -> None:
    launched = ("ftcli", "train", "recipe.yaml", "--profile", "ddp", "--cpu", "--num-processes", 2)
    lines = {
        "bare": bare("train", "recipe.yaml"),
        "ours": launched,
        "none": ("ftcli", "train", "recipe.yaml", "--cpu"),
    }
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, line in lines.items():
        result = start(inputs, *line, "--output", tmp_path / name)
        assert result.returncode == 0, result.stderr
        assert result.stdout == ("" if name == "bare" else f"{tmp_path / name}\n")
        spins = [line for line in result.stderr.splitlines() if "GOMP_SPINCOUNT" in line]
        ranks = 1 if name == "none" else 2
        assert not spins or sum("'0'" in line for line in spins) >= ranks, spins  # of a torch with GNU's OpenMP
        folder = RunFolder(tmp_path / name)
        assert folder.status()["state"] == "done" and folder.final.is_dir()
        rows[name] = folder.metrics()
    for name in ("bare", "ours"):
        for actual, expected in zip(rows[name], rows["none"], strict=True):
            assert actual.keys() == expected.keys()
            for key in expected.keys() & {"step", "items", "samples", "learning_rate"}:
                assert actual[key] == expected[key]
            for key in expected.keys() & {"loss", "grad_norm", "eval/loss", "eval/perplexity"}:
                assert actual[key] == pytest.approx(expected[key], rel=1e-5), (name, key)
    assert "source: environment" in (tmp_path / "bare" / "profile.yaml").read_text()
    profile = yaml.safe_load((tmp_path / "bare" / "profile.yaml").read_text())
    assert (profile["distributed_type"], profile["num_processes"]) == ("MULTI_GPU", 2)
    assert "source: file" in (tmp_path / "ours" / "profile.yaml").read_text()
    environments = {name: json.loads((tmp_path / name / "environment.json").read_text()) for name in lines}
    assert [environments[name]["processes"] for name in lines] == [2, 2, 1]
    assert [environments[name]["launched"] for name in lines] == ["directly", "ftcli", "directly"]


@pytest.mark.slow
def test_train_exception_on_one_rank_ends_all_and_is_printed_last(inputs: Path, tmp_path: Path) -> None:
    line = ("ftcli", "train", "failing.yaml", "--profile", "ddp", "--cpu", "--num-processes", 2)
    result = start(inputs, *line, "--output", tmp_path / "run")
    assert result.returncode == 1, result.stderr
    assert result.stderr.endswith("rank 1: ArithmeticError: a fault of rank 1 at step 2\n")
    assert 'raise ArithmeticError("a fault of rank 1 at step 2")' in result.stderr.rpartition("Traceback")[2]
    status = RunFolder(tmp_path / "run").status()
    assert (status["state"], status["exit_code"]) == ("failed", 1)
    assert [row["step"] for row in RunFolder(tmp_path / "run").metrics()] in ([], [1])
    assert KILLED_BY_TORCHRUN not in result.stderr
    assert not _processes_of(tmp_path / "run")


@pytest.mark.slow
def test_bare_launch_exception_on_one_rank_ends_all(inputs: Path, tmp_path: Path) -> None:
    result = start(inputs, *bare("train", "failing.yaml", "--output", tmp_path / "run"))
    assert result.returncode == 1
    assert "a fault of rank 1 at step 2" in result.stderr
    assert KILLED_BY_TORCHRUN not in result.stderr
    assert not _processes_of(tmp_path / "run")


def _processes_of(run: Path) -> list[list[str]]:
    """Return the command lines of processes that still work for a run folder."""
    import psutil

    return [p.info["cmdline"] for p in psutil.process_iter(["cmdline"]) if str(run) in (p.info["cmdline"] or [])]
