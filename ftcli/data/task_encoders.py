"""Encode rows with the method `encode_rows` or `encode` of a task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftcli.runtime.errors import InputError, RowError

if TYPE_CHECKING:
    from ftcli.tasks.protocol import Row, Task


def encode_rows(task: Task, rows: list[Row], facts: dict[str, Any]) -> list[list[Row] | RowError]:
    """Encode rows with a task.

    Args:
        task: The task.
        rows: Rows of a source, with columns renamed.
        facts: Result of the task's survey.

    Returns:
        For each row, its documents or the `RowError` of a row that cannot be used.

    Raises:
        InputError: `encode` of the task does not return a list.
    """
    if uses_variant(type(task), "encode_rows", "encode"):
        several: list[list[Row] | RowError] = task.encode_rows(rows, facts)  # type: ignore[attr-defined]
        return several
    results: list[list[Row] | RowError] = []
    for row in rows:
        try:
            documents: Any = task.encode(row, facts)
        except RowError as error:
            results.append(error)
            continue
        if not isinstance(documents, list):
            name = f"{type(task).__module__}.{type(task).__qualname__}"
            raise InputError(
                f"`encode` of {name} returned a {type(documents).__name__}, not a list",
                hint="return a list of prepared rows: [row], or [] to leave the row out",
            )
        results.append(documents)
    return results


def check_encoders(task: Task, row: Row, facts: dict[str, Any]) -> None:
    """Check with one row that the task's `encode` and `encode_rows` return the same documents.

    A derived task may override `encode` but inherit `encode_rows`, and ftcli calls `encode_rows`.

    Args:
        task: The task.
        row: A row of a source, with columns renamed.
        facts: Result of the task's survey.

    Raises:
        InputError: The results differ.
    """
    if not uses_variant(type(task), "encode_rows", "encode"):
        return
    (several,) = task.encode_rows([dict(row)], facts)  # type: ignore[attr-defined]
    try:
        alone: Any = task.encode(dict(row), facts)
    except NotImplementedError:  # the task implements `encode_rows` only
        return
    except RowError as error:
        alone = error
    if repr(several) != repr(alone):
        name = f"{type(task).__module__}.{type(task).__qualname__}"
        raise InputError(
            f"`encode` and `encode_rows` of task {name} return different documents for the first row",
            hint=f"`encode` is from {_definer(task, 'encode')}, `encode_rows` from {_definer(task, 'encode_rows')}: "
            "remove `encode_rows` from the class, or change it too; ftcli calls `encode_rows`",
        )


def _definer(task: Task, method: str) -> str:
    """Return the qualified name of a task's method in the class that defines it."""
    function = getattr(type(task), method)
    return f"{function.__module__}.{function.__qualname__}"


def uses_variant(task: type, variant: str, plain: str) -> bool:
    """Return whether an optional method of a task is used instead of the plain one.

    It is not if a derived class overrides only the plain method.

    Args:
        task: The class of the task.
        variant: Name of the optional method, such as `encode_rows`.
        plain: Name of the method that it replaces, such as `encode`.
    """
    first = next((known for known in task.__mro__ if variant in vars(known) or plain in vars(known)), object)
    return variant in vars(first)
