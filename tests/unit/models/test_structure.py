"""The model inside an adapter, with a real one around a tiny model."""

from __future__ import annotations

from pathlib import Path

import peft
import torch
import transformers

import ftcli
from ftcli.models.structure import base_model_of


def tiny() -> transformers.LlamaForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=16, **sizes))


def test_base_model_of_with_a_model_without_an_adapter_is_its_own_base_model() -> None:
    model, layer = tiny(), torch.nn.Linear(2, 2)
    assert base_model_of(model) is model
    assert base_model_of(layer) is layer


def test_base_model_of_an_adapter_is_what_was_wrapped_and_what_its_calls_go_through() -> None:
    model = tiny()
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    inner = base_model_of(wrapped)
    assert inner is model and inner is not wrapped
    assert any("lora_A" in name for name, _ in inner.named_parameters())  # its layers are in there
    inner.forward = lambda **batch: sorted(batch)
    assert "input_ids" in wrapped(input_ids=torch.tensor([[1, 2]]))


def test_base_model_of_is_the_only_check_for_an_adapter() -> None:
    modules = Path(ftcli.__file__).parent.rglob("*.py")
    assert [path.name for path in modules if '"get_base_model"' in path.read_text()] == ["structure.py"]
