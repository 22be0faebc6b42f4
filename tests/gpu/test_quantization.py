"""QLoRA on real GPUs: 4-bit weights and an adapter, on one GPU and sharded over two by FSDP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from ftcli.loop import steps
from ftcli.models.kernels import unread_outputs
from ftcli.runtime import patches
from ftcli.runtime.patches import WITHOUT
from ftcli.testing import environment, run_on_processes
from ftcli.training.setup import prepare

from ..support.cells import cell, train_recipe
from ..support.launches import ftcli_on_gpus
from ..support.runner import MakeInputs

pytest.importorskip("bitsandbytes")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
LORA = {"type": "lora", "r": 3, "lora_alpha": 6}
STEPS = 8
# (cell, adapter); the reference of judged answers is the quantised base
IN_4_BITS = [
    ("sft-lora", LORA | {"use_dora": False}),
    ("sft-lora", LORA | {"use_dora": True}),
    *((name, LORA) for name in ("preference-lora", "unpaired-lora", "reward-lora")),
]


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    """Return a folder of this module's own, because its tests write into it."""
    return make_inputs()


def train_in_4_bits(folder: Path, *, cpu: bool = False) -> list[dict[str, Any]]:
    """Train small cells whose frozen weights are stored in 4 bits."""
    model = {"name": str(folder / "untied"), "dropout": 0.0, "quantization": {"load_in_4bit": True}}
    recipes = [cell(folder, name, model=model, adapter=adapter, precision="bf16") for name, adapter in IN_4_BITS]
    return [train_recipe(recipe, cpu=cpu) for recipe in recipes]


def command_line(inputs: Path, *line: object) -> str:
    """Return the output of `ftcli`, which must succeed."""
    result = ftcli_on_gpus(inputs, *line)
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


def losses(run: Path) -> dict[int, float]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("profile", ["single", pytest.param("fsdp", marks=TWO)])
def test_4_bit_base_trains_resumes_and_exports(profile: str, inputs: Path, tmp_path: Path) -> None:
    model = {"name": str(inputs / "untied"), "dropout": 0.0}
    data = {"train": str(inputs / "chats.jsonl"), "max_length": 128}
    recipe = {"task": "sft", "precision": "bf16", "model": model, "adapter": LORA, "data": data}
    recipe |= {"batch": {"global_size": 12, "micro_size": 3}, "train": {"max_steps": STEPS}}
    recipe |= {"optimizer": {"learning_rate": 2e-2}, "log": {"every_steps": 1}, "checkpoint": {"every_steps": 4}}
    quantised = recipe | {"model": model | {"quantization": {"load_in_4bit": True}}}
    for name, values in (("plain", recipe), ("quantised", quantised)):
        (inputs / f"{name}.yaml").write_text(yaml.safe_dump(values))
    line = ("--profile", profile, "--num-processes", 1 if profile == "single" else 2)
    command_line(inputs, "train", "plain.yaml", "--output", tmp_path / "plain")
    command_line(inputs, "train", "quantised.yaml", *line, "--output", tmp_path / "run")
    plain, resumed = losses(tmp_path / "plain"), losses(tmp_path / "run")
    assert resumed[STEPS] < 0.97 * resumed[1]
    assert resumed == pytest.approx(plain, rel=5e-2)
    assert (tmp_path / "run" / "final" / "adapter_model.safetensors").stat().st_size > 0
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000004"
    command_line(inputs, "train", "quantised.yaml", *line, "--output", tmp_path / "again", "--resume", checkpoint)
    assert losses(tmp_path / "again") == pytest.approx({n: resumed[n] for n in range(5, STEPS + 1)}, rel=2e-3)
    command_line(inputs, "export", tmp_path / "run", tmp_path / "adapter")
    from peft import AutoPeftModelForCausalLM

    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    moved = [v for n, v in loaded.named_parameters() if ".lora_B." in n]
    assert moved and all(v.isfinite().all() and v.abs().max() > 0 for v in moved)


def test_recomputed_4_bit_layers_leave_products_out_and_keep_the_curve(
    inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_out: list[int] = []
    unread = unread_outputs._unread
    monkeypatch.setattr(unread_outputs, "_unread", lambda x, n: (left_out.append(n), unread(x, n))[1])
    model = {"name": str(inputs / "untied"), "dropout": 0.0, "quantization": {"load_in_4bit": True}}
    model |= {"gradient_checkpointing": "full", "torch_compile": True}
    curves = []
    for without in ("four-bit-outputs", ""):
        patches.clear_caches()
        torch._dynamo.reset()
        with environment(**{WITHOUT: without}):
            run = prepare(cell(inputs, "sft-lora", model=model, adapter=LORA, precision="bf16"))
            curves.append([(step.loss, step.grad_norm) for step in steps(run)])
            run.hardware.release(run.model)
        assert bool(left_out) is not bool(without)
    for expected, found in zip(*curves, strict=True):
        assert found == pytest.approx(expected, rel=1e-3)


@pytest.fixture(scope="module")
def single(inputs: Path) -> list[dict[str, Any]]:
    return run_on_processes(train_in_4_bits, inputs, processes=1, profile="single")[0]


@TWO
@pytest.mark.parametrize("profile", ["ddp", "fsdp"])
def test_4_bit_base_on_two_gpus_gives_the_curve_of_one(
    profile: str, inputs: Path, single: list[dict[str, Any]]
) -> None:
    both = run_on_processes(train_in_4_bits, inputs, processes=2, profile=profile)[0]
    for expected, actual in zip(single, both, strict=True):
        assert expected["rows"][-1]["loss"] < expected["rows"][0]["loss"]
        for a, b in zip(expected["rows"], actual["rows"], strict=True):
            assert b["loss"] == pytest.approx(a["loss"], rel=1e-2)
            assert (b["items"], b["samples"]) == (a["items"], a["samples"])
        assert actual["before"] == expected["before"]
