"""Patches of the ZeRO-3 step: no second copy of weights, no wait for the device, one gradient norm for all groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ftcli.testing import run_on_cpu

from ...support.cells import cell
from ...support.patching import patching

STEPS = 4


def master_weights(folder: Path) -> dict[str, tuple[bool, bool]]:
    """Return for each precision whether master weights share the shards' memory, and whether a step changed them."""
    from ftcli.loop import steps
    from ftcli.training.setup import prepare

    results = {}
    for precision in ("fp32", "bf16"):
        run: Any = prepare(cell(folder, "sft-untied", precision=precision, train={"max_steps": 3}), cpu=True)
        zero = run.model.optimizer
        before = [shard.clone() for shard in zero.fp16_partitioned_groups_flat]
        list(steps(run))
        pairs = list(zip(zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat, strict=True))
        same = all(master.data_ptr() == shard.data_ptr() for master, shard in pairs)
        moved = not any(torch.equal(shard, old) for (_, shard), old in zip(pairs, before, strict=True))
        results[precision] = (same, moved)
    return results


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["zero3", pytest.param("zero3_offload", marks=pytest.mark.slow)])
def test_zero3_step_updates_the_gathered_weights_without_a_second_copy(profile: str, inputs: Path) -> None:
    for rank in run_on_cpu(master_weights, inputs, processes=2, profile=profile):
        assert rank == {"fp32": (True, True), "bf16": (True, True)}


@patching
def spared(patch: pytest.MonkeyPatch, folder: Path, *, hastened: bool = True) -> dict[str, Any]:
    """Return the curve of a run with several parameter groups, its waits, and the weights left gathered."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    from ftcli.hardware import deepspeed, zero3_patches
    from ftcli.loop import steps
    from ftcli.training.setup import prepare

    patch.setattr(deepspeed, "STAGE_3", {"sub_group_size": 5000, "stage3_param_persistence_threshold": 100})
    if not hastened:
        share_only = lambda engine, skips: zero3_patches._share_master_weights(engine.optimizer)  # noqa: E731
        patch.setattr(deepspeed, "install_step_patches", share_only)
    results: dict[str, Any] = {"waits": [], "whole": [], "behind": [], "sums": []}
    device: Any = get_accelerator()
    patch.setattr(device, "synchronize", lambda *_: results["waits"].append(1))
    run: Any = prepare(cell(folder, "sft-untied", train={"max_steps": STEPS}), cpu=True)
    zero = run.model.optimizer
    step, behind = zero.step, zero.independent_gradient_partition_epilogue
    sum_up = torch.distributed.all_reduce

    def count() -> int:
        return sum(weight.ds_status == ZeroParamStatus.AVAILABLE for weight in run.model.parameters())

    def counted_step() -> None:
        results["whole"].append(count())
        before = len(results["sums"])
        with pytest.MonkeyPatch.context() as during:
            during.setattr(
                torch.distributed, "all_reduce", lambda *a, **k: (results["sums"].append(1), sum_up(*a, **k))[1]
            )
            step()
        results["sums"][before:] = [len(results["sums"]) - before]

    def counted_behind() -> None:
        behind()
        results["behind"].append(count())

    zero.step, zero.independent_gradient_partition_epilogue = counted_step, counted_behind
    results["losses"] = [(step.loss, step.grad_norm) for step in steps(run)]
    return results | {"groups": len(zero.fp16_groups), "micro-batches": run.plan.accumulation}


@pytest.fixture(scope="module")
def ranks(inputs: Path) -> list[dict[str, Any]]:
    """Return what `spared` returns on each of two ranks."""
    return run_on_cpu(spared, inputs, processes=2, profile="zero3")


@pytest.mark.slow
def test_zero3_step_does_not_synchronise_for_throughput_timers(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert len(rank["losses"]) == STEPS and rank["waits"] == []


@pytest.mark.slow
def test_zero3_step_releases_small_weights_before_the_step_only(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["whole"] == [0] * STEPS
        several = rank["micro-batches"]
        assert several > 1
        assert [whole > 0 for whole in rank["behind"]] == ([True] * (several - 1) + [False]) * STEPS


def test_zero3_step_norm_is_one_sum_over_ranks_and_the_curve_is_that_of_deepspeed(
    ranks: list[dict[str, Any]], inputs: Path
) -> None:
    ours = ranks[0]
    theirs = run_on_cpu(left_alone, inputs, processes=2, profile="zero3")[0]
    assert ours["groups"] > 1 and ours["sums"] == [1] * STEPS
    assert min(theirs["sums"]) >= theirs["groups"] == ours["groups"] and min(theirs["whole"]) > 0
    for (loss, norm), (same_loss, same_norm) in zip(ours["losses"], theirs["losses"], strict=True):
        assert loss == pytest.approx(same_loss, rel=1e-6)
        assert norm == pytest.approx(same_norm, rel=1e-5)  # DeepSpeed adds up in float64


def left_alone(folder: Path) -> dict[str, Any]:
    """Return the results of `spared` with only one of the patches: master weights share the shards' memory."""
    return spared(folder, hastened=False)
