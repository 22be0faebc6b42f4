"""Jobs of `ftcli submit --slurm` on a real Slurm of two nodes: `make test-slurm`.

No part of `make test`, because it needs Debian packages and root: pytest finds this file by its path only.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ftcli.runtime.checkpoint_names import checkpoints_of
from ftcli.runtime.run_folder import RunFolder

from ..support.recipes import recipe_values
from ..support.runner import MakeInputs
from .cluster import slurm_cluster

ROOT = Path(__file__).resolve().parents[2]
# A step of the task takes half a second or more, so that there is time to end it. The file `fail` makes it fail.
TASK = """
import time
from pathlib import Path
from ftcli.tasks import sft

Options = sft.Options

class Task(sft.Task):
    def loss(self, *arguments):
        time.sleep(0.5)
        if Path("fail").exists(): raise RuntimeError("the task fails")
        return super().loss(*arguments)
"""
RECIPE = recipe_values("./slow.py", train={"max_steps": 8})


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


@pytest.fixture
def folder(make_inputs: MakeInputs) -> Path:
    """Return a folder with a recipe and a profile of one process on each of two nodes."""
    profile = yaml.safe_load((ROOT / "accelerate_configs" / "ddp_multi_node.yaml").read_text()) | {"num_processes": 2}
    return make_inputs({"slow.py": TASK, "recipe.yaml": RECIPE, "two.yaml": profile})


class Slurm:
    """Commands of Slurm in one folder."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        added = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        added["GLOO_SOCKET_IFNAME"] = "lo"  # both nodes are this machine; without it doctor finds the loopback wrong
        self.folder, self.environment = folder, environment | added

    def run(self, *command: str) -> str:
        ended = subprocess.run(command, cwd=self.folder, env=self.environment, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout.strip()

    def submit(self, *arguments: str) -> str:
        """Run `ftcli submit` and return the number of the job."""
        line = [sys.executable, "-m", "ftcli", "submit", "recipe.yaml", "--slurm", "--cpu", "--time", "1:00"]
        return self.run(*line, *arguments)

    def facts(self, job: str) -> dict[str, str]:
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", job)))

    def wait(self, job: str, reached: Callable[[dict[str, str]], bool], seconds: float = 240) -> dict[str, str]:
        """Wait for a condition of a job; fail with its log when it is not reached or the job ends before."""
        deadline = time.monotonic() + seconds
        while not reached(facts := self.facts(job)):
            is_over = facts["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
            assert not is_over and time.monotonic() < deadline, (facts, self.log(job))
            time.sleep(0.3)
        return facts

    def wait_for_steps(self, job: str, run: str, steps: int) -> None:
        """Wait until a run has done some steps."""
        self.wait(job, lambda facts: len(self.rows(run)) >= steps)

    def finish_again(self, job: str) -> dict[str, str]:
        """Start a requeued job without Slurm's delay of two minutes, and wait for its end."""
        time.sleep(2)  # slurmd refuses a job that starts in the second in which it was ended
        self.run("scontrol", "update", f"jobid={job}", "starttime=now")
        return self.wait(job, ended)

    def rows(self, run: str) -> list[dict[str, Any]]:
        run_folder = RunFolder(self.folder / "runs" / run)
        return run_folder.training_rows() if (run_folder.path / "metrics.jsonl").exists() else []

    def log(self, job: str) -> str:
        return "\n".join(path.read_text() for path in self.folder.glob(f"*-{job}.log"))


@pytest.fixture
def slurm(folder: Path, cluster: dict[str, str]) -> Iterator[Slurm]:
    slurm = Slurm(folder, cluster)
    yield slurm
    subprocess.run(["scancel", "--user", str(os.getuid())], env=slurm.environment)
    deadline = time.monotonic() + 240
    while slurm.run("squeue", "--noheader") and time.monotonic() < deadline:
        time.sleep(0.5)


def ended(facts: dict[str, str]) -> bool:
    return facts["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")


def requeued(facts: dict[str, str]) -> bool:
    return (facts["Restarts"], facts["JobState"]) == ("1", "PENDING")  # COMPLETING before, while the run saves


def assert_done_like_an_uninterrupted_run(slurm: Slurm, run: str, job: str) -> None:
    """Compare the metrics of a finished run with those of a run in this process that was not stopped."""
    assert RunFolder(slurm.folder / "runs" / run).status()["state"] == "done"
    shutil.rmtree(slurm.folder / "runs" / "whole", ignore_errors=True)
    plain = ["--set", "task=sft", "--output", "runs/whole", "--cpu"]
    slurm.run(sys.executable, "-m", "ftcli", "train", "recipe.yaml", *plain)
    for actual, expected in zip(slurm.rows(run), slurm.rows("whole"), strict=True):
        assert (actual["step"], actual["samples"], actual["items"]) == tuple(
            expected[name] for name in ("step", "samples", "items")
        )
        assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-4)


def test_job_on_two_nodes_that_gets_the_signal_is_requeued_and_resumes(slurm: Slurm) -> None:
    job = slurm.submit("--profile", "two.yaml", "--output", "runs/two")
    slurm.wait_for_steps(job, "two", 2)
    slurm.run("scancel", "--signal=USR1", job)  # as Slurm does before the time limit
    slurm.wait(job, requeued)
    assert checkpoints_of(slurm.folder / "runs" / "two")
    stopped_at = len(slurm.rows("two"))
    assert 2 <= stopped_at < 8
    facts = slurm.finish_again(job)
    assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), slurm.log(job)
    log = slurm.log(job)
    assert log.count("collectives           each pair and each collective answers: 2 ranks") == 4  # 2 nodes, 2 starts
    assert "stopped on request after step" in log and "resumed after step" in log
    assert_done_like_an_uninterrupted_run(slurm, "two", job)


def test_preempted_job_saves_a_checkpoint_and_slurm_requeues_it_once(slurm: Slurm) -> None:
    job = slurm.submit("--output", "runs/low", "--placeholder", "partition=normal")
    slurm.wait_for_steps(job, "low", 2)
    urgent = slurm.run("sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--wrap", "sleep 3")
    slurm.wait(job, requeued)
    slurm.wait(urgent, ended)
    assert checkpoints_of(slurm.folder / "runs" / "low")
    facts = slurm.finish_again(job)
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), slurm.log(job)
    assert_done_like_an_uninterrupted_run(slurm, "low", job)


def test_scontrol_requeue_saves_a_checkpoint_and_requeues_once(slurm: Slurm) -> None:
    job = slurm.submit("--output", "runs/again")
    slurm.wait_for_steps(job, "again", 2)
    slurm.run("scontrol", "requeue", job)
    slurm.wait(job, requeued)
    assert checkpoints_of(slurm.folder / "runs" / "again")
    facts = slurm.finish_again(job)
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), slurm.log(job)
    assert_done_like_an_uninterrupted_run(slurm, "again", job)


def test_scancel_saves_a_checkpoint_and_does_not_requeue(slurm: Slurm) -> None:
    job = slurm.submit("--output", "runs/cancelled")
    slurm.wait_for_steps(job, "cancelled", 2)
    slurm.run("scancel", job)
    slurm.wait(job, ended)
    deadline = time.monotonic() + 240
    while RunFolder(slurm.folder / "runs" / "cancelled").status()["state"] == "running" and time.monotonic() < deadline:
        time.sleep(0.3)
    facts = slurm.facts(job)
    assert (facts["JobState"], facts["Restarts"]) == ("CANCELLED", "0"), slurm.log(job)
    assert RunFolder(slurm.folder / "runs" / "cancelled").status()["state"] == "stopped"
    assert checkpoints_of(slurm.folder / "runs" / "cancelled")


@pytest.mark.parametrize(
    ("cause", "code", "message"),
    [
        ("doctor", "2:0", "NCCL_DEBUGG"),
        ("fail", "1:0", "RuntimeError: the task fails"),
        ("two.yaml", "2:0", "unknown key 'a'"),
    ],
)
def test_job_that_fails_is_not_requeued(cause: str, code: str, message: str, slurm: Slurm) -> None:
    """Let doctor, the training or the check fail; the profile is changed before the job can read it."""
    if cause == "doctor":
        slurm.environment["NCCL_DEBUGG"] = "INFO"  # sbatch passes the environment on
    blocking = slurm.run("sbatch", "--parsable", "--nodes=2", "--wrap", "sleep 3")
    profile = ("--profile", "two.yaml") if cause == "two.yaml" else ()
    job = slurm.submit("--output", f"runs/{Path(cause).stem}", *profile)
    if cause != "doctor":
        (slurm.folder / cause).write_text("a: 1")
    slurm.wait(blocking, ended)
    facts = slurm.wait(job, ended)
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("FAILED", code, "0"), slurm.log(job)
    assert message in slurm.log(job)
    assert (not slurm.rows(Path(cause).stem)) and not checkpoints_of(slurm.folder / "runs" / Path(cause).stem)


def test_dry_run_prints_a_script_that_slurm_accepts_and_submits_nothing(slurm: Slurm) -> None:
    script = slurm.submit("--profile", "two.yaml", "--output", "runs/dry", "--dry-run")
    assert slurm.run("squeue", "--noheader") == "" and not list(slurm.folder.glob("runs/dry*"))
    (slurm.folder / "dry.sh").write_text(script + "\n")
    slurm.run("sbatch", "--test-only", "dry.sh")
