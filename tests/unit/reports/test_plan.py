"""`ftcli plan`: what is forecast for each profile, what is missing, and the output as text and JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import ftcli
from ftcli.__main__ import main
from ftcli.config.load import load_recipe
from ftcli.config.profile import LEAST_PART, ShardCounts, load_profile
from ftcli.data.cached_counts import counts_file
from ftcli.models.estimates.shape import Shape, size_of_shape
from ftcli.models.estimates.step_work import Rows
from ftcli.reports.forecast import Target, forecast
from ftcli.reports.plan import PlanReport
from ftcli.reports.plan_text import _run_table, hints, verdict
from ftcli.runtime.errors import InputError
from ftcli.runtime.gpus import find_gpu, measured_speeds_path
from ftcli.training.short_rows import expect_passes

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
WEIGHTS = 16 * (2048 * (2 * 2048 + 2 * 512 + 3 * 8192) + 2 * 2048) + 128256 * 2048 + 2048


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a recipe for a Llama-3.2-1B shape without weights, on a machine without a GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
    values: dict[str, Any] = {
        "task": "pretrain",
        "precision": "bf16",
        "model": {"name": str(tmp_path / "model"), "dropout": 0.0},
        "data": {"train": "rows.jsonl", "max_length": 4096, "packing": True},
        "batch": {"global_size": 16, "micro_size": 4},
        "train": {"max_steps": 900},
        "optimizer": {"learning_rate": 1.0e-5},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def planned(recipe: Path, *profiles: str, **options: Any) -> PlanReport:
    return ftcli.plan(recipe, profiles or ("ddp",), **{"gpus": 4, "gpu": "H200"} | options)


def test_plan_memory_of_each_part_equals_a_hand_count(recipe: Path) -> None:
    ddp, fsdp, zero3, one = planned(recipe, "ddp", "fsdp", "zero3", "single").forecasts
    layer = 12 * 2048 + 2 * (2 * 2048 + 2 * 512) + 4 * 32 + 3 * 2 * 8192  # bytes that a compiled layer keeps of a token
    activations = 4 * 4096 * 17 * layer
    logits = (2**28 // 128256) * 128256 * 2 + 128256 * 2048 * 4
    assert ddp.parts == {
        "weights": 4 * WEIGHTS,
        "gradients": 4 * WEIGHTS,
        "optimizer": 8 * WEIGHTS,
        "activations": activations,
        "logits": logits,
        "casts": 2 * WEIGHTS,
        "communication buffers": 0,
    }
    one_layer = 2048 * (2 * 2048 + 2 * 512 + 3 * 8192)
    assert fsdp.parts == {
        "weights": WEIGHTS,
        "gradients": 0,  # they take the memory of activations that are freed
        "optimizer": 2 * WEIGHTS,
        "activations": activations,
        "logits": logits,
        "casts": 0,
        "communication buffers": 3 * 4 * one_layer + 4 * 128256 * 2048,
    }
    assert zero3.parts["casts"] == 2 * WEIGHTS // 4
    assert zero3.parts["gradients"] == 4 * LEAST_PART, "of the part whose layers come first"
    assert one.parts["gradients"] == 4 * WEIGHTS and one.gpus == 1, "four micro-batches are added up"


@pytest.mark.parametrize("precision", ["bf16", "fp32", "bf16_pure"])
def test_plan_parts_of_the_memory_add_up_to_all_of_it(recipe: Path, precision: str) -> None:
    small = [f"precision={precision}", "data.max_length=64", "batch.micro_size=1"]
    for one in planned(recipe, "ddp", "fsdp", "zero2", "zero3", "single", overrides=small).forecasts:
        assert one.memory is not None and sum(one.parts.values()) == one.memory.total, one.profile
    # In bf16_pure the head's gradient, which the logits count, is as large as those of both tables.
    assert one.memory is not None and (one.memory.bytes_by_use["arriving gradients"] > 0) == (precision != "bf16_pure")


def test_plan_speed_hours_and_cost_follow_from_the_step_time(recipe: Path) -> None:
    report = planned(recipe, "ddp", "single", price=2.5)
    ddp, single = report.forecasts
    assert ddp.time is not None and single.time is not None
    assert ddp.tokens_per_second == 16 * 4096 / ddp.time.total
    assert ddp.hours == ddp.time.total * 900 / 3600 and ddp.cost(2.5) == 2.5 * 4 * ddp.hours
    assert single.cost(2.5) == 2.5 * single.hours and single.time.total > 3 * ddp.time.total
    assert report.fastest is ddp
    assert single.time.communication == 0 < ddp.time.communication


def test_plan_chooses_less_memory_where_the_recipes_micro_size_does_not_fit(recipe: Path) -> None:
    roomy, tight, none = (planned(recipe, "ddp", memory_gb=size).forecasts[0] for size in (80, 32, 20))
    assert (roomy.fits, roomy.mode, roomy.plan.micro_size, roomy.plan.accumulation) == (True, "none", 4, 1)
    assert tight.fits and tight.mode == "full" and roomy.memory.total > tight.memory.total
    assert none.fits is False and none.plan.micro_size == 1 and none.mode == "tiled"
    assert verdict(none, planned(recipe, "ddp", memory_gb=20)).endswith("; inputs of layers on the host")
    assert "on the host" not in verdict(roomy, planned(recipe, "ddp", memory_gb=80))


def test_plan_of_4_bit_weights_moves_embeddings_and_compiles_where_the_run_does(recipe: Path) -> None:
    config = recipe.parent / "model" / "config.json"
    config.write_text(json.dumps(LLAMA | {"tie_word_embeddings": False}))
    settings = ["adapter.type=lora", "model.quantization.load_in_4bit=true", "model.gradient_checkpointing=full"]
    ddp, fsdp = planned(recipe, "ddp", "fsdp", memory_gb=1, overrides=settings).forecasts
    assert ddp.saving.embeddings_on_host and ddp.saving.offloads and ddp.compiled
    assert fsdp.saving.offloads and not fsdp.saving.embeddings_on_host and not fsdp.compiled
    (one,) = planned(recipe, "fsdp", memory_gb=1, gpus=1, overrides=settings).forecasts
    assert not one.saving.embeddings_on_host, "as the run, which refuses it under this profile"


def test_plan_with_micro_size_auto_takes_the_most_rows_of_the_mode_for_one_row(recipe: Path) -> None:
    large, small = (
        planned(recipe, "fsdp", memory_gb=size, overrides=["batch.micro_size=auto", "batch.global_size=64"]).forecasts[
            0
        ]
        for size in (141, 24)
    )
    assert (large.mode, large.plan.micro_size) == ("none", 16)
    assert small.mode == "none" and small.plan.micro_size < 16 and small.fits


def test_plan_with_micro_size_auto_divides_known_rows_as_the_run_does(recipe: Path) -> None:
    changes = ["batch.micro_size=auto", "data.packing=false", "task=sft", "batch.global_size=8"]
    loaded = load_recipe(recipe, changes)
    size, single = size_of_shape(Shape.of(LLAMA), loaded), load_profile("single")
    lengths = [*[300] * 60, *[4000] * 4]
    known = Rows(sum(lengths) / 64, 300.0, 0.7)
    target = Target(loaded, size, "llama", 1000, known, 4000, find_gpu("H100"), 80 * 10**9, 1)
    by_rows, by_tokens = forecast(single, target), forecast(single, replace(target, typical=tuple(lengths)))
    passes = expect_passes(loaded, size, ShardCounts(), by_rows.plan, lengths, 80 * 10**9, fused=True).plan.passes
    assert by_rows.plan.passes is None and by_tokens.plan.passes == passes and passes.tokens < 8 * 4000
    assert by_tokens.memory.total < by_rows.memory.total and by_tokens.mode == "none" and by_tokens.fits
    assert by_tokens.time.total > 0 and by_tokens.tokens == by_rows.tokens
    (line,) = _run_table(PlanReport("x", target, [by_tokens]), [by_tokens])[1:]
    assert "8 in " in line and "pass" in line


def test_plan_with_micro_size_auto_takes_as_long_for_a_prime_number_of_rows(recipe: Path) -> None:
    lengths, seconds = (*[300] * 60, *[4000] * 4), []
    for rows in (61, 64):
        changes = ["batch.micro_size=auto", "data.packing=false", "task=sft", f"batch.global_size={rows}"]
        loaded = load_recipe(recipe, changes)
        known = Rows(sum(lengths) / 64, 300.0, 0.7)
        size, gpu = size_of_shape(Shape.of(LLAMA), loaded), find_gpu("H100")
        target = Target(loaded, size, "llama", 1000, known, 4000, gpu, 80 * 10**9, 1, typical=lengths)
        one = forecast(load_profile("single"), target)
        assert one.plan.passes.mean > 1
        seconds.append(one.time.total)
    assert seconds[0] == pytest.approx(seconds[1], rel=0.15)


def test_plan_of_prepared_short_rows_has_their_lengths(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = ["batch.micro_size=auto", "data.packing=false", "task=sft", f"data.train={recipe.parent / 'short.jsonl'}"]
    (recipe.parent / "short.jsonl").write_text("{}\n")
    before = planned(recipe, overrides=changes)
    record = {"key": "none", "rows": {"train": 1000, "eval": 0}, "lengths": [100] * 30 + [400] * 10}
    file = counts_file(load_recipe(recipe, changes))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record))
    after = planned(recipe, overrides=changes)
    assert before.target.lengths.tokens == 4096 and "rows have the full length" in " ".join(before.notes)
    assert after.target.lengths == Rows(175.0, (30 * 100**2 + 10 * 400**2) / 7000) and len(after.notes) < len(
        before.notes
    )
    assert after.forecasts[0].plan.passes is not None and after.forecasts[0].tokens == 16 * 175


def test_plan_hints_at_a_smaller_micro_size_that_recomputes_less(recipe: Path) -> None:
    report = planned(recipe, "fsdp", memory_gb=24)
    (one,) = report.forecasts
    assert (
        one.mode == "full" and one.faster is not None and one.faster.mode == "none" and one.faster.plan.micro_size < 4
    )
    (hint,) = [line for line in report.lines() if line.startswith("hint: ")]
    assert "fsdp: batch.micro_size=" in hint and "% faster, because nothing is recomputed" in hint


def waiting(recipe: Path, profile: str = "ddp", gpus: int = 2, **changes: object) -> tuple[float, list[str]]:
    """Return the part of a step in which the GPU waits for the host, and what the hints say of it."""
    report = planned(recipe, profile, gpus=gpus, overrides=[f"{key}={value}" for key, value in changes.items()])
    time = report.forecasts[0].time
    assert time is not None
    return time.waiting / time.total, [line for line in hints(report) if "waits for the host" in line]


def test_plan_says_where_the_gpu_waits_for_the_host_and_what_shortens_it(recipe: Path) -> None:
    short = {"data.max_length": 256, "batch.micro_size": 1, "model.torch_compile": "false"}
    share, (hint,) = waiting(recipe, **short)
    assert share > 0.5 and f" for {100 * share:.0f} % of a step" in hint
    assert hint.startswith("ddp: ") and hint.endswith("a larger batch.micro_size makes fewer passes")
    assert waiting(recipe, **short, **{"batch.global_size": 2})[1][0].endswith(
        "fewer GPUs with more rows in a pass are nearly as fast"
    )
    assert waiting(recipe, "single", 1, **short, **{"batch.global_size": 1})[1][0].endswith("with another loss curve")


def test_plan_says_nothing_of_the_host_where_it_hardly_limits_a_step(recipe: Path) -> None:
    assert waiting(recipe) == (0.0, [])
    several = {"data.max_length": 3072, "batch.micro_size": 1, "model.torch_compile": "false"}
    share, found = waiting(recipe, **several)
    assert 0.1 < share < 0.5 and len(found) == 1, "several passes"
    assert waiting(recipe, **several, **{"batch.global_size": 2})[1] == [], "one pass: more rows would take longer"


@pytest.mark.parametrize(("gpus", "memory", "length"), [(2, 14, 8192), (2, 16, 8192), (8, 14, 8192)])
def test_plan_hints_at_no_micro_size_that_the_recipe_has(gpus: int, memory: int, length: int, recipe: Path) -> None:
    changes = ["batch.micro_size=1", "batch.global_size=64", f"data.max_length={length}"]
    options: dict[str, Any] = {"gpu": "H100", "gpus": gpus, "memory_gb": memory, "overrides": changes}
    assert all(one.faster is None for one in planned(recipe, "fsdp", "zero3_offload", **options).forecasts)


def test_plan_of_a_recipe_that_a_profile_refuses_gives_the_reason(recipe: Path) -> None:
    report = planned(recipe, "zero3", "ddp", overrides=["precision=fp8"])
    zero3, ddp = report.forecasts
    assert "fp8" in zero3.problem and zero3.memory is None and ddp.fits
    assert "zero3  cannot run this recipe: precision is fp8" in "\n".join(report.lines())


def test_plan_with_indivisible_rows_gives_the_reason(recipe: Path) -> None:
    (one,) = planned(recipe, "ddp", gpus=3).forecasts
    assert one.problem == "batch.global_size 16 cannot be divided evenly over 3 processes"


def test_plan_verdicts_name_the_fastest_and_the_reasons_of_the_others(recipe: Path) -> None:
    text = "\n".join(planned(recipe, "single", "ddp", "zero2", memory_gb=64).lines())
    assert "fits; the fastest of the profiles that fit, with 4 GPUs" in text
    assert " times as slow as " in text and "uses 1 GPU of 4" in text
    tight = "\n".join(planned(recipe, "ddp", memory_gb=16).lines())
    assert "does not fit: needs" in tight and "of 14.4; the largest part is" in tight


def test_plan_of_a_hub_name_without_a_cache_goes_on_with_the_batches(recipe: Path) -> None:
    report = planned(recipe, "ddp", overrides=["model.name=nobody/nothing"])
    (one,) = report.forecasts
    assert one.memory is None and one.time is None and one.plan is not None and one.plan.micro_size == 4
    assert any("nobody/nothing is a name on the hub" in line for line in report.missing)
    assert "ddp  not known; rows per step: 16 = 4 rows x 1 micro-batch x 4 processes, 900 steps" in report.lines()
    assert max(map(len, report.lines()[1:])) <= 100, "long sentences are wrapped"


def test_plan_of_a_hub_name_reads_the_cached_configuration(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "hub" / "models--some--model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("a" * 40)
    (folder / "snapshots" / ("a" * 40)).mkdir(parents=True)
    (folder / "snapshots" / ("a" * 40) / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (one,) = planned(recipe, "ddp", overrides=["model.name=some/model"]).forecasts
    assert one.parts["weights"] == 4 * WEIGHTS


def train_a_vit(recipe: Path, model: Path, **sizes: int) -> None:
    """Make a recipe train an image classifier of 12 layers with these sizes."""
    fixed = {"model_type": "vit", "num_hidden_layers": 12, "image_size": 224, "patch_size": 16}
    (model / "config.json").write_text(json.dumps(fixed | sizes))
    values = yaml.safe_load(recipe.read_text())
    values |= {"task": "image_classification", "data": {"train": "images"}}
    recipe.write_text(yaml.safe_dump(values))


def test_plan_of_an_image_model_counts_patches(recipe: Path, tmp_path: Path) -> None:
    train_a_vit(recipe, tmp_path / "model", hidden_size=768, num_attention_heads=12, intermediate_size=3072)
    (one,) = (report := planned(recipe, "single")).forecasts
    assert report.target.longest == 197 and one.tokens == 16 * 197 and one.time is not None and one.time.data == 0
    assert "decoding of images is not counted" in report.notes


def test_plan_of_a_model_with_cuda_graphs_counts_their_gradients_and_no_launches(recipe: Path, tmp_path: Path) -> None:
    train_a_vit(recipe, tmp_path / "model", hidden_size=192, num_attention_heads=3, intermediate_size=768)
    (plain,) = planned(recipe, "single", overrides=["model.cuda_graphs=false"]).forecasts
    (graphs,) = (report := planned(recipe, "single")).forecasts
    assert report.target.size is not None and plain.memory is not None and graphs.memory is not None
    assert graphs.memory.total - plain.memory.total == 4 * report.target.size.trained
    assert plain.time is not None and graphs.time is not None and graphs.time.compute < 0.7 * plain.time.compute
    (sharded,) = planned(recipe, "fsdp").forecasts
    assert sharded.memory is not None and "gradients of CUDA graphs" not in sharded.memory.bytes_by_use


def test_plan_of_prepared_rows_uses_their_lengths(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ftcli.config.load import load_recipe
    from ftcli.data.cached_counts import counts_file

    monkeypatch.setenv("FTCLI_CACHE", str(tmp_path / "cache"))
    (tmp_path / "rows.jsonl").write_text('{"text": "a b c"}\n')
    overrides = [f"data.train={tmp_path / 'rows.jsonl'}", "train.epochs=2"]
    full = planned(recipe, "ddp", overrides=overrides)
    path = counts_file(load_recipe(recipe, overrides))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"rows": {"train": 160, "documents": 1600, "tokens": 480_000}}))
    known = planned(recipe, "ddp", overrides=overrides)
    assert known.target.lengths == Rows(3000, 2 * 300) and known.target.rows == 160
    assert known.forecasts[0].plan.steps == 20 and known.forecasts[0].hours is not None
    assert known.forecasts[0].time.total < full.forecasts[0].time.total
    assert not any("full" in line for line in known.notes) and any("full" in line for line in full.notes)


def test_plan_of_an_unknown_architecture_counts_what_the_files_hold(recipe: Path, tmp_path: Path) -> None:
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({"model_type": "resnet", "hidden_sizes": [8]}))
    (one,) = (report := planned(recipe, "ddp")).forecasts
    assert one.memory is None and any("neither safetensors files nor the sizes" in line for line in report.missing)
    header = json.dumps({"w": {"dtype": "F32", "shape": [1000, 10], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "model" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (one,) = (report := planned(recipe, "ddp")).forecasts
    assert one.parts["weights"] == 40_000 and one.parts["activations"] == 0 and one.time is None
    assert any("of type resnet has no sizes of a transformer" in line for line in report.missing)


def test_plan_and_check_of_an_adapter_named_as_model_refuse_it_as_train_does(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' * 40)
    (tmp_path / "model" / "config.json").unlink()
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "./base"}
    (tmp_path / "model" / "adapter_config.json").write_text(json.dumps(adapter))
    (tmp_path / "model" / "adapter_model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    data = [f"data.train={tmp_path / 'rows.jsonl'}"]
    for command in (ftcli.plan, ftcli.check, ftcli.train):
        with pytest.raises(InputError) as caught:
            command(recipe, overrides=data, **({"output": tmp_path / "run"} if command is ftcli.train else {}))
        (problem,) = caught.value.problems  # not its missing tokenizer, which an adapter need not have
        assert problem.what == f"model.name: {tmp_path / 'model'} is an adapter of ./base, not a model"
        assert problem.hint.startswith(f"set model.name: ./base and adapter.path: {tmp_path / 'model'}")
    (tmp_path / "model" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(InputError, match="model is an adapter, not a model\n.*set model.name: its base model and"):
        ftcli.plan(recipe)


def test_plan_of_a_new_model_type_with_known_keys_is_counted(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA | {"model_type": "brand_new"}))
    (one,) = planned(recipe, "ddp").forecasts
    assert one.parts["weights"] == 4 * WEIGHTS and one.time is not None and not one.compiled


def test_plan_without_a_gpu_gives_memory_only(recipe: Path) -> None:
    report = ftcli.plan(recipe, ["ddp"])
    (one,) = report.forecasts
    assert (one.gpus, one.fits, one.time) == (8, None, None) and one.memory is not None
    assert any("no GPU is visible here" in line for line in report.missing)
    assert any("8 GPUs are assumed" in line for line in report.notes)
    assert any(line.startswith("ddp  needs ") for line in report.lines())


def test_plan_of_an_unknown_gpu_with_its_memory_compares_memory_only(recipe: Path) -> None:
    report = planned(recipe, "ddp", gpu="Radeon RX 7900", memory_gb=64)
    assert report.forecasts[0].fits is True and report.forecasts[0].time is None
    assert any("Radeon RX 7900 is not in the table of GPUs" in line for line in report.missing)
    with pytest.raises(InputError, match="--gpu: Radeon RX 7900 is not in the table"):
        planned(recipe, "ddp", gpu="Radeon RX 7900")


def test_plan_of_this_machines_gpu_uses_its_memory_and_its_measured_rates(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 102400'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setenv("FTCLI_CACHE", str(tmp_path))
    table = ftcli.plan(recipe, ["ddp"])
    assert table.target.gpus == 4
    measured_speeds_path().write_text(json.dumps({"gpu": "NVIDIA H200", "product_flops": {"bf16": 1e14}}))
    measured = ftcli.plan(recipe, ["ddp"], gpus=4)
    assert table.target.capacity == measured.target.capacity == 100 * 2**30
    assert measured.forecasts[0].time.compute > 3 * table.forecasts[0].time.compute
    assert any("measured on this machine" in line for line in measured.lines())


def test_plan_of_a_gpu_without_bfloat16_gives_no_times(recipe: Path) -> None:
    report = planned(recipe, "ddp", gpu="T4")
    assert report.forecasts[0].time is None and "times: T4 has no bf16 products" in report.missing


def test_plan_with_unknown_rows_gives_no_hours(recipe: Path) -> None:
    report = planned(recipe, "ddp", overrides=["train.epochs=1"])
    assert report.forecasts[0].hours is None and report.forecasts[0].time is not None
    assert any("hours: the number of rows is not known" in line for line in report.missing)


@pytest.mark.parametrize(
    ("option", "value"), [("gpus", 0), ("memory_gb", 0), ("price", -1), ("price", float("nan")), ("memory_gb", 1e999)]
)
def test_plan_with_an_unusable_number_raises(option: str, value: float, recipe: Path) -> None:
    with pytest.raises(InputError, match="it must be a number above 0"):
        planned(recipe, "ddp", **{option: value})


def test_plan_without_names_covers_the_shipped_profiles_of_one_machine(recipe: Path) -> None:
    names = [one.profile for one in ftcli.plan(recipe, gpu="H200", gpus=4).forecasts]
    assert {"single", "ddp", "fsdp", "hsdp", "zero2", "zero3", "fsdp_offload", "zero3_offload"} == set(names)


def test_plan_text_fits_into_100_columns(recipe: Path) -> None:
    lines = ftcli.plan(recipe, gpu="H200", gpus=8, price=3.5).lines()
    assert [line for line in lines if len(line) > 100 and not line.startswith("recipe")] == []
    assert not any("\x1b" in line for line in lines)


def test_plan_json_has_the_documented_keys(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", str(recipe), "--profiles", "ddp,fsdp,ddp", "--gpus", "4", "--gpu", "H200", "--price=2", "--json"]
    with pytest.raises(SystemExit) as exit_:
        main(command)
    values = json.loads(capsys.readouterr().out)
    assert exit_.value.code == 0
    assert list(values) == [
        "recipe", "gpus", "gpu", "memory_bytes", "usable_bytes", "profiles", "fastest", "hints", "missing", "notes",
    ]  # fmt: skip
    assert [plan["profile"] for plan in values["profiles"]] == ["ddp", "fsdp"]
    ddp = values["profiles"][0]
    assert list(ddp) == [
        "profile", "gpus", "fits", "verdict", "micro_size", "accumulation", "passes", "gradient_checkpointing",
        "activation_offloading", "embeddings_on_host", "torch_compile",
        "memory_bytes", "step_seconds", "tokens_per_second", "steps", "hours", "cost",
    ]  # fmt: skip
    assert ddp["memory_bytes"]["total"] == sum(v for k, v in ddp["memory_bytes"].items() if k != "total")
    assert ddp["step_seconds"]["total"] == sum(ddp["step_seconds"][k] for k in ("compute", "communication", "data"))
    assert values["fastest"] in ("ddp", "fsdp") and values["gpu"]["name"] == "H200"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profiles", ""], "the name of a profile is empty"),
        (["--profiles", "nothing"], "'nothing' is neither a profile file nor the name of a shipped profile"),
        (["--gpu", "H10"], "did you mean 'H100'"),
        (["--set", "batch.micro_sizes=3"], "micro_size"),
        (["--set", "model.name=/no/such/folder"], "no model folder at"),
        (["--memory", "-3"], "must be a number above 0"),
    ],
)
def test_plan_command_with_a_mistake_exits_2(
    arguments: list[str], message: str, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["plan", str(recipe), *arguments])
    assert exit_.value.code == 2 and message in capsys.readouterr().err


def test_plan_of_an_invalid_recipe_names_file_and_line(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe.write_text(recipe.read_text() + "batchh: 3\n")
    with pytest.raises(SystemExit) as exit_:
        main(["plan", str(recipe), "--gpu", "H200"])
    line = len(recipe.read_text().splitlines())
    assert exit_.value.code == 2 and f"{recipe}:{line}" in capsys.readouterr().err


def test_plan_shape_of_the_fixture_has_the_weights_of_the_hand_count() -> None:
    shape = Shape.of(LLAMA)
    assert shape is not None and shape.weights == WEIGHTS


def test_plan_of_an_adapter_counts_no_more_rows_than_a_process_has(recipe: Path) -> None:
    changes = ["adapter.type=lora", "adapter.r=8", "adapter.lora_alpha=16", "batch.global_size=2"]
    few, many = (
        planned(recipe, "fsdp", gpus=2, memory_gb=80, overrides=[*changes, f"batch.micro_size={size}"]).forecasts[0]
        for size in (1, 1024)
    )
    assert few.plan.micro_size == many.plan.micro_size == 1
    assert few.memory.total == many.memory.total


def test_plan_of_an_adapter_says_where_frozen_weights_are(recipe: Path) -> None:
    adapter = ["adapter.type=lora", "adapter.r=8", "adapter.lora_alpha=16", "model.torch_compile=true"]
    report = planned(recipe, "ddp", "fsdp", "zero3", overrides=adapter)
    (note,) = [line for line in report.notes if "frozen weights" in line]
    assert note.startswith("fsdp, zero3: frozen weights 2.47 GB, whole on each GPU, so trained as under ddp (auto: ")
    _, sharded, whole = report.forecasts
    assert whole.compiled and whole.memory == sharded.memory
    assert not any("frozen weights" in line for line in planned(recipe, "fsdp").notes)
