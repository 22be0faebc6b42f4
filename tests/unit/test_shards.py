"""Weights in files are what `save_pretrained` would have written, one at a time. Tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ftcli.errors import InputError
from ftcli.shards import save_weights, shard_bytes


def tiny_mixture() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=31,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=3,
    )
    return MixtralForCausalLM(config)


def meta(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().to("meta") for name, p in model.named_parameters()}


def values(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name, p.detach()) for name, p in model.named_parameters()]


@pytest.mark.parametrize("most", ["5GB", "1KB"])
def test_experts_that_are_one_weight_in_the_model_are_cut_as_transformers_cuts_them(most: str, tmp_path: Path) -> None:
    model = tiny_mixture()
    model.save_pretrained(tmp_path / "wanted")
    (tmp_path / "found").mkdir()
    save_weights(model, meta(model), values(model), tmp_path / "found", shard_bytes(most))
    wanted = load_file(tmp_path / "wanted" / "model.safetensors")
    assert any("experts.2.w" in name for name in wanted)
    found: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "found").glob("*.safetensors"):
        part = load_file(file)
        assert sum(value.nbytes for value in part.values()) <= max(
            shard_bytes(most), max(v.nbytes for v in part.values())
        )
        found |= part
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    index = tmp_path / "found" / "model.safetensors.index.json"
    assert index.exists() == (most == "1KB")
    assert most == "5GB" or json.loads(index.read_text())["weight_map"].keys() == wanted.keys()


def test_a_weight_that_is_missing_empty_or_of_another_dtype_is_an_error(tmp_path: Path) -> None:
    model = tiny_mixture()
    name, value = values(model)[-1]
    for last in ([], [(name, torch.empty(0))], [(name, value.half())]):
        with pytest.raises(RuntimeError, match="missing|is .* not"):
            save_weights(model, meta(model), [*values(model)[:-1], *last], tmp_path, shard_bytes("5GB"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("text", "wanted"), [("5GB", 5 * 10**9), ("1.5 mb", 1_500_000), ("2kb", 2000)])
def test_sizes_are_read(text: str, wanted: int) -> None:
    assert shard_bytes(text) == wanted


@pytest.mark.parametrize("text", ["", "5", "GB", "-1GB", "0MB", "5GiB"])
def test_what_is_no_size_is_told(text: str) -> None:
    with pytest.raises(InputError, match="not a size"):
        shard_bytes(text)
