"""Batch norm with the statistics of all processes: CUDA has other kernels for each memory format and dtype."""

from __future__ import annotations

import pytest
import torch

from ..support.batch_norms import SHAPES, assert_as_exact_as_one_process

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_batch_norm_over_processes_are_as_exact_as_those_of_one(
    shape: str, layout: torch.memory_format, dtype: torch.dtype, affine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if layout is torch.channels_last and len(SHAPES[shape]) != 4:
        pytest.skip("rows have no such layout")
    assert_as_exact_as_one_process(monkeypatch, SHAPES[shape], device="cuda", dtype=dtype, layout=layout, affine=affine)
