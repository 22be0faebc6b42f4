"""Prepared rows: built once however many processes want them at once, and never half."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from ftcli.testing import ON_CPU, PRELOADED, environment, fork_context


def build(inputs: Path, log: Path, cache: Path, pace: str, lengths: Any) -> None:
    """Prepare the rows of a small recipe in this process of its own; note in `log` each time they are built."""
    import ftcli.data.cache as rows_cache
    from ftcli.tasks.build import build_task

    from ...support.cells import cell

    os.setsid()
    os.environ.update({"FTCLI_CACHE": str(cache), "HF_DATASETS_CACHE": str(cache / "hf")})
    recipe = cell(inputs, "sft-tied")
    task = build_task(recipe)
    whole, encode = rows_cache._build, task.encode_rows

    def counted(*arguments: Any) -> Path:
        with log.open("a") as file:
            file.write("built\n")
        return whole(*arguments)

    def slow(rows: Any, facts: Any) -> Any:
        with log.open("a") as file:
            file.write("encodes\n")
        time.sleep(600)
        return encode(rows, facts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_cache, "_build", counted)
        if pace == "slow":
            patch.setattr(task, "encode_rows", slow)
        lengths.put(len(rows_cache.prepare_rows(recipe, task).train))


def start(inputs: Path, log: Path, cache: Path, lengths: Any, pace: str = "fast") -> Any:
    """Start `build` in a process that forks from the rank server: eight imports would take a minute."""
    with environment(**ON_CPU):
        process = fork_context(PRELOADED).Process(target=build, args=(inputs, log, cache, pace, lengths))
        process.start()
    return process


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 8])
def test_prepare_rows_of_several_processes_at_once_builds_them_once(count: int, inputs: Path, tmp_path: Path) -> None:
    cache, log = tmp_path / "cache", tmp_path / "log"
    lengths = fork_context(PRELOADED).SimpleQueue()
    children = [start(inputs, log, cache, lengths) for _ in range(count)]
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * count
    assert [lengths.get() for _ in children] == [37] * count
    assert log.read_text() == "built\n"


@pytest.mark.slow
def test_prepare_rows_after_a_killed_build_builds_them_anew(inputs: Path, tmp_path: Path) -> None:
    cache, log = tmp_path / "cache", tmp_path / "log"
    lengths = fork_context(PRELOADED).SimpleQueue()
    child = start(inputs, log, cache, lengths, "slow")
    while not log.exists() or "encodes" not in log.read_text():
        time.sleep(0.1)
    os.killpg(child.pid, signal.SIGKILL)
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert list((cache / "rows").glob("*/meta.json")) == []
    again = start(inputs, log, cache, lengths)
    again.join()
    assert again.exitcode == 0 and lengths.get() == 37
    assert len(list((cache / "rows").glob("*/meta.json"))) == 1
    assert list((cache / "rows").glob("*.tmp-*")) == []
