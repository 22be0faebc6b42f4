"""Check the first rows of each source for `ftcli check`.

Reads with json, csv and pyarrow only; never imports torch or `datasets`. Columns are checked for shipped tasks only,
because a custom task may read any row.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.config.task_registry import find_task, is_custom_task, tasks_where
from ftcli.data.formats import convert, with_usual_names
from ftcli.data.paths import local_path
from ftcli.data.sources import FIRST_CHARACTERS, rename_columns, require_columns
from ftcli.data.streaming.lanes import BAD_ROW_HINT
from ftcli.data.streaming.line_reader import text_rows
from ftcli.runtime.errors import InputError, Problem, RowError, shortened
from ftcli.runtime.reader_errors import reading
from ftcli.tasks.protocol import properties_of

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe
    from ftcli.config.recipe_data import Source


CHECKED_ROWS = 8  # number of rows of each source to check


def hub_key_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem for each key for names on the hub that has no effect on a local model or source."""
    sections: list[tuple[str, Any, str, tuple[str, ...]]] = [("model", recipe.model, recipe.model.name, ("revision",))]
    for place, source in recipe.data.named_sources("train") + recipe.data.named_sources("eval"):
        sections.append((place, source, source.path, ("name", "split", "revision")))
    for place, section, name, keys in sections:
        for key in keys:
            if getattr(section, key) != type(section).model_fields[key].default and local_path(name) is not None:
                message = f"{place}.{key} has no effect: {shortened(name, 100)} is on this machine, not on the hub"
                yield Problem(message, hint="delete it; label names a source" if key == "name" else "delete it")


def check_first_rows(recipe: Recipe) -> None:
    """Check that the recipe's task can use the first rows of each source. Streams and images are checked elsewhere.

    Args:
        recipe: A valid recipe.

    Raises:
        InputError: A column is missing, or more than data.max_bad_rows of the first rows cannot be used.
    """
    if is_custom_task(recipe.task):
        return
    task, data = find_task(recipe.task).Task, recipe.data
    for split in ("train", "eval"):
        for key, source in data.named_sources(split):
            path = local_path(source.path)
            if path is None or (split == "train" and data.streaming):
                continue
            if path.is_dir():
                if properties_of(task).reads_text:
                    others = " or ".join(tasks_where(lambda task: not task.reads_text))
                    hint = f"name a data file, or set task: {others}"
                    raise InputError(f"{key}: {path} is a folder, but task {recipe.task} reads text", hint=hint)
                continue
            if path.suffix != ".json" or path.stat().st_size <= FIRST_CHARACTERS:  # a list is parsed as a whole
                _check_rows(recipe, task, source, path)


def _check_rows(recipe: Recipe, task: Any, source: Source, path: Path) -> None:
    """Check the first rows of one file."""
    raw = list(islice(_rows(path), CHECKED_ROWS))
    present = {name for row in raw for name in row}
    columns = with_usual_names(task, recipe.data.columns_of(source), present, where=str(path))
    rows = [rename_columns(row, columns) for row in raw]
    if rows and task.columns:
        require_columns(list(dict.fromkeys(key for row in rows for key in row)), task.columns, str(path))
    bad = [(number, reason) for number, row in enumerate(rows, start=1) if (reason := _fault(task, row))]
    if len(bad) > recipe.data.max_bad_rows:
        number, reason = bad[0]
        raise InputError(f"row {number} of {path}: {reason}", hint=BAD_ROW_HINT)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file one by one, so that only the first rows are read.

    Raises `InputError` with its line for what is no row: data.max_bad_rows does not count it.
    """
    with reading(path):
        if path.suffix != ".parquet":
            yield from text_rows(path)
            return
        from pyarrow import parquet

        with parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=CHECKED_ROWS):
                yield from batch.to_pylist()


def _fault(task: Any, row: dict[str, Any]) -> str:
    """Return why a task cannot use a row; an empty string if it can."""
    from ftcli.data.chat.message_checks import checked_messages

    if kinds := properties_of(task).formats:
        try:
            converted = convert(row, kinds)
            if "messages" in converted:
                checked_messages(converted["messages"])
        except RowError as error:
            return str(error)
    return ""
