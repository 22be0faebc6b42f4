"""Read and write the files of a run folder: recipe, profile, environment, metrics, samples and status.

The file names of the folder are defined here only. Light: never imports torch.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from ftcli.runtime.checkpoint_names import CHECKPOINTS, checkpoint_after_final, checkpoints_of
from ftcli.runtime.durable_files import make_folder, sync, write_durably
from ftcli.runtime.errors import DiskError, InputError, RunFolderGoneError, shortened
from ftcli.runtime.folder_lock import LOCK as LOCK
from ftcli.runtime.folder_lock import is_abandoned, is_gone, lock, locked
from ftcli.runtime.reader_errors import path_problem
from ftcli.runtime.redaction import redact
from ftcli.runtime.torn_files import read_object, read_rows

RUN_FILES = ("recipe.yaml", "metrics.jsonl", "checkpoints", "final")  # one of these shows that a folder holds a run
EVENTS = "events.jsonl"  # launches, checkpoints, stalls and what the load shows, one per line
START = "start.json"  # written on request: the state of a run before its first step
ORIGIN = "resumed.json"  # written by a run that begins at a checkpoint of another run
HEARTBEATS = "heartbeats"  # folder with the current phase of each rank
LOADS = "load"  # folder with the newest load of each rank other than 0
FLIGHT_RECORDER = "flight-recorder-rank-"  # PyTorch's record of collectives, written when one times out
SHARED = ".shared"  # rank 0 writes it for a moment, and all ranks look for it
DRY_RUN = "dry-run"  # the file that marks a folder of a dry run, which may be deleted


class RunFolder:
    """The folder of one run. Reading is possible at any time; only the main process writes.

    Args:
        path: The folder. It need not exist.

    Raises:
        InputError: No folder can have this path.
    """

    def __init__(self, path: str | Path) -> None:
        if problem := path_problem(str(path)):
            raise InputError(f"this path {problem}", where=f"run folder {shortened(str(path), 80)}")
        self.path = Path(path).expanduser()
        self._has_existed = self.path.is_dir()

    def create(self) -> None:
        """Create the folder and its parents unless they exist."""
        make_folder(self.path)
        self._has_existed = True

    def ensure(self) -> None:
        """Create the folder before the first file is written into it.

        Raises:
            RunFolderGoneError: The folder existed after this object was made and has been deleted, or another run has
                replaced it.
        """
        if self._has_existed:
            self.check()
        else:
            self.create()

    def check(self) -> None:
        """Raise `RunFolderGoneError` if the folder existed after this object was made and has been deleted."""
        if self._has_existed and is_gone(self.path):
            raise RunFolderGoneError(self.path)

    @property
    def final(self) -> Path:
        """Folder of the trained weights."""
        return self.path / "final"

    def checkpoint_after_final(self) -> Path | None:
        """Return the newest checkpoint if it is newer than the final weights; else None."""
        return checkpoint_after_final(self.path, self.final)

    @property
    def stop_file(self) -> Path:
        """File that requests the run to end after the current step."""
        return self.path / "stop"

    @property
    def errors(self) -> Path:
        """Folder of the failure records of ranks."""
        return self.path / "errors"

    def claim(self, *, resuming: bool = False) -> None:
        """Create and lock the folder, and remove the stop request and the failure records of an earlier launch.

        Args:
            resuming: Whether the folder may hold a run with results.

        Raises:
            InputError: The folder cannot be created or written, another process trains into it, or it holds a run
                that is not resumed.
        """
        self.check_free(resuming=resuming)
        if self.path.is_symlink() and not self.path.exists():
            raise InputError(f"{self.path} is a broken link", hint="choose another folder with --output")
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"{self.path} is a file, not a folder", hint="choose another folder with --output")
        try:
            self.create()
        except OSError as error:
            raise InputError(f"cannot create the run folder: {error}", hint="choose another with --output") from error
        self.check_writable("choose another folder with --output")
        lock(self.path)
        for stale in (self.stop_file, *self.errors.glob("rank-*.json")):
            stale.unlink(missing_ok=True)

    def check_writable(self, hint: str) -> None:
        """Raise `InputError` with this hint if no file can be created in the folder."""
        if not os.access(self.path, os.W_OK):
            raise InputError(f"{self.path} cannot be written to", hint=hint)

    def check_free(self, *, resuming: bool = False) -> None:
        """Check that the folder holds no run, or one that is resumed. Changes nothing.

        Args:
            resuming: Whether the folder may hold a run with results.

        Raises:
            InputError: The folder holds a run that is not resumed.
        """
        present = [name for name in RUN_FILES if (self.path / name).exists()]
        if present and not resuming and not self._never_started():
            hint = (
                "resume it with --resume auto, choose another folder with --output, or move that run away (in Python: "
                'resume="auto", output=...)'
            )
            raise InputError(f"{self.path} already holds a run ({', '.join(present)})", hint=hint)

    def locked(self) -> AbstractContextManager[None]:
        """Return a context that prevents other processes from training into the folder.

        The folder is locked on entry if it exists, else by `claim`. Has no effect on file systems without locks.

        Raises:
            InputError: Another process trains into the folder.
        """
        return locked(self.path)

    def is_abandoned(self) -> bool:
        """Return whether the process that trained into the folder has certainly ended.

        Returns False when that process ran on another machine.
        """
        return is_abandoned(self.path)

    def _never_started(self) -> bool:
        """Return whether the run in this folder ended before its first step, so that nothing is lost."""
        status, origin = self.status(), read_object(self.path / ORIGIN) or {}
        has_no_step = status.get("state") in ("failed", "stopped") and status.get("step") in (0, origin.get("step"))
        return has_no_step and not any((self.path / name).exists() for name in RUN_FILES[1:])

    def write_bytes(self, name: str, content: bytes, *, durable: bool = True) -> None:
        """Write one file atomically: the file has its old or its new content, never a part.

        Args:
            name: The file's name, without a folder.
            content: The bytes of the file.
            durable: Sync the file to the disk before it is renamed, and then its folder. A file that is replaced often
                need not survive a power cut.

        Raises:
            DiskError: The disk is full or accepts no more files.
            RunFolderGoneError: The run folder has been deleted.
        """
        self.ensure()
        temporary = self.path / f".{name}.{os.getpid()}"
        try:
            with explain_disk_errors(self.path / name):
                if durable:
                    write_durably(temporary, content)
                else:
                    temporary.write_bytes(content)
                temporary.replace(self.path / name)
                if durable:
                    sync(self.path)
        except DiskError:
            with suppress(OSError):
                temporary.unlink()
            raise

    def write_text(self, name: str, text: str, *, durable: bool = True) -> None:
        """Write one text file atomically and without credentials; arguments as for `write_bytes`."""
        self.write_bytes(name, redact(text).encode(), durable=durable)

    def write_json(self, name: str, value: Any, *, durable: bool = True) -> None:
        """Write one JSON file atomically and without credentials; arguments as for `write_bytes`."""
        self.write_text(name, json.dumps(redact(value), indent=1) + "\n", durable=durable)

    def write_status(self, state: str, step: int, exit_code: int, error: str = "") -> None:
        """Write status.json. The status of a running run is replaced twice a second and not synced to the disk.

        Args:
            state: loading, running, done, stopped or failed.
            step: Number of finished optimizer steps.
            exit_code: Exit code of the command; see errors.py.
            error: Message for a run that has failed or was stopped.
        """
        status = {"state": state, "step": step, "exit_code": exit_code, "error": error, "time": time.time()}
        self.write_json("status.json", status, durable=state != "running")

    def status(self) -> dict[str, Any]:
        """Return status.json; an empty dict if the file is missing or incomplete."""
        return read_object(self.path / "status.json") or {}

    def torn(self) -> list[str]:
        """Return one line for each incomplete file, as a power cut or a kill leaves them."""
        lines = []
        if (self.path / "status.json").exists() and read_object(self.path / "status.json") is None:
            lines.append("status.json is empty or truncated: how the run ended is not known")
        for name in ("metrics", "samples"):
            path = self.path / f"{name}.jsonl"
            numbers = [number for number, _, row in read_rows(path) if row is None]
            if numbers:
                places = ", ".join(map(str, numbers[:5])) + ", ..." * (len(numbers) > 5)
                one = f"{path.name}:{places} is not a complete row and is not read; a resumed run moves it away"
                more = f"{path.name}: lines {places} are incomplete and are not read; a resumed run moves them away"
                lines.append(one if len(numbers) == 1 else more)
        return lines

    def origin(self) -> str:
        """Return the checkpoint of another run at which this run began; an empty string if there is none.

        Raises:
            InputError: The file that names the checkpoint is incomplete.
        """
        path = self.path / ORIGIN
        if not path.exists():
            return ""
        record = read_object(path)
        if record is None or "checkpoint" not in record:
            hint = "give the checkpoint at which the run began: --resume DIR"
            raise InputError(f"{path} is empty or truncated", hint=hint)
        return str(record["checkpoint"])

    def start(self) -> dict[str, Any]:
        """Return start.json: the state before the first step, which a run records for `parity`."""
        state: dict[str, Any] = json.loads((self.path / START).read_text(encoding="utf-8"))
        return state

    @property
    def samples(self) -> Path:
        """File of the model's answers at each evaluation, one per line."""
        return self.path / "samples.jsonl"

    def append_event(self, event: str, step: int, text: str) -> None:
        """Add one event (launch, checkpoint, stall, load) after a step to events.jsonl. A resume keeps all events."""
        self._append(self.path / EVENTS, [{"step": step, "event": event, "text": text, "time": time.time()}])

    def append_samples(self, rows: list[dict[str, Any]]) -> None:
        """Add the answers of one evaluation to samples.jsonl."""
        self._append(self.samples, rows, ensure_ascii=False)

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Add one row to metrics.jsonl."""
        self._append(self.path / "metrics.jsonl", [row])

    def _append(self, path: Path, rows: list[dict[str, Any]], *, ensure_ascii: bool = True) -> None:
        with explain_disk_errors(path), path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(redact(row), ensure_ascii=ensure_ascii) + "\n" for row in rows)

    def sync_rows(self) -> None:
        """Sync metrics.jsonl, samples.jsonl and the entries of the folder to the disk."""
        for path in (self.path / "metrics.jsonl", self.samples):
            if path.exists():
                sync(path)
        sync(self.path)

    def rewind(self, step: int, *, evaluated: bool = True, from_start: bool = True) -> None:
        """Move the rows after a step from metrics.jsonl and samples.jsonl to the files `*.abandoned.jsonl`.

        Args:
            step: The step at which the run resumes. Rows of later steps are moved.
            evaluated: Whether the checkpoint includes the evaluation after this step. If not, its rows are moved too.
            from_start: Whether a run at step 0 begins anew, so that its evaluation at the start is repeated.
        """
        for name in ("metrics", "samples"):
            self._rewind(name, step if step or not from_start else -1, evaluated=evaluated)

    def _rewind(self, name: str, step: int, *, evaluated: bool) -> None:
        """Move the rows after a step out of one file; arguments as for `rewind`."""
        path = self.path / f"{name}.jsonl"
        valid: list[bytes] = []
        abandoned: list[bytes] = []
        for _, line, row in read_rows(path):
            is_evaluation = row is not None and row["step"] == step and "loss" not in row
            is_abandoned_row = row is None or row["step"] > step or (not evaluated and is_evaluation)
            (abandoned if is_abandoned_row else valid).append(line + b"\n")
        if abandoned:
            with explain_disk_errors(path), (self.path / f"{name}.abandoned.jsonl").open("ab") as file:
                file.writelines(abandoned)
            self.write_bytes(path.name, b"".join(valid))

    def metrics(self) -> list[dict[str, Any]]:
        """Return the complete rows of metrics.jsonl, training and evaluation rows; `torn` lists incomplete rows."""
        return [row for *_, row in read_rows(self.path / "metrics.jsonl") if row is not None]

    def training_rows(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl that describe optimizer steps."""
        return [row for row in self.metrics() if "loss" in row]


@contextmanager
def explain_disk_errors(path: Path, *others: type[Exception]) -> Iterator[None]:
    """Convert errors of the disk inside the block into errors that name the file.

    Python's own message does not contain the name of a file that is already open.

    Args:
        path: The file or folder in a run folder that the block writes.
        others: Further exceptions that mean an error of the disk.

    Raises:
        DiskError: The disk is full or accepts no more files.
        RunFolderGoneError: The run folder has been deleted.
    """
    refusals: tuple[type[Exception], ...] = (OSError, *others)
    try:
        yield
    except refusals as error:
        if is_gone(path.parent):
            raise RunFolderGoneError(path.parent) from error
        message = f"{path} could not be written: {getattr(error, 'strerror', None) or error}"
        raise DiskError(message, has_checkpoints=has_checkpoints(path.parent)) from error


def has_checkpoints(run: Path) -> bool:
    """Return whether a run folder holds a complete checkpoint; True if the disk of its checkpoints is not mounted."""
    folder = run / CHECKPOINTS
    if folder.is_symlink() and not folder.is_dir():
        return True
    try:
        return bool(checkpoints_of(run))
    except OSError:
        return True


def as_run_folder(folder: RunFolder | str | Path) -> RunFolder:
    """Return the run folder of a path."""
    return folder if isinstance(folder, RunFolder) else RunFolder(folder)
