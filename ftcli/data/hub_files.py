"""List the text files of a data set on the hub, with their layout and location.

`datasets` resolves configuration and split from file names and from README.md. The result is stored on this machine for
each commit, so that later runs need no request. ftcli reads the rows itself (text_files.py), because `datasets` changes
values: NULL becomes missing, 007 becomes 7, and text that looks like a date becomes a time.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.data.declared_types import unknown_types
from ftcli.data.hub_commits import cached_repository, commit_of
from ftcli.data.streaming.line_reader import suffix_of
from ftcli.data.text_files import TABLES, Layout
from ftcli.runtime.errors import InputError
from ftcli.runtime.log import log_line
from ftcli.runtime.resources import cache_root, writing_cache
from ftcli.runtime.torn_files import read_object

if TYPE_CHECKING:
    from datasets import DatasetBuilder, Features

    from ftcli.config.recipe_data import Source


ENDINGS = {"csv": TABLES, "json": (".jsonl", ".ndjson", ".json"), "text": (".txt",)}  # by format name of `datasets`
LISTING_FORMAT = 1  # version of the stored listings
# Settings of `datasets` that this module reads, and those that change no value.
READ = {"name", "version", "data_dir", "data_files", "description", "features", "sep", "delimiter", "field"}
HARMLESS = {
    *("chunksize", "engine", "memory_map", "float_precision", "verbose", "keep_default_na", "na_filter"),
    *("use_threads", "block_size", "newlines_in_values", "on_mixed_types", "parse_agent_traces"),
}
SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\..*)?")
DOWNLOADS = 8  # parallel downloads


@dataclass(frozen=True)
class HubFiles:
    """The files of one configuration of a data set at one commit, by split, in the order in which they are read."""

    repository: str
    commit: str
    kind: str  # a key of ENDINGS
    splits: dict[str, list[str]]
    layout: Layout = Layout()
    declared: dict[str, Any] | None = None  # types of columns as README.md declares them
    why_not: str = field(default="", compare=False)  # why ftcli does not read the files itself; empty if it does

    @property
    def is_table(self) -> bool:
        """Whether the files are tables, whose fields have no type."""
        return self.kind == "csv"

    @property
    def features(self) -> Features:
        """The declared types of columns, as objects of `datasets`."""
        from datasets import Features

        return Features.from_dict(self.declared or {})

    def of(self, split: str) -> list[str]:
        """Return the files of a split; raise `InputError` with the known splits if it does not exist."""
        if split not in self.splits:
            message = f"data set {self.repository} has no split {split!r}"
            raise InputError(message, hint=f"its splits: {', '.join(self.splits)}")
        return self.splits[split]

    def shown(self, file: str) -> str:
        """Return the name of a file for messages."""
        return f"{self.repository}/{file}"


def find_hub_files(source: Source) -> HubFiles | None:
    """Return the text files of a data set on the hub.

    Args:
        source: A name on the hub, with configuration and revision.

    Returns:
        The files; None if the data set has another format, or if neither the hub nor its cache on this machine has
        files of that commit.

    Raises:
        ValueError: The data set has no such configuration.
    """
    commit = commit_of(source.path, source.revision, "dataset")
    if commit is None:
        return None
    listing = _listing_file(source.path, source.name, commit)
    stored = read_object(listing)
    if stored is not None:
        if "other" in stored:
            return None
        return HubFiles(**{**stored, "layout": Layout(*stored["layout"])})
    with tempfile.TemporaryDirectory() as empty:  # an empty cache: an earlier copy has types that `datasets` inferred
        builder = _builder_of_hub(source, commit, empty)
        if builder is not None:
            files = _files_of(builder, source.path, commit, f"hf://datasets/{source.path}@{commit}")
            _write(listing, {"other": builder.name} if files is None else asdict(files) | {"layout": [*files.layout]})
            return files
        snapshot = cached_repository(source.path, "dataset") / "snapshots" / commit
        builder = _builder_of_copy(snapshot, source.name, empty)
        files = None if builder is None else _files_of(builder, source.path, commit, str(snapshot))
    if files is None or not _is_complete(files):
        return None
    _log_copy(source.path, commit, sum(map(len, files.splits.values())))
    return files


@cache
def _log_copy(path: str, commit: str, count: int) -> None:
    """Log once the number of files in the local copy of a data set, if the hub did not answer."""
    log_line(f"data set {path}: the hub's cache on this machine has {count} data files of commit {commit}")


def download(files: HubFiles, names: list[str]) -> list[str]:
    """Download files that are not in the hub's cache, and return the local paths of all.

    Args:
        files: The files of the data set.
        names: Names of the files to download.
    """
    from huggingface_hub import hf_hub_download

    def path_of(name: str) -> str:
        return str(hf_hub_download(files.repository, name, repo_type="dataset", revision=files.commit))

    with ThreadPoolExecutor(DOWNLOADS) as pool:
        return list(pool.map(path_of, names))


def addresses(files: HubFiles, names: list[str]) -> list[str]:
    """Return the address of each file for streaming: its path in the hub's cache, or its address on the hub.

    Args:
        files: The files of the data set.
        names: Names of the files to read.
    """
    snapshot = cached_repository(files.repository, "dataset") / "snapshots" / files.commit
    remote = f"hf://datasets/{files.repository}@{files.commit}"
    return [str(snapshot / name) if (snapshot / name).is_file() else f"{remote}/{name}" for name in names]


def _builder_of_hub(source: Source, commit: str, empty: str) -> DatasetBuilder | None:
    """Return the builder of `datasets` for a data set; None if the hub does not answer or has no data files."""
    from datasets import load_dataset_builder
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        return load_dataset_builder(source.path, source.name, revision=commit, cache_dir=empty)
    except (DatasetNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, ConnectionError, FileNotFoundError):
        return None


def _builder_of_copy(snapshot: Path, name: str | None, empty: str) -> DatasetBuilder | None:
    """Return the builder of `datasets` for the files in the hub's cache; None if they are not there."""
    from datasets import load_dataset_builder

    if not snapshot.is_dir():
        return None
    try:
        return load_dataset_builder(str(snapshot), name, cache_dir=empty)
    except (FileNotFoundError, ValueError):  # no data files, or none of this configuration
        return None


def _files_of(builder: DatasetBuilder, repository: str, commit: str, root: str) -> HubFiles | None:
    """Return the files of a builder of `datasets`; None if they are not text files."""
    kind, config = str(builder.name), builder.config
    if kind not in ENDINGS or not config.data_files:
        return None
    splits = {
        str(split): [os.path.relpath(str(file), root) for file in files] for split, files in config.data_files.items()
    }
    features = getattr(config, "features", None) or builder.info.features
    separator = getattr(config, "sep", ",")
    layout = Layout(None if separator == "," else separator, getattr(config, "field", None))
    why_not = _why_not(config, kind, [file for files in splits.values() for file in files], features)
    declared = None if features is None else features.to_dict()
    return HubFiles(repository, commit, kind, splits, layout, declared, why_not)


def _why_not(config: Any, kind: str, files: list[str], features: Features | None) -> str:
    """Return why `datasets` must read the files; an empty string if ftcli can read them."""
    plain = type(config)()
    others = [
        name
        for name, value in vars(config).items()
        if name not in READ | HARMLESS and value != getattr(plain, name, None) and not _is_default(name, value)
    ]
    if others:
        return f"its README.md sets {', '.join(others)}"
    if len(getattr(config, "sep", ",")) != 1:
        return f"its separator is {config.sep!r}"
    if odd := [file for file in files if suffix_of(file) not in ENDINGS[kind]]:
        return f"{odd[0]} is among its files"
    if unknown := unknown_types(features or {}):
        return f"its README.md declares a type for {', '.join(unknown)} that text files do not have"
    return ""


def _is_default(name: str, value: Any) -> bool:
    """Return whether a setting of `datasets` has the same meaning as ftcli's default."""
    if name == "encoding":
        try:
            return value is None or codecs.lookup(value).name in ("utf-8", "utf-8-sig", "ascii")
        except LookupError:
            return False
    return name == "header" and value == 0


def _is_complete(files: HubFiles) -> bool:
    """Return whether no numbered file is missing. Some are missing if only a few were downloaded."""
    shards: dict[tuple[str, str], set[str]] = {}
    for file in (file for names in files.splits.values() for file in names):
        if (match := SHARD.fullmatch(file)) is not None:
            shards.setdefault((match[1], match[3]), set()).add(match[2])
    return all(len(numbers) == int(count) for (_, count), numbers in shards.items())


def _listing_file(repository: str, name: str | None, commit: str) -> Path:
    """Return the path of the stored listing of a data set at one commit."""
    key = hashlib.sha256(json.dumps([LISTING_FORMAT, repository, name, commit]).encode()).hexdigest()[:32]
    return cache_root() / "hub" / f"{key}.json"


def _write(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file atomically."""
    with writing_cache():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(file.name, path)
