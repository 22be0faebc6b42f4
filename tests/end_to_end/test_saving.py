"""The real command line saves beside training: on a slow disk, on one that fails, and without memory for a copy."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from ftcli.__main__ import main
from ftcli.checkpoint.final import PROBE
from ftcli.checkpoint.folder import find_damage
from ftcli.runtime.checkpoint_names import checkpoints_of, step_of
from ftcli.runtime.run_folder import RunFolder

from ..support.recipes import recipe_values
from ..support.runner import MakeInputs, run_forked

RECIPE = recipe_values(
    "./watching.py",
    data={"train": "chats.jsonl", "max_length": 128},
    batch={"global_size": 6, "micro_size": 6},
    train={"max_steps": 6},
    checkpoint={"every_steps": 2, "keep": None},
)
# A step is one micro-batch here: the task notes what the run has saved when it begins, and may forbid rank 1 to write.
WATCHING_TASK = """
import json, os, resource, signal, subprocess, time
from ftcli.tasks import sft

Options = sft.Options

class Task(sft.Task):
    calls = 0

    def loss(self, model, batch):
        self.calls += 1
        if "SEEN" in os.environ:
            folder = os.environ["WATCHED"]
            names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
            with open(os.environ["SEEN"], "a") as file:
                file.write(json.dumps(names) + "\\n")
        if os.environ.get("RANK", "1") == "1" and str(self.calls) == os.environ.get("FULL_AT"):
            room = int(os.environ.get("ROOM", "50000"))
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        if str(self.calls) == os.environ.get("DO_AT") and os.environ.get("RANK", "0") == "0":
            subprocess.run(os.environ["DO"], shell=True, check=True)
        if str(self.calls) == os.environ.get("STOP_AT"):
            os.kill(os.getpid(), signal.SIGTERM)
        if str(self.calls) == os.environ.get("KILL_AT"):
            os.kill(os.getpid(), signal.SIGKILL)
        if str(self.calls) == os.environ.get("SLOW_AT"):
            os.fsync = lambda file: time.sleep(0.5)
        return super().loss(model, batch)
"""
SLOW_SECONDS = 0.2  # of each call of fsync; a checkpoint needs five, and a step much less


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    return make_inputs({"watching.py": WATCHING_TASK, "recipe.yaml": RECIPE})


@pytest.fixture
def slow_disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, inputs: Path) -> None:
    fsync, seconds = os.fsync, getattr(request, "param", SLOW_SECONDS)
    monkeypatch.setattr(os, "fsync", lambda file: (time.sleep(seconds), fsync(file)))
    monkeypatch.chdir(inputs)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def train(run: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[list[str]]:
    """Train in this process. Return the checkpoint folders, complete or not, at the start of each step."""
    monkeypatch.setenv("WATCHED", str(run / "checkpoints"))
    monkeypatch.setenv("SEEN", str(run.with_suffix(".seen")))
    with pytest.raises(SystemExit) as end:
        main(["train", "recipe.yaml", "--output", str(run), *arguments])
    assert not end.value.code
    assert RunFolder(run).status()["state"] == "done"
    return [json.loads(line) for line in run.with_suffix(".seen").read_text().splitlines()]


def saved_steps(run: Path) -> list[int]:
    assert all(find_damage(folder) == "" for folder in checkpoints_of(run))
    return [step_of(folder) for folder in checkpoints_of(run)]


@pytest.mark.slow
@pytest.mark.usefixtures("slow_disk")
def test_background_save_on_a_slow_disk_delays_only_the_next_save_and_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = tmp_path / "beside", tmp_path / "waited"
    seen = train(run, monkeypatch)
    log = capsys.readouterr().err
    assert log.count("in the background, training waited") == 3
    assert seen[0] == seen[1] == []
    assert set(seen[2] + seen[3]) <= {"step-000002.tmp"}  # two more steps, and it is not complete
    assert all("step-000002" in names and "step-000004" not in names for names in seen[4:6])
    last, final = checkpoints_of(run)[-1] / "COMPLETE", run / "final" / "model.safetensors"
    assert saved_steps(run) == [2, 4, 6] and last.stat().st_mtime_ns < final.stat().st_mtime_ns

    waited = train(other, monkeypatch, "--set", "checkpoint.background=false")
    assert "saved" in capsys.readouterr().err
    assert waited[2] == waited[3] == ["step-000002"] and waited[5] == ["step-000002", "step-000004"]
    assert (other / "final" / "model.safetensors").read_bytes() == final.read_bytes()
    for a, b in zip(checkpoints_of(run), checkpoints_of(other), strict=True):
        assert [(file.name, file.read_bytes()) for file in sorted(a.glob("*.safetensors"))] == [
            (file.name, file.read_bytes()) for file in sorted(b.glob("*.safetensors"))
        ]


@pytest.mark.usefixtures("slow_disk")
@pytest.mark.parametrize("slow_disk", [0.03], indirect=True)
def test_stopped_run_writes_its_status_after_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOP_AT", "3")
    with pytest.raises(SystemExit):
        main(["train", "recipe.yaml", "--output", str(tmp_path / "run")])
    status = RunFolder(tmp_path / "run").status()
    assert status["state"] == "stopped" and saved_steps(tmp_path / "run")[-1] == status["step"]
    assert (checkpoints_of(tmp_path / "run")[-1] / "COMPLETE").stat().st_mtime < status["time"]


@pytest.mark.slow
def test_kill_during_a_background_save_leaves_the_previous_checkpoint(inputs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = ("train", "recipe.yaml", "--output", run, "--resume", "auto")
    assert run_forked(inputs, *command, SLOW_AT="4", KILL_AT="6").code == -9
    assert saved_steps(run) == [2]
    done = run_forked(inputs, *command)
    assert done.code == 0 and "resumed after step 2" in done.err, done.err[-3000:]
    assert saved_steps(run) == [2, 4, 6]
    assert not list((run / "checkpoints").glob("*.tmp"))


@pytest.mark.slow
@pytest.mark.usefixtures("slow_disk")
def test_save_without_memory_for_a_copy_waits_for_the_disk_and_logs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=100_000))
    seen = train(tmp_path / "run", monkeypatch)
    assert capsys.readouterr().err.count("training waits for each checkpoint") == 1
    assert seen[2] == ["step-000002"] and saved_steps(tmp_path / "run") == [2, 4, 6]


@pytest.mark.slow
def test_full_disk_for_metrics_reports_the_first_error_and_the_run_resumes(inputs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = ("train", "recipe.yaml", "--output", run, "--resume", "auto", "--set", "checkpoint.background=false")
    done = run_forked(inputs, *command, FULL_AT="4", ROOM="100")
    assert done.code == 1 and "Traceback" not in done.err, done.err[-3000:]
    first = f"error: {run / 'metrics.jsonl'} could not be written: File too large."  # the first error, not a later one
    assert done.err.splitlines()[-1].startswith(first)
    assert saved_steps(run) == [2] and not list(run.glob(".*.json.*"))
    done = run_forked(inputs, *command)
    assert done.code == 0 and "resumed after step 2" in done.err, done.err[-3000:]
    assert saved_steps(run) == [2, 4, 6]


def test_train_with_unwritable_checkpoints_is_refused_before_the_first_step(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(inputs)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "disk that is not mounted")
    with pytest.raises(SystemExit) as end:
        main(["train", "recipe.yaml", "--output", str(tmp_path / "run"), "--resume", "auto"])
    assert end.value.code == 2
    assert "checkpoints is not a writable folder" in capsys.readouterr().err


@pytest.mark.slow
def test_full_disk_on_one_rank_ends_the_run_soon_and_names_the_rank(inputs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "ftcli", "train", "recipe.yaml", "--profile", "ddp", "--cpu"]
    command += ["--num-processes", "2", "--output", str(run)]
    command += ["--set", "train.max_steps=200", "--set", "checkpoint.every_steps=40"]
    trouble = os.environ | {"FULL_AT": "60", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=inputs, env=trouble)
    assert done.returncode == 1, done.stderr[-3000:]
    message = "step-000080 could not be written: rank 1: OSError: [Errno 27] File too large"
    assert message in done.stderr
    status = RunFolder(run).status()
    assert status["state"] == "failed" and status["exit_code"] == 1 and message in status["error"]
    assert 80 <= status["step"] < 120  # not only when the next save comes
    assert saved_steps(run) == [40]
    assert [folder.name for folder in (run / "checkpoints").iterdir()] == ["step-000040"]
    assert not (run / "final").exists()


@pytest.mark.parametrize("background", ["true", "false"])
def test_lost_checkpoint_disk_ends_the_run_and_intact_checkpoints_are_resumed(
    background: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, disk = tmp_path / "run", tmp_path / "disk"
    run.mkdir()
    disk.mkdir()
    (run / "checkpoints").symlink_to(disk)
    monkeypatch.chdir(inputs)
    command = ["train", "recipe.yaml", "--output", str(run), "--resume", "auto"]
    command += ["--set", f"checkpoint.background={background}"]
    with monkeypatch.context() as trouble, pytest.raises(SystemExit) as end:
        trouble.setenv("DO_AT", "5")
        saved = disk / "step-000004" / "COMPLETE"  # in the background
        trouble.setenv("DO", f"until [ -e {saved} ]; do sleep 0.05; done; mv {disk} {disk}-gone; touch {disk}")
        main(command)
    printed = capsys.readouterr().err
    assert end.value.code == 1 and "Traceback" not in printed
    place = run / "checkpoints" / "step-000006"
    assert printed.splitlines()[-1].startswith(f"error: {place} could not be written: rank 0: ")
    assert "resume with --resume auto" in printed and place.name in RunFolder(run).status()["error"]
    disk.unlink()
    (tmp_path / "disk-gone").rename(disk)
    with pytest.raises(SystemExit) as end:
        main(command)
    assert not end.value.code and "resumed after step 4" in capsys.readouterr().err
    assert saved_steps(run) == [2, 4, 6]


@pytest.mark.parametrize(
    ("place", "obstacle", "message"),
    [("final.tmp", "ln -s /dev/full", "File exists"), (PROBE, "mkdir", ".*I/O error: Is a directory.*")],
)
def test_final_weights_after_a_write_error_are_written_by_the_resumed_run(
    place: str, obstacle: str, message: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    run = tmp_path / "run"
    monkeypatch.chdir(inputs)
    command = ["train", "recipe.yaml", "--output", str(run), "--resume", "auto"]
    with monkeypatch.context() as trouble, pytest.raises(SystemExit) as end:
        trouble.setenv("DO_AT", "6")
        trouble.setenv("DO", f"{obstacle} {run / place}")
        main(command)
    log = capsys.readouterr().err
    assert end.value.code == 1 and "Traceback" not in log
    assert re.search(f"error: {run}/final could not be written: {message}. Saved checkpoints .* --resume auto", log), (
        log
    )
    (run / place).rename(tmp_path / "away")
    with pytest.raises(SystemExit) as end:
        main(command)
    assert not end.value.code and (run / "final" / "model.safetensors").exists() and (run / PROBE).is_file()


@pytest.mark.parametrize(("step", "background"), [("1", "true"), ("5", "true"), ("5", "false"), ("6", "true")])
def test_deleted_run_folder_ends_the_run_and_is_not_recreated(
    step: str, background: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    run = tmp_path / "run"
    monkeypatch.chdir(inputs)
    monkeypatch.setenv("DO_AT", step)
    monkeypatch.setenv("DO", f"mv {run} {run}-renamed")  # at one moment, which rm -r is not
    sets = [f"--set=checkpoint.background={background}", "--set=log.every_steps=100"]
    with pytest.raises(SystemExit) as end:
        main(["train", "recipe.yaml", "--output", str(run), *sets])
    log = capsys.readouterr().err
    assert end.value.code == 1 and "Traceback" not in log
    assert log.splitlines()[-1].startswith(f"error: the run folder {run} is gone: it was deleted or renamed"), log
    assert "Checkpoints that stand" not in log and "file system" not in log
    assert not run.exists()


def test_final_weights_and_prepared_rows_are_synced_before_their_rename(
    inputs: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, fsync, rename = tmp_path / "run", os.fsync, os.rename
    events: list[tuple[str, Path]] = []

    def synced(file: int) -> None:
        events.append(("sync", Path(os.readlink(f"/proc/self/fd/{file}"))))
        fsync(file)

    def renamed(old: Any, new: Any) -> None:
        events.append(("name", Path(new)))
        rename(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.chdir(inputs)
    with pytest.raises(SystemExit) as end:
        main(["train", "recipe.yaml", "--output", str(run), "--set=train.max_steps=2", "--set=data.max_length=127"])
    assert not end.value.code
    (rows,) = [path for kind, path in events if kind == "name" and path.parent == cache / "rows"]
    before = [path for kind, path in events[: events.index(("name", rows))] if ".tmp-" in path.parent.name]
    assert {path.name for path in before} == {"train.arrow", "meta.json"}
    assert ("sync", rows.parent) in events[events.index(("name", rows)) :]

    saved, final = events.index(("name", run / "checkpoints" / "step-000002")), events.index(("name", run / "final"))
    assert ("sync", run / "metrics.jsonl") in events[:saved]
    assert {path.name for kind, path in events[:final] if path.parent == run / "final.tmp"} == {
        path.name for path in (run / "final").iterdir()
    }
    last = [path for kind, path in events if kind == "sync" and path.name.startswith(".status.json")][-1]
    done = max(number for number, event in enumerate(events) if event == ("sync", last))
    assert ("sync", run / PROBE) in events[:final]
    assert saved < final < events.index(("sync", run), final) < done  # done is said when all of it is on the disk


OWN_MOUNTS = ["unshare", "--map-root-user", "--mount"]
MAY_MOUNT = shutil.which("unshare") and not subprocess.run([*OWN_MOUNTS, "true"], capture_output=True).returncode


@pytest.mark.slow
@pytest.mark.skipif(not MAY_MOUNT, reason="this user may not mount")
@pytest.mark.parametrize("launch", [[], ["--profile", "ddp", "--cpu", "--num-processes", "2"]])
def test_read_only_disk_ends_the_run_with_the_first_error(launch: list[str], inputs: Path, tmp_path: Path) -> None:
    run, twin = tmp_path / "run", tmp_path / "twin"
    run.mkdir()
    twin.mkdir()
    line = ("train", "recipe.yaml", "--output", run, "--resume", "auto")
    command = [sys.executable, "-m", "ftcli", *map(str, line)]
    turn = f"mount --bind {run} {twin} && mount -o remount,bind,ro {twin} && mount --bind {twin} {run}"
    trouble = os.environ | {"DO_AT": "6", "DO": turn, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*OWN_MOUNTS, *command, *launch], capture_output=True, text=True, cwd=inputs, env=trouble)
    assert done.returncode == 1, done.stderr[-3000:]
    assert f"error: {run / 'metrics.jsonl'} could not be written: Read-only file system. Saved" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert "resume with --resume auto" in last and "could not be written" in last or "no file can be written to" in last
    assert saved_steps(run)[0] == 2 and all(find_damage(folder) == "" for folder in checkpoints_of(run))
    resumed = run_forked(inputs, *line)
    assert resumed.code == 0 and "ftcli: resumed after step" in resumed.err, resumed.err[-3000:]
    assert saved_steps(run) == [2, 4, 6]
