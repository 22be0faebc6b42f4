"""Liger's kernels give what transformers' own modules give: logits and gradients, each architecture of the table."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from ftcli.models.architectures import model_types_with
from ftcli.models.kernels.liger import replace

from ..unit.models.kernels.test_document_attention import tiny
from .test_attention_on_gpus import apart, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="needs liger-kernel"),
]
MOST, TIMES = 1e-4, 3.0  # in float32: distance; in bfloat16: times the distance of transformers' own from float32


@pytest.mark.parametrize("kind", model_types_with("liger_norm"))
def test_liger_kernels_give_the_results_of_the_model_without(kind: str) -> None:
    model = tiny(kind).cuda()
    ids = torch.randint(3, 97, (4, 33), generator=torch.Generator().manual_seed(0)).cuda()
    batch = [{"input_ids": ids, "use_cache": False}]
    exact, own = run(model, batch, "fp32"), run(model, batch, "bf16")
    replace(model, kind)
    actual, half = run(model, batch, "fp32"), run(model, batch, "bf16")
    assert float(apart(actual[0], exact[0]).max()) < MOST and float(apart(actual[1], exact[1])) < 10 * MOST
    assert float(apart(half[0], exact[0]).max()) < TIMES * float(apart(own[0], exact[0]).max())
    assert float(apart(half[1], exact[1])) < TIMES * float(apart(own[1], exact[1]))
