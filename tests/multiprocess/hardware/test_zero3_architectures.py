"""ZeRO-3 gathers whole layers in every architecture that ftcli packs, and in image models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification, ViTImageProcessor

from ftcli.testing import run_on_cpu, tiny_tokenizer

from ...support.cells import cell
from ...support.patching import patching
from ...support.runner import MakeInputs
from ...unit.models.kernels.test_document_attention import EXTRAS, PACKED, SIZES

pytestmark = pytest.mark.slow

WORDS = {**SIZES, "vocab_size": 259, "pad_token_id": 1, "eos_token_id": 1, "max_position_embeddings": 256}
STAGES = {"depths": [1, 1, 1, 1]}
IMAGES: dict[str, dict[str, Any]] = {
    "convnext": {"hidden_sizes": [8, 16, 16, 32], **STAGES},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
    "segformer": {"hidden_sizes": [8, 8, 16, 16], "num_attention_heads": [1, 1, 2, 2], "image_size": 128, **STAGES},
}


def names() -> list[str]:
    return [*PACKED, *IMAGES]


def save_architecture(kind: str, folder: Path) -> None:
    """Write a tiny language model with random weights, and a tokenizer."""
    torch.manual_seed(0)
    extras = EXTRAS.get(kind, {}) | ({"n_positions": 256} if kind == "gpt2" else {})
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**WORDS, **extras})).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    folder = make_inputs()
    for kind in names():
        if kind not in IMAGES:
            save_architecture(kind, folder / kind)
            continue
        torch.manual_seed(0)
        model = AutoModelForImageClassification.from_config(AutoConfig.for_model(kind, **IMAGES[kind]))
        side = IMAGES[kind].get("image_size", 32)
        ViTImageProcessor(size={"height": side, "width": side}).save_pretrained(folder / kind)
        model.save_pretrained(folder / kind)
    return folder


@patching
def curves(patch: pytest.MonkeyPatch, folder: Path, kinds: list[str]) -> dict[str, dict[str, Any]]:
    """Return for each model its curve, and how many of its layers are gathered as a whole."""
    from deepspeed.utils import z3_leaf_module

    from ftcli.hardware import deepspeed
    from ftcli.loop import steps
    from ftcli.models.structure import layers_of
    from ftcli.training.setup import prepare

    # Small weights would stay whole; and sums are sent several times a backward pass, with what is complete by then.
    patch.setattr(deepspeed, "STAGE_3", {"reduce_bucket_size": 4000, "stage3_param_persistence_threshold": 100})
    results = {}
    for kind in kinds:
        changes = {"model": {"name": str(folder / kind), "dropout": 0.0}, "train": {"max_steps": 3}}
        optimizer = {"learning_rate": 1e-3, "eps": 1e-4}  # a gradient that is all rounding is no whole step
        recipe = cell(folder, "vit" if kind in IMAGES else "sft-untied", optimizer=optimizer, **changes)
        run: Any = prepare(recipe, cpu=True)
        layers = layers_of(run.hardware.unwrap(run.model))
        results[kind] = {
            "curve": [number for step in steps(run) for number in (step.loss, step.grad_norm)],
            "layers": len(layers),
            "leaves": sum(z3_leaf_module(layer) for layer in layers),
        }
    return results


def test_zero3_of_every_architecture_gives_the_curve_of_one_process(inputs: Path) -> None:
    alone = run_on_cpu(curves, inputs, names(), processes=1, profile="single")[0]
    results = run_on_cpu(curves, inputs, names(), processes=2, profile="zero3")[0]
    for kind in names():
        assert results[kind]["curve"] == pytest.approx(alone[kind]["curve"], rel=1e-5), kind
        first = int(kind == "segformer")  # the input of its first layer is the image
        assert results[kind]["leaves"] == results[kind]["layers"] - first > 0, kind
