"""A batch system's warning on real GPUs: SIGUSR1 to every process of a job ends it with 75; then it resumes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from ftcli.checkpoint.folder import find_damage
from ftcli.runtime.checkpoint_names import checkpoints_of
from ftcli.runtime.run_folder import RunFolder

from ..end_to_end.test_preemption import RECIPE, TASK
from ..support.launches import ftcli_on_gpus
from ..support.runner import MakeInputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
STEPS, STOPPED = 6, 3


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    folder = make_inputs({"signalled.py": TASK})
    more = {"train": {"max_steps": STEPS}, "log": {"every_steps": 1}, "evaluate": {"every_steps": 2}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE | more | {"precision": "bf16"}))
    return folder


def losses(run: Path) -> dict[int, float]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


@pytest.mark.timeout(400)
def test_two_gpus_stopped_by_sigusr1_resume_on_the_same_curve(inputs: Path, tmp_path: Path) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    line = ("train", "recipe.yaml", "--profile", "fsdp", "--num-processes", 2, "--resume", "auto")
    result = ftcli_on_gpus(inputs, *line, "--output", whole)
    assert result.returncode == 0, result.stderr
    trouble = {"SIGNAL_AT": f"loss {STOPPED}", "SIGNALS": "SIGUSR1", "WHOLE_TREE": "1", "STOP_FILE": str(run / "stop")}
    result = ftcli_on_gpus(inputs, *line, "--output", run, **trouble)
    assert result.returncode == 75, result.stderr
    assert f"stopped on request after step {STOPPED} of {STEPS} (SIGUSR1)" in result.stderr
    assert (RunFolder(run).status()["state"], find_damage(checkpoints_of(run)[-1])) == ("stopped", "")
    result = ftcli_on_gpus(inputs, *line, "--output", run)
    assert result.returncode == 0, result.stderr
    assert "device cuda" in result.stderr and RunFolder(run).status()["state"] == "done"
    assert losses(run) == pytest.approx(losses(whole), rel=1e-3) and len(losses(run)) == STEPS
