"""Likelihoods that a causal model's head gives itself are those of its own logits, in every architecture we know."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ftcli.models import losses
from ftcli.models.architectures import HEAD_SETTINGS, architecture_of, model_types_with
from ftcli.models.kernels import linear_cross_entropy
from ftcli.models.losses import cross_entropy_rows, return_token_nll

from ...support.watching import Watch

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,  # so that logits are far from zero
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_local_experts": 4}
EXTRAS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": EXPERTS,
    "qwen3_moe": EXPERTS,
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {"final_logit_softcapping": 3.0},
    "gemma3_text": {"final_logit_softcapping": 3.0},
    "granite": {"logits_scaling": 3.0},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 1},
    "deepseek_v3": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    | {"q_lora_rank": 16, "kv_lora_rank": 16, "moe_intermediate_size": 24},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48},
    "falcon": {},
    "bloom": {"n_layer": 1, "n_head": 4},
}
POSITIONS, TARGETS = torch.tensor([0, 3, 4, 10, 12, 17]), torch.tensor([5, 7, 9, 11, 96, 3])


def tiny(kind: str, **more: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **EXTRAS.get(kind, {}), **more})
    return AutoModelForCausalLM.from_config(config).eval()


def tokens() -> Tensor:
    return torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(1))


def whole(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Return likelihoods and gradients from the model's own logits."""
    logits = model(input_ids=tokens(), use_cache=False).logits
    nll = cross_entropy_rows(logits.flatten(0, 1)[POSITIONS], TARGETS)
    return nll, gradients(model, nll)


def gradients(model: nn.Module, nll: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    nll.sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def by_head(model: nn.Module) -> tuple[Tensor, dict[str, Tensor], list[int]]:
    """Return likelihoods and gradients as the changed model gives them, and the shape that its head returned."""
    shapes: list[int] = []
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    head.register_forward_hook(lambda module, given, output: shapes.extend(output.shape))
    nll = model(input_ids=tokens(), positions=POSITIONS, targets=TARGETS)["nll"]
    return nll, gradients(model, nll), shapes


def assert_same(actual: Any, expected: Any, most: float = 1e-5) -> None:
    torch.testing.assert_close(actual[0], expected[0], atol=most, rtol=most)
    assert actual[1].keys() == expected[1].keys()
    rounding = 1e-6 * max(gradient.norm() for gradient in expected[1].values())  # all there is of a key's bias
    for name, gradient in expected[1].items():
        assert (actual[1][name] - gradient).norm() <= most * gradient.norm() + rounding, name


@pytest.fixture(autouse=True)
def two_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_cross_entropy, "MAX_LOGITS_PER_CHUNK", 2 * 97)


@pytest.mark.parametrize("kind", sorted(model_types_with("head")))
def test_head_losses_of_every_known_architecture_equal_those_of_its_logits(kind: str) -> None:
    model = tiny(kind)
    expected = whole(model)
    return_token_nll(model)
    actual = by_head(model)
    assert actual[2] == [len(TARGETS)], "logits were not left out"
    assert_same(actual, expected)
    assert (losses.after_head(model.config) is None) == (architecture_of(kind).head not in HEAD_SETTINGS)


@pytest.mark.parametrize("kind", ["falcon", "bloom"])
def test_head_losses_of_an_unknown_architecture_use_its_logits(kind: str) -> None:
    model = tiny(kind)
    expected = whole(model)
    return_token_nll(model)
    actual = by_head(model)
    assert actual[2] == [len(TARGETS), 97]
    assert_same(actual, expected)


def test_head_losses_of_a_head_with_an_adapter_use_its_logits() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny("llama"), LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False))
    expected = whole(model)
    return_token_nll(model)
    actual = by_head(model)
    assert actual[2] == [len(TARGETS), 97]
    assert_same(actual, expected)
    assert any("lm_head.lora_B" in name for name in actual[1])


def test_head_losses_with_a_frozen_head_under_an_adapter_has_no_gradient() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny("llama"), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    expected = whole(model)
    return_token_nll(model)
    actual = by_head(model)
    assert actual[2] == [len(TARGETS)]
    assert_same(actual, expected)


def test_head_losses_with_a_tied_head_and_recomputed_layers_give_the_same_gradients() -> None:
    model = tiny("llama", tie_word_embeddings=True)
    expected = whole(model)
    return_token_nll(model)
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(by_head(model), expected)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "granite"])
def test_head_losses_of_a_half_precision_model_equal_those_of_its_logits(kind: str) -> None:
    model = tiny(kind).bfloat16()
    logits = model(input_ids=tokens(), use_cache=False).logits
    expected = cross_entropy_rows(logits.flatten(0, 1)[POSITIONS], TARGETS)
    return_token_nll(model)
    actual = by_head(model)
    assert actual[0].dtype == torch.float32
    assert {gradient.dtype for gradient in actual[1].values()} == {torch.bfloat16}
    torch.testing.assert_close(actual[0], expected, atol=1e-6, rtol=1e-6)  # the same operations in the same dtype


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_head_losses_of_a_training_step_make_no_logits_of_all_tokens(kind: str) -> None:
    model = tiny(kind, vocab_size=101)  # a prime, so that N * V elements are logits and nothing else
    with Watch() as watch:
        whole(model)
    assert len(TARGETS) * 101 in watch.sizes
    return_token_nll(model)
    with Watch() as watch:
        by_head(model)
    assert not {n * 101 for n in (len(TARGETS), tokens().numel())} & watch.sizes


def test_head_losses_of_a_model_with_unknown_logit_changes_raise() -> None:
    model = tiny("llama")
    forward = model.forward

    def louder(**given: Any) -> Any:
        output = forward(**given)
        output.logits = output.logits * 2
        return output

    model.forward = louder
    return_token_nll(model)
    with pytest.raises(RuntimeError, match="LlamaForCausalLM changes its logits after the head"):
        by_head(model)


OTHER_POSITIONS, OTHER_TARGETS = torch.tensor([2, 5, 9, 16]), torch.tensor([8, 96, 4, 21])


def two_passes(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the likelihoods of two forward passes, with other positions and targets, and other tokens."""
    first = model(input_ids=tokens(), positions=POSITIONS, targets=TARGETS)["nll"]
    second = model(input_ids=tokens().flip(1), positions=OTHER_POSITIONS, targets=OTHER_TARGETS)["nll"]
    return first, second


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "falcon"])
def test_head_losses_of_two_forward_passes_give_the_sum_of_both_gradients(kind: str, recomputes: bool) -> None:
    model = tiny(kind, tie_word_embeddings=False)
    return_token_nll(model)
    if recomputes:
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    weights = torch.linspace(0.5, 2, len(TARGETS))  # which no gradient made in the forward pass serves
    first, second = two_passes(model)
    actual = gradients(model, torch.cat([first * weights, second]))
    expected = gradients(model, two_passes(model)[0] * weights)
    for name, gradient in gradients(model, two_passes(model)[1]).items():
        torch.testing.assert_close(actual[name], expected[name] + gradient, atol=1e-6, rtol=1e-6, msg=name)
    assert len(actual) > 5


@pytest.mark.parametrize("kind", ["llama", "falcon"])
def test_head_losses_of_a_nested_call_use_its_own_targets(kind: str) -> None:
    model = tiny(kind)
    return_token_nll(model)
    with torch.no_grad():
        expected = two_passes(model)
        logits = model(input_ids=tokens()).logits
        inner: list[Any] = []

        def call_again(module: nn.Module, given: Any) -> None:
            hook.remove()
            inner.append(model(input_ids=tokens().flip(1), positions=OTHER_POSITIONS, targets=OTHER_TARGETS)["nll"])
            inner.append(model(input_ids=tokens()).logits)

        hook = model.get_output_embeddings().register_forward_pre_hook(call_again)
        outer = model(input_ids=tokens(), positions=POSITIONS, targets=TARGETS)["nll"]
    assert torch.equal(outer, expected[0])
    assert torch.equal(inner[0], expected[1])
    assert torch.equal(inner[1], logits)


def test_head_losses_after_a_failed_call_hold_no_targets() -> None:
    model = tiny("llama")
    expected = model(input_ids=tokens()).logits
    return_token_nll(model)
    with pytest.raises(IndexError):
        model(input_ids=tokens(), positions=POSITIONS + 100, targets=TARGETS)
    assert torch.equal(model(input_ids=tokens()).logits, expected)
