"""How the rows of a step are divided into forward passes by their tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from ftcli.config.plan import derive_plan
from ftcli.data.cache import PreparedRows
from ftcli.data.packing import Bins
from ftcli.data.sampler import TrainOrder
from ftcli.runtime.seeds import PADDING
from ftcli.training.batches.passes import PassRule, RowSizes
from ftcli.training.pass_sizes import count_passes_of_run, largest_micro_batch, order_of

from ...models.estimates.test_memory_estimate import recipe


def sizes_of(tokens: list[int]) -> RowSizes:
    lengths = np.array(tokens, dtype=np.int64)
    return RowSizes(lengths, lengths, np.ones_like(lengths))


def rule_for(tokens: list[int], **changes: Any) -> PassRule:
    values: dict[str, Any] = {"processes": 1, "budget": 100, "is_flat": True}
    return PassRule(sizes_of(tokens), **values | changes)


def test_divide_puts_short_rows_into_one_pass_and_a_long_row_alone() -> None:
    assert rule_for([10, 20, 30]).divide([0, 1, 2]) == [[0, 1, 2]]
    assert rule_for([10, 20, 30, 250]).divide([3, 0, 2, 1]) == [[3], [0, 2, 1]]


def test_divide_over_processes_gives_each_the_same_number_of_passes_and_about_the_same_tokens() -> None:
    passes = rule_for([80, 10, 20, 30, 25], processes=2).divide([0, 1, 2, 3, 4])
    assert passes == [[1, 2, 3, 4], [0]]  # 85 and 80 tokens, pass 0 of each process
    assert rule_for([90, 90, 90], processes=2).divide([0, 1, 2]) == [[0], [1], [2], [PADDING]]


def test_divide_with_attention_gives_a_long_row_more_room() -> None:
    tokens = [60, 20, 20, 20, 20, 20, 20]
    by_tokens = rule_for(tokens, processes=2).divide(range(7))
    with_attention = rule_for(tokens, processes=2, budget=200, attention=1 / 20).divide(range(7))
    assert sorted(map(len, by_tokens)) == [3, 4] and sorted(map(len, with_attention)) == [1, 6]


def test_divide_padded_rows_groups_similar_lengths_until_a_pass_is_small_enough() -> None:
    tokens = [10, 50, 11, 49]
    assert rule_for(tokens, is_flat=False).divide([0, 1, 2, 3]) == [[1], [3], [2], [0]]
    assert rule_for(tokens, is_flat=False, enough=60).divide([0, 1, 2, 3]) == [[1, 3], [0, 2]]
    assert rule_for(tokens, is_flat=False, budget=200, enough=200).divide([0, 1, 2, 3]) == [[0, 1, 2, 3]]
    assert rule_for(tokens, is_flat=False, budget=60, enough=200).divide([0, 1, 2, 3]) == [[1], [3], [0, 2]]


def test_divide_counts_the_documents_of_a_padded_row() -> None:
    pairs = RowSizes(np.array([30, 12]), np.array([20, 6]), np.array([2, 2]))
    assert pairs.of_batches(np.array([[0, 1], [0, PADDING]]), is_flat=False).tolist() == [80, 40]
    assert pairs.of_batches(np.array([[0, 1], [0, PADDING]]), is_flat=True).tolist() == [42, 30]
    assert PassRule(pairs, 1, budget=79, enough=79, is_flat=False).divide([1, 0]) == [[0], [1]]


@pytest.mark.parametrize("is_flat", [True, False])
@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_divide_of_any_rows_keeps_every_row_once_and_the_budget(processes: int, is_flat: bool) -> None:
    draw = np.random.default_rng(processes)
    for rows in (1, 2, 7, 16, 64, 600):
        tokens = np.clip(np.exp(draw.normal(np.log(330), 1, rows)).astype(int), 16, 4096).tolist()
        for budget in (512, 4096, 10**6):
            rule = rule_for(tokens, processes=processes, budget=budget, enough=256, is_flat=is_flat)
            passes = rule.divide([*range(rows), PADDING])
            assert sorted(row for one in passes for row in one if row != PADDING) == list(range(rows))
            assert len(passes) % processes == 0 and all(passes)
            for one in passes:
                (held,) = rule.sizes.of_batches(np.array([one]), is_flat=is_flat)
                assert len(one) == 1 or held <= budget
            assert passes == rule.divide([*range(rows), PADDING])


def test_train_order_with_passes_has_the_rows_of_each_step_in_any_number_of_passes() -> None:
    tokens = np.random.default_rng(0).integers(1, 90, 50).tolist()
    how: dict[str, Any] = {
        "global_size": 8,
        "micro_size": 4,
        "seed": 3,
        "first_step": 0,
        "steps": 20,
        "steps_per_epoch": 7,
    }
    plain, passes = TrainOrder(50, **how), TrainOrder(50, divide=rule_for(tokens, processes=2).divide, **how)
    assert plain.batch_size == 4 and passes.batch_size is None
    by_number, by_tokens = iter(plain), iter(passes)
    for step in range(20):
        expected = [key for _ in range(2) for key in next(by_number)]
        count = passes.passes_of(step, 2)
        actual = [key for _ in range(2 * count) for key in next(by_tokens)]
        assert sorted(key for key in actual if key[1] != PADDING) == sorted(k for k in expected if k[1] != PADDING)
    assert next(by_tokens, None) is None and len(plain) == 40
    assert len(passes) == 2 * sum(passes.passes_of(step, 2) for step in range(20))
    resumed = TrainOrder(50, divide=passes.divide, **how | {"first_step": 13})
    assert list(resumed) == list(passes)[len(passes) - len(resumed) :]


def prepared(tokens: list[int]) -> PreparedRows:
    rows = Dataset.from_dict({"input_ids": [[1] * count for count in tokens]})
    return PreparedRows(rows, None, {})


@pytest.mark.parametrize("is_flat", [True, False])
def test_largest_micro_batch_is_that_of_the_rows_that_come_together(is_flat: bool) -> None:
    tokens = np.random.default_rng(0).integers(1, 90, 50).tolist()
    values = recipe(train={"epochs": 3}, batch={"global_size": 8, "micro_size": 4})
    rows, plan = prepared(tokens), derive_plan(values, 1, 50)
    sizes = RowSizes.of(rows)
    assert sizes is not None and plan.steps == 18
    batches = [[tokens[index] for _, index in keys] for keys in order_of(values, plan, rows)]
    expected = max(sum(batch) if is_flat else len(batch) * max(batch) for batch in batches)
    assert largest_micro_batch(values, plan, rows, sizes, is_flat=is_flat, size=4) == expected < 4 * 2 * max(tokens)
    assert largest_micro_batch(values, plan, rows, None, is_flat=is_flat, size=4) is None


def test_count_passes_of_run_gives_the_fewest_the_most_and_the_largest_pass() -> None:
    values = recipe(train={"epochs": 1}, batch={"global_size": 4, "micro_size": "auto"})
    rows = prepared([10] * 11 + [95])
    rule = PassRule(sizes_of([10] * 11 + [95]), 1, budget=100, is_flat=True)
    counts = count_passes_of_run(values, derive_plan(values, 1, 12), rows, rule)
    assert (counts.fewest, counts.most, counts.tokens) == (1, 2, 95) and counts.mean == pytest.approx(4 / 3)
    assert str(counts) == "1 to 2 forward passes (1.3 on average)"
    packed = PreparedRows(rows.train, None, {}, bins=Bins(np.arange(12), np.array([0, 5, 12])))
    sizes = RowSizes.of(packed)
    assert sizes is not None and sizes.tokens.tolist() == [50, 155] and sizes.longest.tolist() == [10, 95]
