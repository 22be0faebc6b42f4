"""Endings of names of modules: ftcli matches them after a dot, peft's `modules_to_save` without one."""

from __future__ import annotations

import pytest

from ftcli.models.module_names import is_saved


@pytest.mark.parametrize(
    ("ending", "name", "expected"),
    [
        ("norm", "model.norm", True),
        ("norm", "model.layers.0.input_layernorm", True),
        ("model.norm", "model.layers.0.input_layernorm", False),
        ("model.norm", "norm", False),
        ("classifier", "pre_classifier", True),
        ("mlp", "model.layers.0.mlp.up_proj", True),
        ("norm", "model.layers.0.normal", False),
    ],
)
def test_is_saved_means_modules_by_the_ends_of_their_names(ending: str, name: str, expected: bool) -> None:
    assert is_saved(name, [ending]) == expected
