"""Compiled layers of every architecture give the eager results, and compile nothing after two lengths.

A file of its own, so that another worker than that of test_compile.py can run it.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from ftcli.models.architectures import model_types_with

from ....gpu.test_attention_on_gpus import apart
from .test_compile import in_both_ways


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(model_types_with("compiles_layers")))
def test_compile_layers_by_default_compiles_nothing_after_two_lengths(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    plain, fast, graphs = in_both_ways(kind, "fp32", "cpu")
    for expected, actual in zip(plain, fast, strict=True):
        assert float(apart(actual[0], expected[0]).max()) < 1e-4 and float(apart(actual[1], expected[1])) < 1e-3
    assert graphs[0] > 0 and graphs[1] == graphs[-1], f"{graphs} graphs after each length"
