"""Share the tests out over xdist's workers: all that start ranks go to one worker, those of any other file to one.

That worker alone imports the rank server, and two cores never run the ranks of two launches. The tests of a file stay
together, so that its fixtures are made once. Used with `--dist loadgroup`. The marker `xdist_group` would do the same,
but xdist 3.8 writes its groups into an attribute that pytest 9.2 does not read.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
# What a test module calls to start ranks. Slow tests of end_to_end/ start them by the command line too.
STARTS = re.compile(r"\b(run_on_cpu|run_on_processes|run_forked|fork_context|support\.killing|ftcli\.doctor\()")
STARTS_BY_COMMAND = re.compile(r"--num[-_]processes\b")
RANKS_SECONDS = 600  # before pytest-timeout takes a test that starts ranks for one that hangs


@cache
def starts_ranks(path: Path, *, slow: bool = True) -> bool:
    """Return whether tests of this file start ranks, its slow ones included or not."""
    folder, text = path.relative_to(TESTS).parts[0], path.read_text(encoding="utf-8")
    by_command = slow and folder == "end_to_end" and STARTS_BY_COMMAND.search(text)
    return bool(folder == "multiprocess" or by_command or STARTS.search(text))


def runs_slow_tests(config: pytest.Config) -> bool:
    """Return whether this run may have slow tests, by its option -m."""
    return "not slow" not in config.getvalue("markexpr")


def prepare_items(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give tests that start ranks more time. On a worker they come first, because their group takes longest."""
    slow = runs_slow_tests(config)
    for item in items:
        if starts_ranks(item.path) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(RANKS_SECONDS))
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not starts_ranks(item.path, slow=slow))


def make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return the scheduler for `--dist loadgroup`, and None for any other, which are xdist's."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    slow = runs_slow_tests(config)

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "ranks" if starts_ranks(config.rootpath / file, slow=slow) else file

    return Groups(config, log)
