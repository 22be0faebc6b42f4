"""Liger's kernels give what transformers' own modules give: logits and gradients, each architecture of the table."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from ftcli.liger import NORMS, replace

from ..unit.test_attention import tiny
from .test_attention_on_gpus import apart, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="needs liger-kernel"),
]
MOST, TIMES = 1e-4, 3.0  # in float32: distance; in bfloat16: times the distance of transformers' own from float32


@pytest.mark.parametrize("kind", NORMS)
def test_a_model_gives_with_ligers_kernels_what_it_gave_without(kind: str) -> None:
    model = tiny(kind).cuda()
    ids = torch.randint(3, 97, (4, 33), generator=torch.Generator().manual_seed(0)).cuda()
    batch = [{"input_ids": ids, "use_cache": False}]
    exact, own = run(model, batch, "fp32"), run(model, batch, "bf16")
    replace(model, kind)
    found, half = run(model, batch, "fp32"), run(model, batch, "bf16")
    assert float(apart(found[0], exact[0]).max()) < MOST and float(apart(found[1], exact[1])) < 10 * MOST
    assert float(apart(half[0], exact[0]).max()) < TIMES * float(apart(own[0], exact[0]).max())
    assert float(apart(half[1], exact[1])) < TIMES * float(apart(own[1], exact[1]))
