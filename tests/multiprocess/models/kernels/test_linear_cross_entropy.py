"""A head that computes likelihoods in chunks gives the curve of whole logits on every profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ftcli.models import losses
from ftcli.models.kernels import linear_cross_entropy
from ftcli.testing import run_on_cpu

from ....support.cells import cell

NAMES = ("sft-tied", "sft-lora")
# Of losses and of gradient norms, relative: low precision rounds the gradients of logits before they are scaled.
CLOSE = {"fp32": (1e-6, 1e-5), "bf16": (1e-4, 5e-3), "fp16": (1e-4, 1e-3), "bf16_pure": (4e-3, 2e-2)}
pytestmark = pytest.mark.slow


def train_in_pieces(folder: Path, precisions: list[str]) -> dict[str, list[tuple[float, float]]]:
    """Return precision and cell -> loss and gradient norm of every step; chunks have seven rows."""
    from ftcli.loop import steps
    from ftcli.training.setup import prepare

    linear_cross_entropy.MAX_LOGITS_PER_CHUNK = 7 * 259
    return {
        f"{precision} {name}": [
            (step.loss, step.grad_norm) for step in steps(prepare(cell(folder, name, precision=precision), cpu=True))
        ]
        for precision in precisions
        for name in NAMES
    }


def train_both_ways(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what `train_in_pieces` returns, and the same with whole logits."""
    in_pieces = train_in_pieces(folder, list(CLOSE))
    losses._is_known = lambda inner, head: False
    return in_pieces, train_in_pieces(folder, list(CLOSE))


@pytest.fixture(scope="module")
def single(inputs: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    results: tuple[dict[str, Any], dict[str, Any]] = run_on_cpu(train_both_ways, inputs, processes=1, profile="single")[
        0
    ]
    return results


def assert_same_curves(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, curve in actual.items():
        of_loss, of_norm = CLOSE[name.split()[0]]
        assert [loss for loss, _ in curve] == pytest.approx([loss for loss, _ in expected[name]], rel=of_loss), name
        assert [norm for _, norm in curve] == pytest.approx([norm for _, norm in expected[name]], rel=of_norm), name


def test_linear_cross_entropy_in_every_precision_gives_the_curve_of_whole_logits(
    single: tuple[dict[str, Any], ...],
) -> None:
    in_pieces, whole = single
    assert len(in_pieces) == len(NAMES) * len(CLOSE)
    assert_same_curves(in_pieces, whole)


@pytest.mark.parametrize("profile", ["fsdp", "zero3"])  # weights are shards outside the head's own call
def test_linear_cross_entropy_on_sharded_profiles_gives_the_curve_of_whole_logits(
    profile: str, inputs: Path, single: tuple[dict[str, Any], ...]
) -> None:
    results = run_on_cpu(train_in_pieces, inputs, ["fp32", "bf16"], processes=2, profile=profile)[0]
    assert len(results) == len(NAMES) * 2
    assert_same_curves(results, single[1])
