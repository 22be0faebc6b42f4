"""The norm of gradients is float32 whatever they are, and clipping is torch's own."""

from __future__ import annotations

import copy

import pytest
import torch

from ftcli.hardware.gradient_clipping import clip_grads_with_norm, get_total_norm


def gradients(dtype: torch.dtype) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=draw).to(dtype) for size in ((40, 30), (7,), (0, 3))]


def test_gradient_norm_of_bfloat16_gradients_is_computed_in_float32() -> None:
    parts = gradients(torch.bfloat16)
    exact = float(torch.cat([part.double().flatten() for part in parts]).norm())
    actual = get_total_norm(parts, torch.device("cpu"))
    assert actual.dtype == torch.float32
    assert float(actual) == pytest.approx(exact, rel=1e-6)
    assert float(torch.nn.utils.get_total_norm(parts)) != pytest.approx(exact, rel=1e-4), "torch has learned it"


@pytest.mark.parametrize("most", [0.5, 1e6, None])
def test_gradients_are_shortened_as_torch_does(most: float | None) -> None:
    parts = gradients(torch.float32)
    weights = [torch.nn.Parameter(torch.zeros_like(part)) for part in parts]
    for weight, part in zip(weights, copy.deepcopy(parts), strict=True):
        weight.grad = part
    expected = torch.nn.utils.clip_grad_norm_(weights, float("inf") if most is None else most)
    norm = get_total_norm(parts, torch.device("cpu"))
    clip_grads_with_norm(parts, norm, most)
    assert torch.equal(norm, expected)
    assert all(
        torch.equal(part, weight.grad) for part, weight in zip(parts, weights, strict=True) if weight.grad is not None
    )


def test_gradient_norm_without_gradients_is_none() -> None:
    assert get_total_norm([], torch.device("cpu")) == 0.0
    clip_grads_with_norm([], torch.tensor(0.0), 1.0)
