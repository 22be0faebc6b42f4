"""Which layers ZeRO-3 gathers at once: only those whose gradients are complete when they are taken."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, SegformerConfig, SegformerForImageClassification

from ftcli.hardware.zero3_leaf_modules import leaves_of
from ftcli.models.structure import layers_of

from ..models.kernels.test_document_attention import tiny


def test_leaves_of_a_language_model_are_all_layers_unless_a_weight_is_frozen() -> None:
    model = tiny("llama")
    assert leaves_of(model) == list(model.model.layers)
    model.model.norm.weight.requires_grad_(False)
    assert leaves_of(model) == []


def test_leaves_of_a_layer_with_a_shared_weight_excludes_it() -> None:
    model = tiny("llama")
    first, second, third = model.model.layers
    third.mlp.up_proj.weight = first.mlp.up_proj.weight
    assert leaves_of(model) == [second]
    model = tiny("llama")
    first, second, third = model.model.layers
    second.mlp = third.mlp
    assert leaves_of(model) == [first]


def test_leaves_of_a_layer_whose_input_needs_no_gradient_excludes_it() -> None:
    sizes: dict[str, Any] = {"hidden_sizes": [8, 8, 8, 8], "num_attention_heads": [1, 1, 1, 1], "depths": [1, 1, 1, 1]}
    model = SegformerForImageClassification(SegformerConfig(**sizes))
    layers = layers_of(model)
    assert len(layers) == 4 and leaves_of(model) == layers[1:]


def test_layers_of_other_code_stay_as_they_are() -> None:
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_layer=2, n_embd=16, n_head=2))
    assert len(leaves_of(model)) == 2
    for layer in model.transformer.h:
        layer.__class__ = type(type(layer).__name__, (type(layer),), {"__module__": "somebody_else"})
    assert leaves_of(model) == []
