"""Measure prepared rows: lengths, trained tokens, duplicates, overlap and padding, in one vectorised pass.

Rows of tokens are read by the columns that language-model tasks share (`input_ids`, `trained`). Other rows are hashed
as a whole. Shapes: N rows, V tokens of a vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ftcli.data.chat.text_spans import special_ids
from ftcli.runtime.seeds import mix

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset


BATCH_ROWS = 1024
PROGRESS_AFTER = 1.0  # seconds
ORIGIN_COLUMNS = (  # columns that identify or weigh a row and are no content
    *("id", "row", "source", "items", "trained", "epoch"),
    *("weight", "turn_weights"),
)
# Odd factors, so that a sum is a hash of tokens with their positions.
TOKEN_FACTOR, POSITION_FACTOR = (
    np.uint64(0x9FB21C651E98DF25),
    np.uint64(0xD6E8FEB86659FD93),
)


@dataclass(frozen=True)
class Vocabulary:
    """Properties of a tokenizer's tokens."""

    characters: NDArray[np.int64]  # [V] characters of each token in the vocabulary, 0 for special tokens
    is_special: NDArray[np.bool_]  # [V]
    ends: NDArray[np.int64]  # ids that end an answer
    bos: int  # -1: none


@dataclass(frozen=True)
class Measures:
    """Measures of rows, one value per row `[N]`. Hashes have 64 bits, so collisions are negligible."""

    whole: NDArray[np.uint64]  # hash of the whole row
    prompt: NDArray[np.uint64]  # hash of the input before the answer
    has_prompt: NDArray[np.bool_]
    source: NDArray[np.int64]  # index of its source
    number: NDArray[np.int64]  # number of the row in that source, from 0
    length: NDArray[np.int64]  # tokens; 0 for rows without tokens
    longest: NDArray[np.int64]  # tokens of the longest of the row's documents
    sides: NDArray[np.int64]  # number of the row's documents, each a row of a padded batch
    trained: NDArray[np.int64]  # trained tokens, except a first token
    content: NDArray[np.int64]  # trained tokens that are not special
    characters: NDArray[np.int64]
    plain: NDArray[np.int64]  # tokens that are not special
    has_end: NDArray[np.bool_]  # whether an end token is trained
    has_other_end: NDArray[np.bool_]  # whether the last trained token is special and not an end token
    has_two_bos: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.whole)


def read_vocabulary(tokenizer: Any, ends: Sequence[int] = ()) -> Vocabulary:
    """Read the vocabulary of a tokenizer. `ends` are ids of further tokens that end an answer."""
    known: dict[str, int] = tokenizer.get_vocab()
    special = special_ids(tokenizer)
    size = max([*known.values(), *special], default=0) + 1
    characters, is_special = np.ones(size, np.int64), np.zeros(size, bool)
    for token, id_ in known.items():
        characters[id_] = len(token)
    is_special[list(special)] = True
    end_ids = {id_ for id_ in (tokenizer.eos_token_id, *ends) if id_ is not None}
    bos = getattr(tokenizer, "bos_token_id", None)
    return Vocabulary(
        np.where(is_special, 0, characters), is_special, np.array(sorted(end_ids), np.int64), -1 if bos is None else bos
    )


def measure(rows: Dataset, vocabulary: Vocabulary | None, *, answers: Sequence[str] = (), title: str = "") -> Measures:
    """Measure prepared rows, with a progress bar on a terminal after one second.

    Args:
        rows: The prepared rows.
        vocabulary: The tokenizer's vocabulary; None for rows without tokens.
        answers: Columns that are no input of the model.
        title: Label of the progress bar.
    """
    parts = [_measure_table(table, vocabulary, answers) for table in _tables(rows, title)]
    return Measures(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Measures)})


def _tables(rows: Dataset, title: str) -> Iterator[pa.Table]:
    from tqdm import tqdm

    with tqdm(total=len(rows), desc=title, unit=" rows", disable=None, delay=PROGRESS_AFTER, leave=False) as bar:
        for table in rows.with_format("arrow").iter(batch_size=BATCH_ROWS):
            yield table
            bar.update(len(table))


def _measure_table(table: pa.Table, vocabulary: Vocabulary | None, answers: Sequence[str]) -> Measures:
    count, names = len(table), table.column_names
    zeros, none = np.zeros(count, np.int64), np.zeros(count, bool)
    values: dict[str, Any] = {f.name: zeros for f in fields(Measures)}
    values |= dict.fromkeys(("has_prompt", "has_end", "has_other_end", "has_two_bos"), none)
    for measure_, column in (("source", "source"), ("number", "row" if "row" in names else "id")):
        if column in names:
            values[measure_] = table[column].to_numpy().astype(np.int64)
    if "input_ids" in names:
        values |= _measure_tokens(table, vocabulary)
    values["longest"] = table["longest"].to_numpy().astype(np.int64) if "longest" in names else values["length"]
    values["sides"] = table["sides"].to_numpy().astype(np.int64) if "sides" in names else np.ones(count, np.int64)
    shown = [name for name in names if name not in (*ORIGIN_COLUMNS, *answers, "input_ids")]
    if "input_ids" not in names:
        values["whole"] = np.zeros(count, np.uint64)
    if shown:
        values["whole"] = mix(values["whole"] ^ _hash_values(table.select(shown)))
    if hidden := [name for name in answers if name in names]:
        values |= {"prompt": values["whole"], "has_prompt": ~none}
        values["whole"] = mix(values["whole"] ^ _hash_values(table.select(hidden)))
    if "trained" not in names and "items" in names:
        values["trained"] = table["items"].to_numpy().astype(np.int64)
    return Measures(**values)


def _measure_tokens(table: pa.Table, vocabulary: Vocabulary | None) -> dict[str, NDArray[Any]]:
    """Measure rows of tokens by differences of cumulative sums over all tokens."""
    ids, length = _flat(table, "input_ids")
    ends = np.cumsum(length)
    starts = ends - length
    positions = np.arange(len(ids)) - np.repeat(starts, length)
    with np.errstate(over="ignore"):
        hashes = mix(ids.astype(np.uint64) * TOKEN_FACTOR + positions.astype(np.uint64) * POSITION_FACTOR)
        cumulative = np.concatenate([np.zeros(1, np.uint64), np.cumsum(hashes, dtype=np.uint64)])
        values: dict[str, Any] = {"length": length, "whole": cumulative[ends] - cumulative[starts]}
    trained = np.zeros(len(ids), bool)
    if "trained" in table.column_names:
        trained, _ = _flat(table, "trained")
        marked = np.flatnonzero(trained)
        first = np.searchsorted(marked, starts)
        has_any = np.searchsorted(marked, ends) > first
        answer = np.where(has_any, np.append(marked, 0)[first], starts)  # start of the first answer of each row
        with np.errstate(over="ignore"):
            values |= {"prompt": cumulative[answer] - cumulative[starts], "has_prompt": answer - starts > 1}
        values["trained"] = _sums(trained & (positions > 0), starts, ends)
    if vocabulary is None:
        return values
    special = np.take(vocabulary.is_special, ids, mode="clip")
    is_last = np.zeros(len(ids), bool)
    if trained.any():
        last = np.maximum(np.searchsorted(np.flatnonzero(trained), ends) - 1, 0)
        is_last[np.flatnonzero(trained)[last]] = True
    is_bos = ids == vocabulary.bos
    doubled = np.append(is_bos[1:] & is_bos[:-1] & (positions[:-1] == 0) & (positions[1:] == 1), False)
    return values | {
        "content": _sums(trained & ~special, starts, ends),
        "characters": _sums(np.take(vocabulary.characters, ids, mode="clip"), starts, ends),
        "plain": _sums(~special, starts, ends),
        "has_end": _sums(trained & np.isin(ids, vocabulary.ends), starts, ends) > 0,
        "has_other_end": _sums(is_last & trained & special, starts, ends) > 0,
        "has_two_bos": _sums(doubled, starts, ends) > 0,
    }


def _flat(table: pa.Table, name: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the concatenated values of a column of lists, and the length of each list."""
    import pyarrow.compute as pc

    column = table[name].combine_chunks()
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64)
    return pc.list_flatten(column).to_numpy(zero_copy_only=False), lengths


def _sums(values: NDArray[Any], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sum of each row's values."""
    cumulative = np.concatenate([np.zeros(1, np.int64), np.cumsum(values, dtype=np.int64)])
    return cumulative[ends] - cumulative[starts]


def _hash_values(table: pa.Table) -> NDArray[np.uint64]:
    """Return a hash of each row of a table."""
    digests = [hashlib.blake2b(repr(row).encode(), digest_size=8).digest() for row in table.to_pylist()]
    return np.frombuffer(b"".join(digests), np.uint64)


def count_duplicates(measures: Measures) -> tuple[int, NDArray[np.int64]]:
    """Count rows that are equal to an earlier row. A row that is repeated by its source's weight is not counted.

    Returns:
        The number of such rows, and the indices of all copies of the most frequent one.
    """
    origin = mix(measures.source.astype(np.uint64) ^ mix(measures.number.astype(np.uint64)))
    _, first = np.unique(mix(measures.whole ^ origin), return_index=True)
    _, where, counts = np.unique(measures.whole[first], return_inverse=True, return_counts=True)
    repeated = len(first) - len(counts)
    copies = first[where == np.argmax(counts)] if repeated else first[:0]
    return repeated, np.sort(copies)


def count_contradictions(measures: Measures) -> int:
    """Count rows that have the same input as an earlier row, and another answer."""
    return len(np.unique(measures.whole)) - len(np.unique(measures.prompt))


def count_overlap(train: Measures, evaluation: Measures) -> tuple[int, int]:
    """Count evaluation rows that are training rows, and those with the prompt of a training row and another answer."""
    exact = np.isin(evaluation.whole, train.whole)
    prompt = evaluation.has_prompt & np.isin(evaluation.prompt, train.prompt[train.has_prompt])
    return int(exact.sum()), int((prompt & ~exact).sum())


def percentiles(lengths: NDArray[np.int64]) -> dict[str, int]:
    """Return minimum, maximum and the 5th, 50th, 95th and 99th percentile of row lengths."""
    at = {"min": 0, "p5": 5, "median": 50, "p95": 95, "p99": 99, "max": 100}
    lengths_at = np.percentile(lengths, list(at.values()), method="inverted_cdf")
    return {name: int(value) for name, value in zip(at, lengths_at, strict=True)}


def histogram(lengths: NDArray[np.int64], bars: int = 12) -> list[tuple[int, int, int]]:
    """Return (shortest, longest, rows) for each bar of a histogram of lengths in tokens. Both limits are inclusive.

    Bars have a width of 1, 2 or 5 times 10^k. If few rows are far longer than most, each bar is twice as wide as the
    previous one.
    """
    low, high = int(lengths.min()), int(lengths.max())
    if high > 10 * np.median(lengths):
        edges = [0] + [2**k + 1 for k in range((high - 1).bit_length() + 1) if 2 ** (k + 1) >= low]
    else:
        widths = (unit * 10**k for k in range(18) for unit in (1, 2, 5))
        width = next(width for width in widths if high // width - low // width < bars)
        edges = list(range(low // width * width, high + width + 1, width))
    counts, _ = np.histogram(lengths, bins=edges)
    return [(edges[i], edges[i + 1] - 1, int(rows)) for i, rows in enumerate(counts) if i or rows]


def padding_share(
    lengths: NDArray[np.int64],
    micro_size: int,
    longest: NDArray[np.int64] | None = None,
    sides: NDArray[np.int64] | None = None,
) -> float:
    """Return the fraction of padding tokens if documents are padded to the longest of their micro-batch.

    Args:
        lengths: Tokens of each row `[N]`, in the order of training.
        micro_size: Rows of a micro-batch.
        longest: Tokens of the longest document of each row `[N]`. None: each row is one document.
        sides: Number of documents of each row `[N]`. None: 1.
    """
    whole = len(lengths) // micro_size * micro_size
    if whole == 0:
        return 0.0
    columns = (lengths, lengths if longest is None else longest, np.ones_like(lengths) if sides is None else sides)
    tokens, widths, documents = (values[:whole].reshape(-1, micro_size) for values in columns)
    return float(1 - tokens.sum() / (widths.max(axis=1) * documents.sum(axis=1)).sum())


def examples(measures: Measures, where: Any, most: int = 3) -> str:
    """Return the numbers of the first rows of a selection, for a message: "rows 3, 17, 18, ...".

    Rows of several sources are named with their source, counted from 1.
    """
    indices = np.flatnonzero(where)
    if len(np.unique(measures.source)) > 1:
        names = [f"row {measures.number[i] + 1} of source {measures.source[i] + 1}" for i in indices[:most]]
        return f"{', '.join(names)}{', ...' if len(indices) > most else ''}"
    numbers = ", ".join(str(int(measures.number[index]) + 1) for index in indices[:most])
    return f"row {numbers}" if len(indices) == 1 else f"rows {numbers}{', ...' if len(indices) > most else ''}"
