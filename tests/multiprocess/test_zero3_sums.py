"""Sums of gradients under ZeRO-3: sent as they come, added up in float32."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from ftcli.testing import run_on_cpu

from .cells import cell, write_inputs

SIZES = ((7,), (4, 3), (1,), (5, 6), (64,))  # elements that three ranks cannot share out, or fewer than ranks


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


def pieces_of_means(dtype: str) -> list[tuple[list[Any], list[Any]]]:
    """Return of one gradient and of several the pieces of this rank, DeepSpeed's from float32 and ours."""
    import deepspeed
    from deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced

    from ftcli.hardware.zero3_sums import _mean

    deepspeed.init_distributed("gloo")
    group, rank = torch.distributed.group.WORLD, torch.distributed.get_rank()
    generator, found = torch.Generator().manual_seed(rank), []
    for sizes in (SIZES, SIZES[:1], SIZES[-1:]):
        gradients = [torch.randn(size, generator=generator).to(getattr(torch, dtype)) for size in sizes]
        ours = _mean(gradients, group)
        theirs = reduce_scatter_coalesced([gradient.float() for gradient in gradients], group)
        assert all(piece.dtype == torch.float32 for piece in ours)
        found.append(([piece.tolist() for piece in theirs], [piece.tolist() for piece in ours]))
    return found


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_pieces_of_the_mean_are_those_of_deepspeed(dtype: str, processes: int) -> None:
    for rank in run_on_cpu(pieces_of_means, dtype, processes=processes, profile="zero3"):
        for theirs, ours in rank:
            assert [len(piece) for piece in ours] == [len(piece) for piece in theirs]
            for own, wanted in zip(ours, theirs, strict=True):
                assert own == pytest.approx(wanted, rel=1e-6, abs=1e-7)


def sent(folder: Path, precision: str, machines: int) -> dict[str, Any]:
    """Return the losses of a run, bytes that one of its steps sent of gradients, by dtype, and the optimizer's word."""
    import os

    from deepspeed.runtime.comm import coalesced_collectives

    from ftcli.hardware import deepspeed, zero3_sums
    from ftcli.loop import steps
    from ftcli.run import prepare

    os.environ["LOCAL_WORLD_SIZE"] = str(int(os.environ["WORLD_SIZE"]) // machines)
    deepspeed.STAGE_3 = {"reduce_bucket_size": 20_000, "stage3_param_persistence_threshold": 100}
    found: Counter[str] = Counter()

    def counting(send: Any, place: int) -> Any:
        def counted(*given: Any, **how: Any) -> Any:
            whole = given[place]
            found[str(whole.dtype).removeprefix("torch.")] += whole.numel() * whole.element_size()
            return send(*given, **how)

        return counted

    coalesced_collectives._torch_reduce_scatter_fn = counting(coalesced_collectives._torch_reduce_scatter_fn, 0)
    zero3_sums.dist.all_to_all_single = counting(torch.distributed.all_to_all_single, 1)
    run: Any = prepare(cell(folder, "sft-untied", precision=precision, train={"max_steps": 3}), cpu=True)
    losses, each = [], []
    for step in steps(run):
        losses.append((step.loss, step.grad_norm))
        each.append(dict(found))
        found.clear()
    assert each[0] == each[1] == each[2]
    zero = run.model.optimizer
    return {"losses": losses, "bytes": each[0], "buckets": zero.contiguous_gradients, "weights": run.plan.accumulation}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_gradients_of_products_are_sent_in_16_bits_inside_of_a_machine(precision: str, inputs: Path) -> None:
    """Of two machines, as of one where DeepSpeed's buckets make them float32, the curve is the same to the last bit."""
    near = run_on_cpu(sent, inputs, precision, 1, processes=2, profile="zero3")[0]
    far = run_on_cpu(sent, inputs, precision, 2, processes=2, profile="zero3")[0]
    assert near["losses"] == far["losses"]
    assert far["buckets"] and set(far["bytes"]) == {"float32"}
    if precision == "fp32":
        assert near == far
        return
    assert not near["buckets"]
    half = {"bf16": "bfloat16", "fp16": "float16"}[precision]
    assert near["bytes"][half] > 0, "embeddings, head and norms are summed in float32"
    assert 2 * near["bytes"][half] + near["bytes"]["float32"] == far["bytes"]["float32"]
