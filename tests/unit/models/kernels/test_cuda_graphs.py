"""Which runs replay their passes as CUDA graphs. tests/gpu/test_cuda_graphs_on_gpus.py compares results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ftcli.config.recipe import Recipe
from ftcli.models.kernels.cuda_graphs import CapturedPass, use_cuda_graphs
from ftcli.runtime.errors import InputError
from ftcli.tiny_models import build_tiny

from ....support.recipes import recipe_values

SIZES = {"embedding_size": 8, "hidden_sizes": [16], "depths": [1], "num_labels": 3}


def resnet() -> nn.Module:
    model: nn.Module = build_tiny("ResNetForImageClassification", **SIZES)
    return model.train()


def vit(**config: Any) -> nn.Module:
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "num_labels": 3,
    }
    model: nn.Module = build_tiny("ViTForImageClassification", image_size=16, patch_size=8, **sizes, **config)
    return model.train()


def chosen(
    network: nn.Module,
    /,
    device: str = "cuda",
    recomputed: str = "none",
    whole: bool = True,
    processes: int = 1,
    **sections: Any,
) -> bool:
    sections["model"] = {"name": "any"} | sections.get("model", {})
    recipe = Recipe.model_validate(recipe_values("image_classification", **sections))
    lines = use_cuda_graphs(network, recipe, device, recomputed=recomputed, is_whole=whole, processes=processes)
    assert bool(lines) == isinstance(network.forward, CapturedPass)
    return bool(lines)


def test_resnets_are_captured_on_one_gpu_and_others_if_the_recipe_asks_for_it() -> None:
    assert chosen(resnet()) and chosen(resnet(), model={"batch_norm": "train"})
    assert not chosen(resnet(), model={"cuda_graphs": False})
    asked = {"cuda_graphs": True}
    assert not chosen(vit()) and chosen(vit(), model=asked)
    assert not chosen(resnet(), processes=2) and chosen(resnet(), processes=2, model=asked)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"device": "cpu"}, "needs an NVIDIA GPU"),
        ({"whole": False}, "this profile shards weights"),
        ({"recomputed": "full"}, "memory saving"),
        ({"model": {"torch_compile": True}}, "torch_compile"),
        ({"model": {"batch_norm": "sync"}}, "exchanges statistics"),
        ({"adapter": {"type": "lora"}}, "without an adapter"),
    ],
)
def test_runs_that_cannot_be_captured_say_why_if_the_recipe_asks_for_it(how: dict[str, Any], why: str) -> None:
    assert not chosen(resnet(), **how)
    how = {**how, "model": {**how.get("model", {}), "cuda_graphs": True}}
    with pytest.raises(InputError, match=f"model.cuda_graphs: .*{why}"):
        chosen(resnet(), **how)


@pytest.mark.parametrize("rate", ["hidden_dropout_prob", "attention_probs_dropout_prob"])
def test_models_with_dropout_are_not_captured(rate: str) -> None:
    with pytest.raises(InputError, match="the model has dropout"):
        chosen(vit(**{rate: 0.1}), model={"cuda_graphs": True})
    with_module = resnet()
    with_module.add_module("last", nn.Dropout(0.5))
    assert not chosen(with_module)


def test_batch_norms_without_momentum_are_not_captured() -> None:
    model = resnet()
    next(module for module in model.modules() if isinstance(module, nn.BatchNorm2d)).momentum = None
    with pytest.raises(InputError, match="batch norm without momentum"):
        chosen(model, model={"cuda_graphs": True})


def test_passes_on_the_host_and_evaluations_run_as_they_are() -> None:
    model, images = resnet(), torch.randn(2, 3, 32, 32)
    expected = model(pixel_values=images).logits
    assert chosen(model)
    assert model(pixel_values=images).logits.equal(expected) and model(images).logits.equal(expected)
    assert model.forward.shapes is None
