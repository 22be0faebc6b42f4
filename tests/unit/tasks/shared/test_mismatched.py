"""Partners of KTO's mismatched rows: fixed by the seed, never of the same prompt, and the same for any micro size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ftcli.data.sampler import TrainOrder
from ftcli.runtime.errors import InputError
from ftcli.tasks.shared.mismatched import mismatched_partners

PROMPTS = st.lists(st.integers(0, 6), min_size=2, max_size=30)


@given(PROMPTS, st.integers(0, 2**40), st.integers(1, 4))
def test_each_fold_is_a_permutation_with_partners_of_other_prompts(prompts: list[int], seed: int, folds: int) -> None:
    groups = np.array(prompts)
    largest = np.bincount(groups).max()
    assume(largest + folds - 1 <= len(prompts) - largest)
    partners = mismatched_partners(groups, seed, folds)
    assert partners.shape == (folds, len(prompts)) and partners.dtype == np.int64
    for fold in partners:
        assert sorted(fold.tolist()) == list(range(len(prompts)))
        assert (groups[fold] != groups).all()
    for row in range(len(prompts)):
        assert len(set(partners[:, row].tolist())) == folds
    assert np.array_equal(partners, mismatched_partners(groups, seed, folds))
    assert np.array_equal(partners[:1], mismatched_partners(groups, seed, 1))


PINNED = [[5, 3, 6, 2, 7, 1, 4, 0]]


def test_partners_depend_on_the_seed_and_are_pinned() -> None:
    prompts = np.arange(8)
    assert mismatched_partners(prompts, 0).tolist() == PINNED
    assert mismatched_partners(prompts, 1).tolist() != PINNED


@pytest.mark.parametrize("prompts", [[0, 0, 0, 1, 2], [0], [0, 0]])
def test_a_prompt_with_too_many_rows_is_refused(prompts: list[int]) -> None:
    with pytest.raises(InputError, match="one prompt has"):
        mismatched_partners(np.array(prompts), 0)


def test_the_mismatched_rows_of_a_step_do_not_depend_on_the_micro_size() -> None:
    partners = mismatched_partners(np.arange(24) // 2, seed=3)[0]
    seen: list[Any] = []
    for micro_size in (1, 2, 4):
        order = TrainOrder(24, global_size=8, micro_size=micro_size, seed=3, first_step=0, steps=3, steps_per_epoch=3)
        rows = [row for batch in order for _, row in batch]
        seen.append([[(row, int(partners[row])) for row in rows[step : step + 8]] for step in (0, 8, 16)])
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0][0]) == 8
