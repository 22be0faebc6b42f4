"""Which weights are decayed."""

from __future__ import annotations

from typing import Any

import pytest

from ftcli.config.recipe import Recipe
from ftcli.tiny_models import SIZES, build_tiny
from ftcli.training.optim.build import build_optimizer

from ....support.recipes import minimal_values

CAUSAL = SIZES | {"intermediate_size": 64, "num_key_value_heads": 2, "vocab_size": 64}
# Class, sizes, parameters of two dimensions that are biases or weights of norms.
WITH_TWO_DIMENSIONS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "experts": (
        "GptOssForCausalLM",
        CAUSAL | {"head_dim": 8, "num_local_experts": 4},
        ["mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias"],
    ),
    "norms": (
        "CohereForCausalLM",
        CAUSAL | {"use_qk_norm": True, "bos_token_id": None, "eos_token_id": 1},
        ["self_attn.q_norm.weight", "self_attn.k_norm.weight"],
    ),
    "biases of heads": (
        "XLNetModel",
        {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "vocab_size": 64},
        ["rel_attn.r_w_bias", "rel_attn.r_r_bias", "rel_attn.r_s_bias"],
    ),
    "biases by distance": (
        "SwinModel",
        {"embed_dim": 16, "depths": [2], "num_heads": [2], "image_size": 16, "patch_size": 4, "window_size": 2},
        ["relative_position_bias_table"],
    ),
    "biases of T5": (
        "T5EncoderModel",
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64},
        ["relative_attention_bias.weight"],
    ),
    "biases of LeViT": (
        "LevitModel",
        {"image_size": 32, "hidden_sizes": [16, 16, 16], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 0]}
        | {"key_dim": [8, 8, 8]},
        ["attention_biases"],
    ),
    "global response norms": (
        "ConvNextV2Model",
        {"hidden_sizes": [8, 8], "depths": [1, 1], "num_stages": 2, "image_size": 32},
        ["grn.weight", "grn.bias"],
    ),
}


@pytest.mark.parametrize("name", WITH_TWO_DIMENSIONS)
def test_biases_and_norms_of_two_dimensions_are_not_decayed(name: str) -> None:
    kind, sizes, endings = WITH_TWO_DIMENSIONS[name]
    model = build_tiny(kind, **sizes)
    section = {"learning_rate": 1e-3, "weight_decay": 0.1}
    recipe = Recipe.model_validate(minimal_values(model={"name": "m"}, data={"train": "t.jsonl"}, optimizer=section))
    optimizer = build_optimizer(model, recipe, fused=False)
    decays = {id(weight): group["weight_decay"] for group in optimizer.param_groups for weight in group["params"]}
    named = {key: (decays[id(weight)], weight) for key, weight in model.named_parameters()}
    special = [key for key in named if key.endswith(tuple(endings))]
    assert len(special) >= len(endings) and all(named[key][1].ndim > 1 for key in special)
    assert all(named[key][0] == 0 for key in special)
    others = {key: value for key, value in named.items() if key not in special}
    assert all((decay == 0.1) == (weight.ndim > 1) for decay, weight in others.values())
