"""Upload the checkpoints and the final weights of a run to the hub, as the recipe's section `hub` says.

The process that owns the run starts one `ftcli export --push` at a time. Training does not wait for these processes. An
upload that fails is one line in the log; the exit code of the run stays what it is. Light: never imports torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING

from ftcli.config.trust import FLAG, check_stored
from ftcli.launch.supervisor import IGNORE_SIGNALS
from ftcli.runtime.checkpoint_names import COMPLETE, checkpoints_of
from ftcli.runtime.log import log_line
from ftcli.runtime.run_folder import RunFolder
from ftcli.runtime.stop import SLURM_STEP, StopRequest

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe


KEY = "hub.push"
POLL_SECONDS = 1.0  # time between two looks at the folder of the checkpoints
# Of one wait of the main thread. Python handles a signal that the system gives to another thread, or that arrives just
# before a wait begins, only when that wait ends.
WAIT_SECONDS = 0.5
LAST_UPLOAD_SECONDS = 300.0  # for the last checkpoint of a stopped run; a signal ends it before
INTERRUPTED = "interrupted by a signal"
NICENESS = 10  # of an upload during training, which needs the cores of the machine
# Variables by which a process knows that a launcher started it. An upload is a command of its own.
LAUNCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCH_PREFIXES = ("FTCLI_LAUNCHED", "FTCLI_PARENT", "FTCLI_PROFILE", "ACCELERATE_", "FSDP_", "TORCHELASTIC_", "GROUP_")


@contextmanager
def pushing(
    recipe: Recipe, folder: RunFolder, *, start: Path | None = None, trust_remote_code: bool = False
) -> Iterator[None]:
    """Upload what the run of the block saves. Without `hub.push` nothing happens.

    The repository is created before the block begins, so that a wrong name or token costs no training. After the block
    the final weights of a finished run are uploaded, or the newest checkpoint of a stopped run. A signal then ends the
    upload only. In a Slurm step a stopped run does not wait for its upload, because Slurm requeues the job only if the
    run ends in time. The next launch uploads its checkpoint.

    Args:
        recipe: The recipe of the run.
        folder: The run folder.
        start: The checkpoint from which the run continues in its folder. It is uploaded too, because the launch before
            may have had no time for it.
        trust_remote_code: Whether the export may run code of the task or the model. The recipe's consent counts too.

    Raises:
        InputError: The export would run code that is not trusted, there is no token, the hub cannot be reached, or it
            refuses the repository.
    """
    if recipe.hub.push is None:
        yield
        return
    from ftcli.checkpoint.hub_upload import create_repository

    trusted = trust_remote_code or recipe.model.trust_remote_code
    check_push_consent(recipe, str(folder.path), trusted=trusted)
    name = create_repository(recipe.hub.push, private=recipe.hub.private, key=KEY)
    options = ["--push", name, *["--private"] * recipe.hub.private, *[FLAG] * trusted]
    checkpoints = _Uploads(folder, options)
    if recipe.hub.push_at == "checkpoint":
        checkpoints.start(start)
    try:
        yield
    except BaseException:
        checkpoints.end("the run has failed or was interrupted")
        raise
    with contextlib.suppress(KeyboardInterrupt), StopRequest() as request, request.raise_on_signal():
        if folder.status().get("state") == "done":
            checkpoints.end(None)  # the final weights replace a checkpoint
            _Uploads(folder, options).push(folder.path)
        elif SLURM_STEP in os.environ:
            checkpoints.end("the job ends; the next launch uploads it")
        else:
            checkpoints.finish(LAST_UPLOAD_SECONDS)
    checkpoints.end(INTERRUPTED)


def check_push_consent(recipe: Recipe, folder: str, *, trusted: bool) -> None:
    """Raise `InputError` if the uploads of a run would run code that is not trusted, as each says after the training.

    Args:
        recipe: The recipe of the run.
        folder: The run folder, for the message.
        trusted: Whether the user gave `--trust-remote-code`.
    """
    if recipe.hub.push is not None:
        check_stored(recipe, Path(f"{KEY}: {folder}"), trusted=trusted)


class _Uploads:
    """A thread that uploads the newest checkpoint of a run, one at a time; older ones are left out."""

    def __init__(self, folder: RunFolder, options: list[str]) -> None:
        self._folder, self._options = folder, options
        self._run_has_ended = Event()
        # Waited for in place of a join. A signal that interrupts a join makes Python 3.11 take the thread for ended.
        self._thread_has_ended = Event()
        self._lock = Lock()  # of the attributes below
        self._is_ended = False
        self._is_killed = False
        self._reason: str | None = None  # why the upload was killed; None: another one replaces it
        self._source: Path | None = None
        self._process: subprocess.Popen[str] | None = None
        self._thread = Thread(target=self._watch, name="ftcli-uploads", daemon=True)

    def start(self, first: Path | None) -> None:
        """Upload checkpoints from now on: `first`, and those that are not there yet."""
        found = _stamps(self._folder.path)
        self._known = {(path, stamp) for path, stamp in found if first is None or path.name != first.name}
        self._thread.start()

    def finish(self, seconds: float) -> None:
        """Upload the newest checkpoint of a run that has ended, if it is not uploaded yet, within a time limit."""
        self._run_has_ended.set()
        if self._thread.ident is None:
            return
        with self._lock:
            if self._source not in checkpoints_of(self._folder.path)[-1:]:
                self._kill(None)
        ends = time.monotonic() + seconds
        while time.monotonic() < ends and not self._thread_has_ended.wait(min(seconds, WAIT_SECONDS)):
            pass
        self.end(f"not finished {seconds:g} seconds after the run was stopped")

    def end(self, reason: str | None) -> None:
        """End the thread and its upload.

        Args:
            reason: Why, for the log. None: no line is logged.
        """
        with self._lock:
            self._is_ended = self._is_killed = True
            self._reason = reason
            self._kill(reason)
        self._run_has_ended.set()
        if self._thread.ident is not None:
            self._thread_has_ended.wait()

    def push(self, source: Path, niceness: int = 0) -> None:
        """Upload a run or a checkpoint in a process of its own, and log how it ended."""
        try:
            # A process that is killed does not delete its files.
            with tempfile.TemporaryDirectory(prefix="ftcli-push-", ignore_cleanup_errors=True) as temporary:
                process = self._start(source, temporary, niceness)
                if process is None:
                    self._log(source, "", "", 1)
                    return
                with process:
                    try:
                        output, errors = _output_of(process)
                    except KeyboardInterrupt:  # a signal after the run
                        with self._lock:
                            self._kill(INTERRUPTED)
                        self._log(source, "", "", process.wait())
                        raise
                self._log(source, output, errors, process.returncode)
        except OSError as error:
            self._log(source, "", str(error), 1)

    def _start(self, source: Path, temporary: str, niceness: int) -> subprocess.Popen[str] | None:
        """Start the upload of a run or a checkpoint, unless uploads were ended.

        Signals that a terminal or a batch system sends to all processes of the run do not end it.
        """
        command = [*IGNORE_SIGNALS, sys.executable, "-m", "ftcli", "export", str(source.absolute()), *self._options]
        with self._lock:
            if self._is_ended:
                return None
            self._source, self._is_killed = source, False
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=_own_environment() | {"TMPDIR": temporary},
                start_new_session=True,
            )
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self._process.pid, niceness)
            return self._process

    def _kill(self, reason: str | None) -> None:
        """End the process of the upload and those that it has started. The caller holds the lock."""
        if self._process is not None and self._process.returncode is None:
            self._is_killed, self._reason = True, reason
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(self._process.pid, signal.SIGKILL)

    def _log(self, source: Path, output: str, errors: str, code: int) -> None:
        """Log how an upload has ended."""
        if code == 0:
            log_line(f"{KEY}: {source} is uploaded: {output.strip()}")
            return
        reason = self._reason if self._is_killed else _reason(errors, code)
        if reason is not None:
            retry = f"ftcli export {source} {' '.join(self._options)}"
            log_line(f"{KEY}: {source} was not uploaded ({reason}); repeat it with `{retry}`")

    def _watch(self) -> None:
        """Upload the newest checkpoint whenever there is a new one. After the end of the run, look one last time."""
        is_last = False
        try:
            while not is_last:
                is_last = self._run_has_ended.wait(POLL_SECONDS)
                found = _stamps(self._folder.path)
                if new := [path for path, stamp in found if (path, stamp) not in self._known]:
                    self._known.update(found)
                    self.push(new[-1], 0 if is_last else NICENESS)
        finally:
            self._thread_has_ended.set()


def _stamps(run: Path) -> list[tuple[Path, int]]:
    """Return the checkpoints of a run, the oldest first, with the time at which each was written."""
    found = []
    for path in checkpoints_of(run):
        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile (checkpoint.keep)
            found.append((path, (path / COMPLETE).stat().st_mtime_ns))
    return found


def _output_of(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Wait for a process, and return what it has written to its two streams."""
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=WAIT_SECONDS)


def _reason(errors: str, code: int) -> str:
    """Return the line of a command's standard error that says what is wrong."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    named = [line for line in lines if "error" in line.lower()]
    return (named or lines or [f"exit code {code}, without a message"])[-1].removeprefix("error: ")[:300]


def _own_environment() -> dict[str, str]:
    """Return the environment of a command that no launcher started, and that leaves the GPUs to the run."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCH_VARIABLES and not name.startswith(LAUNCH_PREFIXES)
    }
    return kept | {"CUDA_VISIBLE_DEVICES": ""}
