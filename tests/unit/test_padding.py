"""Padding that the host tells of: what is known of a mask, and that models give what they gave without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ftcli.padding import Padding, listen, padding_of, told

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
    with told(padding, batch["attention_mask"]):
        values = model(**batch)[0][batch["attention_mask"].bool()]
    (values**2).sum().backward()
    return values.detach(), [parameter.grad for parameter in model.parameters()]


def test_what_is_known_of_a_mask_is_known_from_its_values() -> None:
    assert padding_of(batch_of([5, 5])) == ("nowhere", (2, 5))
    assert padding_of(batch_of([5, 2])) == ("at the end", (2, 5))
    assert padding_of({"attention_mask": batch_of([5, 2])["attention_mask"].bool()}) == ("at the end", (2, 5))
    assert padding_of(batch_of([5, 2], left=True)) is None
    assert padding_of({"attention_mask": torch.tensor([[1, 0, 1]])}) is None


def test_of_masks_of_another_kind_or_of_several_nothing_is_known() -> None:
    mask = torch.ones(2, 5, dtype=torch.int64)
    assert padding_of({"input_ids": mask}) is None
    assert padding_of({"attention_mask": mask.float()}) is None
    assert padding_of({"attention_mask": mask[None, None]}) is None
    assert padding_of({"attention_mask": mask, "decoder_attention_mask": mask}) is None


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_model_gives_the_same_without_the_mask_of_padding_behind_rows(name: str) -> None:
    model = model_of(name, CAUSAL[name])
    listen(model)
    for lengths in (LENGTHS, [7, 7]):
        batch = batch_of(lengths)
        wanted, gradients = outcome(model, batch, None)
        found, others = outcome(model, batch, padding_of(batch))
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(others, gradients)


def test_attention_in_both_directions_keeps_its_mask() -> None:
    model, batch = model_of("Bert", {}), batch_of(LENGTHS)
    listen(model)
    model.pooler = None
    wanted, _ = outcome(model, batch, None)
    found, _ = outcome(model, batch, padding_of(batch))
    assert torch.equal(found, wanted)
    unmasked, _ = outcome(model, batch, Padding("nowhere", (3, 9)))  # a lie, to see that it would show
    assert not torch.allclose(unmasked, wanted)


def test_rows_that_are_padded_before_their_tokens_are_left_to_transformers() -> None:
    model, batch = model_of("Llama", CAUSAL["Llama"]), batch_of(LENGTHS, left=True)
    listen(model)
    wanted, _ = outcome(model, batch, None)
    found, _ = outcome(model, batch, padding_of(batch))
    assert torch.equal(found, wanted)
    unmasked, _ = outcome(model, batch, Padding("at the end", (3, 9)))
    assert not torch.allclose(unmasked, wanted)


def test_what_was_told_of_one_batch_does_not_hold_after_it() -> None:
    model, batch = model_of("Llama", CAUSAL["Llama"]), batch_of(LENGTHS, left=True)
    listen(model)
    wanted, _ = outcome(model, batch, None)
    with pytest.raises(ZeroDivisionError), told(Padding("at the end", (3, 9)), batch["attention_mask"]):
        raise ZeroDivisionError
    assert torch.equal(outcome(model, batch, None)[0], wanted)


def test_a_model_that_is_given_another_mask_than_its_batch_is_told_nothing() -> None:
    model, batch = model_of("Llama", CAUSAL["Llama"]), batch_of([9, 9, 9])
    listen(model)
    changed = batch["attention_mask"].clone()
    changed[1, 4] = 0  # as a task may do on the device
    wanted = model(**batch | {"attention_mask": changed})[0]
    with told(padding_of(batch), batch["attention_mask"]):
        assert torch.equal(model(**batch | {"attention_mask": changed})[0], wanted)
    assert not torch.allclose(model(**batch)[0], wanted)
