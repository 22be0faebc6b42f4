"""Phases of ranks: counted, written down, and read to find the slowest."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from ftcli.runtime import heartbeat
from ftcli.runtime.heartbeat import Heartbeat, HeartbeatAges, describe_slowest
from ftcli.runtime.run_folder import RunFolder


def write(folder: Path, rank: int, **ages: Any) -> None:
    beat = {"count": 40, "phase": "backward", "step": 7, "seconds": 31.2} | ages
    (folder / f"rank-{rank}.json").write_text(json.dumps(beat))


def wait_for_looks(path: Path) -> None:
    """Wait until the thread has written the file anew, has looked at the laps after that, and writes again."""
    for _ in range(3):
        before = path.stat().st_ino if path.exists() else 0
        while not path.exists() or path.stat().st_ino == before:
            time.sleep(0.01)


def test_describe_slowest_names_the_rank_with_the_fewest_phases(tmp_path: Path) -> None:
    write(tmp_path, 0)
    write(tmp_path, 1, count=39, phase="forward")
    write(tmp_path, 2)
    assert (
        describe_slowest(tmp_path, 3, HeartbeatAges()) == "the slowest, rank 1, has been in forward (step 7) for 31 s"
    )
    write(tmp_path, 2, count=39, phase="forward")
    assert describe_slowest(tmp_path, 3, HeartbeatAges()).startswith("the slowest, ranks 1, 2, have been in forward")


def test_watch_of_a_silent_or_absent_rank_logs_it_for_any_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "WRITE_SECONDS", 0.1)
    ages, its_time = HeartbeatAges(), time.time() - 7200
    write(tmp_path, 0)
    assert describe_slowest(tmp_path, 2, ages) == "rank 1 has written no heartbeat yet"
    write(tmp_path, 1, count=39)
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for beat in range(8):
        os.utime(tmp_path / "rank-1.json", (its_time + beat / 10, its_time + beat / 10))
        ages.update(tmp_path)
        now[0] += 0.1
    assert describe_slowest(tmp_path, 2, ages).endswith("for 31 s")  # it beats
    now[0] += 0.6
    ages.update(tmp_path)
    assert describe_slowest(tmp_path, 2, ages).endswith("for 31 s, and has written no heartbeat for 1 s")


def test_heartbeat_phase_duration_ignores_clock_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "WRITE_SECONDS", 0.05)
    with Heartbeat(RunFolder(tmp_path)) as heart:
        now = [heart.now.since + 100]
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        heart.beat("forward", 4)
        now[0] += 7
        monkeypatch.setattr(time, "time", lambda: 0.0)
        written = tmp_path / "heartbeats" / "rank-0.json"
        wait_for_looks(written)
        message = json.loads(written.read_text())
    assert (message["phase"], message["seconds"]) == ("forward", 7.0)


def test_describe_slowest_of_equal_ranks_names_none(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path, rank, phase="saving")
    assert describe_slowest(tmp_path, 2, HeartbeatAges()).startswith("all ranks have been in saving (step 7)")
    assert describe_slowest(tmp_path, 1, HeartbeatAges()).startswith("it has been in saving")


def test_watch_of_a_long_step_logs_once_and_compares_evaluations_with_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(heartbeat, "WRITE_SECONDS", 0.05)
    monkeypatch.setattr(heartbeat, "LEAST_SECONDS", 0.3)
    with Heartbeat(RunFolder(tmp_path)) as heart:
        now = [heart.now.since]
        monkeypatch.setattr(time, "monotonic", lambda: now[0])

        def go(seconds: float) -> None:
            now[0] += seconds
            wait_for_looks(tmp_path / "heartbeats" / "rank-0.json")

        for step in range(4):
            heart.beat("forward", step)
            go(0.01)
        heart.beat("evaluating", 3)
        go(0.5)  # long for a step, but the first of its kind
        heart.beat("forward", 4)
        go(0.0)  # the phase is written down before its time passes
        go(0.4)
        go(0.4)
        written = json.loads((tmp_path / "heartbeats" / "rank-0.json").read_text())
        assert (written["phase"], written["step"], written["count"]) == ("forward", 4, 6)
    log = capsys.readouterr().err.splitlines()
    assert len(log) == 1 and log[0].startswith(
        "ftcli: step 4 has taken 0 s, usually 0.0 s: it has been in forward (step 4)"
    )
    event = json.loads((tmp_path / "events.jsonl").read_text())
    assert (event["event"], event["step"], f"ftcli: {event['text']}") == ("stall", 4, log[0])
    assert not (tmp_path / "heartbeats").exists()


def test_heartbeat_files_remain_after_a_failed_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError), Heartbeat(RunFolder(tmp_path)) as heart:
        heart.beat("saving", 3)
        raise ValueError
    assert (tmp_path / "heartbeats" / "rank-0.json").exists()
