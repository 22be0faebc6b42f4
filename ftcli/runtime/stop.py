"""Receive stop requests in a training process: from a signal, the file `stop` of the run folder, or a time limit.

supervisor.py is the launching side. The two sides communicate only through environment variables and files of the run
folder. Light: never imports torch.
"""

from __future__ import annotations

import atexit
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from ftcli.runtime.errors import EXIT_RESUME, EXIT_SIGNAL
from ftcli.runtime.failures import mark_failed
from ftcli.runtime.log import log_line
from ftcli.runtime.process import current_rank, has_ftcli_parent, local_rank
from ftcli.runtime.run_folder import RunFolder, as_run_folder

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
STARTED = "FTCLI_STARTED"  # when ftcli's parent started the launch, on the monotonic clock of this machine
POLL_SECONDS = 0.5
ECHO_SECONDS = 2.0
REPEAT_SECONDS = 0.5  # `timeout` sends a signal to the process, and then again to its whole process group
# Slurm sends SIGTERM to the processes of a step, and `srun` passes its own SIGTERM on to them.
SLURM_REPEAT_SECONDS = 5.0
SLURM_STEP = "SLURM_STEP_ID"  # set by Slurm for the processes of a step
_ends_with_process = False


class Stopped(KeyboardInterrupt):
    """A stop request arrived during loading or an evaluation, which may be interrupted."""


class StopRequest:
    """Records a request to end the run after the current step: a signal, the file `stop`, or the time limit.

    Use it as a context manager. Below ftcli's parent process only the file and the time limit count. The parent handles
    signals, and a signal to every process of a job (`scancel`) must not end a rank. In a single process, or under a
    bare `accelerate launch`, SIGINT, SIGTERM and SIGUSR1 count too, and a second signal has its previous effect.

    The same signal within half a second (in a Slurm step: five seconds) is not a second signal. Under torchrun no
    signal within two seconds is, because torchrun forwards to the ranks a signal that they have received already. One
    rank per machine reads the file. The ranks must agree among themselves.

    Args:
        folder: The run folder; None reads no file.
        clock: Returns seconds that only increase, for the time between two signals.
    """

    def __init__(
        self, folder: RunFolder | str | Path | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.reason = ""
        self._clock = clock
        self._folder = None if folder is None else as_run_folder(folder)
        self._launched = has_ftcli_parent()
        self._reads_file = local_rank() == 0
        self._previous: dict[signal.Signals, Any] = {}
        self._next_poll = 0.0
        self._began = float(os.environ.get(STARTED) or time.monotonic())
        self._ends = math.inf
        self._pid = os.getpid()
        self._first, self._signalled = "", -math.inf  # the first signal, and when it came
        self._repeat = repeat_seconds()
        self._echo = ECHO_SECONDS if "TORCHELASTIC_RUN_ID" in os.environ else 0.0
        self._raises_on_signal = False
        self.is_listening = False  # inside the `with` block

    @classmethod
    def listening(cls, folder: RunFolder | str | Path) -> StopRequest:
        """Return a request for a `with` statement. It receives signals only inside the block."""
        return cls(folder)

    def __enter__(self) -> StopRequest:
        self.is_listening = True
        if not self._launched:
            self._remove_file()  # of an earlier run; ftcli's parent process has removed it already
            if threading.current_thread() is threading.main_thread():
                for number in STOP_SIGNALS:
                    self._previous[number] = signal.signal(number, self._handle)
        elif threading.current_thread() is threading.main_thread():
            # SIGTERM is ignored already, but process pools forked from this process must be able to end their workers.
            self._previous[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._leave_to_parent)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_listening = False
        self._restore()
        if self._first:
            ignore_repetitions(self._first, self._signalled + self._repetition_seconds(self._first) - self._clock())
        if not self._launched:
            with suppress(OSError):  # the error of a full or failing disk is raised elsewhere
                self._remove_file()

    @contextmanager
    def raise_on_signal(self) -> Iterator[None]:
        """Raise `Stopped` on a signal inside the block or before it, because there is nothing to save yet."""
        self._raises_on_signal = True
        try:
            if self._first:
                raise Stopped(self._first)
            yield
        finally:
            self._raises_on_signal = False

    def start_clock(self, minutes: float | None) -> None:
        """Request a stop after a time limit.

        Args:
            minutes: Minutes since the start of the launch; None for no limit.
        """
        self._ends = math.inf if minutes is None else self._began + 60 * minutes

    def requested(self, *, now: bool = False) -> bool:
        """Return whether this process has received a request. No collective and no device synchronisation.

        Args:
            now: Read the file `stop` at once instead of at most twice a second.
        """
        if not self.reason and time.monotonic() >= self._ends:
            self.reason = "train.max_minutes"
        if not self.reason and self._folder and self._reads_file and (now or time.monotonic() >= self._next_poll):
            self._next_poll = time.monotonic() + POLL_SECONDS
            if self._folder.stop_file.exists():
                self.reason = self._folder.stop_file.read_text(encoding="utf-8").strip() or "stop file"
        return bool(self.reason)

    def forget(self) -> None:
        """Forget a request that was met, and remove its file. A time limit stays."""
        self.reason = ""
        self._remove_file()

    def _leave_to_parent(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            _die_of(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if os.getpid() != self._pid:  # a forked child takes no part in the agreement of the ranks
            _die_of(number)
        elif self._clock() - self._signalled < self._repetition_seconds(name):
            return  # a repetition of the first signal
        elif self._signalled > -math.inf:  # a second signal ends the process at once
            self._restore()
            if signal.getsignal(number) is signal.SIG_IGN:  # shells start background processes with ignored signals
                signal.signal(number, signal.SIG_DFL)
            if self._folder is not None and current_rank() == 0:
                mark_failed(self._folder, EXIT_SIGNAL + number, f"ended by a second signal ({name})")
            os.kill(os.getpid(), number)
        else:
            self._first, self._signalled = name, self._clock()
            self.reason = self.reason or name
            if self._raises_on_signal:
                raise Stopped(name)
            if current_rank() == 0:  # not `print`, because the handler may have interrupted another `print`
                os.write(
                    2,
                    f"ftcli: {name}: stopping after the current step; a second signal ends the run at once\n".encode(),
                )

    def _repetition_seconds(self, name: str) -> float:
        """Return for how long after the first signal one with this name is a repetition of it."""
        return max(self._echo, self._repeat if name == self._first else 0.0)

    def _restore(self) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        self._previous.clear()

    def _remove_file(self) -> None:
        if self._folder and self._reads_file:
            self._folder.stop_file.unlink(missing_ok=True)


def repeat_seconds() -> float:
    """Return for how long the same signal counts as a repetition of the one before it.

    Returns:
        Seconds. Inside a Slurm step more than elsewhere, because Slurm sends SIGTERM several times.
    """
    return SLURM_REPEAT_SECONDS if SLURM_STEP in os.environ else REPEAT_SECONDS


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Raise `SystemExit` on SIGTERM inside the block, so that temporary files are removed. The exit code stays 143.

    Nothing changes outside of the main thread, or in a process that handles or ignores SIGTERM already.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(EXIT_SIGNAL + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def ending_with_process() -> Iterator[None]:
    """Declare that this process ends after the block, so that repetitions of a signal may be ignored until then."""
    global _ends_with_process
    _ends_with_process = True
    try:
        yield
    finally:
        _ends_with_process = False


def ignore_repetitions(name: str, seconds: float) -> None:
    """Ignore repetitions of a stop signal after the code that handled it has restored the handlers.

    Otherwise a repetition would kill a process that has saved its checkpoint, and its exit code would not be 75.
    Nothing changes in processes that go on afterwards, such as notebooks.

    Args:
        name: Name of the signal.
        seconds: For how long it is ignored. If the process ends before, it is ignored until the end.
    """
    if not _ends_with_process or seconds <= 0 or threading.current_thread() is not threading.main_thread():
        return
    number, ends = signal.Signals[name], time.monotonic() + seconds
    previous = signal.getsignal(number)

    def handle(number: int, frame: FrameType | None) -> None:
        if time.monotonic() >= ends:
            signal.signal(number, previous)
            os.kill(os.getpid(), number)

    def ignore() -> None:
        if time.monotonic() < ends:
            signal.signal(number, signal.SIG_IGN)  # Python removes its own handlers before the process ends

    signal.signal(number, handle)
    atexit.register(ignore)


def _die_of(number: int) -> None:
    """End this process by a signal, with the default effect of that signal."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def record_early_stop(folder: RunFolder, reason: str) -> None:
    """Set the status of a run that was stopped before its first step, and log it. There is no checkpoint to save.

    Args:
        folder: The run folder.
        reason: Name of the signal, or another reason of the stop request.
    """
    message = f"stopped on request before the first step, nothing to save ({reason})"
    folder.write_status("stopped", folder.status().get("step", 0), EXIT_RESUME, message)
    log_line(f"{message}; start it again with --resume auto", every_rank=True)


def ignore_signals_in_workers(worker_id: int) -> None:
    """Ignore stop signals in a DataLoader worker (`worker_init_fn`), because the training process ends it."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
