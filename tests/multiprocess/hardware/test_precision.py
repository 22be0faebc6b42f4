"""Precision is the recipe's: every profile computes, accumulates, scales and skips alike."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ftcli.testing import run_on_cpu

from ...support.cells import cell, weights

NAMES = ("sft-tied", "sft-lora", "text")
MOST = {"bf16": 1e-4, "fp16": 1e-4, "bf16_pure": 2e-3}  # of the loss, relative; four to ten times what was seen
HELD = {"bf16": "torch.float32", "fp16": "torch.float32", "bf16_pure": "torch.bfloat16"}
FROZEN = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "bf16_pure": "torch.bfloat16"}
TOO_LARGE = 2.0**130  # a float32 loss times this is infinite, and so is its gradient
pytestmark = pytest.mark.slow
OFFLOADING = "zero3_offload"  # refuses bf16_pure: see compatibility.check_pair
PROFILES = ["ddp", "fsdp", "zero2", "zero3", "fsdp_offload", OFFLOADING]


def train_in_every_precision(folder: Path, profile: str) -> dict[str, Any]:
    """Return losses, dtypes and, for fp16, the steps of a run whose loss scale is too large."""
    from ftcli.loop import steps
    from ftcli.training.setup import prepare

    results: dict[str, Any] = {}
    for precision in [name for name in MOST if (profile, name) != (OFFLOADING, "bf16_pure")]:
        for name in NAMES:
            run = prepare(cell(folder, name, precision=precision), cpu=True)
            parameters = list(run.hardware.unwrap(run.model).parameters())
            results[f"{precision} {name}"] = {
                "held": {str(p.dtype) for p in parameters if p.requires_grad},
                "frozen": {str(p.dtype) for p in parameters if not p.requires_grad},
                "losses": [step.loss for step in steps(run)],
            }
    return results | {"skipped": overflow(folder)}


def overflow(folder: Path) -> dict[str, Any]:
    """Return what happens at each step when the loss scale starts far too large."""
    from ftcli.loop import steps
    from ftcli.training.setup import prepare

    run = prepare(cell(folder, "sft-tied", precision="fp16"), cpu=True)
    assert run.hardware.loss_scale is not None
    run.hardware.loss_scale.scale = TOO_LARGE
    before, moved, norms = weights(run), [], []
    for step in steps(run):
        norms.append(step.grad_norm)
        after = weights(run)
        moved.append(any(not np.array_equal(before[name], after[name]) for name in before))
        if step.number == 2:
            run.hardware.loss_scale.scale = 2.0**10
    scale = run.hardware.loss_scale
    return {"finite": [math.isfinite(n) for n in norms], "moved": moved, "skipped": scale.skipped, "scale": scale.scale}


@pytest.fixture(scope="module")
def single(inputs: Path) -> dict[str, Any]:
    return run_on_cpu(train_in_every_precision, inputs, "single", processes=1, profile="single")[0]


@pytest.fixture(scope="module", params=PROFILES)
def actual(request: pytest.FixtureRequest, inputs: Path) -> dict[str, Any]:
    return run_on_cpu(train_in_every_precision, inputs, request.param, processes=2, profile=request.param)[0]


@pytest.mark.parametrize("precision", MOST)
@pytest.mark.parametrize("name", NAMES)
def test_low_precision_curve_is_the_same_on_every_profile(
    precision: str, name: str, single: dict[str, Any], actual: dict[str, Any]
) -> None:
    if f"{precision} {name}" not in actual:
        pytest.skip(f"{OFFLOADING} refuses {precision}")
    expected, other = single[f"{precision} {name}"], actual[f"{precision} {name}"]
    assert other["losses"] == pytest.approx(expected["losses"], rel=MOST[precision])
    assert other["held"] == expected["held"] == {HELD[precision]}
    assert other["frozen"] == expected["frozen"] == ({FROZEN[precision]} if "lora" in name else set())


def test_fp16_steps_with_overflow_are_skipped_and_counted(single: dict[str, Any], actual: dict[str, Any]) -> None:
    assert single["skipped"] == {
        "finite": [False, False, True, True],
        "moved": [False, False, True, True],
        "skipped": 2,
        "scale": 2.0**10,
    }
    assert actual["skipped"]["finite"] == single["skipped"]["finite"]
    assert actual["skipped"]["skipped"] == 2
