"""The effect of the backends' communication settings, on two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ftcli.testing import run_on_cpu

from ...support.cells import cell

pytestmark = pytest.mark.slow


def shards(folder: Path) -> dict[str, list[Any]]:
    """Return which weights are sharded before a backward pass, and which gradients exist before a forward pass."""
    from torch.distributed.tensor import DTensor

    from ftcli.loop import steps
    from ftcli.training.setup import prepare

    run: Any = prepare(cell(folder, "sft-untied", train={"max_steps": 2}), cpu=True)
    assert run.plan.accumulation == 2
    first, last = run.model.model.layers[0], run.model.model.layers[-1]
    seen: dict[str, list[Any]] = {"blocks": [], "gradients": [], "ahead": []}
    beat = run.heartbeat.beat

    def note(phase: str, step: int) -> None:
        if phase == "backward":
            seen["blocks"].append([isinstance(next(b.parameters()), DTensor) for b in (first, last)])
        if phase == "forward":  # everything is in shards again
            seen["gradients"].append(sum(p.grad is not None for p in run.model.parameters()))
        beat(phase, step)

    run.heartbeat.beat = note
    seen["ahead"] = [len(block._get_fsdp_state()._states_to_forward_prefetch) for block in (first, last)]
    next(steps(run))
    seen["parameters"] = [len(list(run.model.parameters()))]
    return seen


def test_fsdp_leaves_the_last_block_gathered_and_frees_gradients_between_micro_batches(inputs: Path) -> None:
    for rank in run_on_cpu(shards, inputs, profile="fsdp"):
        assert rank["blocks"] == [[True, False], [True, False]]
        assert rank["gradients"] == [0, *rank["parameters"]]  # summed and in shards after the first micro-batch
        assert rank["ahead"] == [1, 0]


def order_of_gradients(folder: Path) -> list[str]:
    """Return what happens in the backward passes of a step: a gradient arrives, or the first block is done."""
    from ftcli.loop import steps
    from ftcli.training.setup import prepare

    run: Any = prepare(cell(folder, "sft-untied", precision="bf16", train={"max_steps": 2}), cpu=True)
    assert run.plan.accumulation == 2
    layers = run.hardware.unwrap(run.model).model.layers
    seen: list[str] = []
    layers[0].mlp.register_full_backward_hook(lambda *_: seen.append("first block"))
    layers[-1].mlp.down_proj.weight.register_post_accumulate_grad_hook(lambda _: seen.append("last gradient"))
    next(steps(run))
    return seen


def test_ddp_receives_the_gradients_of_the_last_block_before_the_first_block_is_done(inputs: Path) -> None:
    for rank in run_on_cpu(order_of_gradients, inputs, profile="ddp"):
        assert rank == ["last gradient", "first block"] * 2


def settings(folder: Path) -> dict[str, Any]:
    from ftcli.training.setup import prepare

    run: Any = prepare(cell(folder, "sft-untied", train={"max_steps": 2}), cpu=True)
    plugin = run.hardware.accelerator.state.deepspeed_plugin
    if plugin is None:
        return {"bucket": run.model.bucket_bytes_cap, "views": run.model.gradient_as_bucket_view}
    return {"bucket": run.model.zero_reduce_bucket_size(), "stage": run.model.zero_optimization_stage()}


def test_gradient_bucket_size_is_the_configured_one(inputs: Path) -> None:
    from ftcli.hardware.ddp import BUCKET_MB
    from ftcli.hardware.deepspeed import STAGE_3

    assert run_on_cpu(settings, inputs, profile="ddp") == [{"bucket": BUCKET_MB * 2**20, "views": True}] * 2
    expected = {"bucket": STAGE_3["reduce_bucket_size"], "stage": 3}
    assert run_on_cpu(settings, inputs, profile="zero3") == [expected] * 2
