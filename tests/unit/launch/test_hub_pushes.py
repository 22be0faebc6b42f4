"""Uploads of a run's checkpoints, as far as they need no export; tests/end_to_end/test_hub_pushes.py has real runs.

One process without torch, because the client reads its settings when it is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ...support.model_hub import TOKEN

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import contextlib, io, json, os, pathlib, psutil, signal, threading, time
from tests.support.model_hub import receiving
from tests.support.recipes import minimal_values

def launch(name, start=None, error=None, task="sft", earlier=(), saved=(3,), **hub):
    "Return what a launch logs that saves checkpoints and stops or fails."
    recipe = Recipe.model_validate(minimal_values(task, model={"name": "m"}, data={"train": "t.jsonl"}, hub={
        "push": "model", "push_at": "checkpoint", **hub}))
    folder = RunFolder(name)
    folder.create()
    for step in earlier:
        save(folder, step)
    text = io.StringIO()
    with contextlib.redirect_stderr(text), contextlib.suppress(KeyError):
        try:
            with pushing(recipe, folder, start=start):
                for step in saved:
                    save(folder, step)
                folder.write_status("stopped", 3, 0)
                if error:
                    while not psutil.Process().children():  # the upload has begun
                        time.sleep(0.01)
                    raise error
        except InputError as refused:
            text.write(str(refused))
    return text.getvalue()

def save(folder, step):
    path = checkpoint_path(folder.path, step)
    path.mkdir(parents=True)
    (path / COMPLETE).touch()

def let_uploads_wait():
    "Make each Python process that is started from now on sleep before it runs anything, until it is ended."
    pathlib.Path("sleeping").mkdir()
    pathlib.Path("sleeping", "sitecustomize.py").write_text("import time; time.sleep(600)")
    paths = [os.path.abspath("sleeping"), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)

def signal_once_an_upload_runs():
    while not psutil.Process().children():
        time.sleep(0.01)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # the main thread waits on

with receiving() as hub:
    os.environ.update(hub.environment("home"))
    from ftcli.config.recipe import Recipe
    from ftcli.launch import hub_pushes
    from ftcli.launch.hub_pushes import pushing
    from ftcli.runtime.checkpoint_names import COMPLETE, checkpoint_path
    from ftcli.runtime.errors import InputError
    from ftcli.runtime.run_folder import RunFolder
    let_uploads_wait()
    said = {"code": launch("code", task="./mine.py"), "failed": launch("failed", error=KeyError("x"))}
    said["requests"] = [request for request in hub.requests if "create" not in request]
    hub_pushes.POLL_SECONDS = 600  # an upload begins after the run, so that no signal comes before
    threading.Thread(target=signal_once_an_upload_runs).start()
    said["signal"] = launch("signal")
    hub_pushes.LAST_UPLOAD_SECONDS = 0.2
    said["slow"] = launch("slow")
    os.environ["SLURM_STEP_ID"] = "0"
    said["slurm"] = launch("slurm")
    said["earlier"] = launch("earlier", earlier=(1, 2), saved=())
    said["resumed"] = launch("resumed", earlier=(1, 2), saved=(), start=checkpoint_path(pathlib.Path("resumed"), 2))
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("pushes")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert TOKEN not in done.stdout + done.stderr
    return {**json.loads(done.stdout.splitlines()[-1]), "left": [path.name for path in folder.glob("ftcli-push-*")]}


def was_ended(run: str, step: int, reason: str) -> str:
    """Return the line about an upload that was ended."""
    path = f"{run}/checkpoints/step-00000{step}"
    command = f"ftcli export {path} --push somebody/model"
    return f"ftcli: hub.push: {path} was not uploaded ({reason}); repeat it with `{command}`\n"


def test_pushing_of_a_custom_task_without_consent_is_refused_before_the_run(said: dict[str, Any]) -> None:
    message = said["code"]
    assert message.startswith("hub.push: code names the task ./mine.py, which is Python code that ftcli would run")
    assert "add --trust-remote-code" in message


def test_pushing_of_a_failed_run_ends_the_upload_with_one_line(said: dict[str, Any]) -> None:
    assert said["failed"] == was_ended("failed", 3, "the run has failed or was interrupted")
    assert said["left"] == []  # no files of the process that was killed


@pytest.mark.parametrize(
    ("run", "reason"),
    [("signal", "interrupted by a signal"), ("slow", "not finished 0.2 seconds after the run was stopped")],
)
def test_pushing_of_a_stopped_run_ends_the_upload_by_a_signal_or_a_limit(
    said: dict[str, Any], run: str, reason: str
) -> None:
    assert said[run] == was_ended(run, 3, reason)


def test_pushing_in_a_slurm_step_does_not_wait_for_the_upload_of_a_stopped_run(said: dict[str, Any]) -> None:
    assert said["slurm"] == was_ended("slurm", 3, "the job ends; the next launch uploads it")


def test_pushing_uploads_the_checkpoint_that_the_run_resumes_and_no_other_earlier_one(said: dict[str, Any]) -> None:
    assert said["earlier"] == ""
    assert said["resumed"] == was_ended("resumed", 2, "the job ends; the next launch uploads it")
