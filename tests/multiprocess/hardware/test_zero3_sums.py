"""Gradient reduction under ZeRO-3: gradients are sent in their own dtype and added in float32."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from ftcli.testing import run_on_cpu

from ...support.cells import cell
from ...support.patching import patching

SIZES = ((7,), (4, 3), (1,), (5, 6), (64,))  # elements that three ranks cannot share out, or fewer than ranks


def pieces_of_means(dtypes: list[str]) -> list[tuple[list[Any], list[Any]]]:
    """Return this rank's shards of averaged gradients by dtype: DeepSpeed's from float32, and ours."""
    import deepspeed
    from deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced

    from ftcli.hardware.cpu_simulation import start_on_cpu
    from ftcli.hardware.zero3_patches import _mean

    start_on_cpu()  # or the next line would compile an extension in C++, which takes a minute or more
    deepspeed.init_distributed("gloo")
    group, rank = torch.distributed.group.WORLD, torch.distributed.get_rank()
    generator, results = torch.Generator().manual_seed(rank), []
    for dtype, sizes in itertools.product(dtypes, (SIZES, SIZES[:1], SIZES[-1:])):
        gradients = [torch.randn(size, generator=generator).to(getattr(torch, dtype)) for size in sizes]
        ours = _mean(gradients, group)
        theirs = reduce_scatter_coalesced([gradient.float() for gradient in gradients], group)
        assert all(shard.dtype == torch.float32 for shard in ours)
        results.append(([shard.tolist() for shard in theirs], [shard.tolist() for shard in ours]))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_mean_of_16_bit_gradients_is_that_of_deepspeed_in_float32(processes: int) -> None:
    for rank in run_on_cpu(pieces_of_means, ["bfloat16", "float16"], processes=processes, profile="zero3"):
        assert len(rank) == 6
        for theirs, ours in rank:
            assert [len(shard) for shard in ours] == [len(shard) for shard in theirs]
            for own, expected in zip(ours, theirs, strict=True):
                assert own == pytest.approx(expected, rel=1e-6, abs=1e-7)


@patching
def sent(patch: pytest.MonkeyPatch, folder: Path, precision: str, machines: int) -> dict[str, Any]:
    """Return losses, gradient bytes sent per step by dtype, whether DeepSpeed's buckets are used, and accumulation."""
    import os

    from deepspeed.runtime.comm import coalesced_collectives

    from ftcli.hardware import deepspeed, zero3_patches
    from ftcli.loop import steps
    from ftcli.training.setup import prepare

    patch.setenv("LOCAL_WORLD_SIZE", str(int(os.environ["WORLD_SIZE"]) // machines))
    patch.setattr(deepspeed, "STAGE_3", {"reduce_bucket_size": 20_000, "stage3_param_persistence_threshold": 100})
    results: Counter[str] = Counter()

    def counting(send: Any, place: int) -> Any:
        def counted(*given: Any, **how: Any) -> Any:
            whole = given[place]
            results[str(whole.dtype).removeprefix("torch.")] += whole.numel() * whole.element_size()
            return send(*given, **how)

        return counted

    sums = counting(coalesced_collectives._torch_reduce_scatter_fn, 0)
    patch.setattr(coalesced_collectives, "_torch_reduce_scatter_fn", sums)
    patch.setattr(zero3_patches.dist, "all_to_all_single", counting(torch.distributed.all_to_all_single, 1))
    run: Any = prepare(cell(folder, "sft-untied", precision=precision, train={"max_steps": 3}), cpu=True)
    losses, each = [], []
    for step in steps(run):
        losses.append((step.loss, step.grad_norm))
        each.append(dict(results))
        results.clear()
    assert each[0] == each[1] == each[2]
    zero = run.model.optimizer
    return {"losses": losses, "bytes": each[0], "buckets": zero.contiguous_gradients, "weights": run.plan.accumulation}


PRECISIONS = ("bf16", "fp16", "fp32")


def sent_in_every_precision(folder: Path) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return precision -> the results of `sent` for one machine and for two."""
    return {precision: (sent(folder, precision, 1), sent(folder, precision, 2)) for precision in PRECISIONS}


@pytest.fixture(scope="module")
def traffic(inputs: Path) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    return run_on_cpu(sent_in_every_precision, inputs, processes=2, profile="zero3")[0]


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_zero3_sends_gradients_of_products_in_16_bits_inside_of_a_machine(
    precision: str, traffic: dict[str, tuple[dict[str, Any], dict[str, Any]]]
) -> None:
    """Two machines use DeepSpeed's float32 buckets. Their curve is bit-identical to the curve of one machine."""
    near, far = traffic[precision]
    assert near["losses"] == far["losses"]
    assert far["buckets"] and set(far["bytes"]) == {"float32"}
    if precision == "fp32":
        assert near == far
        return
    assert not near["buckets"]
    half = {"bf16": "bfloat16", "fp16": "float16"}[precision]
    assert near["bytes"][half] > 0, "embeddings, head and norms are summed in float32"
    assert 2 * near["bytes"][half] + near["bytes"]["float32"] == far["bytes"]["float32"]
