"""The way to save memory that `auto` takes: the fastest that fits, and why."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ftcli.config.plan import derive_plan
from ftcli.config.profile import ShardCounts
from ftcli.models.estimates.memory_estimate import MODES, USABLE_FRACTION, estimate_memory
from ftcli.models.estimates.memory_saving import (
    MemorySaving,
    check_host_table,
    choose_saving,
    estimate_saving,
    host_memory_of,
    savings_to_try,
)
from ftcli.models.estimates.pass_budget import choose_budget
from ftcli.models.estimates.shape import ModelSize, Shape, size_of_shape
from ftcli.runtime.errors import InputError

from .test_memory_estimate import LLAMA, LONG_8B, recipe

FULL_WAYS = [MemorySaving("full", *host) for host in ((), (True,), (True, True), (False, True))]
TILED_WAYS = [replace(way, mode="tiled") for way in FULL_WAYS]
MOVED = [MemorySaving(mode, False, moves) for mode in ("none", "selective") for moves in (False, True)]


def qlora(**model: Any) -> Any:
    quantised = {"name": "m", "quantization": {"load_in_4bit": True}, **model}
    return recipe(model=quantised, adapter={"type": "lora", "r": 16}, precision="bf16")


def size_8b() -> ModelSize:
    shape = Shape.of(LONG_8B)
    assert shape is not None
    return size_of_shape(shape, qlora())


def choose(of: Any, capacity: int, **how: Any) -> tuple[MemorySaving, str]:
    known: dict[str, Any] = {"tokens": 4096, "largest": 16_384, "may_move_table": True} | how
    return choose_saving(of, size_8b(), ShardCounts(), derive_plan(of, 1), capacity=capacity, **known)


def test_auto_tries_all_ways_of_an_adapter_the_fastest_first() -> None:
    ways, reason = savings_to_try(qlora(), size_8b(), ShardCounts(), may_move_table=True)
    assert ways == [*MOVED, *FULL_WAYS, *TILED_WAYS] and reason == ""
    for open_ones, expected in (
        ({"activation_offloading": False}, [*MOVED, *(MemorySaving(m, False, t) for m in MODES[2:] for t in (0, 1))]),
        ({"embeddings_on_host": False}, [way for way in ways if not way.embeddings_on_host]),
        ({"embeddings_on_host": True}, [way for way in ways if way.embeddings_on_host] + []),
        ({"gradient_checkpointing": "full"}, FULL_WAYS),
        ({"activation_offloading": True}, [way for way in ways if way.offloads]),
    ):
        found = savings_to_try(qlora(**open_ones), size_8b(), ShardCounts(), may_move_table=True)[0]
        assert set(found) == set(expected) and len(found) == len(expected)
        for name, value in open_ones.items():
            assert {getattr(way.applied_to(qlora()).model, name) for way in found} == {value}
    assert not any(way.embeddings_on_host for way in savings_to_try(qlora(), size_8b(), ShardCounts())[0])
    for shares in (ShardCounts(0, 0, 0), ShardCounts(1, 1, 0)):  # the host has shards already
        assert not any(way.offloads for way in savings_to_try(qlora(), size_8b(), shares)[0])
    tied = replace(size_8b(), table_bytes=0)
    assert not any(
        way.embeddings_on_host for way in savings_to_try(qlora(), tied, ShardCounts(), may_move_table=True)[0]
    )


def test_auto_takes_the_first_way_that_fits_and_needs_less_with_each_way_on_the_host() -> None:
    how: dict[str, Any] = {"tokens": 16_384, "fused": False, "compiled": False}
    totals = {
        way: estimate_saving(qlora(), size_8b(), ShardCounts(), way, **how).total for way in [*FULL_WAYS, *TILED_WAYS]
    }
    assert totals[FULL_WAYS[0]] > totals[FULL_WAYS[1]] > totals[FULL_WAYS[2]] > totals[TILED_WAYS[2]]
    for way in FULL_WAYS[:3]:
        chosen, line = choose(qlora(), int(totals[way] / USABLE_FRACTION) + 1)
        assert chosen == way and f"; gradient_checkpointing {way} (auto: " in line
        assert ("GB of host memory" in line) == way.offloads
    assert str(FULL_WAYS[2]) == "full, inputs of layers and embeddings on the host" and str(FULL_WAYS[0]) == "full"
    chosen, line = choose(qlora(), 10**9)
    assert chosen == TILED_WAYS[2] and "the way with the least memory, which may not fit either" in line
    roomy, line = choose(qlora(), 10**12)
    assert roomy == MemorySaving("none") and "(auto: it fits)" in line and "host memory" not in line


def test_auto_keeps_nothing_on_a_host_without_room() -> None:
    tight = 8 * 10**9
    assert choose(qlora(), tight)[0].offloads and choose(qlora(), tight, host=10**11)[0].offloads
    assert choose(qlora(), tight, host=10**8)[0] == MemorySaving("tiled")
    assert choose(qlora(), tight, host=2 * 10**9)[0] == MemorySaving("tiled", False, True), "room for the table only"
    fixed = qlora(activation_offloading=True, embeddings_on_host=True)
    assert choose(fixed, tight, host=0)[0] == choose(fixed, tight)[0] == MemorySaving("tiled", True, True)
    for setting in ({"embeddings_on_host": True}, {"activation_offloading": True}):  # they do not count as auto's
        (chosen, line), known = choose(qlora(**setting), tight, host=0), {"longest": 16_384, "of_step": 16_384}
        assert chosen.mode != "none" and chosen.embeddings_on_host is bool(setting.get("embeddings_on_host"))
        budget = choose_budget(qlora(**setting), size_8b(), ShardCounts(), capacity=tight, host=0, **known)
        assert budget.saving.mode == "tiled" or budget.tokens >= 16_384, line
    budget: dict[str, Any] = {"longest": 16_384, "of_step": 16_384, "capacity": tight, "may_move_table": True}
    open_host = choose_budget(qlora(), size_8b(), ShardCounts(), **budget).saving
    full_host = choose_budget(qlora(), size_8b(), ShardCounts(), host=10**8, **budget).saving
    assert open_host.offloads and not full_host.offloads and not full_host.embeddings_on_host
    assert 0 < host_memory_of(4) <= host_memory_of(1) // 4


def test_check_refuses_embeddings_on_the_host_before_the_model_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    model = {"name": str(folder), "embeddings_on_host": True}
    for config, changes, problem in (
        (LONG_8B | {"tie_word_embeddings": True}, {}, "the head uses the same table"),
        (LONG_8B, {"modules_to_save": ["embed_out"]}, ""),
        (LONG_8B, {}, ""),
    ):
        (folder / "config.json").write_text(json.dumps(config))
        asked = recipe(task="pretrain", model=model, adapter={"type": "lora", **changes})
        for other in (asked, recipe(task="pretrain", model=model)):  # the other has no adapter: the key has no effect
            expects = problem and other is asked
            with pytest.raises(InputError, match=f"model.embeddings_on_host: {problem}") if expects else nullcontext():
                check_host_table(other)


def test_estimate_of_embeddings_on_the_host_leaves_out_one_table() -> None:
    how: dict[str, Any] = {"tokens": 16, "fused": False, "compiled": False}
    here, moved = (
        estimate_saving(qlora(), size_8b(), ShardCounts(), MemorySaving("none", False, moves), **how)
        for moves in (False, True)
    )
    table = 2 * 128_256 * 4096
    assert here.total - moved.total == table == moved.host_bytes and here.host_bytes == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"new_tokens": ["<a>"]},
        {"modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": r".*(q_proj|wte)"},
    ],
)
def test_size_of_trained_embeddings_has_no_table_to_move(changes: dict[str, Any]) -> None:
    shape = Shape.of(LONG_8B)
    assert shape is not None
    model = {"name": "m"} | {k: v for k, v in changes.items() if k == "new_tokens"}
    adapter = {"type": "lora", "r": 16} | {k: v for k, v in changes.items() if k != "new_tokens"}
    trained = recipe(model=model, adapter=adapter, precision="bf16")
    assert size_of_shape(shape, trained).table_bytes == 0
    assert size_of_shape(shape, recipe(adapter={"type": "lora"}, precision="bf16")).table_bytes == 2 * shape.table
    assert size_of_shape(replace(shape, ties_head=True), recipe(adapter={"type": "lora"})).table_bytes == 0


def test_auto_takes_the_first_mode_that_fits_and_gives_the_reason() -> None:
    expected = recipe()
    sizes = ModelSize(
        100, 0, Shape.of(LLAMA | {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12})
    )
    plan = derive_plan(expected, 1)
    totals = {
        mode: estimate_memory(expected, sizes, ShardCounts(), rows=4, tokens=16, mode=mode).total for mode in MODES
    }
    assert totals["none"] > totals["selective"] > totals["full"] == totals.pop("tiled"), "16 tokens are one tile"

    def chosen(of: Any, capacity: int | None, **how: Any) -> tuple[str, str]:
        saving, line = choose_saving(of, sizes, ShardCounts(), plan, tokens=16, capacity=capacity, **how)
        return str(saving), line

    for mode, total in totals.items():
        name, message = chosen(expected, int(total / 0.9) + 1)
        assert name == mode
        assert f"gradient_checkpointing {mode} (auto: " in message and "4 rows of 16 tokens" in message
    name, message = chosen(expected, 1000)
    assert name == "full, inputs of layers on the host" and "may not fit either" in message
    assert chosen(expected, None)[0] == chosen(expected, 1000, can_recompute=False)[0] == "none"
    explicit = recipe(model={"name": "m", "gradient_checkpointing": "selective"})
    assert chosen(explicit, 1000)[0] == "selective"
    hosted = recipe(model={"name": "m", "activation_offloading": True})
    assert chosen(hosted, 10**12)[0] == "full, inputs of layers on the host"
    auto = recipe(batch={"global_size": 8, "micro_size": "auto"})
    assert "1 row of 16 tokens" in chosen(auto, 10**12)[1]


def test_estimate_under_compiled_layers_nothing_is_recomputed_selectively() -> None:
    shape = ModelSize(10**9, 0, Shape(16, 2048, 8192, 2048, 512, 32, 128256, None))
    how: dict[str, Any] = {"rows": 8, "tokens": 4096, "fresh_gradients": True}
    # The last: layers are not compiled though the recipe says so, because ZeRO-3 gathers weights inside of them.
    for asks, compiled, expected in ((False, False, "selective"), (True, True, "full"), (True, False, "selective")):
        small_recipe = recipe(model={"name": "m", "torch_compile": asks}, batch={"global_size": 8, "micro_size": 8})
        plan = derive_plan(small_recipe, 1)
        sections = {
            mode: estimate_memory(
                small_recipe, shape, ShardCounts(), mode=mode, fused=compiled and mode == "none", **how
            ).total
            for mode in MODES
        }
        assert sections["full"] < sections["selective"] < sections["none"]
        room = int((sections["none"] + sections["selective"]) / 2 / USABLE_FRACTION)
        chosen, _ = choose_saving(small_recipe, shape, ShardCounts(), plan, tokens=4096, capacity=room, fused=compiled)
        assert chosen.mode == expected
    with pytest.raises(ValueError, match="cannot be combined with torch_compile"):
        recipe(model={"name": "m", "torch_compile": True, "gradient_checkpointing": "selective"})


def test_auto_takes_tiles_where_recomputed_layers_do_not_fit() -> None:
    shape = Shape.of(LONG_8B)
    assert shape is not None
    sizes, how = ModelSize(10**7, 5 * 10**9, shape), {"tokens": 65_536, "fused": True, "compiled": True}
    for offloads in (False, True):
        model = {"name": "m", "activation_offloading": offloads}
        adapted = recipe(model=model, adapter={"type": "lora", "r": 16}, precision="bf16")
        plan = derive_plan(adapted, 1)
        for way in (MemorySaving("full", offloads), MemorySaving("tiled", offloads)):
            capacity = int(estimate_saving(adapted, sizes, ShardCounts(), way, **how).total / 0.9) + 1
            chosen, message = choose_saving(
                adapted, sizes, ShardCounts(), plan, capacity=capacity, largest=65_536, **how
            )
            assert chosen == way
            assert (f"{MemorySaving('full', offloads)} needs" in message) == (way.mode == "tiled")
        others = {"shares": ShardCounts(zero_stage=3), "sizes": replace(sizes, shape=replace(shape, tiles_mlp=False))}
        for name, other in others.items():
            arguments = {"sizes": sizes, "shares": ShardCounts()} | {name: other}
            chosen, _ = choose_saving(adapted, plan=plan, capacity=10**9, largest=65_536, **arguments, **how)
            assert chosen.mode == "full"
