"""`ftcli trace` as a user meets it: one process, two processes, and a rank that dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ftcli.runtime.run_folder import EVENTS

from ..support.recipes import recipe_values
from ..support.runner import MakeInputs, RunCli

ROOT = Path(__file__).resolve().parents[2]
DIES = '''
"""Text generation in which rank 1 fails."""
import os
from ftcli.tasks.sft import Options, Task as Whole

class Task(Whole):
    calls = 0

    def loss(self, model, batch):
        self.calls += 1
        if os.environ.get("RANK") == "1" and self.calls == 9:
            raise RuntimeError("planted")
        return super().loss(model, batch)
'''
FILES = ["rank-0.json", "rank-0.trace.json.gz", "trace.html", "trace.json"]


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    folder = make_inputs()
    values = recipe_values(batch={"global_size": 6, "micro_size": 3})
    (folder / "right.yaml").write_text(yaml.safe_dump(values))
    (folder / "dies.py").write_text(DIES)
    (folder / "dies.yaml").write_text(yaml.safe_dump(values | {"task": "./dies.py"}))
    return folder


def launch(inputs: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ftcli", "trace", *arguments, "--cpu"],
        cwd=inputs,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


def test_trace_of_one_process_writes_its_files_and_no_run(
    inputs: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(inputs)
    done = run_cli("trace", "right.yaml", "--cpu", "--steps", "2", "--json")
    assert done.code == 0, done.err[-3000:]
    found = json.loads(done.out)
    assert (found["processes"], found["steps"], found["slowest_rank"], found["failures"]) == (1, 2, 0, [])
    rank = found["ranks"]["0"]
    assert sum(rank["shares"].values()) == pytest.approx(1) and rank["shares"]["exposed"] == 0
    assert rank["shares"]["compute"] > 0 and rank["shares"]["optimizer"] > 0 and len(rank["step_seconds"]) == 2
    assert len(rank["plain_step_seconds"]) == 4, "two after the first three, and two after the recorded ones"
    folder = inputs / "runs" / "right-trace"
    names = {path.name for path in folder.iterdir()} - {EVENTS}  # a busy machine may be recorded as an event
    assert sorted(names) == ["all-ranks.trace.json.gz", *FILES]
    assert not (inputs / "runs" / "right").exists()
    again = run_cli("trace", "right.yaml", "--cpu")
    assert again.code == 2 and "right-trace exists and is not an empty folder" in again.err


def test_trace_without_bokeh_writes_everything_but_the_page(
    inputs: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(inputs)
    monkeypatch.setattr("ftcli.reports.tracing.trace.is_installed", lambda package: package != "bokeh")
    done = run_cli("trace", "right.yaml", "--cpu", "--steps", "1", "--output", "pageless")
    assert done.code == 0, done.err[-3000:]
    assert "page: not written, because bokeh is not installed (pip install 'ftcli[report]')" in done.out
    names = {path.name for path in (inputs / "pageless").iterdir()} - {EVENTS}
    assert sorted(names) == sorted({"all-ranks.trace.json.gz", *FILES} - {"trace.html"})


@pytest.mark.slow
def test_trace_of_two_processes_has_both_ranks_and_their_communication(inputs: Path) -> None:
    done = launch(inputs, "right.yaml", "--profile", "ddp", "--num-processes", "2", "--output", "two")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((inputs / "two" / "trace.json").read_text())
    assert sorted(found["ranks"]) == ["0", "1"] and found["failures"] == []
    for rank in found["ranks"].values():
        assert sum(rank["shares"].values()) == pytest.approx(1) and rank["shares"]["exposed"] > 0
        calls = {name: count for name, _, count in rank["top"]}
        assert calls["gloo:all_reduce"] == 2  # gradients in one bucket, and the sums of the loss; not the counts
    assert "communication:" in done.stdout and "two/trace.html" in done.stdout
    assert not (inputs / "runs" / "right").exists()


@pytest.mark.slow
def test_trace_of_a_rank_that_dies_explains_what_was_recorded(inputs: Path) -> None:
    done = launch(inputs, "dies.yaml", "--profile", "ddp", "--num-processes", "2", "--output", "died")
    assert done.returncode == 1 and "planted" in done.stderr
    found = json.loads((inputs / "died" / "trace.json").read_text())
    assert "1" in found["ranks"] and len(found["ranks"]["1"]["step_seconds"]) == 2
    assert any(text.startswith("rank 1: RuntimeError: planted") for text in found["failures"])
    assert "failed: rank 1: RuntimeError: planted" in done.stdout
