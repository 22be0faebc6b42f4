"""Settings of a recipe that change a model's configuration before its weights are loaded. Tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ftcli.config.recipe import Recipe
from ftcli.models.load import load_model
from ftcli.runtime.errors import InputError
from ftcli.tiny_models import build_tiny

from ...support.recipes import minimal_values

# Models whose configuration declares a probability as a whole number: class, sizes, key.
WHOLE: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "mpt": (
        "AutoModelForCausalLM",
        "MptForCausalLM",
        {"vocab_size": 64, "d_model": 32, "n_layers": 1, "n_heads": 4},
        "attn_pdrop",
    ),
    "levit": (
        "AutoModelForImageClassification",
        "LevitForImageClassification",
        {"image_size": 64, "hidden_sizes": [16, 16, 16], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1]},
        "drop_path_rate",
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_load_model_sets_a_dropout_that_is_declared_as_a_whole_number_to_0_only(name: str, tmp_path: Path) -> None:
    auto, kind, sizes, key = WHOLE[name]
    build_tiny(kind, **sizes).save_pretrained(tmp_path)

    def load(dropout: float) -> Any:
        model = {"name": str(tmp_path), "dropout": dropout}
        recipe = Recipe.model_validate(minimal_values(model=model, data={"train": "t.jsonl"}))
        return load_model(auto, recipe, new_head=False, dtype=torch.float32)

    load(0.0)
    with pytest.raises(InputError, match=f"(?s)model.dropout: {key} .* cannot be 0.1, .*set model.dropout to 0"):
        load(0.1)
