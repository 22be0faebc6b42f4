"""Match the columns of a source with those of a task: usual names of public data sets, and unused columns."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ftcli.config.task_registry import FROM_FILE
from ftcli.runtime.errors import InputError
from ftcli.tasks.protocol import properties_of


def with_usual_names(task: Any, columns: Mapping[str, str], present: Collection[str], *, where: str) -> dict[str, str]:
    """Add the names that public data sets use for columns of a task, if the source has these instead.

    Args:
        task: The task, or its class.
        columns: Name the task expects -> name in the source, as the recipe maps them.
        present: Columns of the source.
        where: Name of the source in messages.

    Returns:
        The map with the names that were found.

    Raises:
        InputError: The source has several sets of such names.
    """
    own = dict(columns)
    matches = [
        names
        for names in properties_of(task).usual_names
        if set(names.values()) <= set(present)
        and not any(name in present or own.get(name, name) != name for name in names)
    ]
    if len(matches) > 1:
        pairs = " and ".join(", ".join(names.values()) for names in matches)
        first = ", ".join(f"{name}: {stored}" for name, stored in matches[0].items())
        raise InputError(f"has several columns of texts: {pairs}", where=where, hint=f"set data.columns: {{{first}}}")
    return own | dict(matches[0]) if matches else own


def unused_columns(task: Any, columns: Collection[str]) -> str:
    """Return a remark about the columns that a task with fixed columns does not read; "" if there are none.

    A custom task may read columns that it does not declare.

    Args:
        task: The task, or its class.
        columns: Columns of a source, by the names that the task expects.
    """
    if not task.columns:
        return ""
    known = {*task.columns, *properties_of(task).optional_columns, "id"}
    unused = ", ".join(sorted(set(columns) - known))
    kind = task if isinstance(task, type) else type(task)
    is_shipped = kind.__module__.startswith("ftcli.tasks.") and not kind.__module__.startswith(FROM_FILE)
    what = "not used" if is_shipped else "not declared by the task"
    return f"{what}: {unused}" if unused else ""


def described_columns(task: Any, columns: Collection[str]) -> str:
    """Return the columns of a source that a task with fixed columns reads, and those that it does not use."""
    used = [name for name in (*task.columns, *properties_of(task).optional_columns) if name in columns]
    unused = unused_columns(task, columns)
    return ", ".join(used) + (f" ({unused})" if unused else "")
