"""The estimate of memory by hand, what it chooses, and that it is near what a step really holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ftcli.errors import InputError
from ftcli.memory import MODES, USABLE, Estimate, Shape, Sizes, choose, estimate, sizes_in
from ftcli.planning import derive_plan
from ftcli.profiles import Shares, load_profile, profile_from_environment
from ftcli.recipe import Recipe
from ftcli.testing import profile_environment, save_tiny_causal

LLAMA = {
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def recipe(**changes: Any) -> Recipe:
    values: dict[str, Any] = {
        "task": "sft",
        "model": {"name": "m"},
        "data": {"train": "x.jsonl", "max_length": 16},
        "batch": {"global_size": 8, "micro_size": 4},
        "train": {"max_steps": 1},
        "optimizer": {"learning_rate": 1e-3},
    }
    return Recipe.model_validate(values | changes)


def test_a_shape_is_read_from_the_names_of_several_architectures() -> None:
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


def test_what_a_layer_keeps_of_a_token_by_hand() -> None:
    shape = Shape.of(LLAMA)
    assert shape is not None
    attention = 2 * 8 + 2 * 4  # q, its result; k, v
    assert shape.kept("fp32", "full") == 4 * 8 and shape.kept("bf16_pure", "full") == 2 * 8
    assert shape.kept("bf16", "selective") == 4 * 8 + 2 * attention + 4 * 4 + 2 * (2 * 8 + 2 * 20)
    assert shape.kept("bf16", "none") == 26 * 8 + 2 * attention + 4 * 4 + 2 * 4 * 20


def test_what_a_process_holds_by_hand() -> None:
    sizes = Sizes(1000, 500, None)
    assert estimate(recipe(), sizes, Shares(), rows=1, tokens=1, mode="none").parts == {
        "weights": 4500,
        "gradients": 4000,
        "optimizer": 8000,
        "copies of weights": 0,
        "rounded weights": 0,
    }
    cut = estimate(recipe(precision="bf16"), sizes, Shares(2, 4, 4, zero_stage=3), rows=1, tokens=1, mode="none")
    wanted = {"weights": 2250, "gradients": 1000, "optimizer": 2000, "copies of weights": 2000, "rounded weights": 1000}
    assert cut.parts == wanted, "the optimizer steps the model's own weights"
    for shares in (Shares(1, 4, 4, zero_stage=2), Shares(0, 4, 4, zero_stage=3)):
        whole = estimate(recipe(), sizes, shares, rows=1, tokens=1, mode="none").parts["optimizer"]
        assert whole == 3000, "it steps copies of theirs"
    pure = estimate(recipe(precision="bf16_pure"), sizes, Shares(), rows=1, tokens=1, mode="none")
    assert pure.total == 500 + 12 * 1000, "12 bytes an element, as adamw_bf16.py says"
    assert estimate(recipe(), sizes, Shares(0, 0, 0), rows=1, tokens=1, mode="none").total == 0


def test_logits_are_held_once_in_the_compute_dtype_and_in_float32_too_where_a_model_changes_them() -> None:
    config = LLAMA | {"hidden_size": 8, "vocab_size": 1000}
    for more, size in ({}, 2), ({"final_logit_softcapping": None}, 2), ({"final_logit_softcapping": 30.0}, 10):
        sizes = Sizes(0, 0, Shape.of(config | more))
        wanted = recipe(task="pretrain", precision="bf16")
        parts = estimate(wanted, sizes, Shares(), rows=3, tokens=5, mode="none").parts
        assert parts["logits"] == 3 * 5 * 1000 * size + 1000 * 8 * 4


def test_auto_takes_the_first_way_that_fits_and_says_why() -> None:
    wanted = recipe()
    sizes = Sizes(100, 0, Shape.of(LLAMA | {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12}))
    plan = derive_plan(wanted, 1)
    totals = {mode: estimate(wanted, sizes, Shares(), rows=4, tokens=16, mode=mode).total for mode in MODES}
    assert totals["none"] > totals["selective"] > totals["full"]
    for mode, total in totals.items():
        chosen, told = choose(wanted, sizes, Shares(), plan, tokens=16, capacity=int(total / 0.9) + 1)
        assert chosen == mode and f"gradient_checkpointing {mode} (auto: " in told and "4 rows of 16 tokens" in told
    chosen, told = choose(wanted, sizes, Shares(), plan, tokens=16, capacity=1000)
    assert chosen == "full" and "even that may not fit" in told
    assert choose(wanted, sizes, Shares(), plan, tokens=16, capacity=None)[0] == "none"
    assert choose(wanted, sizes, Shares(), plan, tokens=16, capacity=1000, able=False)[0] == "none"
    explicit = recipe(model={"name": "m", "gradient_checkpointing": "selective"})
    assert choose(explicit, sizes, Shares(), plan, tokens=16, capacity=1000)[0] == "selective"
    hosted = recipe(model={"name": "m", "activation_offloading": True})
    assert choose(hosted, sizes, Shares(), plan, tokens=16, capacity=10**12)[0] == "full"
    auto = recipe(batch={"global_size": 8, "micro_size": "auto"})
    assert "1 row of 16 tokens" in choose(auto, sizes, Shares(), plan, tokens=16, capacity=10**12)[1]


def test_true_and_false_are_full_and_none_and_no_other_word_is_known() -> None:
    for given, meant in ((True, "full"), (False, "none"), ("auto", "auto")):
        assert recipe(model={"name": "m", "gradient_checkpointing": given}).model.gradient_checkpointing == meant
    with pytest.raises(ValueError, match="gradient_checkpointing"):
        recipe(model={"name": "m", "gradient_checkpointing": 1})


@pytest.mark.parametrize(
    ("profile", "shares"),
    [
        ("ddp", Shares()),
        ("fsdp", Shares(4, 4, 4)),
        ("hsdp", Shares(2, 2, 2)),
        ("fsdp_offload", Shares(0, 0, 0)),
        ("zero2", Shares(1, 4, 4, zero_stage=2)),
        ("zero3", Shares(4, 4, 4, zero_stage=3)),
        ("zero3_offload", Shares(0, 0, 0, zero_stage=3)),
    ],
)
def test_a_file_and_the_environment_it_becomes_cut_alike(profile: str, shares: Shares) -> None:
    assert load_profile(profile).shares(4) == shares
    environment = profile_environment(profile, 4) | {"WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0"}
    assert profile_from_environment(environment).shares(4) == shares


def test_a_stage_that_a_profile_leaves_open_is_accelerates_own(tmp_path: Path) -> None:
    file = tmp_path / "open.yaml"
    file.write_text("distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero3_init_flag: false\n")
    assert load_profile(file).shares(4) == Shares(1, 4, 4, zero_stage=2)


def test_sizes_are_those_of_the_files_and_an_adapter_is_a_small_part(tmp_path: Path) -> None:
    folder = save_tiny_causal(tmp_path)
    whole = sizes_in(folder, recipe())
    assert (whole.trained, whole.frozen_bytes) == (
        259 * 32 + 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 63 * 32 + 64) + 32,
        0,
    )
    adapted = sizes_in(folder, recipe(adapter={"type": "lora", "r": 2}))
    inputs_and_outputs = 2 * (64 + 48 + 48 + 64 + 3 * (63 + 32))
    assert (adapted.trained, adapted.frozen_bytes) == (2 * inputs_and_outputs, 4 * whole.trained)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_cannot_be_read_is_told_by_name(name: str, tmp_path: Path) -> None:
    folder = save_tiny_causal(tmp_path)
    (folder / name).write_bytes(b"rubbish, and long enough to be a length")
    with pytest.raises(InputError, match=f"{name} cannot be read"):
        sizes_in(folder, recipe())


def test_moments_of_8_bits_take_two_bytes_and_only_beside_float32_weights() -> None:
    packed = {"name": "adamw_8bit", "learning_rate": 1e-3}
    found = estimate(recipe(optimizer=packed), Sizes(1000, 0, None), Shares(), rows=1, tokens=1, mode="none")
    assert found.parts["optimizer"] == 2000
    with pytest.raises(ValueError, match="adamw_8bit steps float32 weights"):
        recipe(optimizer=packed, precision="bf16_pure")


def test_an_estimate_reads_as_one_line() -> None:
    told = str(Estimate({"weights": 10**9, "gradients": 0, "logits": 5 * 10**8}))
    assert told == "about 1.50 GB a process (weights 1.00, logits 0.50)"


def test_under_compiled_layers_nothing_is_recomputed_selectively() -> None:
    shape = Sizes(10**9, 0, Shape(16, 2048, 8192, 2048, 512, 32, 128256, None))
    how: dict[str, Any] = {"rows": 8, "tokens": 4096, "anew": True}
    # The last: layers are not compiled though the recipe says so, because ZeRO-3 gathers weights inside of them.
    for asks, compiled, wanted in ((False, False, "selective"), (True, True, "full"), (True, False, "selective")):
        asked = recipe(model={"name": "m", "torch_compile": asks}, batch={"global_size": 8, "micro_size": 8})
        plan = derive_plan(asked, 1)
        kept = {
            mode: estimate(asked, shape, Shares(), mode=mode, compiled=compiled and mode == "none", **how).total
            for mode in MODES
        }
        assert kept["full"] < kept["selective"] < kept["none"]
        room = int((kept["none"] + kept["selective"]) / 2 / USABLE)
        assert choose(asked, shape, Shares(), plan, tokens=4096, capacity=room, compiled=compiled)[0] == wanted
    with pytest.raises(ValueError, match="does not go with torch_compile"):
        recipe(model={"name": "m", "torch_compile": True, "gradient_checkpointing": "selective"})


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16_pure", "fp8"])
def test_every_precision_has_an_estimate(precision: str) -> None:
    shape = Sizes(10**9, 0, Shape(16, 2048, 8192, 2048, 512, 32, 128256, None))
    asked = recipe(precision=precision, batch={"global_size": 8, "micro_size": 8})
    assert all(estimate(asked, shape, Shares(), rows=8, tokens=4096, mode=mode).total > 10**9 for mode in MODES)


LLAMA_8B = Sizes(8_030_261_248, 0, Shape(32, 4096, 14336, 4096, 1024, 32, 128256, None))
LLAMA_1B = Sizes(1_235_814_400, 0, Shape(16, 2048, 8192, 2048, 512, 32, 128256, None))


@pytest.mark.parametrize(
    ("sizes", "precision", "rows", "measured"),
    [(LLAMA_8B, "bf16_pure", 2, 120.4), (LLAMA_1B, "bf16_pure", 4, 34.8), (LLAMA_1B, "bf16", 4, 41.1)],
)
def test_the_estimate_of_compiled_layers_is_the_peak_that_was_seen(
    sizes: Sizes, precision: str, rows: int, measured: float
) -> None:
    asked = recipe(precision=precision, batch={"global_size": rows, "micro_size": rows})
    how: dict[str, Any] = {"rows": rows, "tokens": 4096, "mode": "none", "anew": True}
    found = estimate(asked, sizes, Shares(), compiled=True, **how).total
    assert found / 1e9 == pytest.approx(measured, rel=0.06)
    assert estimate(asked, sizes, Shares(), **how).total > 1.1 * found
    plan = derive_plan(asked, 1)
    chosen = [
        choose(asked, sizes, Shares(), plan, tokens=4096, capacity=150_110_000_000, compiled=c)[0] for c in (0, 1)
    ]
    assert chosen == (["selective", "none"] if sizes is LLAMA_8B else ["none", "none"])


@pytest.mark.parametrize(
    ("profile", "processes", "mode", "measured"),
    [("fsdp", 2, "none", 98.5), ("fsdp", 4, "none", 74.4), ("zero3", 2, "selective", 107.3)],
)
def test_the_estimate_of_shards_is_the_peak_that_was_seen(
    profile: str, processes: int, mode: str, measured: float
) -> None:
    """Llama-3.1-8B's shape, one row of 8192 tokens, on H200s; layers under FSDP2 were compiled."""
    kept = {"name": "m", "gradient_checkpointing": mode}
    asked = recipe(task="sft", precision="bf16", model=kept, batch={"global_size": processes, "micro_size": 1})
    compiled, shares = profile == "fsdp", load_profile(profile).shares(processes)
    plan = derive_plan(asked, processes)
    told = choose(asked, LLAMA_8B, shares, plan, tokens=8192, capacity=None, compiled=compiled)[1]
    found = float(told.partition("about ")[2].partition(" ")[0])
    assert found == pytest.approx(measured, rel=0.02)


def test_casts_stay_but_where_weights_travel_cast_or_deepspeed_multiplies() -> None:
    asked = {name: recipe(task="sft", precision=name) for name in ("bf16", "fp16", "fp8")}
    asked["labels"] = recipe(task="text_classification", precision="bf16")
    experts = Sizes(10**9, 0, Shape(16, 2048, 8192, 2048, 512, 32, 128256, None, has_experts=True))
    fsdp, zero3 = Shares(2, 2, 2), Shares(2, 2, 2, zero_stage=3)
    for name, sizes, shares, stays in (
        ("bf16", LLAMA_1B, Shares(), True),
        ("bf16", LLAMA_1B, fsdp, False),
        ("fp16", LLAMA_1B, fsdp, False),
        ("fp8", LLAMA_1B, fsdp, False),
        ("labels", LLAMA_1B, fsdp, True),
        ("bf16", experts, fsdp, True),
        ("bf16", LLAMA_1B, zero3, False),
        ("bf16", LLAMA_1B, Shares(zero_stage=3), False),
        ("labels", LLAMA_1B, zero3, False),
        ("bf16", experts, zero3, True),
    ):
        for mode in MODES:
            found = estimate(asked[name], sizes, shares, rows=1, tokens=64, mode=mode).parts["copies of weights"]
            assert found == 2 * sizes.trained * stays, (name, shares, mode)


def test_zero3_keeps_rounded_pieces_of_a_whole_language_model_that_is_on_the_device() -> None:
    bf16, fp32 = (recipe(task="sft", precision=name) for name in ("bf16", "fp32"))
    lora = recipe(task="sft", precision="bf16", adapter={"type": "lora"})
    labels = recipe(task="text_classification", precision="bf16")
    for name, asked, more in (("zero3", bf16, LLAMA_1B.trained // 2), ("fsdp", bf16, 0), ("zero2", bf16, 0)) + tuple(
        ("zero3", other, 0) for other in (fp32, lora, labels)
    ):
        parts = estimate(asked, LLAMA_1B, load_profile(name).shares(4), rows=1, tokens=64, mode="none").parts
        assert parts["rounded weights"] == more, (name, asked)
    experts = Sizes(10**9, 0, Shape(16, 2048, 8192, 2048, 512, 32, 128256, None, has_experts=True))
    parts = estimate(bf16, experts, load_profile("zero3").shares(4), rows=1, tokens=64, mode="none").parts
    assert parts["rounded weights"] == 0, "experts are no modules that only multiply"
    parts = estimate(bf16, LLAMA_1B, Shares(0, 4, 0, zero_stage=3), rows=1, tokens=64, mode="none").parts
    assert parts["rounded weights"] == 0, "pieces that wait on the host are cast on their way"


@pytest.mark.parametrize("profile", ["single", "ddp", "fsdp", "zero2", "zero3", "zero3_offload"])
@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_check_knows_that_zero3_compiles_no_layer_with_an_adapter(profile: str, adapter: str, tmp_path: Path) -> None:
    from ftcli.checks import _memory_fact

    folder = str(save_tiny_causal(tmp_path))
    told = set()
    for asks in (False, True):
        model = {"name": folder, "torch_compile": asks}
        asked = recipe(model=model, data={"train": "x", "max_length": 2**20}, adapter={"type": adapter})
        told |= set(_memory_fact(asked, load_profile(profile), derive_plan(asked, 2), cpu=True).values())
    assert (len(told) == 1) == (profile.startswith("zero3") and adapter == "lora")


def test_gradients_take_the_room_of_activations_only_where_nothing_is_added_up() -> None:
    asked = recipe(batch={"global_size": 8, "micro_size": 4})
    wanted = estimate(asked, LLAMA_1B, Shares(), rows=4, tokens=4096, mode="none").total
    told = choose(asked, LLAMA_1B, Shares(), derive_plan(asked, 1), tokens=4096, capacity=None)[1]
    assert f"about {wanted / 1e9:.2f} GB" in told and "gradients" in told
    short = estimate(asked, LLAMA_1B, Shares(), rows=1, tokens=64, mode="none", anew=True)
    assert 0 < short.parts["gradients"] < 4 * LLAMA_1B.trained
