"""The norm of gradients is float32 whatever they are, and clipping is torch's own."""

from __future__ import annotations

import copy

import pytest
import torch

from ftcli.hardware.ddp import norm_of, shorten


def gradients(dtype: torch.dtype) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=draw).to(dtype) for size in ((40, 30), (7,), (0, 3))]


def test_the_norm_of_bfloat16_gradients_has_the_digits_of_float32() -> None:
    parts = gradients(torch.bfloat16)
    exact = float(torch.cat([part.double().flatten() for part in parts]).norm())
    found = norm_of(parts, torch.device("cpu"))
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(exact, rel=1e-6)
    assert float(torch.nn.utils.get_total_norm(parts)) != pytest.approx(exact, rel=1e-4), "torch has learned it"


@pytest.mark.parametrize("most", [0.5, 1e6, None])
def test_gradients_are_shortened_as_torch_does(most: float | None) -> None:
    parts = gradients(torch.float32)
    weights = [torch.nn.Parameter(torch.zeros_like(part)) for part in parts]
    for weight, part in zip(weights, copy.deepcopy(parts), strict=True):
        weight.grad = part
    wanted = torch.nn.utils.clip_grad_norm_(weights, float("inf") if most is None else most)
    norm = norm_of(parts, torch.device("cpu"))
    shorten(parts, norm, most)
    assert torch.equal(norm, wanted)
    assert all(
        torch.equal(part, weight.grad) for part, weight in zip(parts, weights, strict=True) if weight.grad is not None
    )


def test_no_gradient_has_no_norm() -> None:
    assert norm_of([], torch.device("cpu")) == 0.0
    shorten([], torch.tensor(0.0), 1.0)
