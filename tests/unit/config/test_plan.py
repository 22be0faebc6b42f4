"""Micro-batches, accumulation, steps and warm-up, worked by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftcli.config.plan import (
    Plan,
    derive_batches,
    derive_plan,
    derive_shards,
    derive_steps,
    describe_best_candidates,
    describe_dropped_rows,
)
from ftcli.config.recipe import Recipe
from ftcli.config.recipe_training import Train
from ftcli.runtime.errors import InputError

from ...support.recipes import minimal_values


@pytest.mark.parametrize(
    ("copies", "shards", "processes", "expected"),
    [(1, 1, 1, 1), (1, 1, 8, 8), (2, 1, 4, 2), (2, 1, 16, 8), (2, 2, 4, 2), (1, 4, 4, 4)],
)
def test_derive_shards_divides_processes_by_copies(copies: int, shards: int, processes: int, expected: int) -> None:
    assert derive_shards(copies, shards, processes) == expected


@pytest.mark.parametrize(
    ("copies", "shards", "processes", "message", "hint"),
    [
        (2, 1, 3, "3 processes cannot be divided evenly over 2 copies", "use a multiple of 2 for --num-processes"),
        (2, 1, 2, "leaves one process for each copy", "use --num-processes 4 or more, or the profile ddp"),
        (2, 4, 4, "parallelism_config_dp_shard_size 4 is not 4 processes", "use --num-processes 8, or delete"),
        (1, 2, 4, "parallelism_config_dp_shard_size 2 is not 4 processes", "use --num-processes 2, or delete"),
    ],
)
def test_derive_shards_with_a_wrong_product_is_refused(
    copies: int, shards: int, processes: int, message: str, hint: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        derive_shards(copies, shards, processes)
    assert caught.value.problems[0].hint.startswith(hint)
    assert "parallelism_config_dp_replicate_size" in caught.value.problems[0].what


@given(st.integers(1, 200), st.integers(1, 64), st.integers(1, 16))
def test_derive_batches_with_a_plan_shares_out_the_global_batch_exactly(share: int, most: int, processes: int) -> None:
    micro, accumulation = derive_batches(share * processes, most, processes)
    assert micro <= most
    assert micro * accumulation * processes == share * processes


@pytest.mark.parametrize(
    ("global_size", "most", "processes", "expected"),
    [
        (8, 8, 1, (8, 1)),
        (8, 3, 1, (2, 4)),
        (8, 8, 2, (4, 1)),
        (24, 8, 3, (8, 1)),
        (7, 4, 1, (1, 7)),
        (64, 5, 8, (4, 2)),
    ],
)
def test_derive_batches_micro_size_is_the_largest_divisor_that_fits(
    global_size: int, most: int, processes: int, expected: tuple[int, int]
) -> None:
    assert derive_batches(global_size, most, processes) == expected


def test_derive_batches_with_a_batch_that_cannot_be_shared_names_the_nearest_sizes() -> None:
    with pytest.raises(InputError, match="batch.global_size 8 cannot be divided evenly over 3 processes") as caught:
        derive_batches(8, 4, 3)
    assert "use 6 or 9" in str(caught.value)


def test_derive_batches_with_fewer_rows_than_processes_names_valid_sizes() -> None:
    with pytest.raises(InputError) as caught:
        derive_batches(2, 4, 4)
    assert "use 4," in str(caught.value)


@pytest.mark.parametrize(("epochs", "expected"), [(1.0, (6, 6)), (3.0, (6, 18)), (0.5, (6, 3)), (0.1, (6, 1))])
def test_derive_steps_with_an_epoch_is_cut_to_whole_batches(epochs: float, expected: tuple[int, int]) -> None:
    assert derive_steps(Train(epochs=epochs), rows=50, global_size=8) == expected


@pytest.mark.parametrize(("epochs", "expected"), [(1.0, (7, 7)), (2.0, (7, 14)), (0.1, (7, 1))])
def test_derive_steps_with_drop_last_false_gives_one_more_step(epochs: float, expected: tuple[int, int]) -> None:
    assert derive_steps(Train(epochs=epochs), rows=50, global_size=8, drop_last=False) == expected


def test_derive_steps_with_few_rows_and_drop_last_false_gives_one_small_step() -> None:
    assert derive_steps(Train(epochs=2.0), rows=5, global_size=8, drop_last=False) == (1, 2)


def test_steps_are_unknown_until_the_rows_are() -> None:
    assert derive_steps(Train(epochs=1.0), rows=None, global_size=8) == (None, None)
    assert derive_steps(Train(max_steps=9), rows=None, global_size=8) == (None, 9)


def test_too_few_rows_for_one_batch_are_an_error() -> None:
    with pytest.raises(InputError, match="data.train has 5 rows, fewer than batch.global_size 8"):
        derive_steps(Train(max_steps=9), rows=5, global_size=8)


def test_plan_description_states_rows_per_process() -> None:
    sizes = {"processes": 2, "global_size": 16, "micro_size": 8, "accumulation": 1}
    shared = Plan(**sizes, rows=64, steps_per_epoch=4, steps=4, warmup_steps=0)
    assert shared.batch_layout == "16 = 8 rows x 1 micro-batch x 2 processes"


def test_left_out_rows_of_drop_last_are_counted() -> None:
    values = minimal_values(
        model={"name": "x"}, data={"train": "rows.jsonl"}, batch={"global_size": 8}, train={"epochs": 1}
    )
    recipe = Recipe.model_validate(values)
    (line,) = describe_dropped_rows(recipe, derive_plan(recipe, 1, 43))
    assert line.startswith("data.drop_last: each epoch leaves out 3 rows of 43")
    assert (
        describe_dropped_rows(recipe, derive_plan(recipe, 1, 40))
        == []
        == describe_dropped_rows(recipe, derive_plan(recipe, 1, None))
    )
    whole = Recipe.model_validate(values | {"data": {"train": "rows.jsonl", "drop_last": False}})
    assert describe_dropped_rows(whole, derive_plan(whole, 1, 43)) == []


@pytest.mark.parametrize(
    ("evaluated", "saved", "expected"),
    [
        (5, 5, ""),
        (10, 5, ""),
        (None, 5, "only the last step is both evaluated and saved, so it is the best: evaluate.every_steps is not set"),
        (5, None, "so it is the best: evaluate.every_steps is 5, and checkpoint.every_steps not set"),
        (7, 8, "only the last step is both evaluated and saved"),
        (2, 3, "7 of 20 evaluations are at steps that are saved, and only these can be the best"),
    ],
)
def test_evaluations_that_keep_best_cannot_choose_are_counted(
    evaluated: int | None, saved: int | None, expected: str
) -> None:
    values = minimal_values(model={"name": "x"}, data={"train": "rows.jsonl", "eval_rows": 2}, train={"max_steps": 40})
    values |= {"evaluate": {"every_steps": evaluated}}
    best = {"keep_best": {"metric": "loss", "direction": "min"}}
    without, recipe = (Recipe.model_validate(values | {"checkpoint": {"every_steps": saved} | b}) for b in ({}, best))
    lines = describe_best_candidates(recipe, derive_plan(recipe, 1, 64))
    assert [expected in line for line in lines] == [True] * bool(expected)
    assert describe_best_candidates(without, derive_plan(without, 1, 64)) == []
