"""Frozen weights that are whole on each GPU give the curve of sharded ones, and the same checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ftcli.config.recipe import Recipe
from ftcli.runtime.checkpoint_names import checkpoint_path
from ftcli.testing import run_on_cpu

from ...support.cells import SAVED_AT, cell, resume_cell, save_cell, train_recipe

KINDS = ["sft-lora", "vision-lora", "preference-lora"]
LONGER = {"train": {"max_steps": SAVED_AT + 2}}


def of(folder: Path, kind: str, shard_frozen: bool, changes: dict[str, Any] | None = None) -> Recipe:
    recipe = cell(folder, kind, **(changes or {}))
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"shard_frozen": shard_frozen})})


def sharded(run: Any) -> dict[str, Any]:
    """Return whether parameters are sharded, log lines about the choice, and what is advised without enough memory."""
    from ftcli.training.out_of_memory import _remedies

    parameters = run.hardware.unwrap(run.model).parameters()
    lines = [line for line in run.log_lines if line.startswith("frozen weights")]
    flags = {hasattr(parameter, "placements") or hasattr(parameter, "ds_id") for parameter in parameters}
    return {"sharded": flags, "lines": lines, "remedies": "\n".join(_remedies(run))}


def train(folder: Path, saves: Path, shard_frozen: list[bool]) -> dict[Any, Any]:
    """Return the results of all kinds with each choice; the first choice saves a checkpoint and the last resumes it."""
    results: dict[Any, Any] = {
        (kind, choice): train_recipe(of(folder, kind, choice), look=sharded)
        for kind in KINDS
        for choice in shard_frozen
    }
    first, last = (of(folder, KINDS[0], choice, LONGER) for choice in (shard_frozen[0], shard_frozen[-1]))
    results["saved"] = save_cell(first, saves)
    results["resumed"] = resume_cell(last, checkpoint_path(saves, SAVED_AT))
    return results


def resume_alone(folder: Path, saves: Path) -> Any:
    """Return the rows of a run, and of one that was resumed from its checkpoint, both with whole frozen weights."""
    recipe = of(folder, KINDS[0], False, LONGER)
    saved = save_cell(recipe, saves)
    return saved["rows"][SAVED_AT:], resume_cell(recipe, checkpoint_path(saves, SAVED_AT))["rows"]


@pytest.mark.parametrize("profile", ["fsdp", "zero3"])
def test_whole_frozen_weights_on_three_processes_resume_with_equal_bits(
    inputs: Path, tmp_path: Path, profile: str
) -> None:
    for expected, resumed in run_on_cpu(resume_alone, inputs, tmp_path, processes=3, profile=profile):
        assert resumed == expected


@pytest.mark.parametrize("profile", ["fsdp", "zero3"])
def test_whole_frozen_weights_give_the_curve_of_one_process(inputs: Path, tmp_path: Path, profile: str) -> None:
    (one,) = run_on_cpu(train, inputs, tmp_path / "one", [True], processes=1, profile="single")
    both = run_on_cpu(train, inputs, tmp_path / "two", [False, True], processes=2, profile=profile)
    for rank in both:
        for kind in KINDS:
            assert one[kind, True]["insides"]["lines"] == [], "one process has nothing to choose"
            for choice, line in (
                (True, "sharded over 2 processes (as set)"),
                (False, "whole on each GPU, so trained as under ddp"),
            ):
                insides = rank[kind, choice]["insides"]
                assert insides["sharded"] == {choice}
                assert ("set model.shard_frozen to true" in insides["remedies"]) == (not choice)
                assert line in insides["lines"][0]
                for found, expected in zip(rank[kind, choice]["rows"], one[kind, True]["rows"], strict=True):
                    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
                    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
        resumed, expected = rank["resumed"]["rows"], one["saved"]["rows"][SAVED_AT:]
        for (loss, norm, samples), (goal, goal_norm, goal_samples) in zip(resumed, expected, strict=True):
            assert samples == goal_samples
            assert (loss, norm) == (pytest.approx(goal, rel=1e-6), pytest.approx(goal_norm, rel=1e-5))
