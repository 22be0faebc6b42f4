"""Endings of names of modules: ftcli matches them after a dot, peft's `modules_to_save` without one."""

from __future__ import annotations

import pytest

from ftcli.models.module_names import endings_for_peft


@pytest.mark.parametrize(
    ("endings", "names", "expected"),
    [
        (["norm"], ["model.norm", "model.layers.0.input_layernorm"], ["model.norm"]),
        (["norm"], ["norm", "layers.0.input_layernorm"], ["model.norm"]),  # names begin with base_model.model in peft
        (["lm_head", "embed_tokens"], ["lm_head", "model.embed_tokens"], ["lm_head", "embed_tokens"]),
        (["gate"], ["a.mlp.gate", "b.mlp.gate", "a.mlp.shared_gate"], ["a.mlp.gate", "b.mlp.gate"]),
        (["orm"], ["model.norm"], []),
    ],
)
def test_endings_for_peft_mean_the_same_modules_in_both(
    endings: list[str], names: list[str], expected: list[str]
) -> None:
    found = endings_for_peft(endings, names)
    assert found == expected
    by_peft = [name for name in names if any(f"base_model.model.{name}".endswith(ending) for ending in found)]
    assert by_peft == [name for name in names if any(f".{name}".endswith(f".{ending}") for ending in endings)]
