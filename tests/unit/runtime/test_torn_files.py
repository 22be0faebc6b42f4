"""Damaged run folders: truncated files, foreign files, and a deleted folder."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from ftcli.checkpoint.folder import abandon, prune, publish
from ftcli.reports.run_summary import show_run
from ftcli.runtime.checkpoint_names import COMPLETE, STATE, checkpoint_path, checkpoints_of
from ftcli.runtime.durable_files import write_durably
from ftcli.runtime.errors import DiskError, InputError, RunFolderGoneError
from ftcli.runtime.failures import failure_records, record_failure
from ftcli.runtime.folder_lock import LOCK
from ftcli.runtime.heartbeat import Heartbeat
from ftcli.runtime.run_folder import ORIGIN, RunFolder
from ftcli.training.checkpointing import _check_seen

DATA = "rank-00000-0000.safetensors"


def save(run: Path, step: int) -> Path:
    """Publish a checkpoint with one file of arbitrary content."""
    folder = checkpoint_path(run, step)
    temporary = folder.with_name(f"{folder.name}.tmp")
    temporary.mkdir(parents=True)
    files = {DATA: write_durably(temporary / DATA, b"weights")}
    publish(temporary, folder, {"format": 1, "step": step, "metrics": {}, "files": files})
    return folder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.write_text("recipe.yaml", "task: sft\n")
    folder.write_status("running", 3, 0)
    for step in (1, 2, 3):
        folder.append_metrics({"step": step, "loss": 1.0})
    return folder


@pytest.mark.parametrize("content", [b"", b'{"state": "run', b"\0" * 9, b"[1]", b'{"state": "\xff'])
def test_status_with_a_torn_file_is_reported_and_ignored(content: bytes, run: RunFolder) -> None:
    (run.path / "status.json").write_bytes(content)
    shown = list(show_run(run.path))
    assert "torn     status.json is empty or truncated: how the run ended is not known" in shown
    assert any(line.startswith("loss     1.0000 at step 1, 1.0000 at step 3") for line in shown)
    with pytest.raises(InputError, match="already holds a run"):
        run.claim()
    run.claim(resuming=True)
    with pytest.raises(ValueError), record_failure(run):
        raise ValueError("boom")
    (run.errors / "rank-0.json").write_bytes(content)
    assert failure_records(run) == []
    run.write_bytes(ORIGIN, content)
    with pytest.raises(InputError, match="resumed.json is empty or truncated"):
        run.origin()


@pytest.mark.parametrize("torn", [b'{"step": 4, "lo', b"\0\0\0", b"4", b'{"step": "\xff'])
def test_metrics_with_a_torn_last_row_move_the_row_aside(torn: bytes, run: RunFolder) -> None:
    whole = (run.path / "metrics.jsonl").read_bytes()
    (run.path / "metrics.jsonl").write_bytes(whole + torn)
    assert [row["step"] for row in run.metrics()] == [1, 2, 3]
    assert any(line.startswith("torn     metrics.jsonl:4 is not a complete row") for line in show_run(run.path))
    run.rewind(3)
    assert (run.path / "metrics.jsonl").read_bytes() == whole
    assert (run.path / "metrics.abandoned.jsonl").read_bytes() == torn + b"\n"
    assert not [line for line in show_run(run.path) if line.startswith("torn")]


def test_metrics_with_two_incomplete_rows_have_a_line_that_names_both(run: RunFolder) -> None:
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write(b"{\n4\n")
    assert "metrics.jsonl: lines 4, 5 are incomplete and are not read; a resumed run moves them away" in run.torn()


def test_foreign_files_among_checkpoints_are_kept_and_reported(run: RunFolder) -> None:
    for step in (3, 6):
        save(run.path, step)
    place = run.path / "checkpoints"
    for name in ("x.tmp", "abandoned-notes", "step-000002", "step-000009"):
        (place / name).mkdir()
        (place / name / "notes.txt").write_text("mine")
    (place / "y.tmp").write_text("mine")
    (place / "step-000008").write_text("mine")
    foreign = [place / name / "notes.txt" for name in ("x.tmp", "abandoned-notes", "step-000002")] + [place / "y.tmp"]
    (place / "step-000007.tmp").mkdir()  # half-written
    shutil.copytree(place / "step-000003", place / "step-000004")
    (place / "step-000004" / COMPLETE).unlink()  # half-removed
    shown = "\n".join(show_run(run.path))
    assert all(f"{place / name} was not written by ftcli" in shown for name in ("x.tmp", "y.tmp", "step-000002"))
    assert f"left     {place / 'step-000004'} has no COMPLETE and is not used" in shown
    abandon(run.path, 3)
    prune(run.path, None, None)
    assert [path.name for path in checkpoints_of(run.path)] == ["step-000003"]
    save(run.path, 8)
    save(run.path, 9)
    prune(run.path, None, None)
    left = {path.name for path in place.iterdir()}
    assert left == {
        "step-000002",
        "step-000003",
        "step-000008",
        "step-000009",
        "x.tmp",
        "y.tmp",
        "abandoned-notes",
        "not-by-ftcli-step-000008",
        "not-by-ftcli-step-000009",
    }
    assert all(path.read_text() == "mine" for path in foreign)
    assert (place / "not-by-ftcli-step-000009" / "notes.txt").read_text() == "mine"


def test_record_failure_in_a_deleted_run_folder_names_it_and_does_not_recreate_it(run: RunFolder) -> None:
    save(run.path, 3)
    with pytest.raises(RunFolderGoneError), record_failure(run):
        shutil.rmtree(run.path)
        for write in (
            lambda: run.append_metrics({"step": 4}),
            lambda: run.append_samples([]),
            lambda: run.write_status("running", 4, 0),
            run.ensure,
        ):
            with pytest.raises(RunFolderGoneError, match=r"run folder .*/run is gone: it was deleted or renamed"):
                write()
        run.check()
    assert not run.path.exists()


def test_heartbeat_in_a_deleted_run_folder_does_not_recreate_it(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftcli.runtime.heartbeat.WRITE_SECONDS", 0.02)
    with Heartbeat(run) as heart:
        while not (run.path / "heartbeats" / "rank-0.json").exists():
            time.sleep(0.01)
        run.path.rename(run.path.with_name("renamed"))
        heart.beat("forward", 1)
        time.sleep(0.2)
        assert heart._thread.is_alive()
    assert not run.path.exists()


def test_run_folder_of_another_run_counts_as_gone(run: RunFolder) -> None:
    with run.locked():
        run.claim(resuming=True)
        run.check()
        shutil.rmtree(run.path)
        run.path.mkdir()
        (run.path / LOCK).write_text("process 7 on this machine")
        with pytest.raises(RunFolderGoneError):
            run.write_status("running", 4, 0)
    assert [path.name for path in run.path.iterdir()] == [LOCK]


def test_run_folder_that_was_emptied_counts_as_gone(run: RunFolder) -> None:
    """A run that writes all the time may keep `rm -r` from removing the folder itself."""
    with run.locked():
        run.claim(resuming=True)
        for path in list(run.path.iterdir()):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        with pytest.raises(RunFolderGoneError):
            run.write_status("running", 4, 0)
    assert list(run.path.iterdir()) == []


@pytest.mark.parametrize(("machines", "kind"), [(1, DiskError), (2, InputError)])
def test_check_seen_of_a_missing_checkpoint_names_both_causes(
    machines: int, kind: type[Exception], run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(2 // machines))
    temporary = run.path / "checkpoints" / "step-000001.tmp"
    with pytest.raises(kind) as caught:
        _check_seen(run, temporary, [True, False])
    assert ("all machines share" in str(caught.value)) is (machines == 2)
    shutil.rmtree(run.path)
    with pytest.raises(RunFolderGoneError):
        _check_seen(run, temporary, [True, False])


def test_disk_error_mentions_only_intact_checkpoints(run: RunFolder) -> None:
    (run.path / "samples.jsonl").symlink_to("/dev/full")
    rows: list[dict[str, Any]] = [{"step": 1}]
    with pytest.raises(DiskError, match=r"No checkpoint was saved yet; .* start the run again"):
        run.append_samples(rows)
    save(run.path, 3)
    with pytest.raises(DiskError, match=r"Saved checkpoints are complete; .* resume with --resume auto"):
        run.append_samples(rows)


class Order:
    """The order in which files are synced and renamed, as names below a folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self._folder = folder
        fsync = os.fsync

        def synced(file: int) -> None:
            self._note("sync", os.readlink(f"/proc/self/fd/{file}"))
            fsync(file)

        monkeypatch.setattr(os, "fsync", synced)
        for name in ("rename", "replace"):
            monkeypatch.setattr(os, name, self._renaming(getattr(os, name)))

    def _renaming(self, real: Any) -> Any:
        def renamed(old: Any, new: Any) -> None:
            self._note("name", os.fspath(new))
            real(old, new)

        return renamed

    def _note(self, kind: str, path: str) -> None:
        self.events.append(f"{kind} {os.path.relpath(path, self._folder)}".replace(f".{os.getpid()}", ""))


def test_files_of_a_run_are_synced_before_their_names_and_running_is_not_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = Order(tmp_path, monkeypatch)
    folder = RunFolder(tmp_path / "a" / "run")
    folder.claim()
    assert order.events == ["sync a", "sync ."]  # the run folder's own name, and that of the folder above
    for state in ("running", "done"):
        order.events.clear()
        folder.write_status(state, 1, 0)
        name = "name a/run/status.json"
        assert order.events == ([name] if state == "running" else ["sync a/run/.status.json", name, "sync a/run"])
    order.events.clear()
    save(folder.path, 5)
    step = "a/run/checkpoints/step-000005"
    assert order.events == [
        *(f"sync {step}.tmp/{name}" for name in (DATA, STATE, COMPLETE)),
        f"sync {step}.tmp",
        f"name {step}",
        "sync a/run/checkpoints",
    ]
    assert json.loads((folder.path / "status.json").read_text())["state"] == "done"
