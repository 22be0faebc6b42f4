"""The order of the rows: a pure function of seed and step, the same set of rows in every step on every world."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ftcli.data.sampler import EvalOrder, TrainOrder, epoch_order, group_by_length, hold_out_rows
from ftcli.runtime.seeds import PADDING, digest, seed_of
from ftcli.training.batches.dataloaders import Rows

from ...support.counting import count_lines

SIZES = st.sampled_from([(8, 1, 1), (8, 2, 1), (8, 4, 2), (8, 8, 1), (8, 2, 4), (12, 3, 2), (12, 1, 12)])


def step_rows(order: TrainOrder, step: int) -> list[int]:
    """Return the row indices of one step, over all processes, sorted."""
    per_step = order.global_size // order.batch_size
    batches = list(order)[step * per_step : (step + 1) * per_step]
    return sorted(index for batch in batches for _, index in batch)


@given(SIZES, st.integers(12, 60), st.integers(0, 5))
def test_sampler_step_holds_the_same_rows_for_any_micro_size(sizes: tuple[int, int, int], rows: int, seed: int) -> None:
    global_size, micro, _ = sizes
    common = {
        "global_size": global_size,
        "seed": seed,
        "first_step": 0,
        "steps": 7,
        "steps_per_epoch": rows // global_size,
    }
    reference = TrainOrder(rows, micro_size=global_size, **common)
    other = TrainOrder(rows, micro_size=micro, **common)
    assert [step_rows(reference, s) for s in range(7)] == [step_rows(other, s) for s in range(7)]


@given(st.integers(8, 60), st.integers(0, 3))
def test_sampler_with_an_epoch_gives_no_row_twice_and_drops_less_than_a_batch(rows: int, seed: int) -> None:
    per_epoch = rows // 8
    order = TrainOrder(
        rows, global_size=8, micro_size=4, seed=seed, first_step=0, steps=per_epoch, steps_per_epoch=per_epoch
    )
    seen = [index for batch in order for _, index in batch]
    assert len(set(seen)) == len(seen) == per_epoch * 8


def test_starting_a_million_samples_in_reads_no_row_before() -> None:
    from torch.utils.data import DataLoader

    class Counted:
        read: list[int] = []

        def __len__(self) -> int:
            return 3_000_000

        def __getitem__(self, index: int) -> dict[str, int]:
            self.read.append(index)
            return {"id": index}

    where = {"first_step": 125_000, "steps": 375_000, "steps_per_epoch": 375_000}
    order = TrainOrder(3_000_000, global_size=8, micro_size=4, seed=0, **where)
    rows = Rows(Counted(), None, training=True)  # type: ignore[arg-type]  # no row is padding, no task is asked
    batch = next(iter(DataLoader(rows, batch_sampler=order, collate_fn=list)))  # type: ignore[arg-type]
    assert (
        Counted.read
        == [document["id"] for row in batch for document in row]
        == list(epoch_order(3_000_000, 0, 0)[1_000_000:1_000_004])
    )
    orders = [
        TrainOrder(3_000_000, global_size=8, micro_size=4, seed=0, **where | {"first_step": step})
        for step in (0, 125_000)
    ]
    assert len({count_lines(lambda order=order: next(iter(order))) for order in orders}) == 1


@given(st.integers(1, 60), SIZES, st.integers(0, 3))
def test_sampler_with_drop_last_false_gives_every_row_once_and_pads_the_step(
    rows: int, sizes: tuple[int, int, int], seed: int
) -> None:
    global_size, micro, _ = sizes
    per_epoch = -(-rows // global_size)
    order = TrainOrder(
        rows,
        global_size=global_size,
        micro_size=micro,
        seed=seed,
        first_step=0,
        steps=2 * per_epoch,
        steps_per_epoch=per_epoch,
    )
    batches = list(order)
    assert len(batches) == len(order) == 2 * per_epoch * global_size // micro
    for epoch in range(2):
        real = [index for batch in batches for number, index in batch if number == epoch and index != PADDING]
        assert sorted(real) == list(range(rows))


def test_starting_at_a_step_continues_the_same_order() -> None:
    whole = list(TrainOrder(30, global_size=8, micro_size=2, seed=1, first_step=0, steps=9, steps_per_epoch=3))
    rest = list(TrainOrder(30, global_size=8, micro_size=2, seed=1, first_step=5, steps=9, steps_per_epoch=3))
    assert whole[5 * 4 :] == rest


def test_train_order_with_names_next_leads_through_the_rows_of_each_step() -> None:
    for micro in (1, 4):
        order = TrainOrder(
            9, global_size=4, micro_size=micro, seed=1, first_step=0, steps=3, steps_per_epoch=3, names_next=True
        )
        keys = [key for keys in order for key in keys]
        for step in range(3):
            rows = [row for row in order.rows_of(step).tolist() if row != PADDING]
            expected = [(0, row, other) for row, other in zip(rows, rows[1:] + rows[:1], strict=True)]
            padding = [(0, PADDING)] * (4 - len(rows))
            assert keys[4 * step : 4 * step + 4] == ([(0, rows[0]), *padding] if padding else expected)


def test_sampler_order_depends_on_epoch_and_seed() -> None:
    orders = [tuple(epoch_order(50, seed, epoch)) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == 9


def test_sampler_order_is_defined_by_this_project_and_never_changes() -> None:
    assert epoch_order(10, 0, 0).tolist() == [0, 7, 1, 9, 6, 8, 3, 2, 5, 4]
    assert seed_of(1, 2, 3) == 7510213797696614745


@given(st.integers(1, 17), st.integers(1, 4), st.integers(1, 3))
def test_eval_order_yields_every_row_once_in_equal_batches(rows: int, micro: int, world: int) -> None:
    batches = list(EvalOrder(rows, micro_size=micro, processes=world))
    assert len(batches) == len(EvalOrder(rows, micro_size=micro, processes=world))
    assert len(batches) % world == 0
    assert all(len(batch) == micro for batch in batches)
    real = [index for batch in batches for _, index in batch if index != PADDING]
    assert real == list(range(rows))


def test_sampler_digest_depends_on_the_set_of_rows_only() -> None:
    ids = np.array([5, 9, 2, 7], dtype=np.int64)
    assert digest(ids) == digest(ids[::-1].copy()) == (digest(ids[:2]) + digest(ids[2:])) % 2**64
    assert digest(ids) != digest(np.array([5, 9, 2, 8], dtype=np.int64))
    assert digest(np.array([5, 5], dtype=np.int64)) != digest(np.array([5], dtype=np.int64))
    assert digest(np.array([5, PADDING], dtype=np.int64)) == digest(np.array([5], dtype=np.int64))


def test_held_out_rows_are_disjoint_and_complete() -> None:
    train, held_out = hold_out_rows(20, 6, seed=3)
    assert sorted([*train, *held_out]) == list(range(20))
    assert len(held_out) == 6


def test_sampler_with_a_seed_depends_on_every_part_and_their_order() -> None:
    assert len({seed_of(0, 1, 2), seed_of(0, 2, 1), seed_of(1, 0, 2), seed_of(0, 1, 3), seed_of(0, 1)}) == 5


@given(st.lists(st.integers(1, 99), min_size=1, max_size=90), st.integers(1, 8), st.integers(0, 3))
def test_group_by_length_keeps_all_rows_and_the_tail(drawn: list[int], global_size: int, seed: int) -> None:
    lengths = np.array(drawn, dtype=np.int64)
    plain = epoch_order(len(lengths), seed, 1)
    grouped = group_by_length(plain, lengths, global_size, seed, 1)
    whole = len(lengths) // global_size * global_size
    assert sorted(grouped) == sorted(plain)
    assert grouped[whole:].tolist() == plain[whole:].tolist()
    assert grouped.tolist() == group_by_length(plain, lengths, global_size, seed, 1).tolist()


def test_length_grouping_gives_the_same_steps_for_any_micro_size_and_little_padding() -> None:
    lengths = np.random.default_rng(0).integers(1, 500, 4000)
    common = {"global_size": 16, "seed": 3, "first_step": 0, "steps": 300, "steps_per_epoch": 250}
    orders = [TrainOrder(4000, micro_size=micro, lengths=lengths, **common) for micro in (1, 4, 16)]
    steps = [[step_rows(order, number) for number in (0, 7, 249, 250, 299)] for order in orders]
    assert steps[0] == steps[1] == steps[2]

    def padding(order: TrainOrder) -> float:
        rows = [lengths[[index for _, index in batch]] for batch in order]
        return 1 - sum(int(row.sum()) for row in rows) / sum(len(row) * int(row.max()) for row in rows)

    assert padding(orders[2]) < 0.05 < 0.4 < padding(TrainOrder(4000, micro_size=16, **common))
    heads = [lengths[step_rows(orders[2], number)].mean() for number in range(250)]
    assert 100 < np.mean(heads[:50]) < 400  # long and short steps are mixed
