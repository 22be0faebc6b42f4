"""The `ftcli` command line as tests run it: in their own process (`run_cli` of conftest.py) or in a forked one."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

MARKS = ("FTCLI_LAUNCHED", "FTCLI_PROFILE", "FTCLI_PARENT", "RANK", "WORLD_SIZE", "LOCAL_RANK")  # of launched ranks


class Finished(NamedTuple):
    """A command that has ended: its exit code (negative for a signal) and what it printed."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """Return stdout and stderr together."""
        return self.out + self.err


RunCli = Callable[..., Finished]
MakeInputs = Callable[..., Path]


def run_forked(folder: Path, *arguments: object, timeout: float = 500, **variables: str) -> Finished:
    """Run `ftcli ARGUMENTS` in a process of its own, in `folder`, with further environment variables by name.

    The process forks from the server of `run_on_cpu`, which has imported everything. It ends as a new process does,
    also by a signal. Raises `RuntimeError` when it is still there after `timeout` seconds.
    """
    from ftcli.testing import ON_CPU, PRELOADED, environment, fork_context

    inherited = {name: value for name, value in os.environ.items() if name not in MARKS}
    shared = inherited | ON_CPU | {"HF_HUB_OFFLINE": "1"} | variables
    with environment(**ON_CPU):
        context = fork_context(PRELOADED)
        # Pipes, because a test may limit the size of files.
        (out, child_out), (err, child_err) = context.Pipe(duplex=False), context.Pipe(duplex=False)
        process = context.Process(
            target=_command, args=(folder, list(map(str, arguments)), shared, child_out, child_err)
        )
        process.start()
    child_out.close()
    child_err.close()
    with ThreadPoolExecutor(2) as readers:
        texts = [readers.submit(_read, pipe) for pipe in (out, err)]
        process.join(timeout)
        code = process.exitcode
        process.kill()
        printed = [text.result() for text in texts]
    if code is None:
        raise RuntimeError(f"ftcli {arguments} did not end: {printed[1][-3000:]}")
    return Finished(code, *printed)


def _read(pipe: Any) -> str:
    with open(os.dup(pipe.fileno()), encoding="utf-8", errors="replace") as file:
        return file.read()


def _command(folder: Path, arguments: list[str], shared: dict[str, str], out: Any, err: Any) -> None:
    os.dup2(out.fileno(), sys.stdout.fileno())
    os.dup2(err.fileno(), sys.stderr.fileno())
    out.close()
    err.close()
    os.environ.clear()
    os.environ.update(shared)
    multiprocessing.set_start_method(None, force=True)  # processes of the command's own start as in any run
    os.chdir(folder)
    sys.argv = ["ftcli", *arguments]
    import torch

    from ftcli.__main__ import main

    torch.set_num_threads(1)
    main(arguments)
