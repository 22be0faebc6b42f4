"""Every profile on two GPUs under NCCL gives the loss curve of one GPU."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from ftcli.testing import run_on_processes

from ..support.cells import CELLS, FURTHER_CELLS, train_cells_on_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
NAMES = [*CELLS, *FURTHER_CELLS]
LOSS = {"fp32": 1e-4, "bf16": 1e-2}


def train_in_both(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what each cell gave in each precision: a start of ranks takes longer than a cell."""
    return {precision: train_cells_on_gpus(folder, NAMES, {"precision": precision}) for precision in LOSS}


@pytest.fixture(scope="module")
def single(inputs: Path) -> dict[str, dict[str, Any]]:
    return run_on_processes(train_in_both, inputs, processes=1, profile="single")[0]


@pytest.mark.parametrize("profile", ["ddp", "fsdp", "fsdp_offload", "zero3"])
def test_train_on_two_gpus_gives_the_curve_of_one(
    profile: str, inputs: Path, single: dict[str, dict[str, Any]]
) -> None:
    both = run_on_processes(train_in_both, inputs, processes=2, profile=profile)[0]
    departures = []
    for precision, name in product(LOSS, NAMES):
        expected, actual = single[precision][name], both[precision][name]
        assert len(expected["rows"]) == len(actual["rows"])
        for step, (a, b) in enumerate(zip(expected["rows"], actual["rows"], strict=True), 1):
            if b["loss"] != pytest.approx(a["loss"], rel=LOSS[precision]):
                departures.append(f"{name}, {precision}, step {step}: loss {b['loss']} instead of {a['loss']}")
            if (b["items"], b["samples"]) != (a["items"], a["samples"]):
                departures.append(f"{name}, {precision}, step {step}: other rows")
        is_adamw = not name.startswith("resnet")
        if is_adamw and set(actual["fused"]) != {profile != "fsdp_offload"}:
            departures.append(f"{name}, {precision}: optimizer with fused={actual['fused']}")
        if actual["before"] != expected["before"]:
            departures.append(f"{name}, {precision}: other weights before the first step")
    print("\n".join(departures))
    assert not departures
