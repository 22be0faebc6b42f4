"""Swap the hardware and the curve stays, on real GPUs under NCCL: every profile on two against one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ftcli.testing import run_on_processes

from ..multiprocess.cells import CELLS, train_cells_on_gpus, write_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
LOSS = {"fp32": 1e-4, "bf16": 1e-2}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def single(request: pytest.FixtureRequest, inputs: Path) -> tuple[str, dict[str, Any]]:
    changes = {"precision": request.param}
    found = run_on_processes(train_cells_on_gpus, inputs, list(CELLS), changes, processes=1, profile="single")
    return request.param, found[0]


@pytest.mark.parametrize("profile", ["ddp", "fsdp", "zero3"])
def test_two_gpus_follow_the_curve_of_one(profile: str, inputs: Path, single: tuple[str, dict[str, Any]]) -> None:
    precision, wanted = single
    changes = {"precision": precision}
    found = run_on_processes(train_cells_on_gpus, inputs, list(CELLS), changes, processes=2, profile=profile)[0]
    for name in CELLS:
        for a, b in zip(wanted[name]["rows"], found[name]["rows"], strict=True):
            assert b["loss"] == pytest.approx(a["loss"], rel=LOSS[precision]), name
            assert (b["items"], b["samples"]) == (a["items"], a["samples"])
        assert found[name]["before"] == wanted[name]["before"], name
