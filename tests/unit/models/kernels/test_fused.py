"""A compiled formula equals its plain form. If compilation fails, the plain form runs and a line is logged."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from ftcli.hardware.gradient_reduction import mean_of_rows, sum_of_rows
from ftcli.models.kernels.compile import COMPILERS
from ftcli.models.kernels.fused import Fused
from ftcli.models.kernels.linear_cross_entropy import nll_by_kernel, plain_nll
from ftcli.models.kernels.linear_regularizers import regularized_in_one_pass
from ftcli.training.optim import adamw_bf16
from ftcli.training.optim.adamw_bf16 import KINDS, AdamWBf16, join

COMPILER = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="needs a C++ compiler")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile formulas on the CPU too."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(Fused, "DEVICE_TYPES", ("cpu",))


def rows(count: int, dtype: torch.dtype, *, vocabulary: int = 96) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, of which some are large, targets of which some are masked, and factors."""
    draw = torch.Generator().manual_seed(count)
    logits = (torch.randn(count, vocabulary, generator=draw) * 8).to(dtype)
    targets = torch.randint(0, vocabulary, (count,), generator=draw)
    targets[count // 2] = -100
    return logits, targets, torch.rand(count, generator=draw)


def both(formula: Any, plain: Any, tensors: tuple[Tensor | None, ...]) -> list[Tensor]:
    """Return the result of each function, and its first tensor after the call."""
    results = []
    for function in (formula, plain):
        first, *rest = (None if tensor is None else tensor.clone() for tensor in tensors)
        results += [function(first, *rest), first]
    return results


def broken(first: Tensor, second: Tensor | None) -> Tensor:
    torch._dynamo.graph_break()
    return first + 1


def test_fused_falls_back_to_eager_and_logs_once(on_cpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    fused = Fused(broken, lambda first, second: first + 2)
    assert [fused(torch.ones(2), None).tolist() for _ in range(3)] == [[3.0, 3.0]] * 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ftcli: broken is not compiled: same results, but slower (")


def test_fused_with_a_device_without_memory_is_not_mistaken_for_a_missing_compiler(on_cpu: None) -> None:
    def full(first: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    fused = Fused(broken)
    vars(fused)["_compiled"] = full
    with pytest.raises(torch.OutOfMemoryError):
        fused(torch.ones(2))
    assert fused.problem is None


def test_fused_with_compilation_disabled_runs_the_plain_form(on_cpu: None) -> None:
    fused = Fused(regularized_in_one_pass, lambda *tensors: "plain")
    with torch._dynamo.config.patch(disable=True):
        assert fused(torch.ones(2, 2), torch.ones(2)) == "plain"
    assert fused.problem is None


def test_fused_on_cpu_compiles_nothing() -> None:
    assert Fused(regularized_in_one_pass, lambda *tensors: "plain")(torch.ones(2, 2), torch.ones(2)) == "plain"


def test_fused_formula_with_a_kernel_of_its_own_is_called_as_it_is(on_cpu: None) -> None:
    fused = Fused(lambda first: first * 2, lambda first: "plain", has_kernel=True)
    with torch._dynamo.config.patch(disable=True):
        assert fused(torch.ones(2)).tolist() == [2.0, 2.0]
    assert not counters["stats"]


def test_head_without_triton_for_its_device_runs_the_plain_form_and_logs_once(
    on_cpu: None, capsys: pytest.CaptureFixture[str]
) -> None:
    fused = Fused(nll_by_kernel, plain_nll, has_kernel=True)
    for _ in range(2):
        nll, left, plain, expected = both(fused, plain_nll, rows(7, torch.bfloat16))
        assert torch.equal(nll, plain) and torch.equal(left, expected)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ftcli: nll_by_kernel is not compiled: same results, but slower (")


@COMPILER
@pytest.mark.slow
def test_fused_one_compiled_kernel_of_the_head_serves_any_number_of_rows(on_cpu: None) -> None:
    fused = Fused(regularized_in_one_pass)
    for dtype in (torch.float32, torch.bfloat16):
        for count in (5, 8, 31):
            logits, targets, factors = rows(count, dtype)
            tensors = (logits, targets, torch.stack([factors, factors / 2, factors / 8], dim=-1))
            with torch.autocast("cpu", enabled=count != 8):
                values, left, plain, expected = both(fused, regularized_in_one_pass, tensors)
            torch.testing.assert_close(values, plain, rtol=1e-6, atol=1e-5)
            torch.testing.assert_close(left, expected)
    assert fused.problem is None
    assert counters["stats"]["unique_graphs"] == 2, "one a dtype"


@COMPILER
@pytest.mark.slow
def test_fused_one_compiled_step_of_adamw_serves_weights_of_any_size(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = torch.Generator().manual_seed(0)
    sizes = [(48, 3), (64,), (160, 33), (7,), (33, 3)]  # three that rows of 16 hold, and two that they do not
    start = [torch.randn(size, generator=draw).bfloat16() for size in sizes]
    gradients = [[torch.randn(size, generator=draw).bfloat16() for size in sizes] for _ in range(3)]

    def walk() -> list[Tensor]:
        weights = [torch.nn.Parameter(weight.clone()) for weight in start]
        optimizer = AdamWBf16([{"params": weights}], lr=1e-3, weight_decay=0.1)
        for step in gradients:
            for weight, gradient in zip(weights, step, strict=True):
                weight.grad = gradient
            optimizer.step()
        assert list(optimizer.state[weights[0]]) == [*KINDS, "step"]
        return [join(weight.detach(), optimizer.state[weight]["remainder"]) for weight in weights]

    step = Fused(adamw_bf16.update)
    monkeypatch.setattr(adamw_bf16, "_step", step)
    compiled = walk()
    assert step.problem is None
    assert counters["stats"]["unique_graphs"] == 2, "one of rows of 16, one of single elements"
    monkeypatch.setattr(Fused, "DEVICE_TYPES", ())
    for actual, expected in zip(compiled, walk(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-8)


@COMPILER
@pytest.mark.slow
@pytest.mark.parametrize("formula", [sum_of_rows, mean_of_rows])
def test_fused_sum_over_ranks_rounds_nothing_to_16_bits(on_cpu: None, formula: Any) -> None:
    fused, draw = Fused(formula), torch.Generator().manual_seed(0)
    for size in ((5, 16), (80, 16), (7, 1)):
        parts = torch.randn(3, *size, generator=draw).bfloat16()
        expected = parts.double().sum(0) if formula is sum_of_rows else parts.double().mean(0)
        out = torch.empty(size)
        assert fused(out, *parts).data_ptr() == out.data_ptr()
        torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)
    assert fused.problem is None
    assert counters["stats"]["unique_graphs"] == 2, "one of rows of 16, one of single elements"
