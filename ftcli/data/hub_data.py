"""Read data sets on the hub at one commit. ftcli reads text files itself, and all other files through `datasets`.

`datasets` is imported inside functions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.data.declared_types import class_types, convert_declared, text_types
from ftcli.data.hub_commits import COMMIT
from ftcli.data.hub_files import HubFiles, download, find_hub_files
from ftcli.data.paths import similar_names
from ftcli.data.streaming.line_reader import suffix_of, text_rows, unreadable_row
from ftcli.runtime.errors import InputError, RowError
from ftcli.runtime.log import log_line
from ftcli.runtime.reader_errors import reason

if TYPE_CHECKING:
    from datasets import Dataset, DatasetBuilder

    from ftcli.config.recipe_data import Source


# Changes that `datasets` makes to values, for files that ftcli cannot read itself.
INFERRED = {
    "csv": "it reads NULL, NA and None as missing and 007 as 7",
    "json": "it reads text that looks like a date as a time",
}
NOT_HERE = "neither the hub nor its cache on this machine has its files"


def read_hub(source: Source, text: Collection[str] = ()) -> Dataset:
    """Return the rows of a data set on the hub.

    Args:
        source: Name, configuration, split and revision of the data set.
        text: Columns whose fields in a table stay text even if they look like numbers.

    Raises:
        InputError: The data set does not exist, has no such configuration or split, or is unreadable.
    """
    with explain_hub_errors(source):
        files = find_hub_files(source)
        if files is None or files.why_not:
            builder = hub_builder(source.path, source.name, source.revision)
            builder.download_and_prepare()
            warn_inferred_values(source, builder, NOT_HERE if files is None else files.why_not)
            rows: Dataset = builder.as_dataset(split=source.split)
            return rows
        splits = _splits_of(source.split, files)
        names = [name for split in splits for name in files.of(split)]
        paths = dict(zip(names, download(files, names), strict=True))
    return _read_text(files, splits, paths, source.split, text)


def warn_inferred_values(source: Source, builder: DatasetBuilder, why: str) -> None:
    """Log that `datasets` reads the text files of a data set, and which values it changes.

    Args:
        source: The data set.
        builder: The builder of `datasets`.
        why: Why ftcli does not read the files itself.
    """
    kind = str(builder.info.builder_name or builder.name)
    if kind in INFERRED:
        log_line(
            f"data set {source.path} is stored as {kind} and read through the library datasets, because {why}: "
            f"{INFERRED[kind]}; for exact text download its files and name them in data"
        )


def _splits_of(spec: str, files: HubFiles) -> list[str]:
    """Return the splits in a specification such as `train`, `all` or `train[:10%]+test`.

    Raises `ValueError` for a specification that `datasets` does not accept.
    """
    from datasets import ReadInstruction

    if spec == "all":
        return list(files.splits)
    if spec in files.splits:
        return [spec]
    ReadInstruction.from_spec(spec)
    return list(dict.fromkeys(part.strip().partition("[")[0].partition("(")[0] for part in spec.split("+")))


def _read_text(files: HubFiles, splits: list[str], paths: dict[str, str], spec: str, text: Collection[str]) -> Dataset:
    """Return the rows of text files, read like local files, with the types that the data set declares."""
    from ftcli.data.arrow_tables import build_dataset, infer_numbers

    lengths: dict[str, int] = {}
    rows = build_dataset(_rows(files, splits, paths, text, lengths))
    if len(rows) == 0:
        raise InputError(f"data set {files.repository} has no rows", hint=f"its split is {spec}")
    if files.is_table:
        rows = infer_numbers(rows, {*text, *text_types(files.features)})
    for name, feature in class_types(files.features).items():
        rows = rows.cast_column(name, feature) if name in rows.column_names else rows
    return rows if spec == "all" or spec in lengths else _select_rows(rows, lengths, spec)


def _rows(
    files: HubFiles, splits: list[str], paths: dict[str, str], text: Collection[str], lengths: dict[str, int]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of splits, and store the number of rows of each split in `lengths`.

    Raises `InputError` for an unreadable row, and for tables of one data set that have different columns.
    """
    change = convert_declared(files.features, text)
    first: tuple[str, list[str]] | None = None
    for split in splits:
        lengths[split] = 0
        for file in files.of(split):
            where = files.shown(file)
            for number, row in enumerate(text_rows(paths[file], where, files.layout), start=1):
                if number == 1 and files.is_table:
                    first = first or (where, sorted(row))
                    if sorted(row) != first[1]:
                        message = f"the columns are {', '.join(row)}, and in {first[0]} they are {', '.join(first[1])}"
                        raise InputError(message, where=where, hint="does its first line contain the column names?")
                converted = change(row)
                if isinstance(converted, RowError):
                    raise unreadable_row(where, suffix_of(file), converted, number)
                lengths[split] += 1
                yield converted


def _select_rows(rows: Dataset, lengths: dict[str, int], spec: str) -> Dataset:
    """Return the rows of a specification such as `train[:10%]`, among the rows of its splits."""
    from datasets import ReadInstruction, concatenate_datasets

    starts, done = {}, 0
    for split, length in lengths.items():
        starts[split], done = done, done + length
    parts = [
        rows.select(range(starts[part.splitname] + part.from_, starts[part.splitname] + part.to))
        for part in ReadInstruction.from_spec(spec).to_absolute(lengths)
    ]
    return concatenate_datasets(parts)


def hub_builder(path: str, name: str | None, revision: str | None) -> DatasetBuilder:
    """Return the builder of `datasets` for a data set on the hub at the requested commit.

    If the hub does not answer, `datasets` uses the newest copy on this machine, which may have another commit.

    Args:
        path: Name of the data set.
        name: Name of the configuration.
        revision: Branch, tag or commit. A commit is read exactly.

    Raises:
        InputError: The commit can neither be downloaded nor is it on this machine.
    """
    from datasets import load_dataset_builder

    builder = load_dataset_builder(path, name, revision=revision)
    commit = str(builder.hash)
    if revision is None or commit == revision or not (COMMIT.fullmatch(revision) and COMMIT.fullmatch(commit)):
        return builder
    folder = Path(builder.cache_dir)  # .../owner___name/configuration/version/commit
    if not (folder.parent / revision).is_dir():
        raise InputError(
            f"data set {path}: commit {revision} is needed, but this machine has commit {commit}",
            hint="run `ftcli fetch RECIPE` where there is a network, or name the commit in the source's `revision`",
        )
    version, configuration = folder.parts[-2], folder.parts[-3]
    return type(builder)(
        cache_dir=str(folder.parents[3]),
        dataset_name=path.rpartition("/")[2],
        repo_id=path,
        config_name=configuration,
        version=version,
        hash=revision,
    )


@contextmanager
def explain_hub_errors(source: Source) -> Iterator[None]:
    """Convert exceptions of `datasets` for a data set on the hub into an `InputError` with a hint.

    Args:
        source: The data set.

    Raises:
        InputError: The block raised such an exception.
    """
    from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        yield
    except DatasetGenerationError as error:
        message = f"data set {source.path} cannot be read: {reason(error.__cause__ or error)}"
        raise InputError(message, hint="do all rows of its files have the same types?") from error
    except (
        DatasetNotFoundError,
        OfflineModeIsEnabled,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        ConnectionError,
    ) as error:
        similar = f"{found} Otherwise " if (found := similar_names(Path(source.path))) else ""
        raise InputError(
            f"data set {source.path} is neither on this machine nor reachable on the hub",
            hint=f"{similar}check the name, or run `ftcli fetch RECIPE` where there is a network "
            f"({type(error).__name__})",
        ) from error
    except ValueError as error:  # an unknown configuration or split; the message lists those that exist
        raise InputError(f"data set {source.path}: {error}") from error
