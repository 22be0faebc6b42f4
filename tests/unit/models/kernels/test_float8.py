"""precision fp8: converted layers, refusals, and a curve near the curve of bf16."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from ftcli.config.compatibility import check_pair
from ftcli.config.profile import load_profile
from ftcli.loop import steps
from ftcli.models.kernels import weight_rounding
from ftcli.models.kernels.float8 import check_float8, check_float8_device, multiply_in_float8
from ftcli.reports.comparison import TOLERANCES
from ftcli.runtime import devices
from ftcli.runtime.errors import InputError
from ftcli.testing import run_on_cpu
from ftcli.training.run import Run
from ftcli.training.setup import prepare

from ....support.cells import cell
from .test_document_attention import tiny
from .test_varlen_attention import recipe

TORCHAO = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
FP8 = recipe("x", precision="fp8")


def test_check_of_fp8_without_package_or_gpu_fails_before_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    real_find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "torchao" else real_find_spec(name)
    )
    monkeypatch.setattr(devices, "count_gpus", lambda: 0)
    lines = [problem.what for problem in check_float8(FP8, cpu=False)]
    assert lines == [
        "precision fp8 needs torchao, which is not installed",
        "precision fp8 needs a GPU that multiplies 8-bit floats",
    ]
    assert len(check_float8(FP8, cpu=True)) == 1
    assert check_float8(recipe("x"), cpu=False) == []
    with_adapter = recipe("x", precision="fp8", adapter={"type": "lora"})
    assert "with an adapter" in check_float8(with_adapter, cpu=True)[-1].what


def test_float8_with_an_older_gpu_is_refused_before_a_model_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda place: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda place: "NVIDIA A100")
    with pytest.raises(InputError, match="NVIDIA A100 cannot multiply 8-bit floats"):
        check_float8_device(FP8, torch.device("cuda", 0))
    check_float8_device(recipe("x"), torch.device("cuda", 0))
    check_float8_device(FP8, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda place: (8, 9))
    check_float8_device(FP8, torch.device("cuda", 0))


def test_deepspeed_is_refused() -> None:
    lines = [problem.what for problem in check_pair(FP8, load_profile("zero3"))]
    assert lines == ["precision is fp8, which was not tested under DeepSpeed"]
    assert check_pair(FP8, load_profile("fsdp")) == []


@TORCHAO
def test_linear_layers_but_the_head_are_converted_and_evaluation_is_not() -> None:
    model, before = tiny("llama"), tiny("llama")
    message = multiply_in_float8(model, FP8, "cpu")
    assert message == [
        "fp8: 21 of 22 linear layers, one scale per tensor; simulated: rounded as on a GPU and multiplied in bfloat16"
    ]
    assert list(model.state_dict()) == list(before.state_dict())
    assert type(model.lm_head) is torch.nn.Linear
    ids = torch.arange(3, 20)[None]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model(ids, use_cache=False).logits, before(ids, use_cache=False).logits)
        model.train()
        assert not torch.equal(model(ids, use_cache=False).logits, before(ids, use_cache=False).logits)


def of_weights(*weights: torch.Tensor, compiled: bool = False) -> list[tuple[torch.Tensor, ...]]:
    """Return the output and the gradients of a linear layer in fp8, for the same inputs and each of the weights."""
    torch.manual_seed(1)
    inputs, results = torch.randn(32, 64), []
    for weight in weights:
        model = torch.nn.Sequential(torch.nn.Linear(64, 48))
        model[0].weight.data.copy_(weight)
        model[0].bias.data.copy_(weight[:, 0])
        multiply_in_float8(model, FP8, "cpu")
        leaf = inputs.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = (torch.compile(model, dynamic=True) if compiled else model)(leaf)
        result.float().pow(2).sum().backward()
        assert leaf.grad is not None and model[0].weight.grad is not None
        results.append((result, leaf.grad, model[0].weight.grad))
    return results


def are_equal(*results: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(*results, strict=True))


WHOLE = torch.randn(48, 64, generator=torch.Generator().manual_seed(2))
GATHERED = WHOLE.bfloat16().float()


@TORCHAO
def test_float8_of_a_weight_gathered_in_bfloat16_is_bit_exact() -> None:
    assert not torch.equal(WHOLE, GATHERED)
    assert are_equal(*of_weights(WHOLE, GATHERED))


@TORCHAO
@pytest.mark.slow
def test_float8_of_a_weight_gathered_in_bfloat16_is_bit_exact_in_compiled_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch._dynamo.reset()
    assert are_equal(*of_weights(WHOLE, GATHERED, compiled=True))
    monkeypatch.setattr(weight_rounding, "round_to_bfloat16", lambda weight: weight.to(torch.bfloat16))
    torch._dynamo.reset()
    assert not are_equal(*of_weights(WHOLE, GATHERED, compiled=True)), "else this test shows nothing"


def test_rounding_of_a_weight_is_that_of_a_cast_and_passes_its_gradient_on() -> None:
    values = torch.tensor([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -3.0e38, 3.4e38, float("inf"), float("nan"), 1e-40])
    weight = values.clone().requires_grad_()
    rounded = weight_rounding.round_to_bfloat16(weight)
    assert torch.equal(rounded.nan_to_num(7), values.bfloat16().nan_to_num(7))
    rounded.backward(torch.arange(8, dtype=torch.bfloat16))
    assert weight.grad is not None and torch.equal(weight.grad, torch.arange(8.0))
    half = values.bfloat16()
    assert weight_rounding.round_to_bfloat16(half) is half, "a gathered weight is not rounded again"


@TORCHAO
def test_float8_of_a_model_without_a_suitable_layer_is_refused() -> None:
    with pytest.raises(InputError, match="no layer of Linear has sizes that are multiples of 16"):
        multiply_in_float8(torch.nn.Linear(12, 32), FP8, "cpu")


def trained(folder: Path, precision: str = "fp8", **changes: Any) -> tuple[Run, list[float]]:
    run = prepare(cell(folder, "sft-untied", precision=precision, train={"max_steps": 12}, **changes), cpu=True)
    return run, [step.loss for step in steps(run)]


@TORCHAO
def test_float8_curve_equals_bf16_within_the_tolerance(inputs: Path) -> None:
    run, losses = trained(inputs)
    assert any(fact.startswith("fp8: ") for fact in run.log_lines)
    assert any("weights float32, compute bfloat16" in fact for fact in run.log_lines)
    _, bf16 = trained(inputs, "bf16")
    assert losses != bf16 and losses[-1] < losses[0]
    assert losses == pytest.approx(bf16, rel=TOLERANCES["fp8"].loss)


def losses_of(folder: Path) -> list[float]:
    return trained(folder)[1]


@TORCHAO
@pytest.mark.slow
@pytest.mark.parametrize("profile", ["ddp", "fsdp"])
def test_float8_on_two_processes_gives_the_curve_of_one(inputs: Path, profile: str) -> None:
    single = losses_of(inputs)
    for rank in run_on_cpu(losses_of, inputs, profile=profile):
        assert rank == pytest.approx(single, rel=TOLERANCES["fp8"].loss)
