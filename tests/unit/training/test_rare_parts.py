"""Which trained modules may have no gradient in a step, so that DistributedDataParallel would stop."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from ftcli.training.acceleration import _has_rare_parts


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
    assert _has_rare_parts(model, SimpleNamespace(sparse=sparse)) is expected
    assert not _has_rare_parts(model.requires_grad_(False), SimpleNamespace(sparse=sparse))
