"""`make test-slow`: which groups run, and which have passed at this commit. `make lint`: which cache mypy uses."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SLOW_GROUPS = ROOT / "tests" / "support" / "slow_groups.py"
TYPE_CHECK = ROOT / "tests" / "support" / "type_check.py"
TEST = "from pathlib import Path\n\ndef test_it():\n    with open('build/ran', 'a') as file: file.write('{name} ')\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a git repository with two groups of tests; those of fuzz fail unless the file `mended` exists."""
    for name, more in {"unit": "", "fuzz": "    assert Path('build/mended').exists()\n"}.items():
        (tmp_path / "tests" / name).mkdir(parents=True)
        (tmp_path / "tests" / name / f"test_{name}.py").write_text(TEST.replace("{name}", name) + more)
    for empty in ("contract", "multiprocess", "end_to_end", "unit/nothing"):
        (tmp_path / "tests" / empty).mkdir()
    (tmp_path / "build").mkdir()
    (tmp_path / ".gitignore").write_text("build\n__pycache__\n.pytest_cache\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@x", *command], cwd=tmp_path, check=True)
    return tmp_path


def run(project: Path, *arguments: str) -> tuple[int, list[str], str]:
    """Return the exit code, the groups that ran, and stdout."""
    (project / "build" / "ran").write_text("")
    command = [sys.executable, SLOW_GROUPS, *arguments, "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True)
    return done.returncode, (project / "build" / "ran").read_text().split(), done.stdout + done.stderr


def test_slow_groups_that_passed_at_this_commit_are_not_run_again_unless_forced(project: Path) -> None:
    code, ran, text = run(project)
    assert code == 1 and ran == ["fuzz", "unit"]  # a failed group does not end the others
    assert "slow tests of fuzz: FAILED\n" in text and "slow tests of multiprocess: has no slow tests\n" in text
    (project / "build" / "mended").touch()
    code, ran, text = run(project)
    assert code == 0 and ran == ["fuzz"]
    assert "slow tests of unit: passed before, at this commit" in text
    assert run(project, "--force", "--group", "unit")[:2] == (0, ["unit"])
    (project / "tests" / "unit" / "test_unit.py").touch()  # nothing is changed
    assert run(project, "--group", "unit")[:2] == (0, [])


def test_slow_groups_with_uncommitted_changes_run_each_time(project: Path) -> None:
    (project / "new").touch()
    for _ in range(2):
        assert run(project, "--group", "unit")[:2] == (0, ["unit"])
    (project / "new").unlink()
    assert run(project, "--group", "tests/unit/")[:2] == (0, ["unit"])
    code, ran, text = run(project, "--group", "unti")
    assert (code, ran) == (2, []) and "there is no tests/unti; the groups are contract, fuzz, unit" in text


def test_type_check_uses_the_shared_cache_unless_it_is_locked_or_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "mypy").mkdir()
    (tmp_path / "mypy" / "__init__.py").touch()
    (tmp_path / "mypy" / "__main__.py").write_text("import sys; print(*sys.argv[1:])")  # stands in for mypy

    def arguments(**variables: str) -> list[str]:
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)} | variables
        line = [sys.executable, TYPE_CHECK, "ftcli"]
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.split()

    shared = tmp_path / "user" / "ftcli" / "mypy"
    for variables in ({"XDG_CACHE_HOME": str(tmp_path / "user")}, {"MYPY_CACHE_DIR": str(shared), "HOME": "/"}):
        assert arguments(**variables) == ["--cache-dir", str(shared), "ftcli"]
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert arguments(MYPY_CACHE_DIR=str(shared)) == ["--cache-dir", ".mypy_cache", "ftcli"]
    assert arguments(MYPY_CACHE_DIR=str(tmp_path / "mypy" / "__main__.py")) == ["--cache-dir", ".mypy_cache", "ftcli"]
