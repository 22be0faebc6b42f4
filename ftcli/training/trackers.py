"""Send metrics to the trackers of a run, and continue the trackers' own runs after a resume.

Rows after the step of a resume are abandoned and their steps are repeated. TensorBoard's files are cut at that step.
The other trackers cannot remove rows: each row there has the number of its `attempt`, and the configuration says after
which step each attempt continued.

A tracker that fails after the start gets nothing more, and the training goes on: metrics.jsonl has all values.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import posixpath
import re
import struct
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.runtime.errors import InputError, shortened
from ftcli.runtime.log import log_line
from ftcli.runtime.redaction import redact
from ftcli.runtime.torn_files import read_object

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker

    from ftcli.inference.answers import Answer
    from ftcli.training.run import Run


TRACKERS = "trackers.json"  # in the run folder: the ids of the trackers' runs, and the attempts
EVENT_FILES = "events.out.tfevents.*"
NAME_OF_RUN = {"wandb": "name", "mlflow": "run_name", "trackio": "name"}  # tracker -> its key for the name of a run
ID_OF_RUN = {"wandb": ("WANDB_RUN_ID", "id"), "mlflow": ("MLFLOW_RUN_ID", "run_id")}  # variable and key of the id
EVALUATION = ("eval/", "samples/")  # prefixes of the names of an evaluation's values
TEXT_TRACKERS = ("tensorboard", "wandb", "trackio")
NOT_IN_MLFLOW = re.compile(r"[^/\w.\- ]")  # characters that the names of its metrics cannot have
_open: weakref.WeakSet[Accelerator] = weakref.WeakSet()  # with trackers
_failed: list[GeneralTracker] = []  # that are not ended yet: that may take minutes while their server is gone


class Trackers:
    """The trackers of one run, on every rank; only the main process sends anything.

    Args:
        run: The run. Without a folder it has no trackers.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.names = run, run.recipe.log.trackers if run.folder is not None else []
        self._attempts: list[dict[str, int]] = []  # with the step after which each one continues
        self._newest = self._newest_trained = -1  # steps of the newest row and of the newest training row
        self._project = ""

    def start(self) -> None:
        """Start the trackers once, or continue the runs that an earlier launch of this run started in them.

        Raises:
            InputError: A tracker cannot be started.
        """
        if not self.names or self._attempts:
            return
        run, folder = self.run, self.run.folder
        assert folder is not None
        config = {"task": run.recipe.task, "model": run.recipe.model.name, "seed": run.recipe.seed}
        names = {tracker: {key: folder.path.name} for tracker, key in NAME_OF_RUN.items()}
        stored: dict[str, Any] = read_object(folder.path / TRACKERS) or {}
        wanted = os.environ.get("WANDB_PROJECT", "ftcli")  # Accelerate prefers mlflow's variable
        project = self._project = stored.get("project", wanted)  # an id belongs to a project
        if project != wanted and run.hardware.ranks.is_main:
            log_line(f"trackers: this run continues in its project {project}, and WANDB_PROJECT is now {wanted}")
        self._attempts = [*stored.get("attempts", []), {"after_step": run.first_step}]
        if run.hardware.ranks.is_main:
            names["tensorboard"] = _cut_folder(folder.path / project, run.first_step, evaluated=run.is_measured)
        for tracker, (variable, key) in ID_OF_RUN.items():
            if tracker in stored and variable not in os.environ:
                names[tracker] |= {key: stored[tracker]}
        if "wandb" in stored:
            names["wandb"] |= {"resume": "allow"}
        if "trackio" in stored:
            names["trackio"] |= {"resume": "allow"}  # by its name
        while _failed:  # their library has one run in a process
            with contextlib.suppress(Exception):
                _failed.pop().finish()
        for other in list(_open):  # wandb would return the other run, and mlflow refuse to start a second one
            end_trackers(other, keep=("tensorboard",))
        is_known = all(tracker in stored for tracker in self.names)  # TensorBoard adds a run for each configuration
        config_sent = None if is_known else redact(config)
        try:
            run.hardware.accelerator.init_trackers(project, config=config_sent, init_kwargs=names)
        except Exception as error:
            what = f"log.trackers: {', '.join(self.names)} cannot be started: {_describe(error)}"
            raise InputError(what, hint="correct its settings, or leave it out") from error
        _open.add(run.hardware.accelerator)
        atexit.unregister(_end_open)
        atexit.register(_end_open)  # again: before the hooks of the libraries, after which they cannot send anything
        if run.hardware.ranks.is_main:
            self._record(stored)

    def log(self, row: dict[str, Any]) -> None:
        """Send a row of metrics.

        Args:
            row: Values by name, and `step`.
        """
        if not self.names:
            return
        is_training = "loss" in row
        if row["step"] < self._newest or (is_training and row["step"] == self._newest_trained):  # after a roll-back
            self._continue_after(self.run.first_step)
        self._newest = row["step"]
        if is_training:
            self._newest_trained = row["step"]
        self._send({name: value for name, value in row.items() if name not in ("step", "samples")}, row["step"])

    def log_answers(self, answers: list[Answer], step: int) -> None:
        """Send answers to prompts to the trackers that show texts."""
        self._send({f"samples/{number}": answer.text for number, answer in enumerate(answers)}, step, TEXT_TRACKERS)

    def end(self) -> None:
        """End the trackers."""
        end_trackers(self.run.hardware.accelerator)

    def _send(self, values: dict[str, Any], step: int, names: tuple[str, ...] = ()) -> None:
        """Send values to all trackers, or to those in `names`."""
        attempt = len(self._attempts)
        for tracker in self.run.hardware.accelerator.trackers:
            if names and tracker.name not in names:
                continue
            row: dict[str, Any] = values | {"attempt": attempt}
            at: int | None = step
            if tracker.name == "tensorboard":
                row = values
            elif tracker.name == "wandb":  # it drops rows whose step is not larger than the last one
                row, at = row | {"step": step}, step if attempt == 1 else None
            elif tracker.name == "mlflow":
                row = dict(zip(_names_for_mlflow(row), row.values(), strict=True))
            self._try(tracker, partial(tracker.log, row, step=at))

    def _continue_after(self, step: int) -> None:
        """Cut or mark the rows after a step, to which the run was rolled back."""
        self._attempts.append({"after_step": step})
        self._newest = self._newest_trained = -1
        for tracker in self.run.hardware.accelerator.trackers:
            if tracker.name == "tensorboard":
                self._try(tracker, partial(_cut_tensorboard, tracker, step))
        assert self.run.folder is not None
        self._record(read_object(self.run.folder.path / TRACKERS) or {})

    def _record(self, stored: dict[str, Any]) -> None:
        """Write the ids of the trackers' runs and the attempts into the run folder and to the trackers."""
        assert self.run.folder is not None
        ids: dict[str, Any] = {name: stored.get(name) for name in self.names}  # a tracker that has failed keeps its id
        newest = {f"attempt_{len(self._attempts)}_after_step": self._attempts[-1]["after_step"]}
        for tracker in self.run.hardware.accelerator.trackers:
            if tracker.name == "wandb":
                ids["wandb"] = tracker.run.id
                self._try(tracker, partial(tracker.run.define_metric, "*", step_metric="step"))
            elif tracker.name == "mlflow":
                ids["mlflow"] = tracker.active_run.info.run_id
            if tracker.name != "tensorboard" and len(self._attempts) > 1:
                self._try(tracker, partial(tracker.store_init_configuration, newest))
        self.run.folder.write_json(TRACKERS, stored | ids | {"project": self._project, "attempts": self._attempts})

    def _try(self, tracker: GeneralTracker, action: Callable[[], object]) -> None:
        """Call a function of a tracker, which gets nothing more if that fails."""
        accelerator = self.run.hardware.accelerator
        try:
            action()
        except Exception as error:
            accelerator.trackers = [other for other in accelerator.trackers if other is not tracker]
            _failed.append(tracker)
            log_line(
                f"warning: {tracker.name} has failed and gets nothing more; metrics.jsonl has all values: "
                f"{_describe(error)}"
            )


def end_trackers(accelerator: Accelerator, *, keep: tuple[str, ...] = ()) -> None:
    """End the trackers of an Accelerator but those in `keep`. Its own `end_training` ends the process group too."""
    kept = [tracker for tracker in accelerator.trackers if tracker.name in keep]
    ended = [tracker for tracker in accelerator.trackers if tracker not in kept]
    accelerator.trackers = kept
    for tracker in ended:
        try:
            tracker.finish()
        except Exception as error:
            log_line(
                f"warning: {tracker.name} may lack the last rows, because it failed at its end: {_describe(error)}"
            )


def _describe(error: Exception) -> str:
    """Return the type and the text of an error of a tracker, on one line and without credentials."""
    return shortened(redact(f"{type(error).__name__}: {' '.join(str(error).split())}"), 300)


def _names_for_mlflow(names: Iterable[str]) -> list[str]:
    """Return names that MLflow accepts, all different: other characters become underscores."""
    accepted: list[str] = []
    for name in names:
        clean = posixpath.normpath(NOT_IN_MLFLOW.sub("_", name)).lstrip("/.")
        while not clean or clean in accepted:
            clean += "_"
        accepted.append(clean)
    return accepted


def _cut_tensorboard(tracker: Any, step: int) -> None:
    """Cut the files of TensorBoard after a step, and write on behind them."""
    folder = Path(tracker.logging_dir)
    tracker.writer.close()
    tracker.writer = type(tracker.writer)(str(folder), **_cut_folder(folder, step))


def _end_open() -> None:
    """End the trackers of all runs as the process ends."""
    for accelerator in list(_open):
        end_trackers(accelerator)


def _cut_folder(folder: Path, step: int, *, evaluated: bool = True) -> dict[str, Any]:
    """Remove the events after a step from TensorBoard's files in a folder; `evaluated` as for `cut_events`.

    Returns:
        Arguments of the new writer. With them a TensorBoard that has read the files forgets these events as well.
    """
    last = step if step else -1  # from step 0 the evaluation at the start is repeated too
    files = sorted(folder.glob(EVENT_FILES))
    for path in files:
        cut_events(path, last, evaluated=evaluated)
    return {"purge_step": last + 1} if files else {}


def cut_events(path: Path, last: int, *, evaluated: bool = True) -> None:
    """Remove the events after a step from an event file of TensorBoard; the file is replaced only if there are any.

    Args:
        path: The file: records of length, checksum, event, checksum.
        last: The last step that stays.
        evaluated: Whether evaluations and answers of that step stay.
    """
    content, kept, start = path.read_bytes(), bytearray(), 0
    while start + 12 <= len(content):
        (size,) = struct.unpack_from("<Q", content, start)
        end = start + 12 + size + 4
        if end > len(content):  # a kill left half of a record
            break
        try:
            step, names = _read_event(content[start + 12 : end - 4])
        except (IndexError, UnicodeDecodeError):  # damaged: readers of the file stop here too
            kept += content[start:]
            break
        is_evaluation = any(name.startswith(EVALUATION) for name in names)
        if not names or step < last or (step == last and (evaluated or not is_evaluation)):
            kept += content[start:end]
        start = end
    if len(kept) < len(content):
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_bytes(kept)
        temporary.replace(path)


def _read_event(data: bytes) -> tuple[int, list[str]]:
    """Return (step, names of the values) of a serialised event: fields 2 and 5.1.1 of TensorBoard's event.proto."""
    values = [value for summary in _parts(data, 5) for value in _parts(summary, 1)]
    names = [name.decode() for value in values for name in _parts(value, 1)]
    steps = [value for number, value in _fields(data) if number == 2 and isinstance(value, int)]
    return steps[-1] if steps else 0, names


def _parts(data: bytes, number: int) -> list[bytes]:
    """Return the values of a field that are texts or messages."""
    return [value for field, value in _fields(data) if field == number and isinstance(value, bytes)]


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (number, value) of each field of a message in the wire format of Protocol Buffers; 0 for a float."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
            if byte < 128:
                return value

    while at < len(data):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            yield number, varint()
            continue
        size = {1: 8, 5: 4}.get(kind) or varint()
        yield number, data[at : at + size] if kind == 2 else 0
        at += size
