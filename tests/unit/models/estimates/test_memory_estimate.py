"""The memory estimate: values by hand, the chosen mode, and the difference from measured peaks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ftcli.config.plan import derive_plan
from ftcli.config.profile import PARTS, ShardCounts, gradient_part, load_profile, profile_from_environment
from ftcli.config.recipe import Recipe
from ftcli.models.estimates.memory_estimate import (
    MODES,
    MemoryEstimate,
    estimate_memory,
    has_fresh_gradients,
)
from ftcli.models.estimates.memory_saving import choose_saving
from ftcli.models.estimates.shape import ModelSize, Shape, measure_model
from ftcli.runtime.errors import InputError
from ftcli.testing import profile_environment, save_tiny_causal

from ....support.recipes import minimal_values

LLAMA = {
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def recipe(**changes: Any) -> Recipe:
    values: dict[str, Any] = minimal_values(
        model={"name": "m"}, data={"train": "x.jsonl", "max_length": 16}, batch={"global_size": 8, "micro_size": 4}
    )
    return Recipe.model_validate(values | changes)


def test_memory_estimate_with_a_shape_is_read_from_the_names_of_several_architectures() -> None:
    llama = Shape(layers=2, hidden=8, inner=20, attention=8, keys=4, heads=4, vocabulary=100, patches=None)
    assert Shape.of(LLAMA) == Shape.of({"text_config": LLAMA}) == llama
    wide = Shape.of(LLAMA | {"head_dim": 4})
    assert wide is not None and (wide.attention, wide.keys) == (16, 8)
    gpt2 = Shape.of({"n_layer": 2, "n_embd": 8, "n_head": 2, "n_inner": None, "vocab_size": 9})
    assert gpt2 is not None and (gpt2.inner, gpt2.keys) == (32, 8)
    experts = Shape.of(LLAMA | {"num_experts_per_tok": 3, "moe_intermediate_size": 5})
    assert experts is not None and experts.inner == 15
    vit = Shape.of({k: v for k, v in LLAMA.items() if "vocab" not in k} | {"image_size": 16, "patch_size": 8})
    assert vit is not None and (vit.patches, vit.vocabulary) == (5, 0)
    assert Shape.of({"image_size": 32, "hidden_sizes": [8]}) is None


def test_saved_bytes_of_a_layer_equal_a_hand_count() -> None:
    shape = Shape.of(LLAMA)
    assert shape is not None
    attention = 2 * 8 + 2 * 4  # q, its result; k, v
    assert shape.activation_bytes("fp32", "full") == 4 * 8 and shape.activation_bytes("bf16_pure", "full") == 2 * 8
    assert shape.activation_bytes("bf16", "selective") == 4 * 8 + 2 * attention + 4 * 4 + 2 * (2 * 8 + 2 * 20)
    assert shape.activation_bytes("bf16", "none") == 26 * 8 + 2 * attention + 4 * 4 + 2 * 4 * 20


def test_estimate_of_a_process_equals_a_hand_count() -> None:
    sizes = ModelSize(1000, 500, None)
    assert estimate_memory(recipe(), sizes, ShardCounts(), rows=1, tokens=1, mode="none").bytes_by_use == {
        "weights": 4500,
        "gradients": 4000,
        "optimizer": 8000,
        "copies of weights": 0,
        "rounded weights": 0,
    }
    cut = estimate_memory(
        recipe(precision="bf16"), sizes, ShardCounts(2, 4, 4, zero_stage=3), rows=1, tokens=1, mode="none"
    )
    expected = {
        "weights": 2250,
        "gradients": 1000,
        "optimizer": 2000,
        "copies of weights": 2000,
        "rounded weights": 1000,
    }
    assert cut.bytes_by_use == expected, "the optimizer steps the model's own weights"
    for shares in (ShardCounts(1, 4, 4, zero_stage=2), ShardCounts(0, 4, 4, zero_stage=3)):
        whole = estimate_memory(recipe(), sizes, shares, rows=1, tokens=1, mode="none").bytes_by_use["optimizer"]
        assert whole == 3000, "it steps copies of theirs"
    pure = estimate_memory(recipe(precision="bf16_pure"), sizes, ShardCounts(), rows=1, tokens=1, mode="none")
    assert pure.total == 500 + 12 * 1000, "12 bytes an element, as adamw_bf16.py says"
    assert estimate_memory(recipe(), sizes, ShardCounts(0, 0, 0), rows=1, tokens=1, mode="none").total == 0


def test_estimate_memory_counts_float32_logits_if_the_model_changes_logits() -> None:
    config = LLAMA | {"hidden_size": 8, "vocab_size": 1000}
    for more, size in ({}, 2), ({"final_logit_softcapping": None}, 2), ({"final_logit_softcapping": 30.0}, 10):
        sizes = ModelSize(0, 0, Shape.of(config | more))
        expected = recipe(task="pretrain", precision="bf16")
        parts = estimate_memory(expected, sizes, ShardCounts(), rows=3, tokens=5, mode="none").bytes_by_use
        assert parts["logits"] == 3 * 5 * 1000 * size + 1000 * 8 * 4


@pytest.mark.parametrize(
    ("precision", "measured", "without"), [("bf16", 8.05, 10.28), ("bf16_pure", 6.38, 7.95)], ids=["bf16", "bf16_pure"]
)
def test_estimate_memory_with_liger_kernels_is_near_the_peak_of_an_h100(
    precision: str, measured: float, without: float
) -> None:
    """The peaks are those of tests/gpu/test_memory_on_gpus.py with liger-kernel 0.8.5 and torch 2.11, in GB."""
    shape = Shape(12, 1024, 2816, 1024, 512, 16, 32000, None)
    trained = 2 * 32000 * 1024 + 12 * (1024 * (2 * 1024 + 2 * 512) + 3 * 1024 * 2816 + 2 * 1024) + 1024
    sizes, small_recipe = ModelSize(trained, 0, shape), recipe(precision=precision)
    how: dict[str, Any] = {"rows": 8, "tokens": 1024, "mode": "none"}
    estimate = [
        estimate_memory(small_recipe, sizes, ShardCounts(), fused=fused, **how).total / 1e9 for fused in (True, False)
    ]
    assert estimate == [pytest.approx(measured, rel=0.05), pytest.approx(without, rel=0.01)]


def test_estimate_memory_of_an_adapter_counts_no_gradient_of_the_frozen_head() -> None:
    shape = Shape(2, 8, 32, 8, 8, 2, 1000, None)
    how: dict[str, Any] = {"rows": 3, "tokens": 5, "mode": "none"}

    def logits(**sections: Any) -> int:
        small_recipe = recipe(adapter={"type": "lora"} | sections.pop("adapter", {}), **sections)
        return estimate_memory(small_recipe, ModelSize(100, 0, shape), ShardCounts(), **how).bytes_by_use["logits"]

    frozen = logits()
    trained = frozen + 1000 * 8 * 4
    assert logits(adapter={"modules_to_save": ["lm_head"]}) == trained
    assert logits(model={"name": "m", "new_tokens": ["<a>"]}) == trained


def test_gradient_checkpointing_maps_true_to_full_and_false_to_none() -> None:
    for given, meant in ((True, "full"), (False, "none"), ("auto", "auto")):
        assert recipe(model={"name": "m", "gradient_checkpointing": given}).model.gradient_checkpointing == meant
    with pytest.raises(ValueError, match="gradient_checkpointing"):
        recipe(model={"name": "m", "gradient_checkpointing": 1})


@pytest.mark.parametrize(
    ("profile", "shares"),
    [
        ("ddp", ShardCounts()),
        ("fsdp", ShardCounts(4, 4, 4)),
        ("hsdp", ShardCounts(2, 2, 2)),
        ("fsdp_offload", ShardCounts(0, 0, 0)),
        ("zero2", ShardCounts(1, 4, 4, zero_stage=2)),
        ("zero3", ShardCounts(4, 4, 4, zero_stage=3, gradient_parts=True)),
        ("zero3_offload", ShardCounts(0, 0, 0, zero_stage=3)),
    ],
)
def test_memory_estimate_with_a_file_and_the_environment_it_becomes_cut_alike(
    profile: str, shares: ShardCounts
) -> None:
    assert load_profile(profile).shard_counts(4) == shares
    environment = profile_environment(profile, 4) | {"WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0"}
    assert profile_from_environment(environment).shard_counts(4) == shares


def test_memory_estimate_with_a_stage_that_a_profile_leaves_open_is_accelerates_own(tmp_path: Path) -> None:
    file = tmp_path / "open.yaml"
    file.write_text("distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero3_init_flag: false\n")
    assert load_profile(file).shard_counts(4) == ShardCounts(1, 4, 4, zero_stage=2)


def test_gradients_of_a_deepspeed_file_with_its_own_sub_groups_are_not_counted_in_parts(tmp_path: Path) -> None:
    profile, file = tmp_path / "own.yaml", tmp_path / "ds.json"
    profile.write_text(f"distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: {file}\n")
    plan = derive_plan(recipe(batch={"global_size": 2, "micro_size": 1}), 2)
    for more, has_parts in (("", True), (', "sub_group_size": 1000000000', False)):
        file.write_text('{"zero_optimization": {"stage": 3' + more + "}}")
        shares = load_profile(profile).shard_counts(2)
        assert shares == ShardCounts(2, 2, 2, zero_stage=3, gradient_parts=has_parts)
        assert has_fresh_gradients(shares, plan) is has_parts


def test_measure_model_equals_the_files_and_counts_an_adapter(tmp_path: Path) -> None:
    folder = save_tiny_causal(tmp_path)
    whole = measure_model(folder, recipe())
    assert (whole.trained, whole.frozen_bytes) == (
        259 * 32 + 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 63 * 32 + 64) + 32,
        0,
    )
    adapted = measure_model(folder, recipe(adapter={"type": "lora", "r": 2}))
    inputs_and_outputs = 2 * (64 + 48 + 48 + 64 + 3 * (63 + 32))
    assert (adapted.trained, adapted.frozen_bytes) == (2 * inputs_and_outputs, 4 * whole.trained)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_estimate_with_an_unreadable_file_names_it(name: str, tmp_path: Path) -> None:
    folder = save_tiny_causal(tmp_path)
    (folder / name).write_bytes(b"rubbish, and long enough to be a length")
    with pytest.raises(InputError, match=f"{name} cannot be read"):
        measure_model(folder, recipe())


def test_estimate_memory_of_8_bit_moments_counts_two_bytes_per_element() -> None:
    packed = {"name": "adamw_8bit", "learning_rate": 1e-3}
    estimate = estimate_memory(
        recipe(optimizer=packed), ModelSize(1000, 0, None), ShardCounts(), rows=1, tokens=1, mode="none"
    )
    assert estimate.bytes_by_use["optimizer"] == 2000
    with pytest.raises(ValueError, match="adamw_8bit needs float32 weights"):
        recipe(optimizer=packed, precision="bf16_pure")


def test_memory_estimate_estimate_reads_as_one_line() -> None:
    message = str(MemoryEstimate({"weights": 10**9, "gradients": 0, "logits": 5 * 10**8}))
    assert message == "about 1.50 GB per process (weights 1.00, logits 0.50)"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16_pure", "fp8"])
def test_estimate_every_precision_has_an_estimate(precision: str) -> None:
    shape = ModelSize(10**9, 0, Shape(16, 2048, 8192, 2048, 512, 32, 128256, None))
    small_recipe = recipe(precision=precision, batch={"global_size": 8, "micro_size": 8})
    assert all(
        estimate_memory(small_recipe, shape, ShardCounts(), rows=8, tokens=4096, mode=mode).total > 10**9
        for mode in MODES
    )


LLAMA_8B = ModelSize(8_030_261_248, 0, Shape(32, 4096, 14336, 4096, 1024, 32, 128256, None))
LLAMA_1B = ModelSize(1_235_814_400, 0, Shape(16, 2048, 8192, 2048, 512, 32, 128256, None))
LLAMA_3B = ModelSize(3_212_749_824, 0, Shape(28, 3072, 8192, 3072, 1024, 24, 128256, None, ties_head=True))
SEEN = {"8B": LLAMA_8B, "3B": LLAMA_3B, "1B": LLAMA_1B}
LLAMA_1B_TIED = Shape(16, 2048, 8192, 2048, 512, 32, 128256, None, ties_head=True)


@pytest.mark.parametrize(
    ("sizes", "precision", "rows", "measured"),
    [(LLAMA_8B, "bf16_pure", 2, 120.4), (LLAMA_1B, "bf16_pure", 4, 34.8), (LLAMA_1B, "bf16", 4, 41.1)],
)
def test_estimate_of_compiled_layers_is_the_peak_that_was_seen(
    sizes: ModelSize, precision: str, rows: int, measured: float
) -> None:
    small_recipe = recipe(precision=precision, batch={"global_size": rows, "micro_size": rows})
    how: dict[str, Any] = {"rows": rows, "tokens": 4096, "mode": "none", "fresh_gradients": True}
    estimate = estimate_memory(small_recipe, sizes, ShardCounts(), fused=True, **how).total
    assert estimate / 1e9 == pytest.approx(measured, rel=0.06)
    assert estimate_memory(small_recipe, sizes, ShardCounts(), **how).total > 1.1 * estimate
    plan = derive_plan(small_recipe, 1)
    chosen = [
        choose_saving(small_recipe, sizes, ShardCounts(), plan, tokens=4096, capacity=150_110_000_000, fused=c)[0].mode
        for c in (False, True)
    ]
    assert chosen == (["selective", "none"] if sizes is LLAMA_8B else ["none", "none"])


@pytest.mark.parametrize(("ties_head", "tables"), [(True, 2), (False, 1)])
def test_estimate_of_several_small_passes_counts_gradients_that_are_not_added_yet(ties_head: bool, tables: int) -> None:
    shape = replace(LLAMA_1B_TIED, ties_head=ties_head)
    sizes, how = replace(LLAMA_1B, shape=shape), {"rows": 1, "mode": "none"}
    several = recipe(precision="bf16")
    few = estimate_memory(several, sizes, ShardCounts(), tokens=16, **how)  # type: ignore[arg-type]
    casts, table = 2 * 16 * shape.layer_weights, 4 * 128256 * 2048
    assert few.total == (4 + 4 + 8 + 2) * sizes.trained + casts + tables * table
    one = estimate_memory(several, sizes, ShardCounts(), tokens=16, fresh_gradients=True, **how)  # type: ignore[arg-type]
    assert one.bytes_by_use["arriving gradients"] == 0, "that of the head is counted among the logits"
    many = estimate_memory(several, sizes, ShardCounts(), tokens=16384, **how)  # type: ignore[arg-type]
    assert many.bytes_by_use["arriving gradients"] == 0, "activations are larger, and are free by then"


def test_estimate_of_several_small_passes_is_the_peak_that_was_seen() -> None:
    """Recipe 3 of benchmarks/peaks_of_recipes.py on an H100: passes of 1,024 tokens, without and with Liger."""
    sizes = replace(LLAMA_1B, shape=LLAMA_1B_TIED)
    how: dict[str, Any] = {"rows": 1, "tokens": 1024, "mode": "none"}
    for fused, measured in ((False, 25.84), (True, 25.85)):
        estimate = estimate_memory(recipe(precision="bf16"), sizes, ShardCounts(), fused=fused, **how).total / 1e9
        assert measured < estimate < 1.03 * measured


@pytest.mark.parametrize(
    ("name", "profile", "processes", "measured"),
    [
        ("8B", "fsdp", 2, 98.5),
        ("8B", "fsdp", 4, 74.4),
        ("3B", "fsdp", 2, 46.8),
        ("3B", "zero3", 2, 50.5),
        ("1B", "zero3", 2, 34.8),
    ],
)
def test_choose_estimate_of_shards_is_the_peak_that_was_seen(
    name: str, profile: str, processes: int, measured: float
) -> None:
    """Shapes of Llama-3.1-8B and Llama-3.2, one row of 8192 tokens or four of 4096 (1B), on H200s, layers compiled."""
    rows, tokens = (4, 4096) if name == "1B" else (1, 8192)
    batch = {"global_size": rows * processes, "micro_size": rows}
    model = {"name": "m", "gradient_checkpointing": "none", "torch_compile": True}
    small_recipe = recipe(task="sft", precision="bf16", model=model, batch=batch)
    shares, plan = load_profile(profile).shard_counts(processes), derive_plan(small_recipe, processes)
    how: dict[str, Any] = {"capacity": None, "fused": True, "compiled": True}
    message = choose_saving(small_recipe, SEEN[name], shares, plan, tokens=tokens, **how)[1]
    gigabytes = float(message.partition("about ")[2].partition(" ")[0])
    assert gigabytes == pytest.approx(measured, rel=0.04)


def test_zero3_counts_its_first_part_of_the_gradients_and_several_passes_count_all() -> None:
    shares = load_profile("zero3").shard_counts(2)
    of_rank = 4 * LLAMA_8B.trained // 2
    found = []
    for passes, tokens in ((1, 8192), (1, 16), (2, 8192)):
        small_recipe = recipe(precision="bf16", batch={"global_size": 2 * passes, "micro_size": 1})
        fresh = has_fresh_gradients(shares, derive_plan(small_recipe, 2))
        how: dict[str, Any] = {"rows": 1, "tokens": tokens, "mode": "none", "fresh_gradients": fresh}
        found.append(estimate_memory(small_recipe, LLAMA_8B, shares, **how).bytes_by_use["gradients"])
    head = 4 * 128256 * 4096 // 2
    assert found[0] == 4 * gradient_part(of_rank // 4) + head == of_rank // PARTS + head
    assert 0.9 * of_rank < found[1] < of_rank, "the activations of a short pass are small"
    assert found[2] == of_rank, "the second pass begins with the gradients of the first"
    full: dict[str, Any] = {"rows": 1, "tokens": 8192, "mode": "full", "fresh_gradients": True}
    uses = estimate_memory(recipe(precision="bf16"), LLAMA_8B, shares, **full).bytes_by_use
    assert LLAMA_8B.shape is not None
    stored = 8192 * 32 * LLAMA_8B.shape.activation_bytes("bf16", "full")
    assert uses["gradients"] + stored == of_rank, "at the end a layer is still computed"


def test_casts_stay_but_where_weights_travel_cast_or_deepspeed_multiplies() -> None:
    recipes = {name: recipe(task="sft", precision=name) for name in ("bf16", "fp16", "fp8")}
    recipes["labels"] = recipe(task="text_classification", precision="bf16")
    experts = ModelSize(10**9, 0, Shape(16, 2048, 8192, 2048, 512, 32, 128256, None, has_experts=True))
    fsdp, zero3 = ShardCounts(2, 2, 2), ShardCounts(2, 2, 2, zero_stage=3)
    for name, sizes, shares, stays in (
        ("bf16", LLAMA_1B, ShardCounts(), True),
        ("bf16", LLAMA_1B, fsdp, False),
        ("fp16", LLAMA_1B, fsdp, False),
        ("fp8", LLAMA_1B, fsdp, False),
        ("labels", LLAMA_1B, fsdp, True),
        ("bf16", experts, fsdp, True),
        ("bf16", LLAMA_1B, zero3, False),
        ("bf16", LLAMA_1B, ShardCounts(zero_stage=3), False),
        ("labels", LLAMA_1B, zero3, False),
        ("bf16", experts, zero3, True),
    ):
        for mode in MODES:
            memory = estimate_memory(recipes[name], sizes, shares, rows=1, tokens=64, mode=mode)
            copy_bytes = memory.bytes_by_use["copies of weights"]
            assert copy_bytes == 2 * sizes.trained * stays, (name, shares, mode)


def test_estimate_of_zero3_counts_padded_shards() -> None:
    bf16, fp32 = (recipe(task="sft", precision=name) for name in ("bf16", "fp32"))
    lora = recipe(task="sft", precision="bf16", adapter={"type": "lora"})
    labels = recipe(task="text_classification", precision="bf16")
    for name, case_recipe, more in (
        ("zero3", bf16, LLAMA_1B.trained // 2),
        ("fsdp", bf16, 0),
        ("zero2", bf16, 0),
    ) + tuple(("zero3", other, 0) for other in (fp32, lora, labels)):
        shares = load_profile(name).shard_counts(4)
        parts = estimate_memory(case_recipe, LLAMA_1B, shares, rows=1, tokens=64, mode="none").bytes_by_use
        assert parts["rounded weights"] == more, (name, case_recipe)
    experts = ModelSize(10**9, 0, Shape(16, 2048, 8192, 2048, 512, 32, 128256, None, has_experts=True))
    parts = estimate_memory(
        bf16, experts, load_profile("zero3").shard_counts(4), rows=1, tokens=64, mode="none"
    ).bytes_by_use
    assert parts["rounded weights"] == 0, "experts are no modules that only multiply"
    parts = estimate_memory(
        bf16, LLAMA_1B, ShardCounts(0, 4, 0, zero_stage=3), rows=1, tokens=64, mode="none"
    ).bytes_by_use
    assert parts["rounded weights"] == 0, "pieces that wait on the host are cast on their way"


@pytest.mark.parametrize("profile", ["single", "ddp", "fsdp", "zero2", "zero3", "zero3_offload"])
@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_check_reports_no_compilation_for_an_adapter_under_zero3(profile: str, adapter: str, tmp_path: Path) -> None:
    from ftcli.reports.check import _expect_passes

    folder = str(save_tiny_causal(tmp_path))
    message = set()
    for asks in (False, True):
        model = {"name": folder, "torch_compile": asks}
        small_recipe = recipe(model=model, data={"train": "x", "max_length": 2**20}, adapter={"type": adapter})
        _, facts, _ = _expect_passes(small_recipe, load_profile(profile), derive_plan(small_recipe, 2), cpu=True)
        message.add(facts["memory"])
    assert (len(message) == 1) == (profile.startswith("zero3") and adapter == "lora")


def test_check_expects_compiled_layers_under_zero3_with_whole_frozen_weights(tmp_path: Path) -> None:
    from ftcli.reports.check import _expect_passes

    folder = str(save_tiny_causal(tmp_path))
    lines = {}
    for profile, asks in (("zero3", False), ("zero3", True), ("ddp", True)):
        model = {"name": folder, "torch_compile": asks, "shard_frozen": False}
        lora = recipe(model=model, data={"train": "x", "max_length": 2**20}, adapter={"type": "lora"})
        _, facts, _ = _expect_passes(lora, load_profile(profile), derive_plan(lora, 2), cpu=True)
        lines[profile, asks] = facts["memory"]
    assert lines["zero3", True] == lines["ddp", True] != lines["zero3", False]


def test_estimate_memory_with_fresh_gradients_shares_the_memory_of_activations() -> None:
    small_recipe = recipe(batch={"global_size": 8, "micro_size": 4})
    expected = estimate_memory(small_recipe, LLAMA_1B, ShardCounts(), rows=4, tokens=4096, mode="none").total
    message = choose_saving(
        small_recipe, LLAMA_1B, ShardCounts(), derive_plan(small_recipe, 1), tokens=4096, capacity=None
    )[1]
    assert f"about {expected / 1e9:.2f} GB" in message and "gradients" in message
    short = estimate_memory(small_recipe, LLAMA_1B, ShardCounts(), rows=1, tokens=64, mode="none", fresh_gradients=True)
    assert 0 < short.bytes_by_use["gradients"] < 4 * LLAMA_1B.trained


LONG_8B = LLAMA | {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
}


def test_estimate_of_long_recomputed_passes_counts_tiles_of_the_feed_forward() -> None:
    """In 16-bit tensors of hidden size: 27 for a whole layer in its backward pass, 13 in tiles, 3 inputs of layers."""
    shape = Shape.of(LONG_8B)
    assert shape is not None and shape.tiles_mlp
    model = {"name": "m", "activation_offloading": True}

    def tensors(
        tokens: int, mode: str = "tiled", of: Shape = shape, stage: int | None = None, precision: str = "bf16"
    ) -> float:
        adapted = recipe(model=model, adapter={"type": "lora", "r": 16}, precision=precision)
        how: dict[str, Any] = {"rows": 1, "tokens": tokens, "mode": mode, "fused": True, "compiled": True}
        estimate = estimate_memory(adapted, ModelSize(1, 1, of), ShardCounts(zero_stage=stage), **how)
        return estimate.bytes_by_use["activations"] / tokens / (2 * 4096)

    assert tensors(2048) == pytest.approx(27 + 3, abs=0.5)
    assert tensors(4096) == pytest.approx(6.5 + 2 + 14 / 2 + 3, abs=0.5)
    assert tensors(65_536) == tensors(10**6) == pytest.approx(13 + 3, abs=0.5)
    sizes = [tokens * tensors(tokens) for tokens in range(64, 70_000, 64)]
    assert sizes == sorted(sizes), "the budget of a pass relies on it"
    assert tensors(65_536, of=replace(shape, tiles_mlp=False)) == tensors(65_536, stage=3) == tensors(2048)
    assert tensors(65_536, "full") == tensors(2048)
    assert tensors(65_536, "none") == tensors(4096, "none")
    assert tensors(65_536, precision="fp8") == tensors(4096, precision="fp8")


@pytest.mark.parametrize(
    ("adapter", "precision", "scales"),
    [
        ({"r": 16, "lora_alpha": 32}, "bf16", True),
        ({"r": 16, "lora_alpha": 16, "use_rslora": True}, "bf16", True),
        ({"r": 8, "lora_alpha": 16, "use_rslora": True}, "bf16", False),
        ({"r": 16, "lora_alpha": 24}, "bf16", False),
        ({"r": 16, "lora_alpha": 32, "use_dora": True}, "bf16", False),
        ({"r": 16, "lora_alpha": 32}, "fp32", False),
    ],
)
def test_estimate_counts_no_copies_of_gradients_where_adapters_scale_small_tensors(
    adapter: dict[str, Any], precision: str, scales: bool
) -> None:
    scaled = recipe(precision=precision, adapter={"type": "lora"} | adapter)
    other = recipe(precision=precision, adapter={"type": "lora"} | adapter | {"lora_alpha": 3, "use_rslora": False})
    how: dict[str, Any] = {"rows": 2, "tokens": 4096, "mode": "full", "fused": True}
    for compiled in (True, False):
        found, copied = (
            estimate_memory(one, LLAMA_8B, ShardCounts(), compiled=compiled, **how).bytes_by_use["activations"]
            for one in (scaled, other)
        )
        assert copied - found == 2 * 2 * 14336 * 2 * 4096 * (scales and compiled)
