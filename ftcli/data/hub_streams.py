"""Stream data sets on the hub: files at one commit, each readable from any row on without downloading all of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from ftcli.data.declared_types import with_class_names
from ftcli.data.hub_commits import COMMIT, commit_of
from ftcli.data.hub_data import NOT_HERE, explain_hub_errors, hub_builder, warn_inferred_values
from ftcli.data.hub_files import HubFiles, addresses, find_hub_files
from ftcli.data.streaming.lanes import Corpus, open_corpus
from ftcli.data.streaming.line_reader import read_lines
from ftcli.runtime.errors import RowError

if TYPE_CHECKING:
    from ftcli.config.recipe_data import Source


def open_hub(source: Source) -> Corpus:
    """Return the files of a data set on the hub as a corpus. All files count as equally large.

    ftcli reads text files, and `datasets` reads other files. The lanes and their cursors are the same for both.

    Args:
        source: The data set.

    Raises:
        InputError: The data set does not exist, or has no such configuration or split.
    """
    with explain_hub_errors(source):
        files = find_hub_files(source)
        if files is not None and not files.why_not:
            names = files.of(source.split)
            lines = HubLines(files, tuple(addresses(files, names)))
            return Corpus((1,) * len(names), lines, tuple(map(files.shown, names)))
        commit = source_commit(source)
        revision = commit if COMMIT.fullmatch(commit) else source.revision  # a local copy has no commit
        builder = hub_builder(source.path, source.name, revision)
        warn_inferred_values(source, builder, NOT_HERE if files is None else files.why_not)
        return open_corpus(builder.as_streaming_dataset(split=source.split))


@dataclass(frozen=True)
class HubLines:
    """Reads the text files of a data set on the hub by their number, row by row."""

    files: HubFiles
    addresses: tuple[str, ...]

    def __call__(self, file: int, skip: int) -> Iterator[dict[str, Any] | RowError]:
        """Yield the rows of a file from row `skip` on."""
        change = with_class_names(self.files.features)
        for row in read_lines(self.addresses[file], skip, layout=self.files.layout):
            yield row if isinstance(row, RowError) else change(row)


def source_commit(source: Source) -> str:
    """Return the commit of a data set on the hub. The result stays the same as long as this process runs."""
    if (commit := commit_of(source.path, source.revision, "dataset")) is not None:
        return commit
    with explain_hub_errors(source):
        return _commit_of_builder(source.path, source.name, source.revision)


@cache
def _commit_of_builder(path: str, name: str | None, revision: str | None) -> str:
    """Return the commit, or another hash, of the copy that `datasets` uses."""
    return str(hub_builder(path, name, revision).hash)
