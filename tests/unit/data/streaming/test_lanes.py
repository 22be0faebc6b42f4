"""A streamed corpus: the rows of a step do not depend on the processes, and resuming reads nothing twice."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftcli.data.streaming.cursors import Counts, Cursor, as_table, from_table
from ftcli.data.streaming.lanes import BadRow, Corpus, Lane, StreamOrder, assign_files, lanes_of, open_corpus
from ftcli.data.text_files import EmptyLine
from ftcli.runtime.errors import InputError, RowError, RunError

Reads = list[tuple[int, int]]


def corpus_of(sizes: list[int], reads: Reads | None = None) -> Corpus:
    """Files of so many rows; every row that is read is noted."""

    def read(file: int, skip: int) -> Iterator[dict[str, Any]]:
        for row in range(skip, sizes[file]):
            if reads is not None:
                reads.append((file, row))
            yield {"file": file, "row": row}

    return Corpus(tuple(sizes), read)


def encode(rows: list[dict[str, Any]]) -> list[Any]:
    """Make 0, 1 or 2 documents of each row, as truncation and splitting do."""
    return [[{**raw, "piece": n, "items": 1} for n in range((raw["file"] + raw["row"]) % 3)] for raw in rows]


def alone(documents: list[Any]) -> list[list[Any]]:
    return [[document] for document in documents]


def in_pairs(documents: list[Any]) -> list[list[Any]]:
    return [documents[i : i + 2] for i in range(0, len(documents), 2)]


def order_of(
    corpus: Corpus,
    *,
    rank: int = 0,
    processes: int = 1,
    size: int = 12,
    micro: int = 2,
    block: int = 5,
    seed: int = 0,
    pack: Callable[[list[Any]], list[list[Any]]] = alone,
) -> StreamOrder:
    files = assign_files(corpus.sizes, size)
    lanes = [Lane(n, len(files), files[n], corpus, encode, pack, seed, block) for n in range(len(files))]
    return StreamOrder(lanes, rank=rank, processes=processes, global_size=size, micro_size=micro)


def ids(order: StreamOrder, steps: int) -> list[list[int]]:
    """Return the ids of the documents that a process takes at each step."""
    share = order.global_size // order.processes // order.micro_size
    batches = iter(order)
    return [
        [document["id"] for _ in range(share) for row in next(batches)[0] for document in row] for _ in range(steps)
    ]


def steps_of(corpus: Corpus, processes: int, micro: int, steps: int, **options: Any) -> list[set[int]]:
    orders = [order_of(corpus, rank=r, processes=processes, micro=micro, **options) for r in range(processes)]
    of_ranks = [ids(order, steps) for order in orders]
    return [set().union(*(of_rank[step] for of_rank in of_ranks)) for step in range(steps)]


@pytest.mark.parametrize("pack", [alone, in_pairs])
@pytest.mark.parametrize("sizes", [[100], [30, 1, 17, 44], [9] * 12, [5, 0, 7]])
def test_lane_rows_of_a_step_are_the_same_on_any_number_of_processes(sizes: list[int], pack: Any) -> None:
    expected = steps_of(corpus_of(sizes), 1, 2, 8, pack=pack)
    for processes, micro in ((1, 1), (1, 6), (2, 3), (3, 2), (4, 1), (6, 2), (12, 1)):
        assert steps_of(corpus_of(sizes), processes, micro, 8, pack=pack) == expected


def test_lane_yields_every_document_once_per_epoch() -> None:
    sizes = [30, 1, 17, 44]
    documents = {(f, r, n) for f, size in enumerate(sizes) for r in range(size) for n in range((f + r) % 3)}
    lane = order_of(corpus_of(sizes), size=1).lanes[0]
    first = [row[0] for row in _until_epoch(lane)]
    assert len(first) == len(documents)
    assert {(row["file"], row["row"], row["piece"]) for row in first} == documents
    assert len({row["id"] for row in first}) == len(first)


def _until_epoch(lane: Lane) -> Iterator[list[Any]]:
    for taken in lane.bins(Cursor(0, 0, 0, 0)):
        if taken.after.epoch:
            return
        yield taken.bin


def test_lane_rows_are_shuffled_by_seed_and_epoch() -> None:
    def first(seed: int, steps: int = 4) -> list[list[int]]:
        return ids(order_of(corpus_of([40]), seed=seed, block=20), steps)

    assert first(1) == first(1)
    assert first(1) != first(2)
    assert sorted(sum(first(1), [])) != sum(first(1), [])
    epochs = ids(order_of(corpus_of([12]), block=12, size=12), 2)
    assert sorted(epochs[0]) == sorted(epochs[1]) and epochs[0] != epochs[1]


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=6).filter(lambda sizes: min(sizes) > 2),
    stop=st.integers(0, 9),
    before=st.sampled_from([1, 2, 3, 4]),
    after=st.sampled_from([1, 2, 3, 4, 6]),
    block=st.integers(1, 30),
    packs=st.booleans(),
)
def test_resume_on_another_number_of_processes_continues_at_the_same_row(
    sizes: list[int], stop: int, before: int, after: int, block: int, packs: bool
) -> None:
    pack = in_pairs if packs else alone
    expected = steps_of(corpus_of(sizes), 1, 2, 12, block=block, pack=pack)
    lanes = len(assign_files(sizes, 12))
    table = []
    for rank in range(before):
        order = order_of(corpus_of(sizes), rank=rank, processes=before, micro=1, block=block, pack=pack)
        batches = iter(order)
        where = [(lane, Cursor(0, 0, 0, 0)) for lane in lanes_of(rank, before, lanes)]
        for _ in range(stop * 12 // before):
            where = next(batches).cursors
        table += as_table(where).tolist()
    cursors = from_table(np.array(table), lanes)
    orders = [
        order_of(corpus_of(sizes), rank=r, processes=after, micro=1, block=block, pack=pack) for r in range(after)
    ]
    for order in orders:
        order.cursors = cursors
    of_ranks = [ids(order, 12 - stop) for order in orders]
    assert [set().union(*(rank[step] for rank in of_ranks)) for step in range(12 - stop)] == expected[stop:]


def test_resume_reads_no_row_before_its_block() -> None:
    reads: Reads = []
    order = order_of(corpus_of([1000, 1000], reads), size=2, block=10)
    order.cursors = [Cursor(0, 0, 800, 3), Cursor(0, 0, 800, 0)]
    ids(order, 1)
    assert len(reads) == 20
    assert {row for _, row in reads} == set(range(800, 810))


def test_next_block_continues_in_the_open_file() -> None:
    skips: Reads = []

    def read(file: int, skip: int) -> Iterator[dict[str, Any]]:
        skips.append((file, skip))
        return ({"file": file, "row": row} for row in range(skip, 100))

    ids(order_of(Corpus((100,), read), size=1, micro=1, block=10), 90)
    assert skips == [(0, 0)]


@pytest.mark.parametrize(("processes", "files"), [(1, {0, 1, 2, 3}), (2, {0, 2}), (4, {0})])
def test_process_reads_only_the_files_of_its_lanes(processes: int, files: set[int]) -> None:
    reads: Reads = []
    ids(order_of(corpus_of([50] * 4, reads), processes=processes, micro=1), 6)
    assert {file for file, _ in reads} == files


def test_lanes_share_out_the_global_batch_and_the_files_evenly() -> None:
    cases = ((12, 5, 1), (12, 1, 1), (7, 6, 1), (512, 1000, 64), (6, 6, 6))
    assert [len(assign_files([10] * files, size)) for size, files, _ in cases] == [1, 1, 1, 64, 6]
    assert assign_files([10, 30, 20, 20, 0], 12) == [[0, 1, 4], [2, 3]]
    assert assign_files([1, 1000], 2) == [[0, 1]]  # a lane of the small file would repeat it a thousand times
    assert lanes_of(1, 3, 4) == [0, 1, 2, 3]  # no common divisor: each process reads everything
    assert lanes_of(1, 8, 4) == [1]


def test_lane_first_blocks_differ_in_size() -> None:
    reads: Reads = []
    next(iter(order_of(corpus_of([100] * 4, reads), size=4, micro=4, block=40)))
    assert [sum(file == n for file, _ in reads) for n in range(4)] == [10, 20, 30, 40]


def test_lane_with_a_corpus_without_a_row_to_train_on_raises_and_no_endless_search() -> None:
    with pytest.raises(RunError, match="no trainable row in 2 of its 2 files"):
        ids(order_of(corpus_of([1, 0]), size=1, micro=1), 1)


def with_bad_rows(numbers: set[tuple[int, int]]) -> Callable[[list[dict[str, Any]]], list[Any]]:
    """An `encode` that cannot use the rows (file, row)."""

    def encode(rows: list[dict[str, Any]]) -> list[Any]:
        return [
            RowError("has no text") if (raw["file"], raw["row"]) in numbers else [raw | {"items": 1}] for raw in rows
        ]

    return encode


def test_unusable_row_is_left_out_and_logged_once() -> None:
    lane = Lane(0, 1, [0], corpus_of([4]), with_bad_rows({(0, 2)}), alone, 0, 10, most_bad=1)
    bins = lane.bins(Cursor(0, 0, 0, 0))
    bin_rows = [next(bins) for _ in range(6)]  # two passes
    assert [{taken.bin[0]["row"] for taken in part} for part in (bin_rows[:3], bin_rows[3:])] == [{0, 1, 3}] * 2
    assert [taken.bad for taken in bin_rows] == [[BadRow(0, 2, "has no text")], *[[]] * 5]
    assert [taken.after.counts.bad for taken in bin_rows] == [1] * 6
    assert [taken.after.counts.rows for taken in bin_rows] == [4, 4, 4, 8, 8, 8]


def test_empty_line_is_skipped_and_counted_in_line_numbers() -> None:
    rows = [{"file": 0, "row": 0, "id": 0}, EmptyLine(2), {"file": 0, "row": 2, "id": 2}]
    lane = Lane(0, 1, [0], Corpus((1,), lambda file, skip: iter(rows[skip:])), with_bad_rows(set()), alone, 0, 10)
    bins = lane.bins(Cursor(0, 0, 0, 0))
    bin_rows = [next(bins) for _ in range(2)]
    assert {taken.bin[0]["row"] for taken in bin_rows} == {0, 2} and not any(taken.bad for taken in bin_rows)
    assert bin_rows[-1].after.counts == Counts(rows=3)


def test_lane_that_has_too_many_of_them_names_the_one_beyond_the_bound() -> None:
    bad = with_bad_rows({(0, 1), (0, 2), (0, 7)})
    for most, message in ((0, "row 2 of file 1 of data.train: has no text"), (1, "row 3 .*than data.max_bad_rows 1")):
        with pytest.raises(InputError, match=message):
            next(Lane(0, 1, [0], corpus_of([9]), bad, alone, 0, 5, most).bins(Cursor(0, 0, 0, 0)))
    bins = Lane(0, 1, [0], corpus_of([9]), bad, alone, 0, 5, most_bad=2).bins(Cursor(0, 0, 0, 0))
    for _ in range(3):
        next(bins)
    with pytest.raises(InputError, match="row 8 of file 1"):
        next(bins)


def test_lane_with_a_corpus_of_unusable_rows_is_not_read_to_its_end() -> None:
    reads: Reads = []
    everything = with_bad_rows({(0, row) for row in range(1000)})
    with pytest.raises(InputError, match="row 4 of file 1"):
        next(Lane(0, 1, [0], corpus_of([1000], reads), everything, alone, 0, 10, most_bad=3).bins(Cursor(0, 0, 0, 0)))
    assert len(reads) == 10


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 12])
def test_lane_counts_of_all_processes_add_up_after_any_stop(processes: int) -> None:
    corpus, bad = corpus_of([20] * 4), with_bad_rows({(0, 1), (1, 7), (1, 8), (3, 19)})
    lanes = [Lane(n, 4, [n], corpus, bad, alone, 0, 6, most_bad=9) for n in range(4)]

    def of_steps(rank: int, start: list[Cursor], steps: int) -> tuple[list[BadRow], dict[int, Cursor]]:
        order = StreamOrder(lanes, rank=rank, processes=processes, global_size=12, micro_size=1)
        order.cursors = start
        shares = list(itertools.islice(order, steps * 12 // processes))
        return [one for share in shares for one in share.bad], dict(
            shares[-1].cursors
        ) if order.reports_bad_rows else {}

    begin = [Cursor(0, 0, 0, 0)] * 4
    first = [of_steps(rank, begin, 2) for rank in range(processes)]
    there = {lane: cursor for _, cursors in first for lane, cursor in cursors.items()}
    second = [of_steps(rank, [there[lane] for lane in range(4)], 7) for rank in range(processes)]
    lane_names = sorted(one for cursors, _ in first + second for one in cursors)
    assert [(one.file, one.row) for one in lane_names] == [(0, 1), (1, 7), (1, 8), (3, 19)]
    total = Counts()
    for cursor in {lane: cursor for _, cursors in second for lane, cursor in cursors.items()}.values():
        total = total.plus(cursor.counts)
    assert total.bad == 4
    whole = [of_steps(rank, begin, 9) for rank in range(processes)]
    assert {k: v for _, cursors in whole for k, v in cursors.items()} == {
        k: v for _, cursors in second for k, v in cursors.items()
    }


def test_lane_counts_read_shortened_and_dropped_rows() -> None:
    becomes = [[{"items": 1, "cut": True}], [], [{"items": 0}], [{"items": 1}, {"items": 0}]]
    lane = Lane(0, 1, [0], corpus_of([4]), lambda rows: [becomes[raw["row"]] for raw in rows], alone, 0, 10)
    assert next(lane.bins(Cursor(0, 0, 0, 0))).after.counts == Counts(rows=4, cut=1, dropped=1, untrained=1, bad=0)


def test_progress_is_the_share_of_finished_files() -> None:
    lane = Lane(0, 1, [0, 1], corpus_of([30, 10]), with_bad_rows(set()), alone, 0, 7)
    cursors = [taken.after for taken in itertools.islice(lane.bins(Cursor(0, 0, 0, 0)), 41)]
    shares = [lane.progress(cursor) for cursor in cursors]
    assert shares == sorted(shares) and set(shares) == {0, 0.5, 1}


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    for number, size in enumerate([4, 6, 5]):
        rows = [json.dumps({"text": f"{number}-{row}"}) for row in range(size)]
        (tmp_path / f"part-{number}.jsonl").write_text("\n".join(rows) + "\n")
    return tmp_path


def names(corpus: Corpus) -> list[list[str]]:
    return [[row["text"] for row in corpus.read(file, 2)] for file in range(len(corpus.sizes))]


WANTED = [["0-2", "0-3"], ["1-2", "1-3", "1-4", "1-5"], ["2-2", "2-3", "2-4"]]


def test_files_on_this_disk_are_streamed_from_any_row_on(shards: Path) -> None:
    from datasets import load_dataset

    files = sorted(map(str, shards.glob("*.jsonl")))
    assert names(open_corpus(load_dataset("json", data_files=files, split="train", streaming=True))) == WANTED


def test_files_behind_an_address_are_streamed_from_any_row_on(shards: Path) -> None:
    import fsspec
    from datasets import load_dataset

    for path in shards.glob("*.jsonl"):
        with fsspec.open(f"memory://corpus/{path.name}", "w") as file:
            file.write(path.read_text())
    files = [f"memory://corpus/part-{n}.jsonl" for n in range(3)]
    assert names(open_corpus(load_dataset("json", data_files=files, split="train", streaming=True))) == WANTED
