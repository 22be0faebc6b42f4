"""What a step of ZeRO-3 is spared: a second set of weights, waiting for the device, sums for each group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ftcli.testing import run_on_cpu

from .cells import cell, write_inputs

STEPS = 4


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


def held(folder: Path) -> dict[str, tuple[bool, bool]]:
    """Return of each precision whether masters lie where pieces do after a step, and whether a step moved them."""
    from ftcli.loop import steps
    from ftcli.run import prepare

    found = {}
    for precision in ("fp32", "bf16"):
        run: Any = prepare(cell(folder, "sft-untied", precision=precision, train={"max_steps": 3}), cpu=True)
        zero = run.model.optimizer
        before = [piece.clone() for piece in zero.fp16_partitioned_groups_flat]
        list(steps(run))
        pairs = list(zip(zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat, strict=True))
        same = all(master.data_ptr() == piece.data_ptr() for master, piece in pairs)
        moved = not any(torch.equal(piece, old) for (_, piece), old in zip(pairs, before, strict=True))
        found[precision] = (same, moved)
    return found


@pytest.mark.parametrize("profile", ["zero3", pytest.param("zero3_offload", marks=pytest.mark.slow)])
def test_what_is_stepped_is_what_is_gathered_and_there_is_no_second_set(profile: str, inputs: Path) -> None:
    for rank in run_on_cpu(held, inputs, processes=2, profile=profile):
        assert rank == {"fp32": (True, True), "bf16": (True, True)}


def spared(folder: Path, *, hastened: bool = True) -> dict[str, Any]:
    """Return the curve of a run with several groups of weights, and what its steps waited for and still had whole."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    from ftcli.hardware import deepspeed, zero3_steps
    from ftcli.loop import steps
    from ftcli.run import prepare

    deepspeed.STAGE_3 = {"sub_group_size": 5000, "stage3_param_persistence_threshold": 100}
    if not hastened:
        deepspeed.hasten = lambda engine: zero3_steps._step_what_is_gathered(engine.optimizer)
    found: dict[str, Any] = {"waits": [], "whole": [], "behind": [], "sums": []}
    device: Any = get_accelerator()
    device.synchronize = lambda *_: found["waits"].append(1)
    run: Any = prepare(cell(folder, "sft-untied", train={"max_steps": STEPS}), cpu=True)
    zero = run.model.optimizer
    step, behind = zero.step, zero.independent_gradient_partition_epilogue
    sum_up = torch.distributed.all_reduce

    def count() -> int:
        return sum(weight.ds_status == ZeroParamStatus.AVAILABLE for weight in run.model.parameters())

    def counted_step() -> None:
        found["whole"].append(count())
        before = len(found["sums"])
        torch.distributed.all_reduce = lambda *a, **k: (found["sums"].append(1), sum_up(*a, **k))[1]
        step()
        torch.distributed.all_reduce = sum_up
        found["sums"][before:] = [len(found["sums"]) - before]

    def counted_behind() -> None:
        behind()
        found["behind"].append(count())

    zero.step, zero.independent_gradient_partition_epilogue = counted_step, counted_behind
    found["losses"] = [(step.loss, step.grad_norm) for step in steps(run)]
    return found | {"groups": len(zero.fp16_groups), "micro-batches": run.plan.accumulation}


def test_no_step_waits_for_the_device_to_measure_a_speed_that_nobody_reads(inputs: Path) -> None:
    for rank in run_on_cpu(spared, inputs, processes=2, profile="zero3"):
        assert len(rank["losses"]) == STEPS and rank["waits"] == []


def test_small_weights_are_let_go_of_before_a_step_and_not_between_its_micro_batches(inputs: Path) -> None:
    for rank in run_on_cpu(spared, inputs, processes=2, profile="zero3"):
        assert rank["whole"] == [0] * STEPS
        several = rank["micro-batches"]
        assert several > 1
        assert [whole > 0 for whole in rank["behind"]] == ([True] * (several - 1) + [False]) * STEPS


def test_the_norm_is_one_sum_over_ranks_and_the_curve_is_that_of_deepspeed(inputs: Path) -> None:
    ours = run_on_cpu(spared, inputs, processes=2, profile="zero3")[0]
    theirs = run_on_cpu(left_alone, inputs, processes=2, profile="zero3")[0]
    assert ours["groups"] > 1 and ours["sums"] == [1] * STEPS
    assert min(theirs["sums"]) >= theirs["groups"] == ours["groups"] and min(theirs["whole"]) > 0
    for (loss, norm), (same_loss, same_norm) in zip(ours["losses"], theirs["losses"], strict=True):
        assert loss == pytest.approx(same_loss, rel=1e-6)
        assert norm == pytest.approx(same_norm, rel=1e-5)  # DeepSpeed adds up in float64


def left_alone(folder: Path) -> dict[str, Any]:
    """Return what `spared` does of DeepSpeed as it is."""
    return spared(folder, hastened=False)
