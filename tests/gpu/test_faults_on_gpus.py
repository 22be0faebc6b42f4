"""Faults that only a GPU has: memory that is really full, and a collective that one rank never joins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ftcli.checkpoint.folder import find_damage
from ftcli.runtime.checkpoint_names import checkpoints_of
from ftcli.runtime.run_folder import FLIGHT_RECORDER, RunFolder

from ..end_to_end.test_faults import RECIPE
from ..support.launches import ftcli_on_gpus
from ..support.runner import MakeInputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
TASK = """
import os, time
from datetime import timedelta
import torch
from torch.distributed import distributed_c10d as groups
from ftcli.tasks import sft

Options = sft.Options

class Task(sft.Task):
    calls = 0

    def loss(self, model, batch):
        self.calls += 1
        if str(self.calls) == os.environ.get("FULL_AT"):
            torch.empty(1 << 42, dtype=torch.uint8, device="cuda")
        if self.calls == 1 and "HANG_AT" in os.environ:
            groups._set_pg_timeout(timedelta(seconds=20))  # ten minutes by default
        if os.environ.get("HANG_AT") == f"{os.environ.get('RANK', '0')}:{self.calls}":
            time.sleep(300)
        return super().loss(model, batch)
"""


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    return make_inputs({"troubled.py": TASK, "recipe.yaml": RECIPE})


def test_train_out_of_gpu_memory_error_lists_micro_sizes_that_fit(inputs: Path, tmp_path: Path) -> None:
    line = ("train", "recipe.yaml", "--profile", "single", "--set", "batch.micro_size=6")
    result = ftcli_on_gpus(inputs, *line, "--output", tmp_path / "run", FULL_AT="4")
    print(result.stderr)
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr
    assert "CUDA out of memory. Tried to allocate 4096.00 GiB" in result.stderr
    assert "set batch.micro_size to 1 or 2 or 3" in result.stderr
    assert find_damage(checkpoints_of(tmp_path / "run")[-1]) == ""
    result = ftcli_on_gpus(inputs, *line, "--resume", "auto", "--output", tmp_path / "run")
    assert result.returncode == 0 and RunFolder(tmp_path / "run").status()["state"] == "done", result.stderr


@TWO
@pytest.mark.parametrize("profile", ["ddp", "fsdp"])
@pytest.mark.timeout(300)
def test_hanging_collective_writes_the_position_of_each_rank(profile: str, inputs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    line = ("train", "recipe.yaml", "--profile", profile, "--num-processes", 2, "--output", run)
    result = ftcli_on_gpus(inputs, *line, HANG_AT="1:5")
    print(result.stderr)
    assert result.returncode not in (0, 2, 75), result.stderr
    assert (run / f"{FLIGHT_RECORDER}0").exists() and "ranks wrote their last collectives to" in result.stderr
    assert "the slowest, rank 1, has been in forward (step 4)" in result.stderr
    assert "rank 0 ended because a collective timed out" in result.stderr
    assert find_damage(checkpoints_of(run)[-1]) == ""
    result = ftcli_on_gpus(inputs, *line, "--resume", "auto")
    assert result.returncode == 0 and RunFolder(run).status()["state"] == "done", result.stderr
    assert not list(run.glob(f"{FLIGHT_RECORDER}*")), "of an earlier attempt"
