"""Compiled layers give the eager results, in every architecture that is compiled by default; a few minutes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from ftcli.models.architectures import model_types_with
from ftcli.testing import save_tiny_causal

from ..unit.models.kernels.test_compile import (
    WAYS_TO_STORE,
    counters_of_200_steps,
    distances_from_eager_layers,
    in_both_ways,
)
from .test_attention_on_gpus import apart

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
MOST, TIMES = 1e-4, 3.0  # in float32: distance; in bfloat16: times the distance of layers as they are from float32


@pytest.mark.parametrize("kind", sorted(model_types_with("compiles_layers")))
def test_compiled_layers_give_logits_and_gradients_of_eager_layers(kind: str) -> None:
    exact, single, _ = in_both_ways(kind, "fp32", "cuda")
    own, half, graphs = in_both_ways(kind, "bf16", "cuda")
    for expected, actual, plain, fast in zip(exact, single, own, half, strict=True):
        assert float(apart(actual[0], expected[0]).max()) < MOST and float(apart(actual[1], expected[1])) < 10 * MOST
        assert float(apart(fast[0], expected[0]).max()) < TIMES * float(apart(plain[0], expected[0]).max())
        assert float(apart(fast[1], expected[1])) < TIMES * float(apart(plain[1], expected[1]))
    assert graphs[0] > 0 and graphs[1] == graphs[-1], f"{graphs} graphs after each length"


def test_compiled_layers_with_much_shorter_or_longer_rows_compile_no_new_graph() -> None:
    rows = ([3000, 3000], [2600, 2610], [200, 120], [1500, 1500], [4300])
    sizes = {"hidden_size": 1024, "max_position_embeddings": 8192, "initializer_range": 0.02}
    plain, fast, graphs = in_both_ways("llama", "bf16", "cuda", rows, **sizes)
    assert graphs[0] > 0 and graphs[1] == graphs[-1], f"{graphs} graphs after each row"
    for expected, actual in zip(plain, fast, strict=True):
        assert float(apart(actual[0], expected[0]).max()) < 0.05 and float(apart(actual[1], expected[1])) < 0.05


def test_compiled_layers_with_an_adapter_round_as_eager_layers(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In a narrower model the order of sums, which differs between kernels of GPUs, hides the difference.
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    name = str(save_tiny_causal(tmp_path / "model", initializer_range=0.04, **sizes))
    exact, other = distances_from_eager_layers(inputs, monkeypatch, cpu=False, name=name)
    assert exact < 0.2 * other


HAS_BITSANDBYTES = importlib.util.find_spec("bitsandbytes") is not None


@pytest.mark.parametrize("stored", WAYS_TO_STORE)
@pytest.mark.parametrize("bits", [16, pytest.param(4, marks=pytest.mark.skipif(not HAS_BITSANDBYTES, reason="4 bits"))])
def test_compiled_adapter_training_compiles_nothing_after_step_3_for_any_row_length(
    bits: int, stored: str, inputs: Path, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 4}
    name = save_tiny_causal(tmp_path / "model", tied=False, num_hidden_layers=4, **sizes)
    model = {"name": str(name), "dropout": 0.0, "torch_compile": True} | WAYS_TO_STORE[stored]
    early, late = counters_of_200_steps(
        inputs, tmp_path, model | ({"quantization": {"load_in_4bit": True}} if bits == 4 else {}), cpu=False
    )
    assert early == late
