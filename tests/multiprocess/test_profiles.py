"""Swap the hardware and the curve stays: every profile on two and three CPU processes against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ftcli.testing import run_on_cpu

from .cells import CELLS, STEPS, cell, train_cells, write_inputs

WANTED = {
    "ddp": "MULTI_CPU",
    "fsdp": "FSDP",
    "fsdp_offload": "FSDP",
    "hsdp": "FSDP",
    "zero2": "DEEPSPEED",
    "zero3": "DEEPSPEED",
    "zero3_offload": "DEEPSPEED",
}
PROCESSES = {name: 4 if name == "hsdp" else 2 for name in WANTED}  # two copies, each in two shards
FAST = ("ddp", "fsdp", "zero3")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def single(inputs: Path) -> dict[str, Any]:
    return run_on_cpu(train_cells, inputs, list(CELLS), processes=1, profile="single")[0]


@pytest.fixture(
    scope="module", params=[name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in WANTED]
)
def profile(request: pytest.FixtureRequest, inputs: Path) -> tuple[str, list[dict[str, Any]]]:
    processes = PROCESSES[request.param]
    return request.param, run_on_cpu(train_cells, inputs, list(CELLS), processes=processes, profile=request.param)


@pytest.mark.parametrize("name", CELLS)
def test_several_processes_follow_the_curve_of_one(
    name: str, single: dict[str, Any], profile: tuple[str, list[dict[str, Any]]]
) -> None:
    kind, ranks = profile
    wanted, found = single[name], ranks[0][name]
    assert found["type"] == WANTED[kind]
    assert found["offloads"] == kind.endswith("_offload")
    assert not any(found["fused"]), "on a CPU AdamW is what it was"
    assert_same_curve(wanted, found)
    for other in ranks[1:]:
        assert other[name]["rows"] == found["rows"]
        assert other[name]["eval"] == found["eval"]


def assert_same_curve(wanted: dict[str, Any], found: dict[str, Any]) -> None:
    assert len(wanted["rows"]) == STEPS
    for a, b in zip(wanted["rows"], found["rows"], strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
        assert (b["items"], b["samples"], b["learning_rate"]) == (a["items"], a["samples"], a["learning_rate"])
    assert found["eval"] == pytest.approx(wanted["eval"], rel=1e-5)
    assert found["before"] == wanted["before"]
    assert list(found["after"]) == list(wanted["after"])
    # As one vector: the gradient of a key's bias is zero but for rounding, and Adam makes steps of any rounding.
    after, goal = (np.concatenate([v.ravel() for v in run["after"].values()]) for run in (found, wanted))
    assert np.linalg.norm(after - goal) < 3e-3 * np.linalg.norm(goal)


def test_the_curve_falls_and_the_weights_move(single: dict[str, Any]) -> None:
    for name, found in single.items():
        assert found["rows"][-1]["loss"] < found["rows"][0]["loss"], name


@pytest.mark.parametrize("micro", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_the_micro_size_does_not_move_the_curve(micro: int, inputs: Path, single: dict[str, Any]) -> None:
    changed = {"batch": {"global_size": 12, "micro_size": micro}}
    found = run_on_cpu(train_cells, inputs, ["sft-tied"], changed, processes=3, profile="ddp")
    assert_same_curve(single["sft-tied"], found[0]["sft-tied"])


@pytest.mark.slow
def test_machine_hints_do_not_move_the_curve(inputs: Path, single: dict[str, Any]) -> None:
    data = {"train": {"path": str(inputs / "images")}, "eval_rows": 5, "workers": 2}
    with_workers = run_on_cpu(train_cells, inputs, ["vit"], {"data": data}, processes=2, profile="ddp")[0]
    assert_same_curve(single["vit"], with_workers["vit"])
    model = {"name": str(inputs / "tied"), "dropout": 0.0, "gradient_checkpointing": True}
    for name in ("sft-tied", "sft-lora"):
        recomputed = run_on_cpu(train_cells, inputs, [name], {"model": model}, processes=1, profile="single")[0]
        assert_same_curve(single[name], recomputed[name])


@pytest.mark.slow
def test_what_a_profile_says_of_shards_and_of_the_host_is_what_runs(inputs: Path) -> None:
    ranks = run_on_cpu(look_at_shards, inputs, processes=4, profile="hsdp")
    assert [rank["mesh"] for rank in ranks] == [(2, 2)] * 4
    assert ranks[0]["shard"] == ranks[2]["shard"] and ranks[1]["shard"] == ranks[3]["shard"] != ranks[0]["shard"]
    assert run_on_cpu(look_at_shards, inputs, processes=2, profile="fsdp")[0]["offload"] == "OffloadPolicy"
    assert run_on_cpu(look_at_shards, inputs, processes=2, profile="fsdp_offload")[0]["offload"] == "CPUOffloadPolicy"
    found = run_on_cpu(look_at_engine, inputs, processes=2, profile="zero3_offload")[0]
    assert found == {"optimizer": "torch.optim.adamw.AdamW", "optimizer on": "cpu", "weights on": "cpu"}


def look_at_shards(folder: Path) -> dict[str, Any]:
    from ftcli.run import prepare

    run = prepare(cell(folder, "sft-untied"), cpu=True)
    first: Any = next(run.model.parameters())
    mesh, shard = tuple(first.device_mesh.mesh.shape), first.to_local().detach().sum().item()
    return {
        "mesh": mesh,
        "shard": shard,
        "offload": type(run.hardware.accelerator.state.fsdp_plugin.cpu_offload).__name__,
    }


def look_at_engine(folder: Path) -> dict[str, str]:
    from ftcli.run import prepare

    engine: Any = prepare(cell(folder, "sft-untied"), cpu=True).model
    inner = type(engine.optimizer.optimizer)
    return {
        "optimizer": f"{inner.__module__}.{inner.__qualname__}",
        "optimizer on": str(engine.zero_offload_optimizer().device),
        "weights on": str(engine.zero_offload_param().device),
    }


def test_a_recipe_prepared_twice_in_one_process_gives_the_same_curve(inputs: Path) -> None:
    first, second = run_on_cpu(twice, inputs, processes=1, profile="single")[0]
    assert first["rows"] == second["rows"]


def twice(folder: Path) -> tuple[Any, Any]:
    from .cells import train_recipe

    return train_recipe(cell(folder, "sft-lora")), train_recipe(cell(folder, "sft-lora"))


def own_operation(folder: Path) -> bool:
    """Say whether DeepSpeed compiled an operation for talks between processes of one machine."""
    from deepspeed.comm import comm

    from ftcli.run import prepare

    prepare(cell(folder, "sft-tied"), cpu=True)
    return comm.cdb.shm_comm_op is not None


def test_a_rehearsal_under_deepspeed_compiles_nothing_that_a_killed_build_could_hold_up(inputs: Path) -> None:
    assert run_on_cpu(own_operation, inputs, processes=2, profile="zero2") == [False, False]
