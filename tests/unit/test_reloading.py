"""The proof of an export refuses what it is there to refuse; merging refuses what it cannot do. Tiny models."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from ftcli.errors import InputError
from ftcli.reloading import Proof, digest, reload
from ftcli.testing import save_tiny_causal
from ftcli.trained_weights import merged_model


@pytest.mark.slow
def test_a_weight_that_is_another_missing_new_or_not_finite_is_named(tmp_path: Path) -> None:
    folder = save_tiny_causal(tmp_path / "tied")
    model = AutoModelForCausalLM.from_pretrained(folder)
    digests = {name: digest(p.detach()) for name, p in model.named_parameters()}
    proof = Proof("AutoModelForCausalLM", "float32", digests=digests, whole=True)
    assert reload(folder, proof) == 0
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(RuntimeError, match=f"not the weights that were trained: .*{name}"):
        reload(folder, dataclasses.replace(proof, digests=digests | {name: "0"}))
    del digests[name]
    with pytest.raises(RuntimeError, match=f"weights that were not trained: .*{name}"):
        reload(folder, proof)
    state = model.state_dict()
    state[name] = state[name].index_fill(0, torch.tensor(3), float("nan"))
    model.save_pretrained(folder, state_dict=dict(state))
    with pytest.raises(RuntimeError, match=f"empty or not finite: .*{name}"):
        reload(folder, dataclasses.replace(proof, digests={}, whole=False))
    del state[name]
    model.save_pretrained(folder, state_dict=state)
    with pytest.raises(RuntimeError, match=f"missing or not expected in the files: .*{name}"):
        reload(folder, dataclasses.replace(proof, digests={}, whole=False))


@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_beside_a_tied_weight_is_not_merged(tied: bool, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_tiny_causal(tmp_path, tied=tied))
    model = get_peft_model(model, LoraConfig(target_modules=["lm_head"]))
    if tied:
        with pytest.raises(InputError, match="which is the same weight as"):
            merged_model(model, torch.float32)
    else:
        assert "lm_head.weight" in merged_model(model, torch.float32)[0]
