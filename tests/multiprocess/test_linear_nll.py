"""A head that gives likelihoods in pieces leaves every profile's curve where whole logits have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ftcli import linear_nll, losses
from ftcli.testing import run_on_cpu

from .cells import cell, write_inputs

NAMES = ("sft-tied", "sft-lora")
CLOSE = {"fp32": 1e-6, "bf16": 1e-4, "fp16": 1e-4, "bf16_pure": 4e-3}  # of the loss, relative
pytestmark = pytest.mark.slow


def train(folder: Path, precisions: list[str], in_pieces: bool) -> dict[str, list[float]]:
    """Return precision and cell -> loss and gradient norm of every step."""
    from ftcli.loop import steps
    from ftcli.run import prepare

    linear_nll.PIECE = 7 * 259
    if not in_pieces:
        losses._is_known = lambda inner, head: False
    return {
        f"{precision} {name}": [
            number
            for step in steps(prepare(cell(folder, name, precision=precision), cpu=True))
            for number in (step.loss, step.grad_norm)
        ]
        for precision in precisions
        for name in NAMES
    }


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def with_whole_logits(inputs: Path) -> dict[str, Any]:
    return run_on_cpu(train, inputs, list(CLOSE), False, processes=1, profile="single")[0]


@pytest.mark.parametrize("profile", ["single", "ddp", "fsdp", "zero3"])
def test_pieces_leave_the_curve_where_whole_logits_have_it(
    profile: str, inputs: Path, with_whole_logits: dict[str, Any]
) -> None:
    precisions, processes = (list(CLOSE), 1) if profile == "single" else (["fp32", "bf16"], 2)
    ranks = run_on_cpu(train, inputs, precisions, True, processes=processes, profile=profile)
    assert len(ranks[0]) == len(NAMES) * len(precisions)
    for name, found in ranks[0].items():
        wanted, most = with_whole_logits[name], CLOSE[name.split()[0]]
        assert found[::2] == pytest.approx(wanted[::2], rel=most), name
        assert found[1::2] == pytest.approx(wanted[1::2], rel=10 * most), name  # norms
