"""QLoRA on real GPUs: 4-bit weights beside an adapter, on one GPU and cut over two by FSDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ftcli.testing import run_on_processes

from ..multiprocess.cells import cell, train_recipe, write_inputs

pytest.importorskip("bitsandbytes")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
LORA = {"type": "lora", "r": 3, "lora_alpha": 6}


def train_in_4_bits(folder: Path, use_dora: bool) -> dict[str, Any]:
    """Train a small cell whose frozen weights are held in 4 bits."""
    model = {"name": str(folder / "untied"), "dropout": 0.0, "quantization": {"load_in_4bit": True}}
    adapter = LORA | {"use_dora": use_dora}
    return train_recipe(cell(folder, "sft-lora", model=model, adapter=adapter, precision="bf16"), cpu=False)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("profile", ["ddp", "fsdp"])
def test_4_bits_on_two_gpus_follow_the_curve_of_one(profile: str, use_dora: bool, inputs: Path) -> None:
    single = run_on_processes(train_in_4_bits, inputs, use_dora, processes=1, profile="single")[0]
    found = run_on_processes(train_in_4_bits, inputs, use_dora, processes=2, profile=profile)[0]
    assert single["rows"][-1]["loss"] < single["rows"][0]["loss"]
    for a, b in zip(single["rows"], found["rows"], strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-2)
        assert (b["items"], b["samples"]) == (a["items"], a["samples"])
    assert found["before"] == single["before"]
