"""Which runs replay their passes as CUDA graphs. tests/gpu/test_cuda_graphs_on_gpus.py compares results."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from ftcli.config.recipe import Recipe
from ftcli.models.kernels.captured_pass import (
    MOST_GRAPHS,
    CapturedPass,
    _leaves_of_their_own,
    _tensors_of,
    padded_length,
)
from ftcli.models.kernels.cuda_graphs import COMPARED, use_cuda_graphs
from ftcli.runtime.errors import InputError
from ftcli.tiny_models import build_tiny

from ....support.recipes import recipe_values
from ....support.small_classifiers import CLASSIFIERS

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


ENCODER = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "intermediate_size": 8}
DECODER = {**ENCODER, "num_key_value_heads": 1, "vocab_size": 32}


def bert(**config: Any) -> nn.Module:
    model: nn.Module = build_tiny("BertForSequenceClassification", vocab_size=32, num_labels=2, **ENCODER, **config)
    return model.train()


def chosen(
    network: nn.Module,
    /,
    device: str = "cuda",
    task: str = "image_classification",
    recomputed: str = "none",
    whole: bool = True,
    **sections: Any,
) -> bool:
    sections["model"] = {"name": "any"} | sections.get("model", {})
    recipe = Recipe.model_validate(recipe_values(task, **sections))
    lines = use_cuda_graphs(network, recipe, device, recomputed=recomputed, is_whole=whole)
    assert bool(lines) == isinstance(network.forward, CapturedPass)
    return bool(lines)


GRAPHS = {"cuda_graphs": True}


def test_compared_models_are_captured_by_default_and_others_if_the_recipe_asks_for_it() -> None:
    assert chosen(resnet()) and chosen(vit()) and chosen(bert(), task="text_classification")
    assert not chosen(resnet(), model={"cuda_graphs": False})
    other = resnet()
    other.config.model_type = "other"
    assert not chosen(other)
    assert chosen(other, model=GRAPHS)
    assert chosen(resnet(), model=GRAPHS | {"batch_norm": "train"})


def test_compared_models_that_the_support_module_does_not_build_are_named() -> None:
    assert set(CLASSIFIERS) >= COMPARED


@pytest.mark.parametrize(
    "changes",
    [
        {"adapter": {"type": "lora"}},
        {"model": {"torch_compile": True}},
        {"model": {"gradient_checkpointing": "full"}},
        {"model": {"batch_norm": "sync"}},
    ],
)
def test_runs_that_leave_it_open_and_exclude_graphs_have_none(changes: dict[str, Any]) -> None:
    assert not chosen(resnet(), **changes)


def test_runs_that_leave_it_open_capture_nothing_if_they_need_half_of_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 51)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 100))
    open_, asked = resnet(), resnet()
    assert chosen(open_) and not open_.forward._has_room()
    assert chosen(asked, model=GRAPHS) and asked.forward._has_room()
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 49)
    assert open_.forward._has_room()


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"device": "cpu"}, "needs an NVIDIA GPU"),
        ({"whole": False}, "this profile shards weights"),
        ({"recomputed": "full"}, "recomputes activations"),
    ],
)
def test_runs_that_cannot_be_captured_say_why(how: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=f"model.cuda_graphs: .*{why}"):
        chosen(resnet(), **({"model": GRAPHS} | how))
    assert not chosen(resnet(), **how)


def test_models_that_leave_out_layers_at_random_are_not_captured() -> None:
    with pytest.raises(InputError, match="leaves out layers"):
        chosen(vit(layerdrop=0.1), model=GRAPHS)


def test_batch_norms_without_momentum_are_not_captured() -> None:
    model = resnet()
    next(module for module in model.modules() if isinstance(module, nn.BatchNorm2d)).momentum = None
    with pytest.raises(InputError, match="batch norm without momentum"):
        chosen(model, model=GRAPHS)


def test_text_encoders_are_captured_and_other_models_of_texts_are_not() -> None:
    assert chosen(bert(), task="text_classification", model=GRAPHS)
    decoder = build_tiny("LlamaForSequenceClassification", num_labels=2, **DECODER)
    for model in (decoder, build_tiny("BertForMaskedLM", **ENCODER)):
        with pytest.raises(InputError, match="texts with attention in both directions"):
            chosen(model, task="text_classification", model=GRAPHS)


@pytest.mark.parametrize(
    ("length", "padded"),
    [(1, 16), (16, 16), (17, 32), (128, 128), (129, 144), (256, 256), (257, 288), (500, 512), (4000, 4096)],
)
def test_texts_are_padded_to_one_of_a_few_lengths(length: int, padded: int) -> None:
    assert padded_length(length) == padded
    assert padded_length(padded) == padded


def test_there_are_few_lengths() -> None:
    assert len({padded_length(length) for length in range(1, 513)}) == 24 < MOST_GRAPHS
    assert max(padded_length(length) / length for length in range(257, 4097)) < 1.125


def test_texts_as_long_as_the_model_takes_are_not_padded() -> None:
    passes = CapturedPass(bert(max_position_embeddings=40, pad_token_id=0))
    assert [passes._length_for(length) for length in (10, 32, 33, 40)] == [16, 32, 33, 40]
    passes = CapturedPass(bert(max_position_embeddings=34, pad_token_id=1))
    assert [passes._length_for(length) for length in (10, 32)] == [16, 32]


def test_passes_on_the_host_and_evaluations_run_as_they_are() -> None:
    model, images = resnet(), torch.randn(2, 3, 32, 32)
    expected = model(pixel_values=images).logits
    assert chosen(model, model=GRAPHS)
    assert list(inspect.signature(model.forward).parameters)[0] == "pixel_values"
    for _ in range(3):
        assert model(pixel_values=images).logits.equal(expected) and model(images).logits.equal(expected)
    assert not model.forward.captures


def test_leaves_of_their_own_share_memory_with_the_weights_and_take_no_hooks() -> None:
    model, images = resnet(), torch.randn(2, 3, 32, 32)
    model.tied = model.classifier[1]
    before = list(model.parameters())
    for weight in before:
        weight.register_hook(lambda gradient: 3 * gradient)
    with _leaves_of_their_own(model) as pairs:
        assert [weight for weight, _ in pairs] == before and model.tied.weight is model.classifier[1].weight
        assert all(leaf is not weight and leaf.data_ptr() == weight.data_ptr() for weight, leaf in pairs)
        outputs = list(_tensors_of(model(pixel_values=images)).values())
        found = torch.autograd.grad(outputs, [leaf for _, leaf in pairs], [torch.ones_like(one) for one in outputs])
    assert all(now is weight for now, weight in zip(model.parameters(), before, strict=True))
    model(pixel_values=images).logits.sum().backward()
    for gradient, weight in zip(found, before, strict=True):
        assert weight.grad is not None and (3 * gradient).allclose(weight.grad, rtol=1e-4, atol=1e-6)


def test_outputs_with_other_parts_than_trained_tensors_are_refused() -> None:
    model, images = resnet(), torch.randn(2, 3, 32, 32)
    model.config.output_hidden_states = True
    with pytest.raises(InputError, match="model returns ImageClassifierOutput"):
        _tensors_of(model(pixel_values=images))
    with pytest.raises(InputError, match="model returns Tensor"):
        _tensors_of(images)
