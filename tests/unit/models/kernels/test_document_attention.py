"""Concatenated documents have the logits of single documents, in every supported architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ftcli.checkpoint.final import load_plain
from ftcli.config.recipe import Recipe
from ftcli.inference.decode import SamplingOptions, decode, forward_names
from ftcli.models.architectures import model_types_with
from ftcli.models.hub import keep_soft_capping
from ftcli.models.kernels.document_attention import (
    DOCUMENT_ATTENTION,
    DOCUMENT_ATTENTION_TORCH,
    confine_to_documents,
    document_bounds,
)
from ftcli.models.load import load_model
from ftcli.runtime.errors import InputError

from ....support.recipes import minimal_values

PACKED = model_types_with("packed_attention")
LENGTHS = [7, 1, 12, 3, 9]  # windows of the models below are 4: shorter than most, longer than some
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,  # so that attention is far from uniform
}
MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
EXTRAS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4},
    "mixtral": {"sliding_window": 4, "num_local_experts": 4},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, **MIXED},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3": {"use_sliding_window": True, "sliding_window": 4, "head_dim": 8, **MIXED},
    "qwen3_moe": {**EXPERTS, "head_dim": 8},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 4, "attn_logit_softcapping": 2.0, **MIXED},
    "gemma3_text": {"head_dim": 16, "sliding_window": 4, **MIXED},
    "phi3": {"sliding_window": 4},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 64},
    "smollm3": {"no_rope_layers": [1, 1, 0], "use_sliding_window": True, "sliding_window": 4, **MIXED},
    "olmo3": {"sliding_window": 4, **MIXED},
    "gpt_oss": {"head_dim": 8, "sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2, **MIXED},
    "starcoder2": {"sliding_window": 4},
    "cohere2": {"sliding_window": 4, "head_dim": 8, **MIXED},
    "glm4": {"head_dim": 8},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
    },
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48},
}


def tiny(kind: str, **sizes: int) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **EXTRAS.get(kind, {}), **sizes})
    model: Any = keep_soft_capping(AutoModelForCausalLM.from_config(config)).eval()
    with torch.no_grad():  # sinks, biases and norms too, which are drawn as zeros and ones
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def documents() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(3, 97, (length,), generator=draw) for length in LENGTHS]


def laid_end_to_end(rows: list[torch.Tensor], lengths: list[int]) -> dict[str, Any]:
    return {
        "input_ids": torch.cat(rows)[None],
        "position_ids": torch.cat([torch.arange(len(row)) for row in rows])[None],
        **document_bounds(lengths, None),
        "use_cache": False,
    }


@pytest.mark.parametrize("kind", PACKED)
def test_document_attention_gives_the_logits_of_single_documents(kind: str) -> None:
    model, rows = tiny(kind), documents()
    with torch.no_grad():
        alone = torch.cat([model(row[None], use_cache=False).logits[0] for row in rows])
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = (torch.arange(padded.shape[1]) < torch.tensor(LENGTHS)[:, None]).long()
        before = model(padded, attention_mask=mask, use_cache=False).logits[mask.bool()]
        confine_to_documents(model)
        packed = model(**laid_end_to_end(rows, LENGTHS)).logits[0]
        after = model(padded, attention_mask=mask, use_cache=False).logits[mask.bool()]
        merged = model(**laid_end_to_end(rows, [sum(LENGTHS)])).logits[0]
    assert alone.abs().max() > 0.1
    torch.testing.assert_close(packed, alone, atol=1e-4, rtol=0)
    torch.testing.assert_close(after, before, atol=1e-4, rtol=0)  # evaluation is as it was
    assert (merged - alone).abs().max() > 1e-2, "boundaries that are ignored must show"
    assert model.config._attn_implementation == DOCUMENT_ATTENTION


@pytest.mark.parametrize("kind", PACKED)
def test_document_attention_with_sdpa_uses_torchs_kernels(kind: str) -> None:
    model, rows = tiny(kind), documents()
    with torch.no_grad():
        alone = torch.cat([model(row[None], use_cache=False).logits[0] for row in rows])
        confine_to_documents(model, "sdpa")
        torch.testing.assert_close(model(**laid_end_to_end(rows, LENGTHS)).logits[0], alone, atol=1e-4, rtol=0)
    assert model.config._attn_implementation == DOCUMENT_ATTENTION_TORCH


PROMPTS = [[5, 9, 7], [11], [30, 31, 32, 33, 34, 35, 36, 37, 38]]  # longer than a window, and shorter


def spoken(model: Any) -> tuple[list[Any], torch.Tensor]:
    """Return the tokens of greedy answers with a cache to prompts filled up on the left, and the logits of each."""
    logits = []

    def forward(**options: Any) -> Any:
        output = model(**options)
        logits.append(output.logits[:, -1])
        return output

    options = {"ends": (), "pad": 0, "device": torch.device("cpu")}
    tokens = list(decode(forward, forward_names(model), PROMPTS, SamplingOptions(7), **options))
    return tokens, torch.stack(logits)


@pytest.mark.parametrize("kind", PACKED)
def test_document_attention_with_a_cache_equals_the_models_attention(kind: str) -> None:
    model = tiny(kind)
    tokens, logits = spoken(model)
    confine_to_documents(model)
    confined_tokens, confined_logits = spoken(model)
    assert confined_tokens == tokens
    torch.testing.assert_close(confined_logits, logits, atol=1e-4, rtol=0)


def test_document_attention_with_soft_capping_rejects_kernels_without_it(tmp_path: Path) -> None:
    model = tiny("gemma2")
    model.save_pretrained(tmp_path)
    values: dict[str, Any] = minimal_values(model={"name": str(tmp_path)}, data={"train": "rows.jsonl"})
    options: dict[str, Any] = {"new_head": False, "dtype": torch.float32}
    trained, _ = load_model("AutoModelForCausalLM", Recipe.model_validate(values), **options)
    row = documents()[2][None]
    with torch.no_grad():
        expected = model(row).logits
        capless = AutoModelForCausalLM.from_pretrained(tmp_path, attn_logit_softcapping=None).eval()(row).logits
        assert (capless - expected).abs().max() > 1e-2, "a cap that is left out must show"
        for loaded in (trained.eval(), load_plain("AutoModelForCausalLM", tmp_path)):
            torch.testing.assert_close(loaded(row).logits, expected)
    values["model"]["attn_implementation"] = "sdpa"
    with pytest.raises(InputError, match="sdpa ignores the soft-capping|scaled_dot_product_attention"):
        load_model("AutoModelForCausalLM", Recipe.model_validate(values), **options)


def test_document_attention_name_is_not_saved_with_a_model(tmp_path: Path) -> None:
    model = tiny("gemma2")
    confine_to_documents(model)
    model.save_pretrained(tmp_path)
    assert DOCUMENT_ATTENTION not in (tmp_path / "config.json").read_text()
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation != DOCUMENT_ATTENTION
