"""The second try of `.ci/run`: what it runs, and what it prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
from tests.support.second_try import SecondTry, add_option as pytest_addoption

def pytest_configure(config):
    config.pluginmanager.register(SecondTry(config))
"""
TESTS = """
import os
from pathlib import Path

def note(name):
    with open("ran", "a") as file:
        file.write(name + " ")

def test_stable():
    note("stable")

def test_unstable():
    note("unstable")
    assert Path("mended").exists(), "a rare moment"

def test_crashing():
    note("crashing")
    Path("mended").exists() or os._exit(1)

def test_after_the_crash():
    note("after")
"""


@pytest.mark.parametrize("workers", [[], ["-n", "1", "--max-worker-restart", "0"]], ids=["alone", "with a worker"])
def test_second_try_after_a_crash_runs_what_did_not_pass_and_prints_first_tracebacks(
    tmp_path: Path, workers: list[str]
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS if workers else TESTS.replace("os._exit(1)", "1 / 0"))

    def run(*arguments: str) -> tuple[int, list[str], str]:
        (tmp_path / "ran").unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-p", "no:randomly", "--rootdir", str(tmp_path), *arguments]
        path = {"PYTHONPATH": str(Path(__file__).parents[2])}
        end = subprocess.run(command, cwd=tmp_path, env=os.environ | path, capture_output=True, text=True)
        return end.returncode, (tmp_path / "ran").read_text().split(), end.stdout

    code, ran, _ = run(*workers)
    assert code == 1 and ran[:3] == ["stable", "unstable", "crashing"]
    code, ran, _ = run("--second-try", "--exitfirst")
    assert code == 1 and ran == ["unstable"]  # it failed again, and nothing ran after it
    (tmp_path / "mended").touch()
    code, ran, output = run("--second-try", "--exitfirst")
    assert code == 0 and ran == ["unstable", "crashing", *(["after"] if workers else [])]
    assert "UNSTABLE test_it.py::test_unstable\n" in output and "AssertionError: a rare moment" in output
    assert ("did not run in the first try" in output) == bool(workers)
