"""Run one launched command from start to end: output, signals, child processes and the exit code.

This module uses the run folder's `stop`, `errors/` and result file. It is independent of recipes, profiles and
Accelerate, so any command can be supervised. Light: never imports torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from ftcli.launch.output_relay import OutputRelay
from ftcli.launch.rank_monitor import TIMED_OUT, RankMonitor, flight_records
from ftcli.runtime.errors import EXIT_FAILED, EXIT_INPUT, EXIT_SIGNAL, RunFolderGoneError
from ftcli.runtime.folder_lock import is_gone
from ftcli.runtime.log import log_line
from ftcli.runtime.run_folder import FLIGHT_RECORDER, HEARTBEATS, RunFolder
from ftcli.runtime.stop import STARTED, STOP_SIGNALS, ignore_repetitions, record_early_stop, repeat_seconds

FAILURE_GRACE_SECONDS = 10.0  # for the other ranks to end after a rank has recorded a failure
LOSS_GRACE_SECONDS = 3.0  # after a rank was killed, because the others cannot finish anything without it
TERMINATE_SECONDS = 3.0  # between the request to end and SIGKILL
# Outcomes of a launch beside exit codes.
FOLDER_GONE = "the run folder is gone"
ENDED_EARLY = "ended before the first step"
# Batch systems send their signals to every process of a job, and launchers and ranks would end. So they ignore these
# signals. Only this process handles them, and it ends the others with a different signal.
IGNORE_SIGNALS = ("sh", "-c", 'trap "" INT TERM USR1; exec "$@"', "sh")
END_SIGNAL = signal.SIGHUP
# Variables that an Accelerator in this process (a notebook's) has set. The launched ranks must not inherit them.
FOREIGN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
FOREIGN_PREFIXES = (
    "ACCELERATE_USE_",
    "ACCELERATE_DEEPSPEED_",
    "FSDP_",
    "PARALLELISM_CONFIG_",
    "TORCHELASTIC_",
)


class LaunchError(Exception):
    """A launched run failed. The reason is on stderr.

    Attributes:
        exit_code: 2 if the user's input was wrong, 128 + signal after a second signal, else 1.
    """

    def __init__(self, message: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def supervise(
    command: Sequence[str],
    *,
    folder: RunFolder,
    environment: Mapping[str, str] | None = None,
    result: str | None = "status.json",
    owns_folder: bool = True,
    is_alone: bool = True,
) -> None:
    """Run `command` in its own session and wait until all its processes have ended.

    The first SIGINT, SIGTERM or SIGUSR1 writes the file `stop` into `folder`. A second signal ends all processes. A
    run before its first step has nothing to save. If it is the only machine, the first signal ends it, with the state
    stopped. A failure that a rank recorded in errors/ always counts.

    Args:
        command: Program and arguments.
        folder: The run folder.
        environment: Variables that are added to those of this process.
        result: File in `folder` that the command writes if it succeeds. The state in status.json must be done or
            stopped. None: the exit code of the command decides.
        owns_folder: Whether this is the first machine. On others the folder may be shared: leftovers of an earlier
            launch are not removed, and status.json is not written.
        is_alone: Whether no other machine waits for this one.

    Raises:
        LaunchError: The command failed.
    """
    folder.create()
    if owns_folder:
        _remove_leftovers(folder)
    stamp_before = _file_stamp(folder, result)
    token = uuid.uuid4().hex
    monitor = RankMonitor(folder, token, lambda: _has_result(folder, result, stamp_before))
    allowed_signals = 1 if result in (None, "status.json") else 0  # an evaluation has nothing to save

    def is_loading() -> bool:
        return result == "status.json" and is_alone and _is_loading(folder, stamp_before)

    with Signals() as signals:
        child = _start(command, _child_environment(token, environment or {}))
        relay = OutputRelay(child)
        try:
            code = _wait(child, relay, signals, folder, monitor, is_loading, allowed_signals)
            # Checked before the other ranks end or fail without this one. No rank outlives the launcher.
            monitor.check(child.pid if code is None else None)
            records_before_end = monitor.records() if code is None else None
        finally:
            child.kill()  # on SIGTERM a launcher would print a stack trace
            end_processes(token)
            child.wait()
            relay.finish()
            with suppress(OSError):  # a read-only disk, which the ranks have reported
                folder.stop_file.unlink(missing_ok=True)
    if code == ENDED_EARLY:
        record_early_stop(folder, signals.names[0])
        return
    if is_gone(folder.path):
        raise _failure(str(RunFolderGoneError(folder.path)))
    records = monitor.records() if records_before_end is None else records_before_end
    if dumps := flight_records(folder):
        log_line(
            f"a collective timed out; {len(dumps)} ranks wrote their last collectives to "
            f"{dumps[0].parent}/{FLIGHT_RECORDER}*; compare them with: "
            f"torchfrtrace --prefix {FLIGHT_RECORDER} {dumps[0].parent}"
        )
    try:
        _raise_for_failure(folder, result, stamp_before, code, signals.names, records, monitor.describe_lost_ranks())
    except LaunchError as error:
        status = folder.status()
        is_unreported = status.get("state") in ("loading", "running")  # the ranks could not write the failure
        if owns_folder and (is_unreported or (monitor.lost and status.get("state") == "failed")):
            with suppress(OSError):  # a full disk; the message is on stderr
                folder.write_status("failed", status["step"], error.exit_code, str(error))
        raise


def _start(command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start the command with the output streams of this process, or with pipes if a notebook has replaced those."""
    sys.stdout.flush()
    sys.stderr.flush()
    return subprocess.Popen(
        [*IGNORE_SIGNALS, *command],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=None if sys.stdout is sys.__stdout__ else subprocess.PIPE,
        stderr=None if sys.stderr is sys.__stderr__ else subprocess.PIPE,
        start_new_session=True,
    )


def _child_environment(token: str, additions: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the command: ours without an Accelerator's variables, with the launch's own."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in FOREIGN_VARIABLES and not name.startswith(FOREIGN_PREFIXES)
    }
    started = str(time.monotonic())
    own = {"FTCLI_LAUNCHED": token, STARTED: started, "FTCLI_PARENT": str(os.getpid()), "PYTHONUNBUFFERED": "1"}
    return {**inherited, **additions, **own}


class Signals:
    """Record the names of stop signals inside a `with` block. Only the main thread receives signals.

    Args:
        clock: Returns seconds that only increase, for the time between two signals.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.names: list[str] = []
        self._clock = clock
        self._last_time = 0.0  # of the newest request; its repetitions are not recorded
        self._repeat = repeat_seconds()
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        if self.names:
            ignore_repetitions(self.names[-1], self._last_time + self._repeat - self._clock())

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # The handler must not print: it may interrupt a print, and a second one inside it would raise.
        name, now = signal.Signals(number).name, self._clock()
        if self.names[-1:] != [name] or now - self._last_time >= self._repeat:
            self.names.append(name)
            self._last_time = now


def _wait(
    child: subprocess.Popen[bytes],
    relay: OutputRelay,
    signals: Signals,
    folder: RunFolder,
    monitor: RankMonitor,
    is_loading: Callable[[], bool],
    allowed_signals: int,
) -> int | str | None:
    """Wait until the child ends, passing its output on, handling signals and checking its ranks.

    Returns:
        The exit code. None if the child must be ended: more signals than allowed, or ranks that hang. `ENDED_EARLY` if
        a first signal arrives before there is anything to save. `FOLDER_GONE` if the run folder was deleted.
    """
    is_stopping, next_check = False, 0.0
    while child.poll() is None:
        relay.pass_on(timeout=0.05)
        if not relay.has_pipes:
            time.sleep(0.05)
        if signals.names and allowed_signals and not is_stopping:
            is_stopping = True
            folder.write_text("stop", signals.names[0] + "\n")
            log_line(f"{signals.names[0]}: stopping after the current step; a second signal ends the run at once")
        if len(signals.names) > allowed_signals:
            log_line(f"{signals.names[allowed_signals]}: ending all processes")
            return None
        if time.monotonic() >= next_check:
            next_check = time.monotonic() + (1.0 if monitor.has_seen_all_ranks else 0.5)
            monitor.check(child.pid)
            if is_gone(folder.path):
                return FOLDER_GONE
            if is_stopping and monitor.failed_at is None and is_loading():
                return ENDED_EARLY
        if monitor.is_input and not folder.status().get("step"):  # the others wait for rows that no rank prepares
            return None
        grace = LOSS_GRACE_SECONDS if monitor.lost else FAILURE_GRACE_SECONDS
        if monitor.failed_at is not None and time.monotonic() - monitor.failed_at > grace:
            cause = monitor.describe_lost_ranks() or "a rank has failed"
            log_line(f"{cause}, and the other ranks wait for it: ending all processes")
            return None
    return child.returncode


def _is_loading(folder: RunFolder, stamp_before: tuple[int, int] | None) -> bool:
    """Return whether the ranks are before the first step. After `stop` is written they do not start it.

    The ranks first write the state running and then read `stop`.
    """
    return _file_stamp(folder, "status.json") == stamp_before or folder.status().get("state") == "loading"


def end_processes(token: str) -> None:
    """End every process that inherited FTCLI_LAUNCHED=`token`: by a signal, and by SIGKILL a few seconds later.

    Processes are identified by their environment, because torchrun starts each rank in its own session, and a rank
    whose launcher has ended has another parent.
    """
    import psutil

    for _ in range(5):
        descendants = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("FTCLI_LAUNCHED") == token and process.pid != os.getpid():
                    process.send_signal(END_SIGNAL)
                    descendants.append(process)
            except psutil.Error:  # ended meanwhile, or of another user
                continue
        if not descendants:
            return
        for process in psutil.wait_procs(descendants, timeout=TERMINATE_SECONDS)[1]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue


def _remove_leftovers(folder: RunFolder) -> None:
    """Remove files of an earlier launch into this folder that would stop or fail this one."""
    beats = (folder.path / HEARTBEATS).glob("rank-*.json")
    for stale in (folder.stop_file, *folder.errors.glob("rank-*.json"), *beats, *flight_records(folder)):
        stale.unlink(missing_ok=True)


def _file_stamp(folder: RunFolder, result: str | None) -> tuple[int, int] | None:
    """Return modification time and inode of the result file, which change when it is written again."""
    if result is None or not (folder.path / result).exists():
        return None
    stat = (folder.path / result).stat()
    return stat.st_mtime_ns, stat.st_ino


def _has_result(folder: RunFolder, result: str | None, stamp_before: tuple[int, int] | None) -> bool:
    """Return whether the launch has written its result. If its result is an exit code, status.json decides."""
    if result is not None and _file_stamp(folder, result) in (None, stamp_before):
        return False
    return result not in (None, "status.json") or folder.status().get("state") in ("done", "stopped")


def _raise_for_failure(
    folder: RunFolder,
    result: str | None,
    stamp_before: tuple[int, int] | None,
    code: int | str | None,
    signals: list[str],
    records: list[dict[str, Any]],
    lost: str,
) -> None:
    """Raise `LaunchError` if the run failed, after printing the reason as the last lines of stderr.

    `lost` names ranks that ended without a record. Errors that other ranks recorded are then mostly consequences.
    """
    is_fresh = _file_stamp(folder, result) not in (None, stamp_before)
    status = folder.status() if is_fresh and result == "status.json" else {}
    if records:
        first = records[0]
        if first["traceback"]:
            log_line(f"\n{first['traceback'].rstrip()}", prefix=False)
        reason = f"rank {first['rank']}: {first['message']}"
        raise _failure(f"{lost}; {reason}" if lost and first["exit_code"] != EXIT_INPUT else reason, first["exit_code"])
    if signals and code is None:
        cause = "a second signal" if len(signals) > 1 else "a signal"
        raise _failure(f"ended by {cause} ({signals[-1]})", EXIT_SIGNAL + signal.Signals[signals[-1]])
    if status.get("state") == "failed":
        raise _failure(status["error"], status["exit_code"] or EXIT_FAILED)
    is_done = status.get("state") in ("done", "stopped") if result == "status.json" else is_fresh
    if code == 0 if result is None else is_done:
        if code != 0:
            log_line(f"the launcher ended with code {code}, but the result of the run was already written")
        return
    if lost:
        raise _failure(lost)
    if flight_records(folder):
        raise _failure(f"the launched processes {TIMED_OUT}")
    raise _failure(
        f"the launched processes ended (code {code}) without a result and without recording an error; see their "
        "output above. The system ends a process like this, for instance for lack of host memory.",
    )


def _failure(message: str, exit_code: int = EXIT_FAILED) -> LaunchError:
    """Print the reason and return it as an error."""
    log_line(message, prefix=False)
    return LaunchError(message, exit_code)
