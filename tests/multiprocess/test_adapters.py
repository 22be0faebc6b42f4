"""Adapters of every kind, and new tokens: one curve, and one set of weights, on every profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ftcli.recipe import Recipe
from ftcli.testing import run_on_cpu

from .cells import cell, train_recipe, write_inputs
from .test_profiles import assert_same_curve

LORA = {"type": "lora", "r": 3, "lora_alpha": 6}
NEW = ["<think>", "</think>"]
KINDS: dict[str, dict[str, Any]] = {
    "dora": {"adapter": LORA | {"use_dora": True}},
    "whole modules, rank-stabilised, LoRA+": {
        "adapter": LORA
        | {
            "use_rslora": True,
            "loraplus_lr_ratio": 4.0,
            "modules_to_save": ["lm_head", "norm"],
            "exclude_modules": ["down_proj"],
        }
    },
    "new tokens, all trained": {"model": {"name": "untied", "new_tokens": NEW}},
    "new tokens, all trained, tied": {"model": {"name": "tied", "new_tokens": NEW}},
    "new tokens and LoRA": {"adapter": LORA, "model": {"name": "untied", "new_tokens": NEW}},
    "new tokens and LoRA, tied": {"adapter": LORA, "model": {"name": "tied", "new_tokens": NEW}},
}
FAST = ["dora"]
SLOW = [kind for kind in KINDS if kind not in FAST]


def recipe(folder: Path, kind: str) -> Recipe:
    changes = KINDS[kind]
    model = {"name": "untied"} | changes.get("model", {})
    model = model | {"name": str(folder / model["name"]), "dropout": 0.0}
    data = {"train": {"path": str(folder / "thoughts.jsonl")}, "eval_rows": 5, "max_length": 128}
    return cell(folder, "sft-untied", **(changes | {"model": model, "data": data}))


def train_kinds(folder: Path, kinds: list[str]) -> dict[str, Any]:
    return {kind: train_recipe(recipe(folder, kind)) for kind in kinds}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    rows = (folder / "chats.jsonl").read_text()
    (folder / "thoughts.jsonl").write_text(rows.replace('"completion": "', '"completion": "<think>beta</think> '))
    return folder


def assert_follows(inputs: Path, profile: str, kinds: list[str]) -> None:
    single = run_on_cpu(train_kinds, inputs, kinds, processes=1, profile="single")[0]
    found = run_on_cpu(train_kinds, inputs, kinds, processes=2, profile=profile)[0]
    for kind in kinds:
        assert_same_curve(single[kind], found[kind])


def test_dora_needs_whole_weights_and_has_them_where_they_are_sharded(inputs: Path) -> None:
    assert_follows(inputs, "zero3", FAST)
