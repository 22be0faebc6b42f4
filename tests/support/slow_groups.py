"""Run the slow tests in groups, one after the other: `make test-slow`, or `make test-slow GROUP=multiprocess`.

A group is a folder below tests/. A group that passed at this commit is not run again, so that an interrupted run can be
continued; `FORCE=1` runs it again. With changes that are not committed every group runs, and nothing is noted down.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

GROUPS = ("contract", "fuzz", "unit", "multiprocess", "end_to_end")
PASSED = Path("build/slow-tests")  # one file for each group, with the commit at which it passed
NO_TESTS = 5  # pytest's exit code


def clean_commit() -> str:
    """Return the checked out commit, or an empty string with uncommitted changes or without git."""
    commands = (["git", "rev-parse", "HEAD"], ["git", "status", "--porcelain"])
    commit, changes = (subprocess.run(command, capture_output=True, text=True) for command in commands)
    return "" if commit.returncode or changes.returncode or changes.stdout else commit.stdout.strip()


def run_group(group: str, options: list[str], *, force: bool) -> str:
    """Run a group of tests, unless it has passed at this commit, and return how it ended."""
    commit, note = clean_commit(), PASSED / group.replace("/", ".")
    if commit and not force and note.exists() and note.read_text() == commit:
        return "passed before, at this commit (FORCE=1 runs it again)"
    note.unlink(missing_ok=True)
    print(f"slow tests of {group}", flush=True)
    code = subprocess.run([sys.executable, "-m", "pytest", f"tests/{group}", *options]).returncode
    if code not in (0, NO_TESTS):
        return "FAILED"
    if commit and clean_commit() == commit:
        PASSED.mkdir(parents=True, exist_ok=True)
        note.write_text(commit)
    return "passed" if code == 0 else "has no slow tests"


def main() -> int:
    """Run the groups of the command line, all of them by default, and print how each ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--force", action="store_true", help="run groups again that passed at this commit")
    parser.add_argument("--group", action="append", default=[], help="a folder or file below tests/")
    given, options = parser.parse_known_args()
    groups = [group.strip("/").removeprefix("tests/") for group in given.group] or list(GROUPS)
    for group in groups:
        if not Path("tests", group).exists():
            parser.error(f"there is no tests/{group}; the groups are {', '.join(GROUPS)}, or any folder below them")
    ended = {group: run_group(group, options, force=given.force) for group in groups}
    for group, how in ended.items():
        print(f"slow tests of {group}: {how}")
    return int("FAILED" in ended.values())


if __name__ == "__main__":
    sys.exit(main())
