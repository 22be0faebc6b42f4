"""A merged model has the logits of the base with its adapter and peft's own merged weights. Tiny models."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ftcli.checkpoint.assemble import merged_weights
from ftcli.checkpoint.conversion import convert_adapter, name_dtype
from ftcli.checkpoint.export_job import ExportJob
from ftcli.checkpoint.final import load_plain
from ftcli.checkpoint.hf_shards import save_weights
from ftcli.checkpoint.proof import prove
from ftcli.config.recipe import Recipe
from ftcli.models.adapters import add_adapter, describe_cut_tie
from ftcli.models.new_tokens import initialise_new_rows, resize_embeddings
from ftcli.models.own_model import names_in_files, record_cut_tie, save_config
from ftcli.runtime.errors import ExportError, InputError
from ftcli.testing import tiny_tokenizer
from ftcli.tiny_models import SIZES, build_tiny

from ...support.recipes import minimal_values

TOKENS: dict[str, Any] = {"vocab_size": 259, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 1}
# Sizes of experts are multiples of 16 bytes, which their products need.
PLAIN = SIZES | TOKENS | {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64}
EXPERTS = PLAIN | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("LlamaForCausalLM", PLAIN | {"tie_word_embeddings": True}),
    "untied": ("LlamaForCausalLM", PLAIN),
    "gpt2": ("GPT2LMHeadModel", TOKENS | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "gemma2": ("Gemma2ForCausalLM", PLAIN | {"tie_word_embeddings": True}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", EXPERTS),
    "qwen3-moe-tied": ("Qwen3MoeForCausalLM", EXPERTS | {"tie_word_embeddings": True}),
    "phi": ("PhiForCausalLM", SIZES | TOKENS | {"intermediate_size": 64}),
    "mixtral": ("MixtralForCausalLM", PLAIN | {"num_local_experts": 4}),
}
MLP = ["gate_proj", "up_proj", "down_proj"]
# architecture, adapter, whether embeddings and head of the merged model are tied
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "linear": ("untied", {}, False),
    "tied": ("tied", {"use_rslora": True}, True),
    "dora": ("untied", {"use_dora": True}, False),
    "conv1d": ("gpt2", {}, True),
    "conv1d and dora": ("gpt2", {"use_dora": True}, True),
    "scaled embeddings": ("gemma2", {"target_modules": ["embed_tokens", "q_proj"]}, False),
    "all experts": ("qwen3-moe", {"target_modules": MLP}, False),
    "experts and attention": ("qwen3-moe", {"use_rslora": True}, False),
    "experts by a pattern": ("qwen3-moe", {"target_modules": r".*\.(q_proj|down_proj)"}, False),
    "other experts": ("mixtral", {}, False),
    "experts and embeddings": ("qwen3-moe-tied", {"modules_to_save": ["embed_tokens"]}, False),
    "saved embeddings": ("tied", {"modules_to_save": ["embed_tokens"]}, False),
    "saved embeddings of conv1d": ("gpt2", {"modules_to_save": ["wte"]}, False),
    "saved head": ("tied", {"modules_to_save": ["lm_head"]}, False),
    "saved embeddings and head": ("untied", {"modules_to_save": ["embed_tokens", "lm_head"]}, False),
    "saved norm": ("tied", {"modules_to_save": ["norm"]}, True),
    "embeddings": ("tied", {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True}, False),
    "head": ("tied", {"target_modules": ["lm_head"]}, False),
    "embeddings and head": ("tied", {"target_modules": ["embed_tokens", "lm_head"]}, False),
    "new tokens": ("tied", {"new_tokens": ["<a>", "<b>"]}, True),
    "new tokens beside both": (
        "tied",
        {"new_tokens": ["<a>", "<b>"], "modules_to_save": ["embed_tokens", "lm_head"]},
        False,
    ),
    "new tokens beside a head": ("untied", {"new_tokens": ["<a>", "<b>"]}, False),
    "new tokens beside a saved head": ("phi", {"new_tokens": ["<a>", "<b>"], "modules_to_save": ["lm_head"]}, False),
}


def recipe_of(base: Path, *, new_tokens: tuple[str, ...] | list[str] = (), **adapter: Any) -> Recipe:
    """Return a recipe with a LoRA adapter of a base model."""
    return Recipe.model_validate(
        minimal_values(
            model={"name": str(base), "new_tokens": list(new_tokens)},
            data={"train": "rows.jsonl", "max_length": 32},
            adapter={"type": "lora", "r": 4, "lora_alpha": 8} | adapter,
        )
    )


def adapted(recipe: Recipe, base: Path, name: str, settings: dict[str, Any]) -> Any:
    """Write a base model and return it with an adapter of random values."""
    model = build_tiny(name, **settings)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.mul_(3 if parameter.ndim > 1 else 1).add_(1 if key == "lm_head.bias" else 0)
    model.save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    model = resize_embeddings(AutoModelForCausalLM.from_pretrained(base), recipe)
    initialise_new_rows(model, recipe)
    wrapped: Any = add_adapter(model, recipe, keep=[], task_type="CAUSAL_LM").eval()
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape) * 0.05)
    return wrapped


def write_merged(model: Any, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write the merged model as an export does."""
    shapes, values = merged_weights(model, dtype)
    save_config(None, model.get_base_model(), folder)
    record_cut_tie(model.get_base_model(), shapes, folder)
    name_dtype(folder / "config.json", str(dtype).removeprefix("torch."))
    save_weights(names_in_files(model.get_base_model()), shapes, values, folder, 10**9)
    return folder


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(261).remainder(model.get_input_embeddings().weight.shape[0])[-60:][None]
    with torch.no_grad():
        output: torch.Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return output


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("case", CASES)
def test_merged_weights_of_every_adapter_give_its_logits_and_the_weights_of_peft(case: str, tmp_path: Path) -> None:
    architecture, settings, stays_tied = CASES[case]
    recipe = recipe_of(tmp_path / "base", **settings)
    model = adapted(recipe, tmp_path / "base", *ARCHITECTURES[architecture])
    expected = logits(model)
    with model.disable_adapter():
        base = logits(model)
    exported = AutoModelForCausalLM.from_pretrained(write_merged(model, tmp_path / "merged")).eval()
    assert distance(logits(exported), expected) < 1e-5 < 1e-2 < distance(logits(exported), base)
    assert distance(logits(model), expected) == 0  # merging has changed nothing in the model
    is_tied = exported.get_input_embeddings().weight is exported.get_output_embeddings().weight
    assert is_tied == exported.config.tie_word_embeddings == stays_tied
    was_tied = model.get_base_model().config.tie_word_embeddings
    assert bool(describe_cut_tie(model)) == (was_tied and not stays_tied)

    ends = [model.get_base_model().get_input_embeddings(), model.get_base_model().get_output_embeddings()]
    if was_tied and any(isinstance(end, LoraLayer) for end in ends):
        return  # peft's merge adds the update of the one to the other
    merged = dict(model.merge_and_unload().named_parameters())
    weights = dict(exported.named_parameters())
    assert weights.keys() == merged.keys()
    for name, value in merged.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-6, atol=1e-6, msg=name)


def test_new_tokens_of_a_head_with_a_bias_are_refused_beside_an_adapter(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path / "base", new_tokens=["<a>"])
    with pytest.raises(InputError, match=r"lm_head has a bias, which peft leaves out(.|\n)*modules_to_save"):
        adapted(recipe, tmp_path / "base", *ARCHITECTURES["phi"])


def test_load_plain_of_an_adapter_without_its_base_names_both(tmp_path: Path) -> None:
    settings = {"peft_type": "LORA", "base_model_name_or_path": str(tmp_path / "gone")}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match=r"the base model .*gone of the adapter in .* cannot be loaded: "):
        load_plain("AutoModelForCausalLM", tmp_path)


def job_of(recipe: Recipe, dtype: str = "float32") -> ExportJob:
    return ExportJob(recipe, "AutoModelForCausalLM", None, None, None, dtype, True, 10**9)


@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_prove_with_a_weight_that_was_not_merged_names_it(scale: float, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path / "base", target_modules=MLP)
    model = adapted(recipe, tmp_path / "base", *ARCHITECTURES["qwen3-moe"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(scale if ".lora_B." in name else 1)
    file = write_merged(model, tmp_path / "merged") / "model.safetensors"
    base, merged = load_file(tmp_path / "base" / "model.safetensors"), load_file(file)
    experts = {name: value for name, value in base.items() if re.search(r"layers\.1\.mlp.*down_proj", name)}
    assert experts
    save_file(merged | experts, file, metadata={"format": "pt"})
    with pytest.raises(ExportError, match=r"the export is wrong: .*layers\.1\.mlp\.experts\.down_proj differs from"):
        prove(job_of(recipe), model, file.parent, labels=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prove_of_a_right_export_returns_its_distance(dtype: str, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path / "base", target_modules=["embed_tokens", "q_proj"])
    model = adapted(recipe, tmp_path / "base", *ARCHITECTURES["tied"])
    folder = write_merged(model, tmp_path / "merged", getattr(torch, dtype))
    away = prove(job_of(recipe, dtype), model, folder, labels=0)
    assert away is not None and away < (1e-5 if dtype == "float32" else 2e-2)


def test_prove_of_embeddings_that_became_the_head_is_refused(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path / "base", modules_to_save=["embed_tokens"])
    model = adapted(recipe, tmp_path / "base", *ARCHITECTURES["tied"])
    folder = write_merged(model, tmp_path / "merged")
    weights = load_file(folder / "model.safetensors")
    assert not torch.equal(weights.pop("lm_head.weight"), weights["model.embed_tokens.weight"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(ExportError, match=r"The first wrong weight is lm_head\.weight"):
        prove(job_of(recipe), model, folder, labels=0)


def test_resize_of_embeddings_that_a_wrong_configuration_ties_keeps_the_head(tmp_path: Path) -> None:
    from ftcli.models.load import load_model

    name, settings = ARCHITECTURES["untied"]
    build_tiny(name, **settings).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    recipe = recipe_of(tmp_path, new_tokens=["<a>", "<b>"])
    head = load_file(tmp_path / "model.safetensors")["lm_head.weight"]
    model: Any = load_model("AutoModelForCausalLM", recipe, new_head=False, dtype=torch.float32)[0]
    assert len(model.lm_head.weight) == 260 and torch.equal(model.lm_head.weight[:258], head[:258])
    save_config(None, model, tmp_path / "final")
    assert json.loads((tmp_path / "final" / "config.json").read_text())["tie_word_embeddings"] is False


def test_convert_adapter_keeps_counters_of_batch_norms_as_integers(tmp_path: Path) -> None:
    path = tmp_path / "adapter_model.safetensors"
    save_file({"weight": torch.ones(2), "num_batches_tracked": torch.tensor(257)}, path)  # bfloat16 has no 257
    convert_adapter(path, "bfloat16")
    stored = load_file(path)
    assert stored["weight"].dtype == torch.bfloat16 and stored["num_batches_tracked"].dtype == torch.int64
    assert stored["num_batches_tracked"] == 257
