"""Fixtures of all tests: temporary caches, tiny inputs (`inputs`, `make_inputs`) and the command line (`run_cli`)."""

from __future__ import annotations

import atexit
import io
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .support.runner import Finished, MakeInputs, RunCli
from .support.second_try import SecondTry, add_option
from .support.worker_groups import make_scheduler, prepare_items

# A shell has what it starts in the background ignore Ctrl-C, and Python then raises no KeyboardInterrupt for it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# The hub's cache is a temporary folder too. Its place is read when huggingface_hub is imported, so it is set before.
HUB_CACHE = tempfile.mkdtemp(prefix="ftcli-hub-cache-")
os.environ["HF_HUB_CACHE"] = HUB_CACHE
atexit.register(shutil.rmtree, HUB_CACHE, ignore_errors=True)

SECONDS: Counter[str] = Counter()  # of tests with their fixtures, by folder


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add our options."""
    add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Register our plugins."""
    if config.pluginmanager.hasplugin("cacheprovider"):  # -p no:cacheprovider: nothing is recorded
        config.pluginmanager.register(SecondTry(config))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Treat tests that start ranks apart."""
    prepare_items(config, items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return our scheduler for workers."""
    return make_scheduler(config, log)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add the time of a test, its fixtures or its cleaning up to its folder; xdist's controller sees all of them."""
    SECONDS[report.nodeid.rpartition("::")[0].rpartition("/")[0].partition("[")[0]] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the seconds of each folder. They are for people: no run fails because it took long."""
    if len(SECONDS) > 1:
        terminalreporter.section("seconds by folder")
        for folder, seconds in SECONDS.most_common():
            terminalreporter.write_line(f"{seconds:8.0f}  {folder}")


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Point ftcli's cache at a temporary folder; assets fetched before are linked in, not fetched again."""
    from ftcli.runtime.resources import cache_root

    real = cache_root()
    folder = tmp_path_factory.mktemp("cache")
    real.joinpath("assets").mkdir(parents=True, exist_ok=True)
    (folder / "assets").symlink_to(real / "assets")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FTCLI_CACHE", str(folder))
        yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Set a temporary folder for compiled code, so that no test meets what another process left half done."""
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def make_inputs(tmp_path_factory: pytest.TempPathFactory) -> MakeInputs:
    """Return a function that makes a folder of tiny models and rows (`cells.write_inputs`) with files of its own.

    Its argument maps the name of a file to its text, or to a dictionary that is written as YAML.
    """
    import yaml

    from .support.cells import write_inputs

    template = tmp_path_factory.mktemp("template")
    write_inputs(template)

    def make(files: dict[str, str | dict[str, Any]] | None = None) -> Path:
        folder = tmp_path_factory.mktemp("inputs")
        shutil.copytree(template, folder, dirs_exist_ok=True)
        for name, content in (files or {}).items():
            (folder / name).write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        return folder

    return make


@pytest.fixture(scope="session")
def inputs(make_inputs: MakeInputs) -> Iterator[Path]:
    """Yield the folder of tiny models and rows that all tests of this process read; it is an error to write into it."""
    folder = make_inputs()
    before = _files(folder)
    yield folder
    assert _files(folder) == before, "a test wrote into the shared inputs: give its module a folder by make_inputs"


def _files(folder: Path) -> dict[str, int]:
    """Return path -> time of the last change of each file that is not compiled Python."""
    return {
        str(path): path.stat().st_mtime_ns
        for path in folder.rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }


@pytest.fixture
def run_cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunCli:
    """Return a function that runs `ftcli ARGUMENTS` in this process, with further environment variables by name."""
    from ftcli.__main__ import main

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(*arguments: object, stdin: str = "", **variables: str) -> Finished:
        capsys.readouterr()
        with monkeypatch.context() as patched, pytest.raises(SystemExit) as end:
            patched.setattr("sys.stdin", io.StringIO(stdin))
            for name, value in variables.items():
                patched.setenv(name, value)
            main([str(argument) for argument in arguments])
        return Finished(int(end.value.code or 0), *capsys.readouterr())

    return run
