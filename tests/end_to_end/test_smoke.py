"""The smoke recipes, real models on real rows: one curve under every profile, and what is learnt.

The smallest goes through the real command line under every profile; ranks of the others fork (`run_on_cpu`), for it
would be imports that take their time. What is learnt is learnt through the real command line.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ftcli
from ftcli.fetching import fetch
from ftcli.run_folder import RunFolder
from ftcli.testing import run_on_cpu

pytestmark = [pytest.mark.network, pytest.mark.timeout(1500)]
PROFILES = {"single": 1, "ddp": 2, "fsdp": 2, "zero3": 2}
# Three steps show what twenty would; few evaluation rows, for it is the profiles that are compared.
SHORT = [
    "train.max_steps=3",
    "schedule.warmup_steps=1",
    "optimizer.eps=1e-4",  # a gradient that is all rounding would be a whole step of AdamW, up or down
    "evaluate.at_start=false",
    "data.eval=null",
    "data.eval_rows=6",
]
# A unit at the edge of its ReLU falls on either side by rounding: the loss does not see it, the gradient's norm does.
NEAR = {"loss": 2e-5, "grad_norm": 1e-3, "eval/loss": 5e-5}
# The large model: one small micro-batch a rank, for each gathers all of its weights; how many rows says nothing more.
LARGE = ["batch.global_size=4", "batch.micro_size=2"]
FEWER = {"sft": [*LARGE, "data.max_length=96"], "pretrain": [*LARGE, "data.max_length=48"]}


def train(recipe: str, profile: str, folder: Path, overrides: list[str]) -> RunFolder:
    command = [sys.executable, "-m", "ftcli", "train", f"smoke/{recipe}", "--profile", profile, "--cpu"]
    command += ["--num-processes", str(PROFILES[profile]), "--output", str(folder)]
    for override in overrides:
        command += ["--set", override]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return RunFolder(folder)


def train_here(recipe: str, folder: Path, overrides: list[str]) -> None:
    """Train on this rank, as a process of a bare launch does."""
    from ftcli import launcher

    launcher.train(f"smoke/{recipe}", output=folder, overrides=overrides, cpu=True)


@pytest.mark.slow
def test_the_command_line_gives_a_smoke_recipes_curve_under_every_profile(tmp_path: Path) -> None:
    fetch("smoke/image_classification")
    assert_one_curve(
        {profile: train("image_classification", profile, tmp_path / profile, SHORT) for profile in PROFILES}
    )


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["text_classification", "sft", "pretrain"])
def test_a_smoke_recipe_gives_the_same_curve_under_every_profile(recipe: str, tmp_path: Path) -> None:
    fetch(f"smoke/{recipe}")
    overrides = [*SHORT, *FEWER.get(recipe, [])]
    for profile, processes in PROFILES.items():
        run_on_cpu(train_here, recipe, tmp_path / profile, overrides, processes=processes, profile=profile)
    assert_one_curve({profile: RunFolder(tmp_path / profile) for profile in PROFILES})


def assert_one_curve(runs: dict[str, RunFolder]) -> None:
    for profile, run in runs.items():
        assert run.status()["state"] == "done", profile
        assert_same(runs["single"].metrics(), run.metrics())
        assert (run.final / "README.md").is_file()


def assert_same(wanted: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    assert len(wanted) == len(found) == 4  # three steps and one evaluation
    for a, b in zip(wanted, found, strict=True):
        for key in ("step", "items", "samples", "learning_rate"):
            assert a.get(key) == b.get(key)
        for key, near in NEAR.items():
            assert b.get(key) == (pytest.approx(a[key], rel=near) if key in a else None)


@pytest.mark.slow
def test_digits_are_learnt_far_beyond_the_majority_class(tmp_path: Path) -> None:
    fetch("smoke/image_classification")
    run = train("image_classification", "single", tmp_path / "run", ["train.max_steps=60"])
    last = run.metrics()[-1]
    assert last["eval/accuracy"] > 0.8  # always answering the commonest digit: 0.10
    assert last["eval/macro_f1"] > 0.8


@pytest.mark.slow
def test_modules_are_told_apart_far_beyond_the_majority_class(tmp_path: Path) -> None:
    fetch("smoke/text_classification")
    last = train("text_classification", "single", tmp_path / "run", []).metrics()[-1]
    assert last["eval/accuracy"] > 0.6  # always answering the commonest module: 0.29


@pytest.mark.slow
def test_documenting_functions_is_learnt(tmp_path: Path) -> None:
    fetch("smoke/sft")
    metrics = train("sft", "single", tmp_path / "run", ["evaluate.at_start=true"]).metrics()
    evaluations = [row["eval/perplexity"] for row in metrics if "eval/perplexity" in row]
    assert evaluations[-1] < 0.6 * evaluations[0]


@pytest.mark.slow
def test_raw_text_is_learnt_and_the_run_goes_on_from_it(tmp_path: Path) -> None:
    fetch("smoke/pretrain")
    asked = 'evaluate.generate={"prompts": ["Return the"], "max_new_tokens": 8}'
    run = train(
        "pretrain",
        "single",
        tmp_path / "run",
        ["data.packing=true", "data.eval.max_rows=8", "train.max_steps=8", asked],
    )
    evaluations = [row["eval/perplexity"] for row in run.metrics() if "eval/perplexity" in row]
    assert evaluations[-1] < 0.6 * evaluations[0]
    (answer,) = ftcli.generate(tmp_path / "run", ["Return the"], max_new_tokens=8, cpu=True)
    samples = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    assert answer == json.loads(samples[-1])["answer"] != ""
