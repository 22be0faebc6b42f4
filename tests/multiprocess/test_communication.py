"""When ranks communicate: what the backends' settings really do on two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ftcli.testing import run_on_cpu

from .cells import cell, write_inputs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


def shards(folder: Path) -> dict[str, list[Any]]:
    """Return what is in shards when a backward pass begins, and which gradients are there before a forward pass."""
    from torch.distributed.tensor import DTensor

    from ftcli.loop import steps
    from ftcli.run import prepare

    run: Any = prepare(cell(folder, "sft-untied", train={"max_steps": 2}), cpu=True)
    assert run.plan.accumulation == 2
    first, last = run.model.model.layers[0], run.model.model.layers[-1]
    found: dict[str, list[Any]] = {"blocks": [], "gradients": [], "ahead": []}
    beat = run.heart.beat

    def note(phase: str, step: int) -> None:
        if phase == "backward":
            found["blocks"].append([isinstance(next(b.parameters()), DTensor) for b in (first, last)])
        if phase == "forward":  # everything is in shards again
            found["gradients"].append(sum(p.grad is not None for p in run.model.parameters()))
        beat(phase, step)

    run.heart.beat = note
    found["ahead"] = [len(block._get_fsdp_state()._states_to_forward_prefetch) for block in (first, last)]
    next(steps(run))
    found["parameters"] = [len(list(run.model.parameters()))]
    return found


def test_fsdp_keeps_the_last_block_whole_and_holds_no_whole_gradients_between_micro_batches(inputs: Path) -> None:
    for found in run_on_cpu(shards, inputs, profile="fsdp"):
        assert found["blocks"] == [[True, False], [True, False]]
        assert found["gradients"] == [0, *found["parameters"]]  # summed and in shards after the first micro-batch
        assert found["ahead"] == [1, 0]


def settings(folder: Path) -> dict[str, Any]:
    from ftcli.run import prepare

    run: Any = prepare(cell(folder, "sft-untied", train={"max_steps": 2}), cpu=True)
    plugin = run.hardware.accelerator.state.deepspeed_plugin
    if plugin is None:
        return {"bucket": run.model.bucket_bytes_cap, "views": run.model.gradient_as_bucket_view}
    return {"bucket": run.model.zero_reduce_bucket_size(), "stage": run.model.zero_optimization_stage()}


def test_gradients_are_summed_in_buckets_of_the_size_that_is_written_down(inputs: Path) -> None:
    from ftcli.hardware.ddp import BUCKET_MB
    from ftcli.hardware.deepspeed import STAGE_3

    assert run_on_cpu(settings, inputs, profile="ddp") == [{"bucket": BUCKET_MB * 2**20, "views": True}] * 2
    wanted = {"bucket": STAGE_3["reduce_bucket_size"], "stage": 3}
    assert run_on_cpu(settings, inputs, profile="zero3") == [wanted] * 2
