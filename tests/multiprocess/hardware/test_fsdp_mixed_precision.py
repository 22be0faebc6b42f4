"""FSDP2 sends the weights of autocast's matrix products, and their gradients, in 16 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ftcli.hardware.fsdp_mixed_precision import Float32Sums
from ftcli.testing import run_on_cpu

from ...support.cells import cell
from ...support.patching import patching

NAMES = ("sft-tied", "sft-untied", "sft-lora", "text")


def gathered(folder: Path, precision: str) -> dict[str, dict[str, Any]]:
    """Return for each recipe the dtype of each kind of module's weight in its forward pass, and the losses."""
    from ftcli.loop import steps
    from ftcli.training.setup import prepare

    by_recipe: dict[str, dict[str, Any]] = {}
    for name in NAMES:
        run = prepare(cell(folder, name, precision=precision, train={"max_steps": 3}), cpu=True)
        seen: dict[str, set[str]] = {}

        def look(module: Any, inputs: Any, seen: dict[str, set[str]] = seen) -> None:
            kind = type(module).__name__.removeprefix("FSDP")
            seen.setdefault(kind, set()).add(str(module.weight.dtype).removeprefix("torch."))

        for key, module in run.hardware.unwrap(run.model).named_modules():
            if isinstance(getattr(module, "weight", None), torch.Tensor) and "lora" not in key:
                module.register_forward_pre_hook(look)
        losses = [step.loss for step in steps(run)]
        by_recipe[name] = {kind: " ".join(sorted(dtypes)) for kind, dtypes in seen.items()} | {"losses": losses}
    return by_recipe


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "multiplied"), [("bf16", "bfloat16"), pytest.param("fp32", "float32", marks=pytest.mark.slow)]
)
def test_fsdp_gathers_matrix_weights_in_16_bits_and_the_rest_in_float32(
    precision: str, multiplied: str, inputs: Path
) -> None:
    (single,) = run_on_cpu(gathered, inputs, precision, processes=1, profile="single")
    for rank in run_on_cpu(gathered, inputs, precision, processes=2, profile="fsdp"):
        for name in ("sft-tied", "sft-untied"):
            layers = rank[name]
            assert layers["LlamaRMSNorm"] == layers["Embedding"] == "float32"
            assert layers["Linear"] == " ".join(sorted({multiplied, "float32"}))  # the head stays float32
        assert "float32" in rank["text"]["Linear"], "an encoder has no head like that, and travels as it is"
        for name in NAMES:
            assert rank[name]["losses"] == pytest.approx(single[name]["losses"], rel=1e-4)


@patching
def summed(patch: pytest.MonkeyPatch, folder: Path) -> dict[str, Any]:
    """Return losses and norms with gradients sent in 16 and in 32 bits, and what the first run sent."""
    import torch.distributed as dist

    from ftcli.hardware import fsdp
    from ftcli.loop import steps
    from ftcli.training.setup import prepare

    sent: list[str] = []
    send, results = dist.all_to_all_single, {}

    def watch(output: torch.Tensor, input: torch.Tensor, **how: Any) -> Any:
        sent.append(str(input.dtype).removeprefix("torch."))
        return send(output, input, **how)

    patch.setattr(dist, "all_to_all_single", watch)
    for name, ways in {"half": fsdp.send_gradients_in_16_bits, "whole": lambda model: False}.items():
        patch.setattr(fsdp, "send_gradients_in_16_bits", ways)
        run = prepare(cell(folder, "sft-untied", precision="bf16", train={"max_steps": 4}), cpu=True)
        results[name] = [value for step in steps(run) for value in (step.loss, step.grad_norm)]
    return results | {"sent": sent, "calls": 4 * run.plan.accumulation * run.model.config.num_hidden_layers}


@pytest.mark.parametrize("processes", [2, 4])
def test_fsdp_sends_gradients_in_16_bits_and_sums_in_float32(processes: int, inputs: Path) -> None:
    for rank in run_on_cpu(summed, inputs, processes=processes, profile="fsdp"):
        assert rank["sent"] == ["bfloat16"] * rank["calls"], "once a layer and micro-batch"
        assert rank["half"] == pytest.approx(rank["whole"], rel=2e-6)


def sums_of(dtype: torch.dtype) -> list[list[float]]:
    """Return this rank's shards of a sum and a mean that have more digits than the values sent."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ranks, results = dist.get_world_size(), []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        add = Float32Sums(dtype, ranks)
        add.allocate((3 * ranks,), dtype=torch.float32, device=torch.device("cpu"))  # a step that failed here
        given = add.allocate((3 * ranks,), dtype=torch.float32, device=torch.device("cpu"))
        result = add.allocate((3,), dtype=torch.float32, device=torch.device("cpu"))
        given.fill_(4096.0 if dist.get_rank() == 0 else 1.0)
        add(result, given, dist.group.WORLD, op)
        results.append(result.tolist())
    return results


def test_allocate_with_partly_frozen_layers_distinguishes_send_buffer_and_output() -> None:
    add = Float32Sums(torch.bfloat16, 2)
    room = [
        add.allocate((n,), dtype=torch.float32, device=torch.device("cpu")) for n in (1024, 512, 256, 128, 256, 128)
    ]
    assert [tensor.dtype for tensor in room] == [torch.bfloat16, torch.float32] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reduce_scatter_of_16_bit_gradients_sums_in_float32(dtype: torch.dtype) -> None:
    for rank in run_on_cpu(sums_of, dtype, processes=4):
        assert rank == [[4099.0] * 3, [4099.0 / 4] * 3]


def sends(folder: Path, machines: int) -> bool:
    """Return whether units send 16 bits if the ranks are on this number of machines."""
    import os

    from ftcli.hardware.fsdp_mixed_precision import send_gradients_in_16_bits
    from ftcli.training.setup import prepare

    os.environ["LOCAL_WORLD_SIZE"] = str(2 // machines)
    run = prepare(cell(folder, "sft-untied", precision="bf16", train={"max_steps": 3}), cpu=True)
    return send_gradients_in_16_bits(run.model)


@pytest.mark.parametrize("machines", [1, 2])
def test_fsdp_between_machines_uses_the_default_reduce_scatter(machines: int, inputs: Path) -> None:
    assert run_on_cpu(sends, inputs, machines, processes=2, profile="fsdp") == [machines == 1] * 2


def stepped(folder: Path) -> dict[bool, list[float]]:
    """Return the losses of a run whose AdamW steps shards one by one, and fused, as on GPUs."""
    from ftcli.loop import steps
    from ftcli.training.setup import prepare

    results: dict[bool, list[float]] = {}
    for fused in (False, True):
        run = prepare(cell(folder, "sft-tied", precision="bf16", train={"max_steps": 4}), cpu=True)
        for group in run.optimizer.param_groups:
            group["fused"] = fused
        results[fused] = [step.loss for step in steps(run)]
    return results


def test_fused_adamw_on_shards_equals_the_loop(inputs: Path) -> None:
    one_by_one, fused = run_on_cpu(stepped, inputs, processes=2, profile="fsdp")[0].values()
    assert fused == pytest.approx(one_by_one, rel=1e-5)
