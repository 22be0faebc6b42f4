"""Numbers of prepared rows: lengths, trained tokens, duplicates, overlap, padding; one pass, vectorised.

Reads prepared rows by the columns that language-model tasks agree on (`input_ids`, `trained`) and hashes any other
row as a whole. Knows no task and no recipe, judges nothing and draws nothing. N rows, V tokens of a vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .sampling import mix
from .spans import special_ids

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

ROWS_AT_ONCE = 1024
PROGRESS_AFTER = 1.0  # seconds
NAMING = ("id", "row", "source", "items", "trained", "epoch")  # columns that say which row it is, not what it holds
TOKEN, PLACE = np.uint64(0x9FB21C651E98DF25), np.uint64(0xD6E8FEB86659FD93)  # odd; a token and its place in one sum


@dataclass(frozen=True)
class Vocabulary:
    """What the statistics need to know of a tokenizer."""

    characters: NDArray[np.int64]  # [V] letters of each token as the vocabulary writes it, 0 for special ones
    is_special: NDArray[np.bool_]  # [V]
    ends: NDArray[np.int64]  # ids that end an answer
    bos: int  # -1: none


@dataclass(frozen=True)
class Measures:
    """One value per row [N]. Hashes have 64 bits: among a million rows two share one by chance once in 4e7 sets."""

    whole: NDArray[np.uint64]  # hash of all that a row holds
    prompt: NDArray[np.uint64]  # hash of what the model is given before the answer
    has_prompt: NDArray[np.bool_]
    source: NDArray[np.int64]  # index of its source
    number: NDArray[np.int64]  # its place in that source, from 0
    length: NDArray[np.int64]  # tokens; 0 where rows have none
    trained: NDArray[np.int64]  # trained tokens that have one before them
    content: NDArray[np.int64]  # trained tokens that are not special
    characters: NDArray[np.int64]
    plain: NDArray[np.int64]  # tokens that are not special
    has_end: NDArray[np.bool_]  # an end token is trained
    has_other_end: NDArray[np.bool_]  # its last trained token is special, if not an end token
    has_two_bos: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.whole)


def read_vocabulary(tokenizer: Any, ends: Sequence[int] = ()) -> Vocabulary:
    """Return the vocabulary of a tokenizer; `ends` are further tokens that end an answer."""
    known: dict[str, int] = tokenizer.get_vocab()
    special = special_ids(tokenizer)
    size = max([*known.values(), *special], default=0) + 1
    characters, is_special = np.ones(size, np.int64), np.zeros(size, bool)
    for token, id_ in known.items():
        characters[id_] = len(token)
    is_special[list(special)] = True
    found = {id_ for id_ in (tokenizer.eos_token_id, *ends) if id_ is not None}
    bos = getattr(tokenizer, "bos_token_id", None)
    return Vocabulary(
        np.where(is_special, 0, characters), is_special, np.array(sorted(found), np.int64), -1 if bos is None else bos
    )


def measure(rows: Dataset, vocabulary: Vocabulary | None, *, answers: Sequence[str] = (), title: str = "") -> Measures:
    """Return the measures of prepared rows; `answers` are columns that the model is not given.

    Shows progress where a person watches, once it has taken a second.
    """
    parts = [_measure_table(table, vocabulary, answers) for table in _tables(rows, title)]
    return Measures(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Measures)})


def _tables(rows: Dataset, title: str) -> Iterator[pa.Table]:
    from tqdm import tqdm

    with tqdm(total=len(rows), desc=title, unit=" rows", disable=None, delay=PROGRESS_AFTER, leave=False) as bar:
        for table in rows.with_format("arrow").iter(batch_size=ROWS_AT_ONCE):
            yield table
            bar.update(len(table))


def _measure_table(table: pa.Table, vocabulary: Vocabulary | None, answers: Sequence[str]) -> Measures:
    count, names = len(table), table.column_names
    zeros, none = np.zeros(count, np.int64), np.zeros(count, bool)
    found: dict[str, Any] = {f.name: zeros for f in fields(Measures)}
    found |= dict.fromkeys(("has_prompt", "has_end", "has_other_end", "has_two_bos"), none)
    for measure_, column in (("source", "source"), ("number", "row" if "row" in names else "id")):
        if column in names:
            found[measure_] = table[column].to_numpy().astype(np.int64)
    if "input_ids" in names:
        found |= _measure_tokens(table, vocabulary)
    shown = [name for name in names if name not in (*NAMING, *answers, "input_ids")]
    if "input_ids" not in names:
        found["whole"] = np.zeros(count, np.uint64)
    if shown:
        found["whole"] = mix(found["whole"] ^ _hash_values(table.select(shown)))
    if hidden := [name for name in answers if name in names]:
        found |= {"prompt": found["whole"], "has_prompt": ~none}
        found["whole"] = mix(found["whole"] ^ _hash_values(table.select(hidden)))
    if "trained" not in names and "items" in names:
        found["trained"] = table["items"].to_numpy().astype(np.int64)
    return Measures(**found)


def _measure_tokens(table: pa.Table, vocabulary: Vocabulary | None) -> dict[str, NDArray[Any]]:
    """Return what can be said of rows of tokens: sums over the tokens of each row, taken as differences of sums."""
    ids, length = _flat(table, "input_ids")
    ends = np.cumsum(length)
    starts = ends - length
    places = np.arange(len(ids)) - np.repeat(starts, length)
    with np.errstate(over="ignore"):
        hashes = mix(ids.astype(np.uint64) * TOKEN + places.astype(np.uint64) * PLACE)
        upto = np.concatenate([np.zeros(1, np.uint64), np.cumsum(hashes, dtype=np.uint64)])
        found: dict[str, Any] = {"length": length, "whole": upto[ends] - upto[starts]}
    trained = np.zeros(len(ids), bool)
    if "trained" in table.column_names:
        trained, _ = _flat(table, "trained")
        marked = np.flatnonzero(trained)
        first = np.searchsorted(marked, starts)
        has_any = np.searchsorted(marked, ends) > first
        answer = np.where(has_any, np.append(marked, 0)[first], starts)  # where each row's first answer begins
        with np.errstate(over="ignore"):
            found |= {"prompt": upto[answer] - upto[starts], "has_prompt": answer - starts > 1}
        found["trained"] = _sums(trained & (places > 0), starts, ends)
    if vocabulary is None:
        return found
    special = np.take(vocabulary.is_special, ids, mode="clip")
    is_last = np.zeros(len(ids), bool)
    if trained.any():
        last = np.maximum(np.searchsorted(np.flatnonzero(trained), ends) - 1, 0)
        is_last[np.flatnonzero(trained)[last]] = True
    is_bos = ids == vocabulary.bos
    doubled = np.append(is_bos[1:] & is_bos[:-1] & (places[:-1] == 0) & (places[1:] == 1), False)
    return found | {
        "content": _sums(trained & ~special, starts, ends),
        "characters": _sums(np.take(vocabulary.characters, ids, mode="clip"), starts, ends),
        "plain": _sums(~special, starts, ends),
        "has_end": _sums(trained & np.isin(ids, vocabulary.ends), starts, ends) > 0,
        "has_other_end": _sums(is_last & trained & special, starts, ends) > 0,
        "has_two_bos": _sums(doubled, starts, ends) > 0,
    }


def _flat(table: pa.Table, name: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return (the values of a column of lists after each other, the length of each list)."""
    import pyarrow.compute as pc

    column = table[name].combine_chunks()
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64)
    return pc.list_flatten(column).to_numpy(zero_copy_only=False), lengths


def _sums(values: NDArray[Any], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sum of each row's values."""
    upto = np.concatenate([np.zeros(1, np.int64), np.cumsum(values, dtype=np.int64)])
    return upto[ends] - upto[starts]


def _hash_values(table: pa.Table) -> NDArray[np.uint64]:
    digests = [hashlib.blake2b(repr(row).encode(), digest_size=8).digest() for row in table.to_pylist()]
    return np.frombuffer(b"".join(digests), np.uint64)


def count_duplicates(measures: Measures) -> tuple[int, NDArray[np.int64]]:
    """Return (rows that hold the same as an earlier one, indices of all copies of the most frequent such row).

    A row that a source's weight repeats is the same row, not a duplicate.
    """
    place = mix(measures.source.astype(np.uint64) ^ mix(measures.number.astype(np.uint64)))
    _, first = np.unique(mix(measures.whole ^ place), return_index=True)
    _, where, counts = np.unique(measures.whole[first], return_inverse=True, return_counts=True)
    repeated = len(first) - len(counts)
    copies = first[where == np.argmax(counts)] if repeated else first[:0]
    return repeated, np.sort(copies)


def count_contradictions(measures: Measures) -> int:
    """Return rows that hold what an earlier one holds, with another answer."""
    return len(np.unique(measures.whole)) - len(np.unique(measures.prompt))


def count_overlap(train: Measures, evaluation: Measures) -> tuple[int, int]:
    """Return evaluation rows that (are trained on, have the prompt of a training row with another answer)."""
    exact = np.isin(evaluation.whole, train.whole)
    prompt = evaluation.has_prompt & np.isin(evaluation.prompt, train.prompt[train.has_prompt])
    return int(exact.sum()), int((prompt & ~exact).sum())


def percentiles(lengths: NDArray[np.int64]) -> dict[str, int]:
    """Return the lengths that 5, 50, 95 and 99 of 100 rows do not exceed, and both extremes."""
    at = {"min": 0, "p5": 5, "median": 50, "p95": 95, "p99": 99, "max": 100}
    found = np.percentile(lengths, list(at.values()), method="inverted_cdf")
    return {name: int(value) for name, value in zip(at, found, strict=True)}


def histogram(lengths: NDArray[np.int64], bars: int = 12) -> list[tuple[int, int, int]]:
    """Return (shortest, longest, rows) of each bar, in tokens, both inclusive.

    Bars are 1, 2 or 5 times 10^k wide; where few rows are far longer than most, each is twice as wide as the last.
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


def padding_share(lengths: NDArray[np.int64], micro_size: int) -> float:
    """Return the share of padding in micro-batches of rows in this order, each row as long as its batch's longest."""
    whole = len(lengths) // micro_size * micro_size
    if whole == 0:
        return 0.0
    batches = lengths[:whole].reshape(-1, micro_size)
    return float(1 - batches.sum() / (batches.max(axis=1).sum() * micro_size))
