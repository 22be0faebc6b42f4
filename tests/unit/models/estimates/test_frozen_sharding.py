"""The choice between sharded and whole frozen weights."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ftcli.config.profile import ShardCounts
from ftcli.config.recipe import Recipe
from ftcli.models.estimates.frozen_sharding import choose_frozen
from ftcli.models.estimates.memory_estimate import USABLE_FRACTION
from ftcli.models.estimates.memory_saving import MemorySaving, estimate_saving
from ftcli.models.estimates.shape import ModelSize, Shape

FSDP = ShardCounts(4, 4, 4)
SIZES = ModelSize(10**6, 8 * 10**9, Shape(2, 8, 32, 8, 8, 2, 1000, None))


def recipe(shard_frozen: bool | str = "auto", adapter: str = "lora") -> Recipe:
    return Recipe.model_validate(
        {
            "task": "sft",
            "model": {"name": "m", "shard_frozen": shard_frozen},
            "data": {"train": "t.jsonl", "max_length": 16},
            "adapter": {"type": adapter},
            "batch": {"global_size": 8, "micro_size": 2},
            "train": {"max_steps": 1},
            "optimizer": {"learning_rate": 1e-3},
            "precision": "bf16",
        }
    )


def chosen(
    shard_frozen: bool | str = "auto", *, shares: ShardCounts = FSDP, capacity: int | None = 80 * 10**9
) -> tuple[ShardCounts, str | None]:
    return choose_frozen(recipe(shard_frozen), SIZES, shares, rows=1, tokens=16, capacity=capacity)


def test_frozen_weights_are_whole_where_they_fit() -> None:
    shares, line = chosen()
    assert shares == ShardCounts()
    assert line == "frozen weights 8.00 GB, whole on each GPU, so trained as under ddp (auto: they fit)"
    shares, line = chosen(capacity=8 * 10**9)
    assert shares == FSDP
    assert line is not None and "sharded over 4 processes (auto: whole ones would need 8.0" in line
    assert chosen(capacity=None)[1] == "frozen weights 8.00 GB, sharded over 4 processes (auto: no device)"


def test_frozen_weights_are_whole_under_zero3_where_they_fit() -> None:
    shares, line = chosen(shares=ShardCounts(4, 4, 4, zero_stage=3))
    assert shares == ShardCounts()
    assert line is not None and "trained as under ddp (auto: they fit)" in line


def test_a_recipe_decides_for_itself() -> None:
    assert chosen(True)[0] == FSDP
    assert chosen(False, capacity=10**9)[0] == ShardCounts()


@pytest.mark.parametrize(
    ("shares", "adapter"),
    [
        (ShardCounts(1, 4, 4, zero_stage=2), "lora"),
        (ShardCounts(4, 0, 0, zero_stage=3), "lora"),
        (ShardCounts(0, 0, 0), "lora"),
        (FSDP, "none"),
    ],
    ids=["zero2", "zero3 with its optimizer on the host", "fsdp_offload", "without an adapter"],
)
def test_weights_stay_sharded_where_there_is_no_choice(shares: ShardCounts, adapter: str) -> None:
    assert choose_frozen(recipe("auto", adapter), SIZES, shares, rows=1, tokens=16, capacity=10**12) == (shares, None)


def test_without_shards_there_is_nothing_to_choose() -> None:
    assert chosen(False, shares=ShardCounts()) == (ShardCounts(), None)


def choose(sizes: ModelSize, rows: int, tokens: int, capacity: int = 80 * 10**9, **known: int | bool) -> str:
    _, line = choose_frozen(recipe(), sizes, FSDP, rows=rows, tokens=tokens, capacity=capacity, **known)
    assert line is not None
    return line.partition("auto: ")[2].rstrip(")")


def test_weights_stay_sharded_where_the_activations_are_not_known() -> None:
    assert choose(replace(SIZES, frozen_bytes=60 * 10**9, shape=None), 8, 4096) == "activations not known"


def test_weights_stay_sharded_where_a_step_may_not_train_all_modules() -> None:
    """DistributedDataParallel stops at a parameter without a gradient, and FSDP does not."""
    assert choose(SIZES, 1, 16, has_rare_parts=True) == "not every step trains all modules"


def test_rows_of_images_have_their_patches_and_known_micro_batches_their_tokens() -> None:
    assert SIZES.shape is not None
    assert choose(SIZES, 64, 10**7).startswith("whole ones would need")
    assert choose(replace(SIZES, shape=replace(SIZES.shape, patches=197)), 64, 10**7) == "they fit"
    assert choose(SIZES, 64, 10**7, largest=1000) == "they fit"


def needed(saving: str, shares: ShardCounts, sizes: ModelSize, tokens: int) -> int:
    return estimate_saving(
        recipe(), sizes, shares, MemorySaving(saving), tokens=tokens, fused=False, compiled=False
    ).total


def test_weights_are_whole_on_small_devices_where_shards_would_have_to_recompute_too() -> None:
    sizes, tokens = replace(SIZES, trained=1000, frozen_bytes=10**6), 4096  # activations are larger than weights
    none_in_shards = needed("none", FSDP, sizes, tokens)
    assert needed("selective", ShardCounts(), sizes, tokens) < 0.99 * none_in_shards, "else this test shows nothing"
    at = {"rows": 1, "tokens": tokens, "can_recompute": True}
    too_small = int(0.99 * none_in_shards / USABLE_FRACTION)
    shares, line = choose_frozen(recipe(), sizes, FSDP, capacity=too_small, **at)
    assert shares == ShardCounts()
    assert line is not None and "(auto: they fit with gradient_checkpointing selective)" in line
    large_enough = int(1.01 * none_in_shards / USABLE_FRACTION)
    shares, line = choose_frozen(recipe(), sizes, FSDP, capacity=large_enough, **at)
    assert shares == FSDP, "gathering takes less time than recomputing"
    assert line is not None and "auto: whole ones would need" in line


def test_weights_stay_sharded_where_nothing_fits() -> None:
    assert choose(SIZES, 1, 10**6, capacity=10**9).startswith("whole ones would need")


def test_weights_are_whole_where_only_host_memory_lets_either_fit() -> None:
    assert SIZES.shape is not None
    sizes, tokens = ModelSize(1000, 10**4, replace(SIZES.shape, layers=64)), 4096
    full = needed("full", FSDP, sizes, tokens)
    shares, line = choose_frozen(
        recipe(), sizes, FSDP, capacity=int(0.99 * full / USABLE_FRACTION), rows=1, tokens=tokens
    )
    assert shares == ShardCounts()
    assert line is not None and "they fit with gradient_checkpointing full, inputs of layers on the host" in line


def of_layers(layers: int, frozen: int) -> ModelSize:
    assert SIZES.shape is not None
    return ModelSize(1000, frozen, replace(SIZES.shape, layers=layers))


def test_weights_stay_sharded_where_whole_ones_would_need_host_memory_and_shards_do_not() -> None:
    sizes, tokens = of_layers(64, 10**7), 4096
    full = needed("full", FSDP, sizes, tokens)
    limits = {"capacity": int(1.01 * full / USABLE_FRACTION), "rows": 1, "tokens": tokens}
    assert choose_frozen(recipe(), sizes, FSDP, **limits)[0] == FSDP
    smaller = of_layers(64, 10**4)
    of_host = needed("full", FSDP, smaller, tokens)
    limits["capacity"] = int(0.99 * of_host / USABLE_FRACTION)
    assert choose_frozen(recipe(), smaller, FSDP, **limits)[0] == ShardCounts()
    assert choose_frozen(recipe(), smaller, FSDP, **limits, host=1000)[0] == FSDP, "the host has no room"


def test_a_model_that_cannot_recompute_is_whole_only_if_it_fits_as_it_is() -> None:
    sizes, tokens = replace(SIZES, trained=1000, frozen_bytes=10**6), 4096
    small = int(0.99 * needed("none", FSDP, sizes, tokens) / USABLE_FRACTION)
    for can_recompute, expected in ((True, ShardCounts()), (False, FSDP)):
        at = {"rows": 1, "tokens": tokens, "capacity": small, "can_recompute": can_recompute}
        assert choose_frozen(recipe(), sizes, FSDP, **at)[0] == expected


def test_shards_are_estimated_with_their_own_layers() -> None:
    """Hooks inside layers prevent the compilation of sharded layers, which then need more memory."""
    plain, sizes, tokens = recipe(), of_layers(8, 10**6), 4096
    compiling = plain.model_copy(update={"model": plain.model.model_copy(update={"torch_compile": True})})
    compiled, eager = dict.fromkeys(("fused", "compiled"), True), dict.fromkeys(("fused", "compiled"), False)
    in_shards = estimate_saving(compiling, sizes, FSDP, MemorySaving("none"), tokens=tokens, **compiled).total
    at = {"rows": 1, "tokens": tokens, "capacity": int(1.01 * in_shards / USABLE_FRACTION), **compiled}
    assert choose_frozen(compiling, sizes, FSDP, **at)[0] == FSDP
    assert choose_frozen(compiling, sizes, FSDP, **at, in_shards=eager)[0] == ShardCounts()


def test_with_an_automatic_micro_size_a_pass_has_enough_tokens_for_a_gpu() -> None:
    automatic = recipe().model_copy(update={"batch": recipe().batch.model_copy(update={"micro_size": "auto"})})
    sizes = of_layers(64, 10**5)
    alone = estimate_saving(
        automatic, sizes, ShardCounts(), MemorySaving("none"), tokens=16, fused=False, compiled=False
    )
    at = {"rows": 1, "tokens": 16, "capacity": int(1.001 * alone.total / USABLE_FRACTION)}
    assert choose_frozen(recipe(), sizes, FSDP, **at)[1] == choose_frozen(automatic, sizes, FSDP, **at, largest=16)[1]
    line = choose_frozen(automatic, sizes, FSDP, **at)[1]
    assert line is not None and "(auto: they fit)" not in line, "8 rows of a step are 2 of a process"
