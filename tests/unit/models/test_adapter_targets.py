"""Names in the adapter section: all match, the parameters of experts are reachable, and peft leaves none out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.utils.other import ModulesToSaveWrapper

from ftcli.config.recipe import Recipe
from ftcli.models.adapter_targets import describe_unadapted
from ftcli.models.adapters import adapter_problems, add_adapter, describe_cut_tie
from ftcli.models.module_names import describe_saved
from ftcli.runtime.errors import InputError
from ftcli.tiny_models import build_tiny

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", SIZES),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", SIZES | EXPERTS | {"head_dim": 8}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", SIZES | EXPERTS | {"shared_expert_intermediate_size": 16}),
    "bert": ("BertForSequenceClassification", {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}),
    "distilbert": (
        "DistilBertForSequenceClassification",
        {"vocab_size": 64, "dim": 32, "hidden_dim": 48, "n_layers": 1, "n_heads": 4},
    ),
    "glm4_moe": (
        "Glm4MoeForCausalLM",
        SIZES | {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    ),
    "gpt_oss": ("GptOssForCausalLM", SIZES | {"num_local_experts": 4, "head_dim": 8}),
    "mixtral": ("MixtralForCausalLM", SIZES | {"num_local_experts": 4, "head_dim": 8}),
    "phimoe": ("PhimoeForCausalLM", SIZES | {"num_local_experts": 4}),
    "mamba": ("MambaForCausalLM", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "time_step_rank": 4}),
    "jamba": (
        "JambaForCausalLM",
        SIZES | {"attn_layer_period": 2, "attn_layer_offset": 0, "num_experts": 1, "mamba_dt_rank": 4},
    ),
    "falcon": (
        "FalconForCausalLM",
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    ),
    "llama4": ("Llama4ForCausalLM", SIZES | {"num_local_experts": 4, "head_dim": 8, "intermediate_size_mlp": 48}),
}
OLD_NAMES = ["gate_proj", "up_proj", "down_proj"]  # of experts that were modules before transformers 5
LORA = {"type": "lora", "r": 2}
RECIPE: dict[str, Any] = {
    "task": "sft",
    "model": {"name": "tiny"},
    "data": {"train": "rows.jsonl"},
    "adapter": LORA,
    "train": {"max_steps": 1},
    "optimizer": {"learning_rate": 1e-3},
    "batch": {"global_size": 1},
}


def adapted(kind: str, task_type: str = "CAUSAL_LM", **section: Any) -> Any:
    name, settings = MODELS[kind]
    recipe = Recipe.model_validate(RECIPE | {"adapter": LORA | section})
    return add_adapter(build_tiny(name, **settings), recipe, keep=[], task_type=task_type)


def test_modules_that_are_saved_by_the_ends_of_their_names_get_no_adapter() -> None:
    section: dict[str, Any] = {"target_modules": "all-linear", "modules_to_save": ["gate"]}
    model = adapted("qwen2_moe", **section)
    names = [name for name, weight in model.named_parameters() if weight.requires_grad and "shared_expert_gate" in name]
    assert len(names) == 2 and all(".modules_to_save." in name for name in names)
    (line,) = describe_saved(model, Recipe.model_validate(RECIPE | {"adapter": LORA | section}).adapter)
    assert "also model.layers.0.mlp.shared_expert_gate (2 others); model.layers.0.mlp.gate would mean that one" in line
    (line,) = describe_unadapted(model, Recipe.model_validate(RECIPE | {"adapter": LORA | section}).adapter)
    assert "shared_expert_gate" not in line


def test_part_whose_name_ends_like_that_of_the_saved_module_around_it_is_saved_with_it() -> None:
    model = adapted("bert", "FEATURE_EXTRACTION", target_modules=["query"], modules_to_save=["embeddings"])
    wrapped = [name for name, module in model.named_modules() if isinstance(module, ModulesToSaveWrapper)]
    assert wrapped == ["base_model.model.bert.embeddings"]


def test_log_names_no_longer_ending_if_there_is_none() -> None:
    section: dict[str, Any] = {"target_modules": ["q_lin"], "modules_to_save": ["classifier"]}
    model = adapted("distilbert", "FEATURE_EXTRACTION", **section)
    (line,) = describe_saved(model, Recipe.model_validate(RECIPE | {"adapter": LORA | section}).adapter)
    assert line.endswith("classifier means every module whose name ends so, also pre_classifier (1 others)")


REFUSED: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "a misspelt module": (
        "llama",
        {"target_modules": ["q_proj", "v_porj"]},
        ("target_modules: no module's name ends with v_porj", "did you mean 'v_proj'?"),
    ),
    "all lists at once": (
        "llama",
        {"target_modules": ["q_prj"], "exclude_modules": ["mpl"], "modules_to_save": ["lm_haed"]},
        ("ends with q_prj", "'q_proj'", "exclude_modules: no module's name ends with mpl", "'mlp'", "'lm_head'"),
    ),
    "a misspelt path": ("llama", {"target_modules": ["self_atn.q_proj"]}, ("did you mean 'self_attn.q_proj'?",)),
    "an index that is too large": ("llama", {"target_modules": ["q_proj", "layers.7.mlp.up_proj"]}, ("layers.7",)),
    "an expression for an ending": (
        "llama",
        {"target_modules": "q_proj"},
        ("no module's full name matches q_proj", "model.layers.0.self_attn.q_proj"),
    ),
    "a name of another model": ("gpt2", {"target_modules": ["c_attn", "q_proj"]}, ("ends with q_proj",)),
    "a name that peft renames in other models": (
        "gpt_oss",
        {"target_modules": ["q_proj", "up_proj"]},
        ("ends with up_proj", "'gate_up_proj'"),
    ),
    "a misspelt parameter": ("qwen3_moe", {"target_modules": ["q_proj", "experts.down_prj"]}, ("'experts.down_proj'",)),
    "a block": (
        "llama",
        {"target_modules": ["mlp"]},
        ("model.layers.0.mlp is a LlamaMLP, which cannot have an adapter", "down_proj, gate_proj, up_proj"),
    ),
    "experts as a block": ("qwen3_moe", {"target_modules": ["experts"]}, ("is a Qwen3MoeExperts", "gate_up_proj")),
    "half of a fused parameter": ("qwen3_moe", {"target_modules": ["gate_proj"]}, ("without also targeting up_proj",)),
    "a shared expert that peft leaves out": (
        "glm4_moe",
        {"target_modules": OLD_NAMES},
        ("peft gives model.layers.0.mlp.down_proj", "and 2 more no adapter", "adapter.exclude_modules"),
    ),
    "an expression that peft reads as experts": (
        "glm4_moe",
        {"target_modules": r".*shared_experts\..*_proj"},
        ("shared_experts.down_proj", "no adapter"),
    ),
    "excluded experts": (
        "qwen3_moe",
        {"exclude_modules": ["experts"]},
        ("exclude_modules: peft adapts model.layers.0.mlp.experts.down_proj",),
    ),
    "dropout on experts": (
        "qwen3_moe",
        {"target_modules": OLD_NAMES, "lora_dropout": 0.1},
        ("adapter.lora_dropout: not possible", "mlp.experts.", "remove lora_dropout"),
    ),
    "dropout and DoRA on experts": (
        "gpt_oss",
        {"target_modules": ["experts.down_proj"], "lora_dropout": 0.1, "use_dora": True},
        ("adapter.lora_dropout and use_dora: not possible", "mlp.experts."),
    ),
    "a router whose output is a tuple": (
        "phimoe",
        {"target_modules": ["q_proj", "router"]},
        ("model.layers.0.mlp.router", "the output of a PhimoeTopKRouter", "adapter.modules_to_save"),
    ),
    "a projection whose weight kernels read": (
        "mamba",
        {"target_modules": ["in_proj", "x_proj"]},
        (
            "backbone.layers.0.mixer.x_proj",
            "a MambaMixer passes the weight alone to kernels",
            "adapter.exclude_modules",
        ),
    ),
    "a name of which all modules are excluded": (
        "llama",
        {"target_modules": ["q_proj", "up_proj"], "exclude_modules": ["mlp"]},
        ("target_modules: all modules of up_proj are left out, because adapter.exclude_modules", "remove the name"),
    ),
    "an expression of which all modules are excluded": (
        "llama",
        {"target_modules": r".*\.up_proj", "exclude_modules": ["mlp"]},
        (r"target_modules: all modules of .*\.up_proj are left out",),
    ),
    "all linear layers excluded": (
        "llama",
        {"exclude_modules": ["layers", "lm_head"]},
        ("target_modules: all-linear finds no linear layer in this model", "such as embed_tokens"),
    ),
    "a saved module with others of its name outside": (
        "llama",
        {"modules_to_save": ["layers.1.mlp", "up_proj"]},
        (
            "modules_to_save: up_proj names model.layers.1.mlp.up_proj, which is a part of model.layers.1.mlp",
            "outside of it, such as model.layers.0.mlp.up_proj",
            "give longer endings",
        ),
    ),
    "layers that are all saved whole": (
        "llama",
        {"modules_to_save": ["layers"]},
        ("target_modules: No modules were targeted", "adapter.exclude_modules"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_add_adapter_with_a_name_that_is_not_adapted_names_it(case: str) -> None:
    kind, section, expected = REFUSED[case]
    with pytest.raises(InputError) as error:
        adapted(kind, **section)
    assert [text for text in expected if text not in str(error.value)] == [], str(error.value)


ADAPTED: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "endings": ("llama", {"target_modules": ["self_attn.q_proj", "up_proj"]}, {"self_attn.q_proj", "mlp.up_proj"}),
    "a full name": ("llama", {"target_modules": ["model.layers.1.mlp.up_proj"]}, {"mlp.up_proj"}),
    "experts beside attention": (
        "qwen3_moe",
        {"target_modules": ["q_proj", "experts.gate_up_proj"]},
        {"self_attn.q_proj", "mlp.experts"},
    ),
    "experts alone": ("gpt_oss", {"target_modules": ["gate_up_proj"]}, {"mlp.experts"}),
    "old names of experts": (
        "qwen3_moe",
        {"target_modules": OLD_NAMES},
        {"mlp.experts", "mlp.experts.base_layer"},
    ),
    "a shared expert left out by name": (
        "glm4_moe",
        {"target_modules": OLD_NAMES, "exclude_modules": ["shared_experts", "layers.0.mlp"]},
        {"mlp.experts", "mlp.experts.base_layer"},
    ),
    "projections that a state-space layer calls": (
        "jamba",
        {"target_modules": ["x_proj", "in_proj", "out_proj"]},
        {"mamba.x_proj", "mamba.in_proj", "mamba.out_proj"},
    ),
    "a projection that is named and saved whole": (
        "mamba",
        {"target_modules": ["in_proj", "x_proj"], "modules_to_save": ["x_proj"]},
        {"mixer.in_proj"},
    ),
}


@pytest.mark.parametrize("case", ADAPTED)
def test_add_adapter_with_names_of_modules_or_parameters_adapts_them(case: str) -> None:
    kind, section, expected = ADAPTED[case]
    trained = [name for name, p in adapted(kind, **section).named_parameters() if p.requires_grad and "lora_A" in name]
    assert {name.partition(".layers.1.")[2].partition(".lora_A")[0] for name in trained} - {""} == expected


def test_add_adapter_of_dora_on_weights_that_are_zero_names_the_modules() -> None:
    def dora(**section: Any) -> None:
        model = build_tiny(MODELS["llama"][0], **SIZES)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.mlp.down_proj.weight[3] = 0
        recipe = Recipe.model_validate(RECIPE | {"adapter": LORA | {"use_dora": True} | section})
        add_adapter(model, recipe, keep=[], task_type="CAUSAL_LM")

    name = r"model\.layers\.{}\.mlp\.down_proj".format
    expected = (
        rf"output 3 of {name(0)} are zero, and DoRA divides by their norm\n.*exclude_modules: {name(0)}, {name(1)}"
    )
    with pytest.raises(InputError, match=expected):
        dora()
    dora(exclude_modules=["mlp.down_proj"])


def test_describe_unadapted_of_all_linear_names_what_has_no_adapter() -> None:
    lines = {}
    for kind in ("llama", "qwen3_moe", "glm4_moe", "gpt_oss"):
        model = adapted(kind)
        lines[kind] = describe_unadapted(model, Recipe.model_validate(RECIPE).adapter)
    assert lines["llama"] == lines["qwen3_moe"] == []
    assert "shared_experts.down_proj" in lines["glm4_moe"][0]
    assert "mlp.experts.down_proj" in lines["gpt_oss"][0]


@pytest.mark.filterwarnings("error:The following")
def test_add_adapter_hides_the_warning_about_patterns_that_peft_applies() -> None:
    model = adapted("qwen3_moe", target_modules=OLD_NAMES)
    assert model.peft_config["default"].rank_pattern == {r".*\.gate_up_proj": 4}
    shapes = {name: p.shape[0] for name, p in model.named_parameters() if "layers.0" in name and "lora_A" in name}
    assert sorted(shapes.values()) == [4 * 2, 4 * 4]  # experts times rank


@pytest.mark.filterwarnings("error:Model has `tie_word_embeddings")
@pytest.mark.parametrize("section", [{"modules_to_save": ["embed_tokens"]}, {"target_modules": ["lm_head"]}])
def test_add_adapter_hides_the_warning_about_a_tie_that_the_log_describes(section: dict[str, Any]) -> None:
    model = build_tiny(MODELS["llama"][0], **SIZES, tie_word_embeddings=True)
    recipe = Recipe.model_validate(RECIPE | {"adapter": LORA | section})
    (line,) = describe_cut_tie(add_adapter(model, recipe, keep=[], task_type="CAUSAL_LM"))
    assert "they become two weights" in line


@pytest.mark.parametrize("kind", ["phimoe", "llama4"])
def test_all_linear_of_a_model_whose_router_returns_a_tuple_leaves_it_out(kind: str) -> None:
    model = adapted(kind)
    model(input_ids=torch.tensor([[1, 2, 3]]))
    (line,) = describe_unadapted(model, Recipe.model_validate(RECIPE).adapter)
    assert ".router" in line and any("q_proj.lora_A" in name for name, _ in model.named_parameters())


# model -> modules that all-linear adapts and leaves out
ALL_LINEAR: dict[str, tuple[set[str], set[str]]] = {
    "mamba": ({"in_proj"}, {"dt_proj", "out_proj", "x_proj"}),
    "jamba": ({"in_proj", "x_proj", "out_proj"}, {"dt_proj"}),
    "falcon": ({"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}, set()),
}


@pytest.mark.parametrize("kind", ALL_LINEAR)
def test_all_linear_adapts_the_layers_that_are_called_and_names_the_others(kind: str) -> None:
    expected, left_out = ALL_LINEAR[kind]
    model = adapted(kind)
    model(input_ids=torch.tensor([[1, 2, 3]])).logits.square().sum().backward()
    weights = {name.partition(".lora_B")[0]: p.grad for name, p in model.named_parameters() if "lora_B" in name}
    assert expected <= {name.rpartition(".")[2] for name in weights}
    assert [name for name, gradient in weights.items() if gradient is None or not gradient.any()] == []
    lines = describe_unadapted(model, Recipe.model_validate(RECIPE).adapter)
    assert len(lines) == bool(left_out) and all(f".{name}" in lines[0] for name in left_out)


def test_add_adapter_with_a_saved_module_and_a_part_of_it_trains_both_once() -> None:
    model = adapted("llama", modules_to_save=["layers.1.mlp", "layers.1.mlp.up_proj"])
    saved = [name for name, p in model.named_parameters() if p.requires_grad and "modules_to_save" in name]
    assert [name.split(".")[-2] for name in saved] == ["gate_proj", "up_proj", "down_proj"]
    model(input_ids=torch.tensor([[1, 2, 3]])).logits.square().sum().backward()
    assert all(model.get_parameter(name).grad is not None for name in saved)


def test_add_adapter_continues_an_adapter_with_the_ranks_that_peft_gives_experts(tmp_path: Path) -> None:
    first = adapted("mixtral", target_modules=["w1", "w2", "w3"])
    assert first.peft_config["default"].rank_pattern
    first.save_pretrained(tmp_path, save_embedding_layers=False)
    section = LORA | {"target_modules": ["w1", "w2", "w3"], "path": str(tmp_path)}
    assert adapter_problems(Recipe.model_validate(RECIPE | {"adapter": section}).adapter) == []
    adapted("mixtral", **section)
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"alpha_pattern": {"gate_up_proj": 2}}))
    with pytest.raises(InputError, match="alpha_pattern {'gate_up_proj': 2}, but an adapter of this recipe has"):
        adapted("mixtral", **section)
