"""Which trained modules may have no gradient in a step, so that DistributedDataParallel would stop."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from ftcli.config.recipe import Recipe
from ftcli.training.acceleration import _has_rare_parts

from ...support.recipes import minimal_values


def faults(missing_gradient: str) -> Recipe:
    sections = {"model": {"name": "m"}, "data": {"train": "t.jsonl"}, "faults": {"missing_gradient": missing_gradient}}
    return Recipe.model_validate(minimal_values(**sections))


@pytest.mark.parametrize(
    ("name", "sparse", "expected"),
    [
        ("experts", (), True),
        ("branches", ("branches",), True),
        ("branches", ("other",), False),
    ],
)
def test_single_experts_and_sparse_modules_may_have_no_gradient(
    name: str, sparse: tuple[str, ...], expected: bool
) -> None:
    model = nn.ModuleDict({name: nn.ModuleList([nn.Linear(2, 2)])})
    assert _has_rare_parts(model, faults("stop"), SimpleNamespace(sparse=sparse)) is expected
    assert not _has_rare_parts(model.requires_grad_(False), faults("stop"), SimpleNamespace(sparse=sparse))


def test_a_recipe_that_warns_of_missing_gradients_may_have_them() -> None:
    assert _has_rare_parts(nn.Linear(2, 2), faults("warn"), SimpleNamespace())
