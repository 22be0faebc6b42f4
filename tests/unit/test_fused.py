"""A formula compiled gives what its plain form gives; what cannot be compiled runs as it stands, and a line says so."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from ftcli import adamw_bf16
from ftcli.adamw_bf16 import KINDS, AdamWBf16, join
from ftcli.compilation import COMPILERS
from ftcli.fused import Fused
from ftcli.linear_nll import nll_in_one_pass, plain_nll

COMPILER = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="needs a C++ compiler")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let formulas be compiled on the CPU, as they are on GPUs."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(Fused, "PLACES", ("cpu",))


def rows(count: int, dtype: torch.dtype, *, vocabulary: int = 96) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, of which some are large, targets of which some are masked, and factors."""
    draw = torch.Generator().manual_seed(count)
    logits = (torch.randn(count, vocabulary, generator=draw) * 8).to(dtype)
    targets = torch.randint(0, vocabulary, (count,), generator=draw)
    targets[count // 2] = -100
    return logits, targets, torch.rand(count, generator=draw)


def both(formula: Any, plain: Any, tensors: tuple[Tensor | None, ...]) -> list[Tensor]:
    """Return what each gives and what it leaves in its first tensor."""
    found = []
    for function in (formula, plain):
        first, *rest = (None if tensor is None else tensor.clone() for tensor in tensors)
        found += [function(first, *rest), first]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("trained", [True, False])
def test_the_formula_of_the_head_gives_the_numbers_of_its_plain_form(dtype: torch.dtype, trained: bool) -> None:
    logits, targets, factors = rows(7, dtype)
    nll, left, plain, wanted = both(nll_in_one_pass, plain_nll, (logits, targets, factors if trained else None))
    torch.testing.assert_close(nll, plain, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(left, wanted)
    assert nll[3] == 0 and nll.dtype == torch.float32
    assert torch.equal(left, logits) is not trained


def test_a_target_outside_the_vocabulary_is_no_likelihood() -> None:
    logits, targets, factors = rows(6, torch.float32)
    targets[:2] = torch.tensor([-1, 96])
    assert nll_in_one_pass(logits, targets, factors).isnan().tolist() == [True, True] + [False] * 4


def broken(first: Tensor, second: Tensor | None) -> Tensor:
    torch._dynamo.graph_break()
    return first + 1


def test_what_cannot_be_compiled_runs_as_it_stands_and_is_told_once(
    on_cpu: None, capsys: pytest.CaptureFixture[str]
) -> None:
    fused = Fused(broken, lambda first, second: first + 2)
    assert [fused(torch.ones(2), None).tolist() for _ in range(3)] == [[3.0, 3.0]] * 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ftcli: broken is not compiled: the same numbers, but slower (")


def test_a_device_without_memory_is_not_mistaken_for_a_missing_compiler(on_cpu: None) -> None:
    def full(first: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    fused = Fused(broken)
    vars(fused)["_compiled"] = full
    with pytest.raises(torch.OutOfMemoryError):
        fused(torch.ones(2))
    assert fused.problem is None


def test_where_compiling_is_switched_off_the_plain_form_runs_and_nothing_is_wrong(on_cpu: None) -> None:
    fused = Fused(nll_in_one_pass, lambda *tensors: "plain")
    with torch._dynamo.config.patch(disable=True):
        assert fused(torch.ones(2, 2), torch.ones(2)) == "plain"
    assert fused.problem is None


def test_on_a_cpu_nothing_is_compiled() -> None:
    assert Fused(nll_in_one_pass, lambda *tensors: "plain")(torch.ones(2, 2), torch.ones(2)) == "plain"


@COMPILER
@pytest.mark.slow
def test_one_compiled_kernel_of_the_head_serves_any_number_of_rows(on_cpu: None) -> None:
    fused = Fused(nll_in_one_pass, plain_nll)
    for dtype in (torch.float32, torch.bfloat16):
        for count in (5, 8, 31):
            with torch.autocast("cpu", enabled=count != 8):
                nll, left, plain, wanted = both(fused, plain_nll, rows(count, dtype))
            torch.testing.assert_close(nll, plain, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(left, wanted)
    assert fused.problem is None
    assert counters["stats"]["unique_graphs"] == 2, "one a dtype"


@COMPILER
@pytest.mark.slow
def test_one_compiled_step_of_adamw_serves_weights_of_any_size(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr(Fused, "PLACES", ())
    for found, wanted in zip(compiled, walk(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)
