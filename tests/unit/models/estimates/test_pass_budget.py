"""How many tokens a forward pass may have, and what is then recomputed."""

from __future__ import annotations

from typing import Any

import pytest

from ftcli.config.profile import ShardCounts
from ftcli.models.estimates.memory_estimate import MODES, USABLE_FRACTION
from ftcli.models.estimates.memory_saving import estimate_saving
from ftcli.models.estimates.pass_budget import CAUTIOUS_FRACTION, CPU_TOKENS, FULL_TOKENS, choose_budget, pass_costs
from ftcli.models.estimates.shape import ModelSize, Shape

from .test_memory_estimate import recipe

H100 = 85_030_000_000  # bytes
SHAPE_8B = Shape(32, 4096, 14336, 4096, 1024, 32, 128256, None)
LORA_8B = ModelSize(42_000_000, 16_060_000_000, SHAPE_8B)


def lora(**changes: Any) -> Any:
    values: dict[str, Any] = {"precision": "bf16", "adapter": {"type": "lora", "r": 16}}
    return recipe(**values | changes)


def test_choose_budget_for_short_rows_recomputes_nothing_although_padded_rows_of_the_longest_would_not_fit() -> None:
    budget = choose_budget(lora(), LORA_8B, ShardCounts(), longest=4072, of_step=9000, capacity=H100)
    assert budget.saving.mode == "none" and budget.reason == "auto: it fits" and FULL_TOKENS <= budget.tokens <= 9000
    long = choose_budget(lora(), LORA_8B, ShardCounts(), longest=16_000, of_step=16_000, capacity=H100)
    assert long.saving.mode == "selective" and "none needs" in long.reason and "for 16000 tokens" in long.reason
    too_long = choose_budget(lora(), LORA_8B, ShardCounts(), longest=10**6, of_step=10**6, capacity=H100)
    assert (too_long.saving.mode, too_long.tokens) == ("full", 10**6) and "may not fit either" in too_long.reason


@pytest.mark.parametrize("longest", [10, 3000, 9000, 20_000])
@pytest.mark.parametrize("capacity", [H100, H100 // 2, 24 * 10**9])
def test_choose_budget_has_an_estimate_within_the_usable_memory(longest: int, capacity: int) -> None:
    budget = choose_budget(lora(), LORA_8B, ShardCounts(), longest=longest, of_step=64_000, capacity=capacity)
    how: dict[str, Any] = {"fused": False, "compiled": False}
    total = estimate_saving(lora(), LORA_8B, ShardCounts(), budget.saving, tokens=budget.tokens, **how).total
    fraction = USABLE_FRACTION if budget.tokens <= FULL_TOKENS else CAUTIOUS_FRACTION
    if budget.tokens > longest:
        assert total <= fraction * capacity
    assert budget.saving.mode in MODES and budget.tokens >= longest


def test_choose_budget_without_a_gpu_is_a_fixed_number_or_the_longest_row() -> None:
    for longest, expected in ((100, CPU_TOKENS), (CPU_TOKENS + 1, CPU_TOKENS + 1)):
        budget = choose_budget(lora(), LORA_8B, ShardCounts(), longest=longest, of_step=9000, capacity=None)
        assert (budget.tokens, budget.saving.mode) == (expected, "none")


def test_pass_costs_are_smaller_for_larger_layers() -> None:
    small = Shape(28, 1024, 3072, 2048, 1024, 16, 151936, None)
    assert pass_costs("cuda", small)["enough"] > 10 * pass_costs("cuda", SHAPE_8B)["enough"] > 0
    assert pass_costs("cpu", small)["overhead"] > pass_costs("cpu", SHAPE_8B)["overhead"] == 0
    assert pass_costs("cuda", None)["overhead"] == pass_costs("cpu", None)["enough"] == 0
