"""Phases of ranks: counted, written down, and read by whoever looks for the slowest."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from ftcli import heartbeat
from ftcli.heartbeat import Changes, Heartbeat, describe_slowest
from ftcli.run_folder import RunFolder


def write(folder: Path, rank: int, **changes: Any) -> None:
    beat = {"count": 40, "phase": "backward", "step": 7, "seconds": 31.2} | changes
    (folder / f"rank-{rank}.json").write_text(json.dumps(beat))


def test_the_rank_with_the_fewest_phases_is_the_slowest(tmp_path: Path) -> None:
    write(tmp_path, 0)
    write(tmp_path, 1, count=39, phase="forward")
    write(tmp_path, 2)
    assert describe_slowest(tmp_path, 3, Changes()) == "the slowest, rank 1 is in forward (step 7) for 31 s"
    write(tmp_path, 2, count=39, phase="forward")
    assert describe_slowest(tmp_path, 3, Changes()).startswith("the slowest, ranks 1, 2 are in forward")


def test_a_rank_that_is_silent_or_absent_is_told_whatever_its_machine_believes_the_time_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "WRITE_SECONDS", 0.1)
    changes, its_time = Changes(), time.time() - 7200
    write(tmp_path, 0)
    assert describe_slowest(tmp_path, 2, changes) == "rank 1 has written no heartbeat yet"
    write(tmp_path, 1, count=39)
    for beat in range(8):
        os.utime(tmp_path / "rank-1.json", (its_time + beat / 10, its_time + beat / 10))
        changes.look(tmp_path)
        time.sleep(0.1)
    assert describe_slowest(tmp_path, 2, changes).endswith("for 31 s")  # it beats
    time.sleep(0.6)
    changes.look(tmp_path)
    assert describe_slowest(tmp_path, 2, changes).endswith("for 31 s, and has written no heartbeat for 1 s")


def test_a_clock_that_is_set_meanwhile_neither_shortens_a_phase_nor_prolongs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "WRITE_SECONDS", 0.05)
    with Heartbeat(RunFolder(tmp_path)) as heart:
        heart.beat("forward", 4)
        monkeypatch.setattr(time, "time", lambda: 0.0)
        time.sleep(0.3)
        told = json.loads((tmp_path / "heartbeats" / "rank-0.json").read_text())
    assert 0.1 < told["seconds"] < 30


def test_when_all_are_equally_far_nobody_is_blamed(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path, rank, phase="saving")
    assert describe_slowest(tmp_path, 2, Changes()).startswith("all ranks are in saving (step 7)")
    assert describe_slowest(tmp_path, 1, Changes()).startswith("it is in saving")


def test_a_long_step_is_told_once_and_an_evaluation_is_measured_by_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(heartbeat, "WRITE_SECONDS", 0.05)
    monkeypatch.setattr(heartbeat, "LEAST_SECONDS", 0.3)
    with Heartbeat(RunFolder(tmp_path)) as heart:
        for step in range(4):
            heart.beat("forward", step)
            time.sleep(0.01)
        heart.beat("evaluating", 3)
        time.sleep(0.5)  # long for a step, but the first of its kind
        heart.beat("forward", 4)
        time.sleep(0.8)
        written = json.loads((tmp_path / "heartbeats" / "rank-0.json").read_text())
        assert (written["phase"], written["step"], written["count"]) == ("forward", 4, 6)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith(
        "ftcli: step 4 has taken 0 s, usually 0.0 s: it is in forward (step 4)"
    )
    assert not (tmp_path / "heartbeats").exists()


def test_the_last_phases_of_a_run_that_failed_stay(tmp_path: Path) -> None:
    with pytest.raises(ValueError), Heartbeat(RunFolder(tmp_path)) as heart:
        heart.beat("saving", 3)
        raise ValueError
    assert (tmp_path / "heartbeats" / "rank-0.json").exists()
