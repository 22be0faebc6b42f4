"""The phase in which a fast rank waits for the rows of a slow one has its name, so that `ftcli trace` can count it."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import ftcli
from ftcli.testing import run_on_cpu

from ...support.cells import cell

SLOW = """import os
import time

from ftcli.tasks.sft import Options
from ftcli.tasks.sft import Task as Sft


class Task(Sft):
    def collate(self, rows):
        time.sleep(0.15 if os.environ["RANK"] == "1" else 0)
        return super().collate(rows)
"""
STEPS = 6


def seconds_by_phase(inputs: Path, task: Path) -> dict[str, float]:
    recipe = cell(inputs, "sft-tied", task=str(task), train={"max_steps": STEPS}, checkpoint={"every_steps": None})
    run = ftcli.prepare(recipe, cpu=True)
    seconds: dict[str, float] = defaultdict(float)
    state: list[Any] = ["loading", time.perf_counter()]
    beat = run.heartbeat.beat

    def timed(phase: str, step: int) -> None:
        now = time.perf_counter()
        seconds[state[0]] += now - state[1]
        state[:] = phase, now
        beat(phase, step)

    run.heartbeat.beat = timed  # type: ignore[method-assign]
    for _ in ftcli.steps(run):
        pass
    return dict(seconds)


def test_wait_for_the_rows_of_a_slow_rank_is_in_the_phase_of_waiting_for_ranks(inputs: Path, tmp_path: Path) -> None:
    task = tmp_path / "slow.py"
    task.write_text(SLOW)
    fast, slow = run_on_cpu(seconds_by_phase, inputs, task, profile="ddp")
    assert fast["waiting for ranks"] > 0.15 * (STEPS - 1) / 2
    assert fast["waiting for ranks"] > 2 * fast["waiting for the device"]
    assert slow["loading rows"] > 0.15 * (STEPS - 1)
