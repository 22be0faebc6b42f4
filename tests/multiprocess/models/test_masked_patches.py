"""Image models that can be pretrained on masked patches: classification masks none, and trains all the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Dinov2Config, Dinov2Model, ViTImageProcessor

from ftcli.reports.comparison import TOLERANCES
from ftcli.testing import run_on_cpu

from ...support.cells import cell, train_recipe
from ...support.runner import MakeInputs

TOKEN = "dinov2.embeddings.mask_token"


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    folder = make_inputs()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 8}
    Dinov2Model(Dinov2Config(**sizes)).save_pretrained(folder / "dinov2")
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(folder / "dinov2")
    return folder


def trained(folder: Path, precision: str) -> dict[str, Any]:
    section = {"name": str(folder / "dinov2"), "dropout": 0.0}
    return train_recipe(cell(folder, "vit", model=section, precision=precision))


@pytest.mark.parametrize(("profile", "precision"), [("ddp", "fp32"), ("fsdp", "bf16"), ("zero3", "bf16")])
def test_prepare_with_a_mask_token_freezes_it(inputs: Path, profile: str, precision: str) -> None:
    """Trained, it would have no gradient: DDP would wait for one, and every run would be ended as a mistake."""
    alone = trained(inputs, precision)
    results = run_on_cpu(trained, inputs, precision, processes=2, profile=profile)[0]
    losses = [[row["loss"] for row in one["rows"]] for one in (alone, results)]
    assert losses[0] == pytest.approx(losses[1], rel=TOLERANCES[precision].loss) and len(losses[0]) == 4
    assert TOKEN not in alone["after"] and len(alone["after"]) > 30
