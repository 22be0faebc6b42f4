"""Adapters of every kind, and new tokens: one curve, and one set of weights, on every profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ftcli.config.recipe import Recipe
from ftcli.runtime.checkpoint_names import checkpoint_path
from ftcli.testing import run_on_cpu

from ...support.cells import SAVED_AT, cell, resume_cell, save_cell, train_recipe
from ...support.runner import MakeInputs
from ..config.test_profile import assert_same_curve

LORA = {"type": "lora", "r": 3, "lora_alpha": 6}
NEW = ["<think>", "</think>"]
KINDS: dict[str, dict[str, Any]] = {
    "whole modules, rank-stabilised, LoRA+": {
        "model": {"name": "tied"},
        "adapter": LORA
        | {
            "use_rslora": True,
            "loraplus_lr_ratio": 4.0,
            "modules_to_save": ["lm_head", "norm"],
            "exclude_modules": ["down_proj"],
        },
    },
    "new tokens, all trained": {"model": {"name": "untied", "new_tokens": NEW}},
    "new tokens, all trained, tied": {"model": {"name": "tied", "new_tokens": NEW}},
    "new tokens and LoRA": {"adapter": LORA, "model": {"name": "untied", "new_tokens": NEW}},
    "new tokens and DoRA, tied": {"adapter": LORA | {"use_dora": True}, "model": {"name": "tied", "new_tokens": NEW}},
}


def recipe(folder: Path, kind: str, **more: Any) -> Recipe:
    changes = KINDS[kind]
    model = {"name": "untied"} | changes.get("model", {})
    model = model | {"name": str(folder / model["name"]), "dropout": 0.0}
    data = {"train": {"path": str(folder / "thoughts.jsonl")}, "eval_rows": 5, "max_length": 128}
    return cell(folder, "sft-untied", **(changes | {"model": model, "data": data} | more))


def train_kinds(folder: Path, kinds: list[str]) -> dict[str, Any]:
    return {kind: train_recipe(recipe(folder, kind)) for kind in kinds}


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    """Return a folder of this module's own, because a test writes a task into it."""
    return make_inputs()


@pytest.fixture(scope="module")
def single(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_on_cpu(train_kinds, inputs, list(KINDS), processes=1, profile="single")[0]


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["ddp", "fsdp", "zero3"])
def test_adapters_and_new_tokens_on_every_profile_give_the_curve_of_one_process(
    profile: str, inputs: Path, single: dict[str, Any]
) -> None:
    results = run_on_cpu(train_kinds, inputs, list(KINDS), processes=2, profile=profile)[0]
    for kind in KINDS:
        assert_same_curve(single[kind], results[kind])


RESUMED = ["whole modules, rank-stabilised, LoRA+", "new tokens and DoRA, tied"]


def save_kinds(folder: Path, output: Path, changes: dict[str, Any]) -> dict[str, Any]:
    return {kind: save_cell(recipe(folder, kind, **changes), output / kind) for kind in RESUMED}


def resume_kinds(folder: Path, output: Path, changes: dict[str, Any]) -> dict[str, Any]:
    return {
        kind: resume_cell(recipe(folder, kind, **changes), checkpoint_path(output / kind, SAVED_AT)) for kind in RESUMED
    }


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("fsdp", "zero3")])
def test_resume_of_adapters_from_another_profile_gives_the_same_curve(
    before: str, after: str, inputs: Path, tmp_path: Path
) -> None:
    changes = {"train": {"max_steps": 7}}
    expected = run_on_cpu(save_kinds, inputs, tmp_path, changes, processes=2, profile=before)[0]
    actual = run_on_cpu(resume_kinds, inputs, tmp_path, changes, processes=2, profile=after)[0]
    for kind in RESUMED:
        for (loss, norm, samples), row in zip(expected[kind]["rows"][SAVED_AT:], actual[kind]["rows"], strict=True):
            assert row == (pytest.approx(loss, rel=1e-6), pytest.approx(norm, rel=1e-5), samples)
        assert list(actual[kind]["after"]) == list(expected[kind]["after"])
        ends = (np.concatenate([v.ravel() for v in run[kind]["after"].values()]) for run in (actual, expected))
        assert np.allclose(*ends, atol=1e-5)


UNUSED = """
from ftcli.tasks.sft import Options
from ftcli.tasks.sft import Task as Sft


class Task(Sft):
    def finish_model(self, model):
        import torch

        model.extra = torch.nn.Linear(2, 2, device=model.device)
        super().finish_model(model)
"""


def train_with_an_unused_part(folder: Path) -> str:
    from ftcli.loop import steps
    from ftcli.runtime.errors import RunError
    from ftcli.training.setup import prepare

    values = cell(folder, "sft-untied").model_dump() | {"task": str(folder / "own.py")}
    run = prepare(Recipe.model_validate(values), cpu=True)
    with pytest.raises(RunError) as caught:
        list(steps(run))
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["fsdp", "zero3"])
def test_check_gradients_on_sharded_profiles_names_unused_weights(profile: str, inputs: Path) -> None:
    (inputs / "own.py").write_text(UNUSED)
    for message in run_on_cpu(train_with_an_unused_part, inputs, processes=2, profile=profile):
        assert "had no gradient in 4 steps: extra.weight, extra.bias." in message
