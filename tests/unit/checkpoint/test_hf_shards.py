"""Weights in files are what `save_pretrained` would have written, one at a time. Tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ftcli.checkpoint.hf_shards import save_weights, shard_bytes
from ftcli.runtime.errors import InputError
from ftcli.tiny_models import SIZES, build_tiny


def tiny_mixture() -> Any:
    sizes = SIZES | {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}
    return build_tiny("MixtralForCausalLM", **sizes, vocab_size=31, num_local_experts=3)


def meta(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().to("meta") for name, p in model.named_parameters()}


def values(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name, p.detach()) for name, p in model.named_parameters()]


@pytest.mark.parametrize("most", ["5GB", "1KB"])
def test_save_weights_splits_expert_weights_as_transformers(most: str, tmp_path: Path) -> None:
    model = tiny_mixture()
    model.save_pretrained(tmp_path / "expected")
    (tmp_path / "written").mkdir()
    save_weights(model, meta(model), values(model), tmp_path / "written", shard_bytes(most))
    expected = load_file(tmp_path / "expected" / "model.safetensors")
    assert any("experts.2.w" in name for name in expected)
    tensors: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "written").glob("*.safetensors"):
        part = load_file(file)
        assert sum(value.nbytes for value in part.values()) <= max(
            shard_bytes(most), max(v.nbytes for v in part.values())
        )
        tensors |= part
    assert tensors.keys() == expected.keys() and all(torch.equal(tensors[name], expected[name]) for name in expected)
    index = tmp_path / "written" / "model.safetensors.index.json"
    assert index.exists() == (most == "1KB")
    assert most == "5GB" or json.loads(index.read_text())["weight_map"].keys() == expected.keys()


def test_save_weights_with_a_weight_that_is_missing_empty_or_of_another_dtype_raises(tmp_path: Path) -> None:
    model = tiny_mixture()
    name, value = values(model)[-1]
    for last in ([], [(name, torch.empty(0))], [(name, value.half())]):
        with pytest.raises(RuntimeError, match="missing|is .* not"):
            save_weights(model, meta(model), [*values(model)[:-1], *last], tmp_path, shard_bytes("5GB"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("text", "expected"), [("5GB", 5 * 10**9), ("1.5 mb", 1_500_000), ("2kb", 2000)])
def test_sizes_are_read(text: str, expected: int) -> None:
    assert shard_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "5", "GB", "-1GB", "0MB", "5GiB"])
def test_shard_bytes_of_other_text_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="not a size"):
        shard_bytes(text)
