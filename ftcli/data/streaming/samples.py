"""Compute a digest of the files of a stream from samples, to find the same data at another place. Light: no torch."""

from __future__ import annotations

import hashlib
import json
import os
from functools import cache
from typing import TYPE_CHECKING, Any

from ftcli.data.cache_key import file_state
from ftcli.data.streaming.source_files import local_files

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe


SAMPLE_BYTES = 1 << 14
SAMPLES_PER_FILE = 16  # per file
MOST_FILES = 4096  # of more files only the sizes and the first bytes are read


def stream_digests(recipe: Recipe) -> list[str | None] | None:
    """Return a digest of the files of each streamed source, in order.

    Args:
        recipe: A recipe.

    Returns:
        None for a source that is not in local files; None instead of the list if the rows are not a stream.
    """
    if not recipe.data.streaming:
        return None
    files = [tuple(local_files(source) or ()) for source in recipe.data.train_sources]
    return [_digest(each, tuple(file_state(file) for file in each)) for each in files]


def changed_streams(stored: list[str | None] | None, recipe: Recipe) -> list[str]:
    """Return the paths of the streamed sources of a recipe whose files are not those with these digests."""
    if not stored or len(stored) != len(recipe.data.train_sources):
        return []
    pairs = zip(recipe.data.train_sources, stored, stream_digests(recipe) or stored, strict=True)
    return [source.path for source, before, now in pairs if before and now and before != now]


def is_same_stream(stored: list[str | None] | None, recipe: Recipe) -> bool:
    """Return whether the streamed sources of a recipe certainly have the files with these digests."""
    return bool(stored) and None not in (stored or [None]) and stream_digests(recipe) == stored


@cache
def _digest(files: tuple[str, ...], states: tuple[Any, ...]) -> str | None:
    """Return a digest of sizes and samples of files, which does not depend on their place; None without files.

    Checkpoints need it again and again; `states` differ after a change of a file.
    """
    if not files:
        return None
    content = []
    for file in files:
        size = os.path.getsize(file)
        whole = size <= SAMPLE_BYTES * SAMPLES_PER_FILE
        count = 1 if whole or len(files) > MOST_FILES else SAMPLES_PER_FILE
        digest = hashlib.blake2b(digest_size=16)
        with open(file, "rb") as stream:
            for number in range(count):
                stream.seek(0 if count == 1 else number * (size - SAMPLE_BYTES) // (count - 1))
                digest.update(stream.read(size if whole and len(files) <= MOST_FILES else SAMPLE_BYTES))
        content.append([size, digest.hexdigest()])
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()
