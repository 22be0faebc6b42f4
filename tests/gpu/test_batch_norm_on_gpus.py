"""Batch norm with the statistics of all processes: CUDA has other kernels for each memory format and dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ftcli.hardware import batch_norm

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
SHAPES = {"images": (8, 16, 7, 7), "one pixel": (8, 16, 1, 1), "one channel": (8, 1, 7, 7), "rows": (8, 16)}


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_batch_norm_over_processes_are_as_exact_as_those_of_one(
    shape: str, layout: torch.memory_format, dtype: torch.dtype, affine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if layout is torch.channels_last and len(SHAPES[shape]) != 4:
        pytest.skip("rows have no such layout")
    monkeypatch.setattr(batch_norm.dist, "all_reduce", lambda values: None)  # of one process
    draw = torch.Generator().manual_seed(0)
    inputs, grad = torch.randn(2, *SHAPES[shape], generator=draw)
    weight, bias = torch.randn(2, inputs.shape[1], generator=draw).cuda() if affine else (None, None)
    inputs = (inputs * 2 + 1).cuda().to(dtype).contiguous(memory_format=layout)
    grad = (grad + 3).cuda().to(dtype)  # the mean cancels, so an early rounding would show

    def result(function: Any, width: torch.dtype) -> list[torch.Tensor]:
        leaves = [inputs.to(width).requires_grad_()]
        leaves += [
            value.to(torch.promote_types(width, torch.float32)).requires_grad_() for value in (weight, bias) if affine
        ]
        output = function(*leaves)
        return [output.detach(), *torch.autograd.grad(output, leaves, grad.to(width))]

    def plain(inputs: torch.Tensor, weight: Any = None, bias: Any = None) -> torch.Tensor:
        return torch.nn.functional.batch_norm(inputs, None, None, weight, bias, True, eps=1e-5)

    def shared(inputs: torch.Tensor, weight: Any = None, bias: Any = None) -> torch.Tensor:
        output: torch.Tensor = batch_norm._NormaliseOfAll.apply(inputs, weight, bias, 1e-5)[0]
        return output

    exact, one, actual = result(plain, torch.float64), result(plain, dtype), result(shared, dtype)
    for right, other, value in zip(exact, one, actual, strict=True):
        size, floor = float(right.norm()), torch.finfo(torch.float32).eps * 20
        distance, usual = (float((each.double() - right).norm()) / size for each in (value, other))
        assert value.dtype == other.dtype and distance <= max(1.2 * usual, floor), (distance, usual)
    assert actual[1].is_contiguous(memory_format=layout)
