"""Prepared rows: built once however many processes want them at once, and never half."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .cells import write_inputs

PROGRAM = """
import sys
from pathlib import Path
from ftcli.cache import prepare_rows
from ftcli.tasks import build_task
from tests.multiprocess.cells import cell
import ftcli.cache as cache
recipe = cell(Path(sys.argv[1]), "sft-tied")
task = build_task(recipe)
build = cache._build
def counted(*arguments):
    Path(sys.argv[2]).open("a").write("built\\n")
    if sys.argv[3] == "slow":
        encode = task.encode_rows
        task.encode_rows = lambda rows, facts: (__import__("time").sleep(5), encode(rows, facts))[1]
    build(*arguments)
cache._build = counted
print(len(prepare_rows(recipe, task).train))
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


def start(inputs: Path, log: Path, cache: Path, pace: str = "fast") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, str(inputs), str(log), pace]
    environment = os.environ | {"FTCLI_CACHE": str(cache), "HF_DATASETS_CACHE": str(cache / "hf")}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)


@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_processes_that_want_the_same_rows_at_once_build_them_once(count: int, inputs: Path, tmp_path: Path) -> None:
    cache, log = tmp_path / "cache", tmp_path / "log"
    children = [start(inputs, log, cache) for _ in range(count)]
    assert [child.communicate(timeout=120)[0].split()[-1] for child in children] == ["37"] * count
    assert log.read_text() == "built\n"


def test_a_killed_build_leaves_nothing_that_is_taken_for_rows(inputs: Path, tmp_path: Path) -> None:
    cache, log = tmp_path / "cache", tmp_path / "log"
    child = start(inputs, log, cache, "slow")
    while not log.exists():
        time.sleep(0.1)
    time.sleep(2)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    assert list((cache / "rows").glob("*/meta.json")) == []
    assert start(inputs, log, cache).communicate(timeout=120)[0].split()[-1] == "37"
    assert len(list((cache / "rows").glob("*/meta.json"))) == 1
    assert list((cache / "rows").glob("*.tmp-*")) == []
