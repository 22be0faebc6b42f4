"""precision fp8: which layers, what is refused where, and a curve beside that of bf16."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from ftcli import devices
from ftcli.comparison import TOLERANCES
from ftcli.errors import InputError
from ftcli.float8 import check_float8, check_float8_device, multiply_in_float8
from ftcli.loop import steps
from ftcli.profiles import check_pair, load_profile
from ftcli.run import Run, prepare
from ftcli.testing import run_on_cpu

from ..multiprocess.cells import cell, write_inputs
from .test_attention import tiny
from .test_attention_kernels import recipe

TORCHAO = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
FP8 = recipe("x", precision="fp8")


def test_a_machine_without_the_package_or_a_gpu_is_told_before_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "torchao" else found(name))
    monkeypatch.setattr(devices, "count_gpus", lambda: 0)
    told = [problem.what for problem in check_float8(FP8, cpu=False)]
    assert told == [
        "precision fp8 needs torchao, which is not installed",
        "precision fp8 needs a GPU that multiplies 8-bit floats",
    ]
    assert len(check_float8(FP8, cpu=True)) == 1
    assert check_float8(recipe("x"), cpu=False) == []
    with_adapter = recipe("x", precision="fp8", adapter={"type": "lora"})
    assert "with an adapter" in check_float8(with_adapter, cpu=True)[-1].what


def test_an_older_gpu_is_refused_before_a_model_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda place: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda place: "NVIDIA A100")
    with pytest.raises(InputError, match="NVIDIA A100 cannot multiply 8-bit floats"):
        check_float8_device(FP8, torch.device("cuda", 0))
    check_float8_device(recipe("x"), torch.device("cuda", 0))
    check_float8_device(FP8, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda place: (8, 9))
    check_float8_device(FP8, torch.device("cuda", 0))


def test_deepspeed_is_refused() -> None:
    told = [problem.what for problem in check_pair(FP8, load_profile("zero3"))]
    assert told == ["precision is fp8, which is not known to train the same under DeepSpeed"]
    assert check_pair(FP8, load_profile("fsdp")) == []


@TORCHAO
def test_linear_layers_but_the_head_are_converted_and_evaluation_is_not() -> None:
    model, before = tiny("llama"), tiny("llama")
    told = multiply_in_float8(model, FP8, "cpu")
    assert told == [
        "fp8: 21 of 22 linear layers, one scale for each tensor; a rehearsal, rounded as on a GPU and multiplied in "
        "bfloat16"
    ]
    assert list(model.state_dict()) == list(before.state_dict())
    assert type(model.lm_head) is torch.nn.Linear
    ids = torch.arange(3, 20)[None]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model(ids, use_cache=False).logits, before(ids, use_cache=False).logits)
        model.train()
        assert not torch.equal(model(ids, use_cache=False).logits, before(ids, use_cache=False).logits)


@TORCHAO
def test_a_weight_that_travelled_in_bfloat16_gives_the_same_numbers_to_the_last_bit() -> None:
    torch.manual_seed(1)
    inputs, found = torch.randn(32, 64), []
    whole = torch.randn(48, 64)
    for weight in (whole, whole.bfloat16().float()):
        model = torch.nn.Sequential(torch.nn.Linear(64, 48))
        model[0].weight.data.copy_(weight)
        model[0].bias.data.zero_()
        multiply_in_float8(model, FP8, "cpu")
        asked = inputs.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = model(asked)
        result.float().pow(2).sum().backward()
        found.append((result, asked.grad, model[0].weight.grad))
    assert not torch.equal(whole, whole.bfloat16().float())
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@TORCHAO
def test_a_model_with_no_layer_that_fits_is_refused() -> None:
    with pytest.raises(InputError, match="no layer of Linear has sizes that are multiples of 16"):
        multiply_in_float8(torch.nn.Linear(12, 32), FP8, "cpu")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


def trained(folder: Path, precision: str = "fp8", **changes: Any) -> tuple[Run, list[float]]:
    run = prepare(cell(folder, "sft-untied", precision=precision, train={"max_steps": 12}, **changes), cpu=True)
    return run, [step.loss for step in steps(run)]


@TORCHAO
def test_the_curve_is_that_of_bf16_within_the_tolerance_of_fp8(inputs: Path) -> None:
    run, losses = trained(inputs)
    assert any(fact.startswith("fp8: ") for fact in run.facts)
    assert any("weights float32, compute bfloat16" in fact for fact in run.facts)
    _, bf16 = trained(inputs, "bf16")
    assert losses != bf16 and losses[-1] < losses[0]
    assert losses == pytest.approx(bf16, rel=TOLERANCES["fp8"].loss)


def losses_of(folder: Path) -> list[float]:
    return trained(folder)[1]


@TORCHAO
@pytest.mark.slow
@pytest.mark.parametrize("profile", ["ddp", "fsdp"])
def test_two_processes_give_the_curve_of_one(inputs: Path, profile: str) -> None:
    single = losses_of(inputs)
    for found in run_on_cpu(losses_of, inputs, profile=profile):
        assert found == pytest.approx(single, rel=TOLERANCES["fp8"].loss)
