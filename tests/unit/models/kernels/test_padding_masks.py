"""Padding facts computed on the host: their values, and unchanged results of models that use them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ftcli.models.kernels.padding_masks import (
    Padding,
    _with_padding,
    padding_of,
    replace_mask_functions,
    use_padding,
)

CAUSAL: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 2},
    "Mistral": {"num_key_value_heads": 2, "sliding_window": 4},
    "Gemma3Text": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "GPTNeoX": {},
}
LENGTHS = [9, 5, 1]


def model_of(name: str, options: dict[str, Any]) -> Any:
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "max_position_embeddings": 32, "pad_token_id": 0}
    config = getattr(transformers, f"{name}Config")(**sizes, **heads, **options)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    kind = transformers.AutoModel if name == "Bert" else transformers.AutoModelForCausalLM
    return kind.from_config(config).train(False)


def batch_of(lengths: list[int], *, left: bool = False) -> dict[str, torch.Tensor]:
    longest = max(lengths)
    places = torch.arange(longest)[None, :]
    own = places >= longest - torch.tensor(lengths)[:, None] if left else places < torch.tensor(lengths)[:, None]
    ids = torch.randint(1, 64, own.shape, generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids * own, "attention_mask": own.long()}


def outcome(model: Any, batch: dict[str, torch.Tensor], padding: Padding | None) -> tuple[torch.Tensor, list[Any]]:
    """Return the model's first output where rows have tokens, and the gradients of its sum of squares there."""
    model.zero_grad()
    with use_padding(padding, batch["attention_mask"]):
        values = model(**batch)[0][batch["attention_mask"].bool()]
    (values**2).sum().backward()
    return values.detach(), [parameter.grad for parameter in model.parameters()]


def test_padding_of_a_mask_follows_from_its_values() -> None:
    assert padding_of(batch_of([5, 5])) == ("nowhere", (2, 5))
    assert padding_of(batch_of([5, 2])) == ("at the end", (2, 5))
    assert padding_of({"attention_mask": batch_of([5, 2])["attention_mask"].bool()}) == ("at the end", (2, 5))
    assert padding_of(batch_of([5, 2], left=True)) is None
    assert padding_of({"attention_mask": torch.tensor([[1, 0, 1]])}) is None


def test_padding_of_other_or_several_masks_is_none() -> None:
    mask = torch.ones(2, 5, dtype=torch.int64)
    assert padding_of({"input_ids": mask}) is None
    assert padding_of({"attention_mask": mask.float()}) is None
    assert padding_of({"attention_mask": mask[None, None]}) is None
    assert padding_of({"attention_mask": mask, "decoder_attention_mask": mask}) is None


@pytest.mark.parametrize("name", CAUSAL)
def test_listen_of_a_causal_model_with_right_padding_gives_the_same_without_a_mask(name: str) -> None:
    model = model_of(name, CAUSAL[name])
    replace_mask_functions(model)
    for lengths in (LENGTHS, [7, 7]):
        batch = batch_of(lengths)
        expected, gradients = outcome(model, batch, None)
        actual, others = outcome(model, batch, padding_of(batch))
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(others, gradients)


def test_use_padding_of_bidirectional_attention_retains_the_mask() -> None:
    model, batch = model_of("Bert", {}), batch_of(LENGTHS)
    replace_mask_functions(model)
    model.pooler = None
    expected, _ = outcome(model, batch, None)
    actual, _ = outcome(model, batch, padding_of(batch))
    assert torch.equal(actual, expected)
    unmasked, _ = outcome(model, batch, Padding("nowhere", (3, 9)))  # a lie, to see that it would show
    assert not torch.allclose(unmasked, expected)


def test_listen_with_left_padding_leaves_masks_unchanged() -> None:
    model, batch = model_of("Llama", CAUSAL["Llama"]), batch_of(LENGTHS, left=True)
    replace_mask_functions(model)
    expected, _ = outcome(model, batch, None)
    actual, _ = outcome(model, batch, padding_of(batch))
    assert torch.equal(actual, expected)
    unmasked, _ = outcome(model, batch, Padding("at the end", (3, 9)))
    assert not torch.allclose(unmasked, expected)


def test_use_padding_after_its_block_has_no_effect() -> None:
    model, batch = model_of("Llama", CAUSAL["Llama"]), batch_of(LENGTHS, left=True)
    replace_mask_functions(model)
    expected, _ = outcome(model, batch, None)
    with pytest.raises(ZeroDivisionError), use_padding(Padding("at the end", (3, 9)), batch["attention_mask"]):
        raise ZeroDivisionError
    assert torch.equal(outcome(model, batch, None)[0], expected)


def test_use_padding_with_another_mask_has_no_effect() -> None:
    model, batch = model_of("Llama", CAUSAL["Llama"]), batch_of([9, 9, 9])
    replace_mask_functions(model)
    changed = batch["attention_mask"].clone()
    changed[1, 4] = 0  # as a task may do on the device
    expected = model(**batch | {"attention_mask": changed})[0]
    with use_padding(padding_of(batch), batch["attention_mask"]):
        assert torch.equal(model(**batch | {"attention_mask": changed})[0], expected)
    assert not torch.allclose(model(**batch)[0], expected)


def test_bidirectional_attention_without_a_mask_needs_no_mask_function() -> None:
    """While a CUDA graph is captured, transformers 5.17 would build a mask of ones."""

    def built(*args: Any, **kwargs: Any) -> str:
        return "built"

    mask, sizes = _with_padding(built), {"batch_size": 1, "q_length": 4, "kv_length": 4, "attention_mask": None}
    assert mask(**sizes, allow_is_bidirectional_skip=True) is None
    assert mask(**sizes, allow_is_bidirectional_skip=True, local_size=2) == "built"
    assert mask(**sizes) == "built"
