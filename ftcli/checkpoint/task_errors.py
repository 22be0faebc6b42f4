"""Convert exceptions of a user's task into errors with the line in the task's file."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ftcli.runtime.errors import InputError, RunError


@contextmanager
def explain_task_errors(task: Any, hint: str) -> Iterator[None]:
    """Convert exceptions of a task's methods inside the block into an `InputError` with the line in the task's file.

    Args:
        task: The task.
        hint: What to do.

    Raises:
        InputError: The block raised an exception, and code in the file of a user's task was running.
    """
    try:
        yield
    except (InputError, RunError):
        raise
    except Exception as error:
        frame = task_frame(task, error)
        if frame is None:
            raise
        raise InputError(
            f"the task's method {_method_name(error, frame.filename)} raised {type(error).__name__}: {error}",
            where=f"{frame.filename}:{frame.lineno}",
            hint=hint,
        ) from error


def _method_name(error: Exception, file: str) -> str:
    """Return the function of a file that was called first: the last frame may be of a helper, or `<lambda>`."""
    return next(frame.name for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file)


def task_frame(task: Any, error: Exception) -> traceback.FrameSummary | None:
    """Return the last frame of an exception in the file of a user's task; None without one.

    Args:
        task: The task.
        error: The exception.
    """
    module = type(task).__module__
    if module.startswith("ftcli."):
        return None
    file = getattr(sys.modules.get(module), "__file__", None)
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame for frame in reversed(frames) if frame.filename == file), None)
