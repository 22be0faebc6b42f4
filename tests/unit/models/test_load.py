"""Settings of a recipe that change a model's configuration before its weights are loaded. Tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ftcli.config.recipe import Recipe
from ftcli.models.load import largest_dropout, load_model
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


# Probabilities whose names have no "dropout", and one that is a list: class, sizes, probabilities in the configuration.
OTHER_NAMES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "efficientnet": (
        "EfficientNetForImageClassification",
        {"width_coefficient": 0.25, "depth_coefficient": 0.3, "image_size": 32, "hidden_dim": 320},
        {"drop_connect_rate": 0.2, "dropout_rate": 0.5},
    ),
    "cvt": (
        "CvtForImageClassification",
        {"embed_dim": [8, 16, 24], "num_heads": [1, 2, 3], "depth": [1, 2, 10]},
        {"drop_path_rate": [0.0, 0.0, 0.1], "drop_rate": [0.1, 0.0, 0.0], "attention_drop_rate": [0.0, 0.1, 0.0]},
    ),
}


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_load_model_sets_every_dropout_probability(name: str, tmp_path: Path) -> None:
    kind, sizes, probabilities = OTHER_NAMES[name]
    model = build_tiny(kind, **sizes, **probabilities)
    assert largest_dropout(model) > 0
    model.save_pretrained(tmp_path)
    values = minimal_values(model={"name": str(tmp_path), "dropout": 0.0}, data={"train": "t.jsonl"})
    loaded = load_model(
        "AutoModelForImageClassification", Recipe.model_validate(values), new_head=False, dtype=torch.float32
    )[0]
    assert largest_dropout(loaded) == 0
    for key, before in probabilities.items():
        assert getattr(loaded.config, key) == ([0.0] * 3 if isinstance(before, list) else 0.0)
    chances = [getattr(module, key, None) or 0 for module in loaded.modules() for key in ("p", "drop_prob")]
    assert not any(chances)
