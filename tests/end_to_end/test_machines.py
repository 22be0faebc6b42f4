"""Several machines in one run: here two launchers on one host, each with its own process and machine rank.

They share the disk, as nodes of a cluster do; what differs from real machines is the network and nothing else.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from ftcli.runtime.run_folder import RunFolder

from ..support.ports import free_port
from ..support.runner import MakeInputs, run_forked
from .test_bare_launch import FAILING_TASK, KILLED_BY_TORCHRUN, MARKS, RECIPE, ROOT

TWENTY = "train.max_steps=20"
Ended = tuple[int, str, str]  # exit code, stdout, stderr


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    folder = make_inputs({"recipe.yaml": RECIPE})
    for rank in (0, 1):
        task = FAILING_TASK.replace('== "1"', f'== "{rank}"').replace("rank 1", f"rank {rank}")
        (folder / f"failing_task_{rank}.py").write_text(task)
        (folder / f"failing_{rank}.yaml").write_text(yaml.safe_dump(RECIPE | {"task": f"./failing_task_{rank}.py"}))
    rendezvous = (ROOT / "accelerate_configs" / "ddp_multi_node.yaml").read_text()
    assert "rdzv_backend: static" in rendezvous
    (folder / "rendezvous.yaml").write_text(rendezvous.replace("rdzv_backend: static", "rdzv_backend: c10d"))
    return folder


@pytest.fixture(scope="module")
def single(inputs: Path) -> RunFolder:
    """Return a run of one process with twenty steps."""
    assert run_forked(inputs, "train", "recipe.yaml", "--cpu", "--output", "single", "--set", TWENTY).code == 0
    return RunFolder(inputs / "single")


def environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in MARKS}
    added = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return inherited | added


def on_two_machines(inputs: Path, recipe: str, profile: str, output: Path, *changes: str) -> list[Ended]:
    """Start two launchers, machine 0 first, and return how each ended; `changes` go to --set."""
    port = free_port()
    line = [sys.executable, "-m", "ftcli", "train", recipe, "--profile", profile, "--cpu", "--num-processes", "2"]
    line += ["--main-process-ip", "127.0.0.1", "--main-process-port", str(port), "--output", str(output)]
    line += [word for change in changes for word in ("--set", change)]
    machines = []
    for rank in (0, 1):
        command = [*line, "--machine-rank", str(rank)]
        machines.append(
            subprocess.Popen(
                command,
                cwd=inputs,
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        while machines[0].poll() is None and not _listens(port):  # one host: machine 1 would take the port first
            time.sleep(0.1)
    try:
        ended = []
        for machine in machines:
            out, err = machine.communicate()
            ended.append((machine.returncode, out, err))
    finally:
        for machine in machines:
            machine.kill()
    return ended


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("profile", "micro"),
    [("ddp_multi_node", 1), ("rendezvous.yaml", 4), ("fsdp_multi_node", 2), ("zero3_multi_node", 2)],
)
def test_train_on_two_machines_that_share_a_disk_gives_the_curve_of_one_process(
    profile: str, micro: int, inputs: Path, single: RunFolder, tmp_path: Path
) -> None:
    """Each profile and each micro size is launched once: a launch imports six times."""
    folder = RunFolder(tmp_path / "run")
    changes = (TWENTY, f"batch.micro_size={micro}")
    for code, out, err in on_two_machines(inputs, "recipe.yaml", profile, folder.path, *changes):
        assert code == 0 and out.splitlines()[-1] == str(folder.path), err
        assert "of 2 (from 0) waits for " in err
    assert folder.status()["state"] == "done" and folder.final.is_dir()
    assert len(folder.training_rows()) == 20
    assert_same_curve(folder, single)


def assert_same_curve(folder: RunFolder, single: RunFolder) -> None:
    for actual, expected in zip(folder.metrics(), single.metrics(), strict=True):
        for key in expected.keys() & {"step", "items", "samples", "learning_rate"}:
            assert actual[key] == expected[key]
        for key in expected.keys() & {"loss", "grad_norm", "eval/loss", "eval/perplexity"}:
            assert actual[key] == pytest.approx(expected[key], rel=1e-4 if key == "grad_norm" else 1e-5), key


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 0])
def test_train_error_on_one_machine_ends_both_with_the_same_message(rank: int, inputs: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    for code, _, err in on_two_machines(inputs, f"failing_{rank}.yaml", "ddp_multi_node", folder.path):
        assert code == 1 and KILLED_BY_TORCHRUN not in err
        assert err.endswith(f"rank {rank}: ArithmeticError: a fault of rank {rank} at step 2\n")
    status = folder.status()
    assert (status["state"], status["exit_code"]) == ("failed", 1)


@pytest.mark.slow
def test_train_on_two_machines_into_a_folder_with_a_run_is_refused(inputs: Path, single: RunFolder) -> None:
    before = single.status()
    line = [sys.executable, "-m", "ftcli", "train", "recipe.yaml", "--profile", "ddp_multi_node", "--cpu"]
    line += ["--main-process-ip", "127.0.0.1", "--num-processes", "2", "--output", str(single.path)]
    result = subprocess.run(line, cwd=inputs, env=environment(), capture_output=True, text=True)
    assert result.returncode == 2 and "already holds a run" in result.stderr
    assert single.status() == before
