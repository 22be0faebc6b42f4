"""What is said about packing to a run whose rows are short."""

from __future__ import annotations

from typing import Any

import numpy as np

from ftcli.config.plan import derive_plan
from ftcli.config.profile import ShardCounts
from ftcli.models.estimates.pass_budget import enough_tokens
from ftcli.training.short_rows import expect_passes

from ..models.estimates.test_pass_budget import H100, LORA_8B, lora

LENGTHS = np.sort(np.exp(np.random.default_rng(0).normal(np.log(330), 0.9, 64)).astype(int)).clip(16, 4072).tolist()


def expected(lengths: list[int], capacity: int | None = H100, **changes: Any) -> tuple[Any, int, list[str]]:
    data = {"train": "x.jsonl", "max_length": 4096} | changes.pop("data", {})
    recipe = lora(data=data, batch={"global_size": 8, "micro_size": "auto"} | changes)
    return expect_passes(recipe, LORA_8B, ShardCounts(), derive_plan(recipe, 1, 100), lengths, capacity)[:3]


def test_expect_passes_of_short_rows_counts_passes_and_names_what_packing_brings() -> None:
    plan, largest, notes = expected([20] * 32 + [60] * 32)
    assert (plan.passes.fewest, plan.passes.most) == (1, 1) and 0 < largest < 8 * 60
    assert plan.batch_layout == "8 rows in 1 forward pass"
    (note,) = notes
    assert note.startswith("rows fill 1 % of data.max_length 4096: data.packing true would train about ")
    assert note.endswith("so the 8 rows of a step become 1 for the same curve")


def test_expect_passes_of_longer_rows_makes_several_passes_of_a_step_with_long_ones() -> None:
    plan, largest, _ = expected([*LENGTHS[:-6], *[4072] * 6])
    assert plan.passes.fewest == 1 and plan.passes.most == 2 and 4072 <= largest <= 8192


def test_expect_passes_of_packed_or_long_rows_has_no_note() -> None:
    assert expected([3000] * 64)[2] == []
    assert expected([20] * 64, data={"packing": True})[2] == []
    assert expected([20] * 64, capacity=None)[2] == []
    assert expected([900] * 64)[2] == []  # two thirds of a second pass are full already


def test_expect_passes_with_a_number_of_rows_measures_its_micro_batches() -> None:
    plan, largest, notes = expected([20] * 32 + [60] * 32, micro_size=2)
    assert plan.passes is None and largest == 120 and len(notes) == 1
    by_tokens = expected([20] * 32 + [60] * 32)[2]
    gains = [float(note.split(" times as many")[0].rpartition(" ")[2]) for note in (*notes, *by_tokens)]
    assert gains[0] > 3 * gains[1]


def test_packing_note_compares_with_packed_passes_of_the_same_number_of_rows() -> None:
    # Passes of one row of 16 tokens become passes of one row of 256, which have too few tokens for this GPU too.
    size = {"data": {"max_length": 256}, "global_size": 64, "micro_size": 1}
    (note,) = expected([16] * 64, **size)[2]
    assert "would train about 16 times as many" in note and note.endswith("become 4 for the same curve")
    assert enough_tokens(LORA_8B.shape) > 2 * 256
    # With micro-batches of 16 rows, which have 256 tokens too, packing brings 4 times as many: there are only 4 rows.
    (note,) = expected([16] * 64, **size | {"micro_size": 16})[2]
    assert "would train about 4.0 times as many" in note
