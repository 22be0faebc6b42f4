"""What travels between ranks in 16 bits under FSDP2 is what autocast multiplies in them, and its gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ftcli.hardware.fsdp_units import Float32Sums
from ftcli.testing import run_on_cpu

from .cells import cell, write_inputs

NAMES = ("sft-tied", "sft-untied", "sft-lora", "text")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


def gathered(folder: Path, precision: str) -> dict[str, dict[str, Any]]:
    """Return of each recipe in which dtype each kind of module had its weight while it computed, and the losses."""
    from ftcli.loop import steps
    from ftcli.run import prepare

    found: dict[str, dict[str, Any]] = {}
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
        found[name] = {kind: " ".join(sorted(dtypes)) for kind, dtypes in seen.items()} | {"losses": losses}
    return found


@pytest.mark.parametrize(("precision", "multiplied"), [("bf16", "bfloat16"), ("fp32", "float32")])
def test_products_of_layers_travel_as_they_are_multiplied_and_the_rest_as_it_is(
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


def summed(folder: Path) -> dict[str, Any]:
    """Return two runs' losses and norms, of gradients sent in 16 bits and in 32, and what the first sent."""
    import torch.distributed as dist

    from ftcli.hardware import fsdp
    from ftcli.loop import steps
    from ftcli.run import prepare

    sent: list[str] = []
    send, found = dist.all_to_all_single, {}

    def watch(output: torch.Tensor, input: torch.Tensor, **how: Any) -> Any:
        sent.append(str(input.dtype).removeprefix("torch."))
        return send(output, input, **how)

    dist.all_to_all_single = watch
    for name, ways in {"half": fsdp.send_gradients_in_16_bits, "whole": lambda model: False}.items():
        fsdp.send_gradients_in_16_bits = ways
        run = prepare(cell(folder, "sft-untied", precision="bf16", train={"max_steps": 4}), cpu=True)
        found[name] = [value for step in steps(run) for value in (step.loss, step.grad_norm)]
    return found | {"sent": sent, "calls": 4 * run.plan.accumulation * run.model.config.num_hidden_layers}


@pytest.mark.parametrize("processes", [2, 4])
def test_gradients_of_products_are_sent_in_16_bits_and_summed_in_32(processes: int, inputs: Path) -> None:
    for rank in run_on_cpu(summed, inputs, processes=processes, profile="fsdp"):
        assert rank["sent"] == ["bfloat16"] * rank["calls"], "once a layer and micro-batch"
        assert rank["half"] == pytest.approx(rank["whole"], rel=2e-6)


def sums_of(dtype: torch.dtype) -> list[list[float]]:
    """Return this rank's parts of a sum and a mean that have more digits than what is sent."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ranks, found = dist.get_world_size(), []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        add = Float32Sums(dtype, ranks)
        add.allocate((3 * ranks,), dtype=torch.float32, device=torch.device("cpu"))  # a step that failed here
        given = add.allocate((3 * ranks,), dtype=torch.float32, device=torch.device("cpu"))
        result = add.allocate((3,), dtype=torch.float32, device=torch.device("cpu"))
        given.fill_(4096.0 if dist.get_rank() == 0 else 1.0)
        add(result, given, dist.group.WORLD, op)
        found.append(result.tolist())
    return found


def test_what_is_sent_is_told_from_its_sum_whatever_part_of_a_layer_has_gradients() -> None:
    add = Float32Sums(torch.bfloat16, 2)
    room = [
        add.allocate((n,), dtype=torch.float32, device=torch.device("cpu")) for n in (1024, 512, 256, 128, 256, 128)
    ]
    assert [tensor.dtype for tensor in room] == [torch.bfloat16, torch.float32] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sum_over_ranks_keeps_what_16_bits_would_round(dtype: torch.dtype) -> None:
    for found in run_on_cpu(sums_of, dtype, processes=4):
        assert found == [[4099.0] * 3, [4099.0 / 4] * 3]


def sends(folder: Path, machines: int) -> bool:
    """Say whether units send 16 bits where the ranks are in so many machines."""
    import os

    from ftcli.hardware.fsdp_units import send_gradients_in_16_bits
    from ftcli.run import prepare

    os.environ["LOCAL_WORLD_SIZE"] = str(2 // machines)
    run = prepare(cell(folder, "sft-untied", precision="bf16", train={"max_steps": 3}), cpu=True)
    return send_gradients_in_16_bits(run.model)


@pytest.mark.parametrize("machines", [1, 2])
def test_between_machines_gradients_are_summed_by_the_ring(machines: int, inputs: Path) -> None:
    assert run_on_cpu(sends, inputs, machines, processes=2, profile="fsdp") == [machines == 1] * 2


def stepped(folder: Path) -> dict[bool, list[float]]:
    """Return the losses of a run whose AdamW steps shards one by one, and fused, as on GPUs."""
    from ftcli.loop import steps
    from ftcli.run import prepare

    found: dict[bool, list[float]] = {}
    for fused in (False, True):
        run = prepare(cell(folder, "sft-tied", precision="bf16", train={"max_steps": 4}), cpu=True)
        for group in run.optimizer.param_groups:
            group["fused"] = fused
        found[fused] = [step.loss for step in steps(run)]
    return found


def test_a_fused_adamw_steps_shards_as_one_that_goes_through_them(inputs: Path) -> None:
    one_by_one, fused = run_on_cpu(stepped, inputs, processes=2, profile="fsdp")[0].values()
    assert fused == pytest.approx(one_by_one, rel=1e-5)
