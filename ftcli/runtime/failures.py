"""Write and read the failure records of ranks, and end this process when its parent or another rank has failed."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ftcli.runtime.errors import EXIT_FAILED, EXIT_INPUT, EXIT_SIGNAL, InputError, RunError
from ftcli.runtime.log import log_line
from ftcli.runtime.process import current_rank, has_ftcli_parent, parent_id, world_size
from ftcli.runtime.redaction import redact, redact_error
from ftcli.runtime.run_folder import RunFolder, as_run_folder
from ftcli.runtime.torn_files import read_object

PEER_GRACE_SECONDS = 10.0


@contextmanager
def record_failure(folder: RunFolder | str | Path) -> Iterator[None]:
    """Write errors/rank-<r>.json when the block raises, and raise the exception again.

    An `InputError` is recorded with exit code 2, a KeyboardInterrupt with 130, anything else with 1. Under torchrun
    the error file of torchrun is written too, so that the summary of a bare launch names the exception. The exception
    gets the attribute `recorded`.

    Args:
        folder: The run folder.
    """
    run = as_run_folder(folder)  # made before the block, so that a folder deleted inside it is not created again
    try:
        yield
    except BaseException as error:
        if not isinstance(error, GeneratorExit) and not (isinstance(error, SystemExit) and not error.code):
            with suppress(OSError):  # on a full disk the record fails too, and must not hide the first error
                _write_record(run, error)
        raise


def _write_record(run: RunFolder, error: BaseException) -> None:
    """Write the failure record of this rank, and set the status of the run to failed."""
    redact_error(error)  # a notebook or torchrun may print the exception later
    rank = current_rank()
    is_input, is_complete = isinstance(error, InputError), isinstance(error, InputError | RunError)
    failed = EXIT_SIGNAL + signal.SIGINT if isinstance(error, KeyboardInterrupt) else EXIT_FAILED
    text = str(error)
    name = type(error).__name__
    record: dict[str, Any] = {
        "rank": rank,
        "time": time.time(),
        "exit_code": EXIT_INPUT if is_input else failed,
        "message": text if is_complete else f"{name}: {text}" if text else name,
        "traceback": "" if is_complete else "".join(traceback.format_exception(error)),
    }
    mark_failed(run, record["exit_code"], record["message"])
    errors = run.errors
    run.ensure()
    errors.mkdir(exist_ok=True)
    temporary = errors / f".rank-{rank}.{os.getpid()}"
    temporary.write_text(json.dumps(redact(record), indent=1) + "\n", encoding="utf-8")
    temporary.replace(errors / f"rank-{rank}.json")
    error.recorded = True  # type: ignore[attr-defined]  # __main__ then does not print it a second time
    # The parent process prints a complete message once; torchrun would print a stack trace for each rank.
    is_printed_by_parent = is_complete and has_ftcli_parent()
    if "TORCHELASTIC_ERROR_FILE" in os.environ and not is_printed_by_parent:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)


def failure_records(folder: RunFolder | str | Path) -> list[dict[str, Any]]:
    """Return the failure records in a run folder, the earliest first.

    Records are sorted by the clock of the file system, because the clocks of several machines differ.

    Args:
        folder: The run folder.
    """
    dated: list[tuple[int, float, int, dict[str, Any]]] = []
    paths: list[Path] = []
    with suppress(FileNotFoundError):  # the run folder may be deleted at this moment
        paths = list((as_run_folder(folder).path / "errors").glob("rank-*.json"))
    for path in paths:
        with suppress(FileNotFoundError):  # the main rank may remove records of an earlier run at this moment
            written, record = path.stat().st_mtime_ns, read_object(path)
            if record is not None and record.keys() >= {"time", "rank"}:  # a power cut leaves incomplete records
                dated.append((written, record["time"], record["rank"], record))
    return [record for *_, record in sorted(dated, key=lambda item: item[:3])]


def mark_failed(folder: RunFolder, exit_code: int, message: str) -> None:
    """Set the status of a run to failed, unless the run has ended already."""
    status = folder.status()
    if status.get("state") in ("loading", "running"):
        folder.write_status("failed", status["step"], exit_code, message)


def watch_parent() -> None:
    """End this process about a second after its ftcli parent process has died. Does nothing without a parent."""
    if (parent_pid := parent_id()) is None:
        return
    import psutil

    parent: psutil.Process | None = None
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(parent_pid)

    def is_gone() -> bool:
        # The creation time is not compared: psutil derives it from the wall clock, which may be set meanwhile.
        try:
            return parent is None or not parent.is_running() or parent.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    _watch("ftcli-parent", is_gone, "the ftcli process that launched this run is gone")


def watch_peers(folder: RunFolder | str | Path) -> None:
    """End this process when another rank has recorded a failure and this one still hangs ten seconds later.

    A rank that waits inside a collective for a dead peer cannot run Python's signal handlers, and torchrun
    would wait thirty seconds before it kills it. The seconds are counted here, from when the record was seen: clocks
    of machines differ, and may be set. Does nothing in a run of one process, which a notebook may outlive.
    """
    if world_size() == 1:
        return
    path, rank = as_run_folder(folder), current_rank()
    stale = failure_records(path)  # an earlier run's
    seen: list[float] = []

    def peer_failed() -> bool:
        if any(record["rank"] != rank and record not in stale for record in failure_records(path)):
            seen.append(time.monotonic())
        return bool(seen) and time.monotonic() - seen[0] > PEER_GRACE_SECONDS

    _watch("ftcli-peers", peer_failed, "another rank has failed")


def _watch(name: str, should_end: Callable[[], bool], why: str) -> None:
    def watch() -> None:
        while not should_end():
            time.sleep(1.0)
        with suppress(OSError):  # the reader of the output has ended too
            log_line(f"rank {current_rank()} ends: {why}", every_rank=True)
        os._exit(EXIT_FAILED)  # the main thread may hang in a collective: nothing softer ends it

    threading.Thread(target=watch, name=name, daemon=True).start()
