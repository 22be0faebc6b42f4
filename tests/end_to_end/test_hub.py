"""Streams by a name on the hub, through the real command line; the hub is a server on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ftcli import testing

from ..support.hub import COMMIT

ROOT = Path(__file__).resolve().parents[2]
RECIPE: dict[str, Any] = {
    "task": "./stopping.py",
    "model": {"name": "model", "dropout": 0.0},
    "data": {"train": "org/words", "streaming": True, "shuffle_buffer": 8, "max_length": 64},
    "batch": {"global_size": 4, "micro_size": 4},
    "train": {"max_steps": 14},
    "optimizer": {"learning_rate": 1e-3},
}
STOPPING_TASK = """
import os, signal
from ftcli.tasks import pretrain
Options = pretrain.Options
class Task(pretrain.Task):
    calls = 0
    def loss(self, model, batch):
        self.calls += 1
        if str(self.calls) == os.environ.get("STOP_AT"):
            os.kill(os.getpid(), signal.SIGTERM)
        return super().loss(model, batch)
"""
# All in one process that never knew another hub: importing torch takes seconds, and the hub changes in between.
SCRIPT = """
import contextlib, io, json, os, pathlib, sys
from tests.support.hub import Hub, serving

def shards(kind):
    rows = [[{"text": f"text {n} {i}"} for i in range(12)] for n in range(4)]
    return {f"data/train-{n:05d}-of-00004.{kind}": content(kind, each) for n, each in enumerate(rows)}

def content(kind, rows):
    if kind == "jsonl":
        return "".join(json.dumps(row) + "\\n" for row in rows).encode()
    import pyarrow
    from pyarrow import parquet
    file = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()

def ftcli(*arguments, **trouble):
    from ftcli.__main__ import main
    output, code = io.StringIO(), 0
    os.environ.update(trouble)
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            main(list(arguments))
        except SystemExit as end:
            code = end.code
    for name in trouble:
        del os.environ[name]
    print(json.dumps([code, output.getvalue()]))

def train(run, *arguments, **trouble):
    ftcli("train", "recipe.json", "--output", run, *arguments, **trouble)

with serving(Hub("org/words", shards("jsonl"))) as hub:
    os.environ.update(hub.environment("home"))
    ftcli("check", "recipe.json")
    train("whole")
    train("run", STOP_AT="5")
    train("run", "--resume", "auto")
    train("late", STOP_AT="5")
    hub.publish("f" * 40, shards("parquet"))
    from ftcli.data.hub_commits import commit_of
    from ftcli.data.hub_streams import _commit_of_builder
    _commit_of_builder.cache_clear()  # what a process of its own begins with
    commit_of.cache_clear()
    train("other", "--resume", "late", "--set", "data.train.revision=main")
    from ftcli.runtime.checkpoint_names import checkpoints_of
    from ftcli.checkpoint.folder import read_state, update_state
    for folder in checkpoints_of(pathlib.Path("late")):  # as an older version wrote it
        (entry,) = read_state(folder)["resolution"]
        update_state(folder, resolution=[{name: value for name, value in entry.items() if name != "reader"}])
    train("late", "--resume", "auto")
    train("parquet")
    ftcli("train", "recipe.json", "--output", "none", "--set", "data.train=org/nothing")
"""


@pytest.mark.slow
def test_stream_of_a_hub_data_set_is_checked_trained_and_resumed_and_another_commit_is_refused(tmp_path: Path) -> None:
    testing.save_tiny_causal(tmp_path / "model")
    (tmp_path / "stopping.py").write_text(STOPPING_TASK)
    (tmp_path / "recipe.json").write_text(json.dumps(RECIPE))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "FTCLI_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [code for code, _ in lines] == [0, 0, 75, 0, 75, 2, 0, 0, 2], lines
    check, whole, _, resumed_rows, _, another, reread, _, nothing = (output for _, output in lines)
    assert "org/words: its files are listed when rows are read" in check
    assert "4 files in 4 lanes of 2 shuffled rows" in whole and "resumed after step 5" in resumed_rows
    commits = [COMMIT, "f" * 40]
    assert "data.train.revision: '{}' -> '{}'".format(*commits) in another
    assert all(f"revision main, commit {COMMIT}" in output for output in (check, whole))
    assert "data set org/nothing is neither on this machine nor reachable on the hub" in nothing
    says = "from here on, rows of org/words hold the values of its files"
    assert says in reread and says not in resumed_rows
    steps = {run: steps_of(tmp_path / run) for run in ("whole", "run", "late", "parquet")}
    assert len(steps["whole"]) == 14 and steps["run"] == steps["whole"] == steps["late"] == steps["parquet"]
    read = [
        yaml.safe_load((tmp_path / run / "recipe.yaml").read_text())["data"]["train"] for run in ("late", "parquet")
    ]
    assert [source["revision"] for source in read] == commits
    assert len({samples for _, samples in steps["whole"]}) == 14


def steps_of(run: Path) -> list[tuple[float, int]]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(row["loss"], row["samples"]) for row in rows]
