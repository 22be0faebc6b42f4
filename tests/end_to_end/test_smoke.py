"""The smoke recipes, real models on real rows: one curve under every profile, and a falling loss.

The smallest goes through the real launcher under every profile of several processes. The other runs fork (`run_on_cpu`,
`run_forked`), because imports would take most of their time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ftcli
from ftcli.cli.prepare_data import fetch
from ftcli.runtime.run_folder import RunFolder
from ftcli.testing import run_on_cpu, save_tiny_vit

from ..support.runner import run_forked

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
NEAR = {"loss": 2e-5, "grad_norm": 1e-3, "eval/loss": 5e-5}
# Few rows in a step, because each rank computes for itself on these processors. More rows would show nothing else.
FOUR_ROWS = ["batch.global_size=4", "batch.micro_size=2"]
FEWER = {
    "sft": [*FOUR_ROWS, "data.max_length=96"],
    "pretrain": [*FOUR_ROWS, "data.max_length=48"],
    "text_classification": ["batch.global_size=8", "batch.micro_size=4"],
}


def train(recipe: str, profile: str, folder: Path, overrides: list[str]) -> RunFolder:
    command = [sys.executable, "-m", "ftcli", "train", f"smoke/{recipe}", "--profile", profile, "--cpu"]
    command += ["--num-processes", str(PROFILES[profile]), "--output", str(folder)]
    for override in overrides:
        command += ["--set", override]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return RunFolder(folder)


def train_forked(recipe: str, folder: Path, overrides: list[str]) -> RunFolder:
    """Train by the command line in one forked process."""
    changes = [word for override in overrides for word in ("--set", override)]
    command = ("train", f"smoke/{recipe}", "--cpu", "--output", folder, *changes)
    ended = run_forked(folder.parent, *command, timeout=1200)
    assert ended.code == 0, ended.err[-3000:]
    return RunFolder(folder)


def train_here(recipe: str, folder: Path, overrides: list[str]) -> None:
    """Train on this rank, as a process of a bare launch does. ZeRO-3 releases every weight after its use."""
    from ftcli.hardware import deepspeed
    from ftcli.launch import launcher

    # By default weights within 10^9 elements of their next use stay. These models are smaller than that, and DeepSpeed
    # then searches the whole model for each module. A large model's weights are released, as here.
    deepspeed.STAGE_3 = deepspeed.STAGE_3 | {"stage3_max_reuse_distance": 10**6}
    launcher.train(f"smoke/{recipe}", output=folder, overrides=overrides, cpu=True)


@pytest.mark.slow
def test_train_command_under_every_profile_gives_one_smoke_curve(tmp_path: Path) -> None:
    fetch("smoke/image_classification")
    # The recipe's own MobileNet has ReLUs. A unit at the edge of one falls on either side by rounding: weights that are
    # changed by half a unit in the last place then change the third loss by up to 1.6e-3, and with this model by 2e-7.
    overrides = [*SHORT, f"model.name={save_tiny_vit(tmp_path / 'vit')}"]
    forked = {"single": train_forked("image_classification", tmp_path / "single", overrides)}
    launched = [profile for profile in PROFILES if profile != "single"]
    assert_one_curve(
        forked
        | {profile: train("image_classification", profile, tmp_path / profile, overrides) for profile in launched}
    )


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param("text_classification", marks=pytest.mark.slow),
        pytest.param("sft", marks=pytest.mark.full),
        pytest.param("pretrain", marks=pytest.mark.full),
    ],
)
def test_smoke_recipe_under_every_profile_gives_one_curve(recipe: str, tmp_path: Path) -> None:
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


def assert_same(expected: list[dict[str, Any]], actual: list[dict[str, Any]]) -> None:
    assert len(expected) == len(actual) == 4  # three steps and one evaluation
    for a, b in zip(expected, actual, strict=True):
        for key in ("step", "items", "samples", "learning_rate"):
            assert a.get(key) == b.get(key)
        for key, near in NEAR.items():
            assert b.get(key) == (pytest.approx(a[key], rel=near) if key in a else None)


@pytest.mark.slow
def test_smoke_image_classification_accuracy_exceeds_the_majority_class(tmp_path: Path) -> None:
    fetch("smoke/image_classification")
    run = train_forked("image_classification", tmp_path / "run", ["train.max_steps=25", "evaluate.at_start=false"])
    last = run.metrics()[-1]
    assert last["eval/accuracy"] > 0.5  # always answering the commonest digit: 0.10
    assert last["eval/macro_f1"] > 0.5


@pytest.mark.slow
def test_smoke_resnet_learns_digits_from_random_weights(tmp_path: Path) -> None:
    fetch("smoke/resnet")
    rows = train_forked("resnet", tmp_path / "run", ["train.epochs=3"]).metrics()
    assert rows[0]["eval/accuracy"] < 0.3
    assert rows[-1]["eval/accuracy"] > 0.6


@pytest.mark.slow
def test_smoke_face_swap_losses_fall_and_faces_are_drawn(tmp_path: Path) -> None:
    fetch("smoke/face_swap")
    few = ["train.max_steps=12", "batch.micro_size=16", "evaluate.every_steps=12"]
    run = train_forked("face_swap", tmp_path / "run", few)
    first, last = (row for row in run.metrics() if "loss" not in row)
    for name in ("identity", "reconstruction", "perceptual", "attributes"):
        assert last[f"eval/{name}"] < 0.9 * first[f"eval/{name}"], name
    assert len(list((run.path / "drawings").glob("*.png"))) == 2


@pytest.mark.slow
def test_smoke_text_classification_accuracy_exceeds_the_majority_class(tmp_path: Path) -> None:
    fetch("smoke/text_classification")
    few = ["train.max_steps=14", "batch.global_size=16", "evaluate.at_start=false", "data.eval.max_rows=100"]
    last = train_forked("text_classification", tmp_path / "run", few).metrics()[-1]
    assert last["eval/accuracy"] > 0.38  # always answering the commonest module: 0.29


@pytest.mark.slow
def test_smoke_sft_perplexity_falls(tmp_path: Path) -> None:
    fetch("smoke/sft")
    few = ["train.max_steps=6", "batch.global_size=4", "data.max_length=96", "data.eval.max_rows=12"]
    first, last = perplexities(train_forked("sft", tmp_path / "run", few))
    assert last < 0.9 * first


@pytest.mark.full
def test_whole_smoke_image_classification_reaches_its_accuracy(tmp_path: Path) -> None:
    fetch("smoke/image_classification")
    last = train("image_classification", "single", tmp_path / "run", []).metrics()[-1]
    assert last["eval/accuracy"] > 0.8 and last["eval/macro_f1"] > 0.8


@pytest.mark.full
def test_whole_smoke_face_swap_gives_more_of_the_source_than_a_copy_of_the_target(tmp_path: Path) -> None:
    fetch("smoke/face_swap")
    last = train("face_swap", "single", tmp_path / "run", []).metrics()[-1]
    assert last["eval/similarity"] > last["eval/between"] + 0.1 and last["eval/reconstruction"] < 0.1


@pytest.mark.full
def test_whole_smoke_text_classification_reaches_its_accuracy(tmp_path: Path) -> None:
    fetch("smoke/text_classification")
    last = train("text_classification", "single", tmp_path / "run", []).metrics()[-1]
    assert last["eval/accuracy"] > 0.6


@pytest.mark.full
def test_whole_smoke_sft_perplexity_falls(tmp_path: Path) -> None:
    fetch("smoke/sft")
    first, *_, last = perplexities(train("sft", "single", tmp_path / "run", []))
    assert last < 0.6 * first


@pytest.mark.full
def test_whole_smoke_preference_reaches_its_accuracy(tmp_path: Path) -> None:
    fetch("smoke/preference")
    last = train("preference", "single", tmp_path / "run", []).metrics()[-1]
    assert last["eval/rewards/accuracies"] > 0.9 and last["eval/rewards/margins"] > 0.5


@pytest.mark.full
@pytest.mark.parametrize(
    ("recipe", "accuracy"), [("unpaired_preference", "rewards/accuracies"), ("reward", "accuracy")]
)
def test_whole_smoke_recipe_of_judged_answers_reaches_its_accuracy(recipe: str, accuracy: str, tmp_path: Path) -> None:
    fetch(f"smoke/{recipe}")
    last = train(recipe, "single", tmp_path / "run", []).metrics()[-1]
    assert last[f"eval/{accuracy}"] > 0.9


def perplexities(run: RunFolder) -> list[float]:
    return [row["eval/perplexity"] for row in run.metrics() if "eval/perplexity" in row]


@pytest.mark.slow
def test_smoke_pretrain_perplexity_falls_and_generate_continues_text(tmp_path: Path) -> None:
    fetch("smoke/pretrain")
    generation = 'evaluate.generate={"prompts": ["Return the"], "max_new_tokens": 8}'
    run = train_forked(
        "pretrain",
        tmp_path / "run",
        ["data.packing=true", "data.eval.max_rows=8", "train.max_steps=8", generation],
    )
    first, *_, last = perplexities(run)
    assert last < 0.6 * first
    (answer,) = ftcli.generate(tmp_path / "run", ["Return the"], max_new_tokens=8, cpu=True)
    samples = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    assert answer == json.loads(samples[-1])["answer"] != ""
