"""Record which tests passed, and run those that did not once more: `.ci/run` does so after a failed `make test`.

One unstable test then does not hold back a whole piece of work, but it is printed with its first traceback.
"""

from __future__ import annotations

import pytest

PASSED = "ftcli/passed"  # names of the tests that passed or were skipped, in pytest's cache
FAILURES = "ftcli/failures"  # name of a failed test -> traceback


class SecondTry:
    """A plugin for pytest.

    With `--second-try` it deselects what passed in the run before, including a run that a crash ended early. Tests that
    never ran are therefore not lost. Without the option it writes down how each test ended.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.cache = config.cache
        self.is_second = config.getoption("--second-try")
        self.is_worker = hasattr(config, "workerinput")  # xdist's controller sees the reports of all workers
        self.ended: set[str] = set()  # names of the tests that passed or were skipped
        self.failures: dict[str, str] = {}

    def pytest_sessionstart(self) -> None:
        """Forget the run before, so that a crash of this one cannot leave an older result."""
        if not self.is_second and not self.is_worker:
            self._write()

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselect the tests that passed before."""
        if self.is_second:
            passed = set(self.cache.get(PASSED, []))
            config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
            items[:] = [item for item in items if item.nodeid not in passed]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how a phase of a test ended. The last phase is `teardown`: a test without it was cut off."""
        name = report.nodeid.partition("@")[0]  # xdist appends the group of a test
        if report.failed:
            self.failures[name] = report.longreprtext
        elif report.when == "teardown" and name not in self.failures:
            self.ended.add(name)

    def pytest_sessionfinish(self) -> None:
        """Write down how the tests ended."""
        if not self.is_second and not self.is_worker:
            self._write()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the tests that passed only now, with their first tracebacks."""
        if not self.is_second:
            return
        before = self.cache.get(FAILURES, {})
        if unstable := sorted(self.ended):
            terminalreporter.section("unstable tests: passed in the second try")
        for name in unstable:
            terminalreporter.write_line(f"UNSTABLE {name}", yellow=True)
            terminalreporter.write_line(before.get(name) or "    did not run in the first try")

    def _write(self) -> None:
        self.cache.set(PASSED, sorted(self.ended))
        self.cache.set(FAILURES, self.failures)


def add_option(parser: pytest.Parser) -> None:
    """Add the option `--second-try`."""
    parser.addoption("--second-try", action="store_true", help="run only the tests that did not pass in the run before")
