"""Pack documents into bins of equal capacity (best-fit decreasing), and store the bins beside the prepared rows.

A bin is one row of the sampler and the model. The packing depends only on the lengths of the documents, so it is the
same for every profile, number of processes and micro size. Uses numpy only.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ftcli.runtime.durable_files import sync, sync_tree
from ftcli.runtime.process import local_rank

if TYPE_CHECKING:
    from datasets import Dataset


TYPICAL_ROWS = 64  # whose lengths are recorded beside the counts of rows, for `ftcli check`
FOLDER = "bins-1"  # name of the folder beside the rows; increase the number when the algorithm changes


@dataclass(frozen=True)
class Bins:
    """Documents grouped by bin: bin b holds `documents[starts[b] : starts[b + 1]]`, in the order of the rows."""

    documents: NDArray[np.int64]
    starts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> list[int]:
        """Return the numbers of the documents of one bin."""
        numbers: list[int] = self.documents[self.starts[index] : self.starts[index + 1]].tolist()
        return numbers


def pack(lengths: NDArray[np.integer], capacity: int) -> Bins:
    """Pack documents into bins of at most `capacity` tokens. Every document is in one bin.

    Best-fit decreasing (Johnson 1974): documents are placed from the longest to the shortest, each into the fullest bin
    with enough room. Documents of one length are placed together, so the time grows with the number of different
    lengths.

    Args:
        lengths: Tokens of each document, `[documents]`.
        capacity: Tokens of a bin.

    Raises:
        ValueError: A length is below 1 or above `capacity`.
    """
    lengths = np.asarray(lengths)
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= capacity:
        raise ValueError(f"lengths from {lengths.min()} to {lengths.max()} do not fit bins of {capacity}")
    longest_first = np.argsort((capacity - lengths).astype(np.uint16 if capacity < 2**16 else np.uint32), kind="stable")
    counts = np.bincount(lengths)
    bin_of = np.empty(len(lengths), dtype=np.uint32)
    open_bins: dict[int, list[NDArray[np.uint32]]] = {}  # free tokens -> stacks of bins with this number
    free_lengths = 0  # the keys of `open_bins` as a set of bits, to find the smallest sufficient one
    bins = placed = 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            fitting = free_lengths >> length
            if fitting:
                free = length + (fitting & -fitting).bit_length() - 1
                candidates = open_bins[free].pop()
                if not open_bins[free]:
                    free_lengths ^= 1 << free
            else:
                free, needed = capacity, -(-left // (capacity // length))
                candidates, bins = np.arange(bins, bins + needed, dtype=np.uint32), bins + needed
            each = free // length
            full = min(len(candidates), left // each)
            filled, each = (candidates[:full], each) if full else (candidates[:1], left)  # the last few of a length
            amount = len(filled) * each
            bin_of[longest_first[placed : placed + amount]] = np.repeat(filled, each)
            placed, left = placed + amount, left - amount
            for rest, room in ((candidates[len(filled) :], free), (filled, free - each * length)):
                if len(rest) and room:
                    open_bins.setdefault(room, []).append(rest)
                    free_lengths |= 1 << room
    starts = np.concatenate([[0], np.cumsum(np.bincount(bin_of, minlength=bins))])
    return Bins(np.argsort(bin_of, kind="stable"), starts)


def lengths_of(rows: Dataset) -> NDArray[np.int64]:
    """Return the number of tokens of every prepared row, `[rows]`. Reads only the offsets of the column."""
    import pyarrow.compute as pc

    column = rows.select_columns("input_ids").with_format("arrow")[:]["input_ids"]
    return np.asarray(pc.list_value_length(column).to_numpy(), dtype=np.int64)


def typical_lengths(rows: Dataset, *, streamed: bool) -> list[int]:
    """Return the tokens of some rows that stand for all, ascending and evenly spaced among them; none without tokens.

    Args:
        rows: The prepared rows.
        streamed: Whether they are only the first rows of a stream.
    """
    if streamed or "input_ids" not in rows.column_names or len(rows) == 0:
        return []
    places = ((np.arange(TYPICAL_ROWS) + 0.5) * len(rows) / TYPICAL_ROWS).astype(int)
    lengths: list[int] = np.sort(lengths_of(rows))[places].tolist()
    return lengths


def longest_documents(rows: Dataset) -> NDArray[np.int64]:
    """Return the tokens of the longest document of every prepared row: of the row itself, unless it has several."""
    if "longest" not in rows.column_names:
        return lengths_of(rows)
    return np.asarray(rows.with_format("numpy")["longest"][:], dtype=np.int64)


def row_capacity(rows: Dataset, max_length: int) -> int:
    """Return the most tokens that a prepared row can have, in tokens.

    Args:
        rows: The prepared rows.
        max_length: The most tokens of a document.
    """
    if "sides" not in rows.column_names:
        return max_length
    return max_length * int(np.max(rows.with_format("numpy")["sides"][:]))


def pack_rows(rows: Dataset, folder: Path, capacity: int) -> Bins:
    """Return the bins of prepared rows. Local rank 0 packs and stores them if needed; other ranks wait for the folder.

    In a folder that cannot be written each rank packs for itself.

    Args:
        rows: The prepared rows.
        folder: The cache folder of the rows.
        capacity: Tokens of a bin.
    """
    from filelock import FileLock

    stored = folder / f"{FOLDER}-{capacity}"
    if not stored.exists() and not (os.access(folder, os.W_OK) and os.access(folder.parent, os.W_OK)):
        return pack(lengths_of(rows), capacity)  # rows that another user prepared
    if local_rank() == 0 and not stored.exists():
        with FileLock(f"{folder}.lock"):
            if not stored.exists():
                _write(pack(lengths_of(rows), capacity), stored)
    while not stored.exists():
        time.sleep(0.1)
    return Bins(*(np.load(stored / f"{name}.npy", mmap_mode="r") for name in ("documents", "starts")))


def _write(bins: Bins, folder: Path) -> None:
    """Write bins into a temporary folder and rename it."""
    temporary = folder.parent / f"{folder.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)  # we hold the lock, so its writer is gone
    temporary.mkdir()
    np.save(temporary / "documents.npy", bins.documents)
    np.save(temporary / "starts.npy", bins.starts)
    sync_tree(temporary)
    temporary.rename(folder)
    sync(folder.parent)
