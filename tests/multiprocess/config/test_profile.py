"""Every profile on two and three CPU processes gives the loss curve of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ftcli.testing import run_on_cpu

from ...fixtures.make_curves import CURVES, NAMES, curve
from ...fixtures.make_run_folders import describe_machine
from ...support.cells import CELLS, STEPS, cell, train_cells
from ..conftest import WITH_TOWER, Launch

WANTED = {
    "ddp": "MULTI_CPU",
    "fsdp": "FSDP",
    "fsdp_offload": "FSDP",
    "hsdp": "FSDP",
    "zero2": "DEEPSPEED",
    "zero3": "DEEPSPEED",
    "zero3_offload": "DEEPSPEED",
}
FAST = ("ddp", "fsdp", "zero3")
RECORDED: dict[str, Any] = json.loads(CURVES.read_text())


@pytest.fixture(scope="module")
def single(trained: Launch) -> dict[str, Any]:
    return trained("single")[0]


@pytest.fixture(
    scope="module", params=[name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in WANTED]
)
def profile(request: pytest.FixtureRequest, trained: Launch) -> tuple[str, list[dict[str, Any]]]:
    return request.param, trained(request.param)


@pytest.mark.parametrize("name", [*CELLS, *WITH_TOWER])
def test_train_under_every_profile_gives_the_curve_of_one_process(
    name: str, single: dict[str, Any], profile: tuple[str, list[dict[str, Any]]]
) -> None:
    kind, ranks = profile
    expected, actual = single[name], ranks[0][name]
    assert actual["type"] == WANTED[kind]
    assert actual["offloads"] == kind.endswith("_offload")
    assert not any(actual["fused"]), "on a CPU AdamW is what it was"
    assert_same_curve(expected, actual)
    for other in ranks[1:]:
        assert other[name]["rows"] == actual["rows"]
        assert other[name]["eval"] == actual["eval"]


def assert_same_curve(expected: dict[str, Any], actual: dict[str, Any]) -> None:
    assert len(expected["rows"]) == STEPS
    for a, b in zip(expected["rows"], actual["rows"], strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
        assert (b["items"], b["samples"], b["learning_rate"]) == (a["items"], a["samples"], a["learning_rate"])
    assert actual["eval"] == pytest.approx(expected["eval"], rel=1e-5)
    assert actual["before"] == expected["before"]
    assert list(actual["after"]) == list(expected["after"])
    # As one vector: the gradient of a key's bias is zero but for rounding, and Adam makes steps of any rounding.
    after, goal = (np.concatenate([v.ravel() for v in run["after"].values()]) for run in (actual, expected))
    assert np.linalg.norm(after - goal) < 3e-3 * np.linalg.norm(goal)


@pytest.mark.parametrize("name", NAMES)
def test_one_process_trains_the_recorded_curve(name: str, single: dict[str, Any]) -> None:
    assert_recorded(curve(single[name]["rows"]), RECORDED["curves"]["single"][name])


@pytest.mark.parametrize("name", NAMES)
def test_every_recorded_profile_trains_its_recorded_curve(name: str, profile: tuple[str, list[dict[str, Any]]]) -> None:
    kind, ranks = profile
    if kind not in RECORDED["curves"]:
        pytest.skip("curves are recorded of the profiles of the fast tests")
    assert_recorded(curve(ranks[0][name]["rows"]), RECORDED["curves"][kind][name])


def assert_recorded(actual: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Compare a curve bit by bit where the machine is that of the record, elsewhere up to rounding."""
    if describe_machine() == RECORDED["machine"]:
        assert actual == expected
    for a, b in zip(expected, actual, strict=True):
        assert b["items"] == a["items"]
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)


def test_two_forward_passes_before_one_backward_pass_give_the_curve_of_one(single: dict[str, Any]) -> None:
    assert_same_curve(single["sft-tied"], single["two-passes"])


def test_train_on_one_process_lowers_the_loss_and_changes_the_weights(single: dict[str, Any]) -> None:
    for name, actual in single.items():
        assert actual["rows"][-1]["loss"] < actual["rows"][0]["loss"], name


@pytest.mark.parametrize("micro", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_micro_size_does_not_change_the_curve(micro: int, inputs: Path, single: dict[str, Any]) -> None:
    changed = {"batch": {"global_size": 12, "micro_size": micro}}
    names = ["sft-tied", "vit-mixed", "resnet"]
    ranks = run_on_cpu(train_cells, inputs, names, changed, processes=3, profile="ddp")
    for name in names:
        assert_same_curve(single[name], ranks[0][name])


@pytest.mark.slow
def test_machine_hints_do_not_change_the_curve(inputs: Path, single: dict[str, Any]) -> None:
    data = {"train": {"path": str(inputs / "images")}, "eval_rows": 5, "workers": 2}
    names = ["vit", "vit-mixed"]
    with_workers = run_on_cpu(train_cells, inputs, names, {"data": data}, processes=2, profile="ddp")[0]
    for name in names:
        assert_same_curve(single[name], with_workers[name])
    model = {"name": str(inputs / "tied"), "dropout": 0.0, "gradient_checkpointing": True}
    for name in ("sft-tied", "sft-lora"):
        recomputed = run_on_cpu(train_cells, inputs, [name], {"model": model}, processes=1, profile="single")[0]
        assert_same_curve(single[name], recomputed[name])


@pytest.mark.slow
def test_prepare_under_every_profile_shards_and_offloads_as_the_profile_states(inputs: Path) -> None:
    ranks = run_on_cpu(look_at_shards, inputs, processes=4, profile="hsdp")
    assert [rank["mesh"] for rank in ranks] == [(2, 2)] * 4
    assert ranks[0]["shard"] == ranks[2]["shard"] and ranks[1]["shard"] == ranks[3]["shard"] != ranks[0]["shard"]
    assert run_on_cpu(look_at_shards, inputs, processes=2, profile="fsdp")[0]["offload"] == "OffloadPolicy"
    assert run_on_cpu(look_at_shards, inputs, processes=2, profile="fsdp_offload")[0]["offload"] == "CPUOffloadPolicy"
    results = run_on_cpu(look_at_engine, inputs, processes=2, profile="zero3_offload")[0]
    assert results == {"optimizer": "torch.optim.adamw.AdamW", "optimizer on": "cpu", "weights on": "cpu"}


def test_deepspeed_file_without_a_bucket_size_gets_the_default(inputs: Path, tmp_path: Path) -> None:
    from ftcli.hardware.deepspeed import STAGE_3

    zero = {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}}
    config = {"zero_optimization": zero, "optimizer": optimizer, "scheduler": scheduler, "bf16": {"enabled": "auto"}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    profile = tmp_path / "auto.yaml"
    profile.write_text(
        "distributed_type: DEEPSPEED\n"
        f"deepspeed_config:\n  deepspeed_config_file: {tmp_path / 'ds.json'}\n  zero3_init_flag: true\n"
    )
    (results,) = run_on_cpu(look_at_sizes, inputs, processes=1, profile=str(profile))
    assert results["reduce_bucket_size"] == STAGE_3["reduce_bucket_size"]
    assert "auto" not in results.values()
    assert results["optimizer"] == "AdamW" and results["learning_rate"] == 5e-3  # of the recipe


def look_at_sizes(folder: Path) -> dict[str, Any]:
    """Return what DeepSpeed's engine was given under zero_optimization."""
    from ftcli.training.setup import prepare

    run = prepare(cell(folder, "sft-untied"), cpu=True)
    sizes: dict[str, Any] = run.hardware.accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
    return {name: value for name, value in sizes.items() if name.endswith("_size")} | {
        "reduce_bucket_size": run.model.zero_reduce_bucket_size(),  # type: ignore[operator]
        "optimizer": type(run.model.optimizer.optimizer).__name__,  # type: ignore[union-attr]
        "learning_rate": run.recipe.optimizer.learning_rate,
    }


def look_at_shards(folder: Path) -> dict[str, Any]:
    from ftcli.training.setup import prepare

    run = prepare(cell(folder, "sft-untied"), cpu=True)
    first: Any = next(run.model.parameters())
    mesh, shard = tuple(first.device_mesh.mesh.shape), first.to_local().detach().sum().item()
    return {
        "mesh": mesh,
        "shard": shard,
        "offload": type(run.hardware.accelerator.state.fsdp_plugin.cpu_offload).__name__,
    }


def look_at_engine(folder: Path) -> dict[str, str]:
    from ftcli.training.setup import prepare

    engine: Any = prepare(cell(folder, "sft-untied"), cpu=True).model
    inner = type(engine.optimizer.optimizer)
    return {
        "optimizer": f"{inner.__module__}.{inner.__qualname__}",
        "optimizer on": str(engine.zero_offload_optimizer().device),
        "weights on": str(engine.zero_offload_param().device),
    }


def test_prepare_twice_in_one_process_gives_the_same_curve(inputs: Path) -> None:
    first, second = run_on_cpu(twice, inputs, processes=1, profile="single")[0]
    assert first["rows"] == second["rows"]


def twice(folder: Path) -> tuple[Any, Any]:
    from ...support.cells import train_recipe

    return train_recipe(cell(folder, "sft-lora")), train_recipe(cell(folder, "sft-lora"))


def own_operation(folder: Path) -> bool:
    """Return whether DeepSpeed compiled its operation for communication inside one machine."""
    from deepspeed.comm import comm

    from ftcli.training.setup import prepare

    prepare(cell(folder, "sft-tied"), cpu=True)
    return comm.cdb.shm_comm_op is not None


def test_dry_run_under_deepspeed_compiles_no_extension(inputs: Path) -> None:
    assert run_on_cpu(own_operation, inputs, processes=2, profile="zero2") == [False, False]
