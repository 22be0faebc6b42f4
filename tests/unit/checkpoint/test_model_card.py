"""The model card of a merged adapter has nothing that only its adapter needs."""

from __future__ import annotations

from ftcli.checkpoint.model_card import loading_instructions, merged_card, model_card
from ftcli.config.recipe import Recipe

from ...support.recipes import minimal_values


def test_merged_card_says_nothing_of_a_base_or_of_peft() -> None:
    values = minimal_values(
        model={"name": "base", "new_tokens": ["<a>"]}, data={"train": "t.jsonl"}, adapter={"type": "lora"}
    )
    card = model_card(Recipe.model_validate(values), {})
    assert "resize_token_embeddings" in card and "library_name: peft" in card
    merged = merged_card(card + "\n".join(loading_instructions("AutoModel", ["x"], "text-classification")))
    assert "New tokens: `<a>`." in merged and "# Fine-tuned (LoRA, merged) from base" in merged
    assert "resize" not in merged and "peft" not in merged and "```" not in merged
