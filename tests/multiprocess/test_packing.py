"""Packed and padding-free runs: one curve for every micro size and profile, and documents counted, not rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ftcli.testing import run_on_cpu

from .cells import LORA, cell, write_inputs
from .test_matrix import assert_same, curve

VARIANTS: dict[str, dict[str, Any]] = {
    "packed, micro 1": {"micro": 1},
    "packed, micro 2": {"micro": 2},
    "packed, micro 4": {"micro": 4},
    "packed, recomputed": {"micro": 2, "gradient_checkpointing": True},
    "packed, lora": {"micro": 2, "adapter": LORA},
    "padded": {"micro": 2, "data": {"packing": False}},
    "padding-free": {"micro": 2, "data": {"packing": False, "padding_free": True}},
    "grouped, micro 1": {"micro": 1, "data": {"packing": False, "group_by_length": True}},
    "grouped, micro 2": {"micro": 2, "data": {"packing": False, "group_by_length": True}},
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


def recipe(folder: Path, name: str) -> Any:
    variant = VARIANTS[name]
    source = {"train": {"path": str(folder / "chats.jsonl")}, "eval_rows": 5, "max_length": 256, "drop_last": False}
    return cell(
        folder,
        "sft-tied",
        model={
            "name": str(folder / "tied"),
            "dropout": 0.0,
            "gradient_checkpointing": variant.get("gradient_checkpointing", False),
        },
        adapter=variant.get("adapter", {}),
        batch={"global_size": 4, "micro_size": variant["micro"]},
        data=source | {"packing": True} | variant.get("data", {}),
    )


def curves(folder: Path) -> dict[str, Any]:
    return {name: curve(recipe(folder, name)) for name in VARIANTS}


@pytest.fixture(scope="module")
def single(inputs: Path) -> dict[str, Any]:
    return run_on_cpu(curves, inputs, processes=1, profile="single")[0]


def test_micro_size_and_recomputation_leave_the_packed_curve(single: dict[str, Any]) -> None:
    for name in ("packed, micro 2", "packed, micro 4", "packed, recomputed"):
        assert_same(single["packed, micro 1"], single[name])
    assert_same(single["grouped, micro 1"], single["grouped, micro 2"])


def test_a_packed_epoch_delivers_every_document_once(inputs: Path, single: dict[str, Any]) -> None:
    from ftcli.cache import known_rows
    from ftcli.checks import _size_facts

    counts = known_rows(recipe(inputs, "packed, micro 1"))
    assert counts is not None
    steps = -(-counts["train"] // 4)
    assert counts["documents"] == 37 > counts["train"] > 1
    facts = _size_facts(recipe(inputs, "packed, micro 1"), counts)[0]
    assert f"37 documents in {counts['train']} rows" in facts["packing"]
    assert f"at most {4 * 256}, {4 * counts['tokens'] / counts['train']:.0f} on average" == facts["tokens per step"]
    assert sum(step["rows"] for step in single["packed, micro 1"][:steps]) == counts["documents"]


def test_padding_free_is_a_machine_hint_and_moves_nothing(single: dict[str, Any]) -> None:
    assert_same(single["padded"], single["padding-free"])


def hold(profile: str, inputs: Path, single: dict[str, Any]) -> None:
    for rank in run_on_cpu(curves, inputs, processes=2, profile=profile):
        for name, wanted in single.items():
            assert_same(wanted, rank[name])


def test_two_processes_give_the_packed_curve_of_one(inputs: Path, single: dict[str, Any]) -> None:
    hold("ddp", inputs, single)


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["fsdp", "zero3"])
def test_sharded_processes_give_the_packed_curve_of_one(profile: str, inputs: Path, single: dict[str, Any]) -> None:
    hold(profile, inputs, single)
