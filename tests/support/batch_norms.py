"""Compare batch norm with the statistics of all processes to that of one process, in each memory format and dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ftcli.hardware import batch_norm

SHAPES = {"images": (8, 16, 7, 7), "one pixel": (8, 16, 1, 1), "one channel": (8, 1, 7, 7), "rows": (8, 16)}


def assert_as_exact_as_one_process(
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, ...],
    *,
    device: str,
    dtype: torch.dtype,
    layout: torch.memory_format = torch.contiguous_format,
    affine: bool = True,
) -> None:
    """Compare outputs and gradients of both in `dtype` with those of one process in float64."""
    monkeypatch.setattr(batch_norm.dist, "all_reduce", lambda values: None)  # of one process
    draw = torch.Generator().manual_seed(0)
    inputs, grad = torch.randn(2, *shape, generator=draw)
    weight, bias = torch.randn(2, inputs.shape[1], generator=draw).to(device) if affine else (None, None)
    inputs = (inputs * 2 + 1).to(device, dtype).contiguous(memory_format=layout)
    grad = (grad + 3).to(device, dtype)  # its mean cancels, so an early rounding shows

    def result(function: Any, width: torch.dtype) -> list[torch.Tensor]:
        leaves = [inputs.to(width).requires_grad_()]
        wide = torch.promote_types(width, torch.float32)
        leaves += [value.to(wide).requires_grad_() for value in (weight, bias) if value is not None]
        output = function(*leaves)
        return [output.detach(), *torch.autograd.grad(output, leaves, grad.to(width))]

    def plain(inputs: torch.Tensor, weight: Any = None, bias: Any = None) -> torch.Tensor:
        return torch.nn.functional.batch_norm(inputs, None, None, weight, bias, True, eps=1e-5)

    def shared(inputs: torch.Tensor, weight: Any = None, bias: Any = None) -> torch.Tensor:
        output: torch.Tensor = batch_norm._NormaliseOfAll.apply(inputs, weight, bias, 1e-5)[0]
        return output

    exact, one, actual = result(plain, torch.float64), result(plain, dtype), result(shared, dtype)
    for right, other, value in zip(exact, one, actual, strict=True):
        distance, usual = (float((each.double() - right).norm() / right.norm()) for each in (value, other))
        # cuDNN rounds outputs in float16 once more if the statistics are given.
        assert value.dtype == other.dtype and distance <= max(2 * usual, 1e-5), (distance, usual)
    assert actual[1].is_contiguous(memory_format=layout)
