"""Frozen embeddings in host memory give the same curve, checkpoints and adapters as embeddings on the device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from ftcli.config.recipe import Recipe
from ftcli.runtime.checkpoint_names import checkpoint_path
from ftcli.runtime.errors import InputError
from ftcli.testing import run_on_cpu
from ftcli.training import acceleration
from ftcli.training.setup import prepare

from ...support.cells import SAVED_AT, cell, resume_cell, save_cell, train_recipe
from ...support.patching import patching

LONGER = {"train": {"max_steps": SAVED_AT + 2}}


def of(folder: Path, name: str, on_host: bool, **changes: Any) -> Recipe:
    recipe = cell(folder, name, **changes)
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"embeddings_on_host": on_host})})


def look(run: Any) -> tuple[bool, list[str]]:
    """Return whether the table of the embeddings is a parameter, and the log lines about it."""
    (table,) = (module for module in run.hardware.unwrap(run.model).modules() if isinstance(module, nn.Embedding))
    lines = [line for line in run.log_lines if line.startswith("embeddings on the host")]
    return isinstance(table.weight, nn.Parameter), lines


def both(folder: Path, saves: Path, precision: str) -> dict[str, Any]:
    """Return the results with embeddings on the host and not, and a run that was resumed with the other choice."""
    here, there = (train_recipe(of(folder, "sft-dora", each, precision=precision), look=look) for each in (False, True))
    save_cell(of(folder, "sft-dora", False, precision=precision, **LONGER), saves)
    whole = save_cell(of(folder, "sft-dora", True, precision=precision, **LONGER), saves.with_name("whole"))
    resumed = resume_cell(of(folder, "sft-dora", True, precision=precision, **LONGER), checkpoint_path(saves, SAVED_AT))
    return {"here": here, "there": there, "resumed": resumed["rows"], "whole": whole["rows"][SAVED_AT:]}


@pytest.mark.parametrize(("profile", "processes"), [("single", 1), ("ddp", 2)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_embeddings_on_the_host_give_equal_bits(
    inputs: Path, tmp_path: Path, profile: str, processes: int, precision: str
) -> None:
    for found in run_on_cpu(both, inputs, tmp_path / "saves", precision, processes=processes, profile=profile):
        here, there = found["here"], found["there"]
        assert here["insides"] == (True, [])
        is_parameter, (line,) = there["insides"]
        assert not is_parameter and "the rows of each micro-batch are copied" in line
        assert there["rows"] == here["rows"] and len(there["rows"]) > 2
        assert found["resumed"] == found["whole"]


@patching
def chosen(patch: pytest.MonkeyPatch, folder: Path, hosts: tuple[int, int]) -> dict[str, Any]:
    """Train with what auto chooses for a device without room, where ranks may use so many bytes of the host."""
    rank = int(os.environ.get("RANK", 0))
    patch.setattr(acceleration, "_gpu_memory", lambda hardware: 1)
    patch.setattr(acceleration, "host_memory_of", lambda processes: hosts[rank])
    return train_recipe(cell(folder, "sft-dora"), look=look)


@pytest.mark.parametrize(("profile", "processes"), [("single", 1), ("ddp", 2), ("fsdp", 1)])
def test_auto_moves_embeddings_if_all_hosts_have_room_and_the_profile_allows_it(
    inputs: Path, profile: str, processes: int
) -> None:
    moves = profile != "fsdp"
    here = run_on_cpu(train_recipe, cell(inputs, "sft-dora"), processes=processes, profile=profile)
    for hosts, expected in (((10**9, 10**9), moves), ((10**9, 0) if processes == 2 else (0, 0), False)):
        for rank, found in enumerate(run_on_cpu(chosen, inputs, hosts, processes=processes, profile=profile)):
            is_parameter, lines = found["insides"]
            assert (is_parameter, len(lines)) == (not expected, expected)
            assert found["rows"] == here[rank]["rows"]


def test_embeddings_that_the_head_uses_are_refused(inputs: Path) -> None:
    with pytest.raises(InputError, match="model.embeddings_on_host: the head or another module uses the same table"):
        prepare(of(inputs, "sft-lora", True), cpu=True)


def test_a_model_without_a_table_is_refused(inputs: Path) -> None:
    recipe = of(inputs, "vit", True)
    recipe = recipe.model_copy(update={"adapter": cell(inputs, "text-lora").adapter})
    with pytest.raises(InputError, match="the input embeddings of ViTForImageClassification are no plain table"):
        prepare(recipe, cpu=True)


def test_trained_embeddings_are_refused(inputs: Path) -> None:
    recipe = of(inputs, "sft-dora", True)
    adapter = recipe.adapter.model_copy(update={"modules_to_save": ["embed_tokens"], "use_dora": False})
    with pytest.raises(InputError, match="model.embeddings_on_host: the"):
        prepare(recipe.model_copy(update={"adapter": adapter}), cpu=True)
