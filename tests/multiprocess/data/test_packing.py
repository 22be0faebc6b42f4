"""Packed and padding-free runs: one curve for every micro size and profile, and documents counted, not rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ftcli.testing import run_on_cpu

from ...support.cells import LORA, cell
from ...support.runner import MakeInputs
from ..test_profile_matrix import assert_same, curve

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
    "sources, packed": {"micro": 1, "sources": True},
    "sources, padded": {"micro": 2, "sources": True, "data": {"packing": False}},
    "sources, padding-free": {"micro": 2, "sources": True, "data": {"packing": False, "padding_free": True}},
}
PARTS = {"many": slice(24), "some": slice(24, 39), "few": slice(39, None)}


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    folder = make_inputs()
    chats = (folder / "chats.jsonl").read_text().splitlines(keepends=True)
    for name, part in PARTS.items():
        (folder / f"{name}.jsonl").write_text("".join(chats[part]))
    return folder


def recipe(folder: Path, name: str) -> Any:
    variant = VARIANTS[name]
    train: Any = [str(folder / f"{name}.jsonl") for name in PARTS if "sources" in variant] or str(
        folder / "chats.jsonl"
    )
    source = {"train": train, "eval_rows": 5, "max_length": 256, "drop_last": False}
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


def test_packing_with_other_micro_size_and_recomputation_gives_the_same_curve(single: dict[str, Any]) -> None:
    for name in ("packed, micro 2", "packed, micro 4", "packed, recomputed"):
        assert_same(single["packed, micro 1"], single[name])
    assert_same(single["grouped, micro 1"], single["grouped, micro 2"])


def test_packing_delivers_every_document_once_an_epoch(inputs: Path, single: dict[str, Any]) -> None:
    from ftcli.data.cached_counts import cached_row_counts
    from ftcli.reports.check import _describe_sizes

    counts = cached_row_counts(recipe(inputs, "packed, micro 1"))
    assert counts is not None
    steps = -(-counts["train"] // 4)
    assert counts["documents"] == 37 > counts["train"] > 1
    facts = _describe_sizes(recipe(inputs, "packed, micro 1"), counts)[0]
    assert f"37 documents in {counts['train']} rows" in facts["packing"]
    assert f"at most {4 * 256}, {4 * counts['tokens'] / counts['train']:.0f} on average" == facts["tokens per step"]
    assert sum(step["rows"] for step in single["packed, micro 1"][:steps]) == counts["documents"]


def test_padding_free_does_not_change_the_curve(single: dict[str, Any]) -> None:
    assert_same(single["padded"], single["padding-free"])


def test_source_losses_add_up_and_a_source_without_rows_has_none(single: dict[str, Any]) -> None:
    assert_same(single["sources, padded"], single["sources, padding-free"])
    for name in ("sources, packed", "sources, padded"):
        curve = single[name]
        for step in curve:
            assert set(step["source_items"]) == set(PARTS)
            present = {label: items for label, items in step["source_items"].items() if items}
            assert set(step["source_losses"]) == set(present) and sum(present.values()) == step["items"]
            total = sum(step["source_losses"][label] * items for label, items in present.items())
            assert step["loss"] == pytest.approx(total / step["items"], rel=1e-6)
    assert any(len(step["source_losses"]) < 3 for step in single["sources, padded"])
    assert any(len(step["source_losses"]) == 3 for step in single["sources, packed"])
    assert all(step["source_losses"] == {} for step in single["padded"])


def hold(profile: str, inputs: Path, single: dict[str, Any]) -> None:
    for rank in run_on_cpu(curves, inputs, processes=2, profile=profile):
        for name, expected in single.items():
            assert_same(expected, rank[name])


@pytest.mark.slow
def test_packing_on_two_processes_gives_the_curve_of_one(inputs: Path, single: dict[str, Any]) -> None:
    hold("ddp", inputs, single)


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["fsdp", "zero3"])
def test_packing_on_sharded_processes_gives_the_curve_of_one(
    profile: str, inputs: Path, single: dict[str, Any]
) -> None:
    hold(profile, inputs, single)
