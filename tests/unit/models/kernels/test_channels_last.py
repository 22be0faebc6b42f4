"""Networks with batch norm compute in channels-last format, with the results of the usual format."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.detr.modeling_detr import DetrFrozenBatchNorm2d

from ftcli.hardware.ddp import DDP
from ftcli.hardware.fsdp import FSDP2
from ftcli.models.adapters import add_adapter
from ftcli.models.kernels.channels_last import use_channels_last
from ftcli.runtime.errors import InputError
from ftcli.tiny_models import build_tiny
from ftcli.training.acceleration import use_kernels

from .test_varlen_attention import recipe

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet": (
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [16, 24], "depths": [1, 2], "layer_type": "bottleneck"},
    ),
    "mobilenet": (
        "MobileNetV2ForImageClassification",
        {"image_size": 32, "depth_multiplier": 0.25, "min_depth": 8, "classifier_dropout_prob": 0.0},
    ),
}


class OfTransformers(nn.Sequential):
    """A network that counts as one of transformers."""

    __module__ = "transformers.models.small"


MODES = [("train", True), ("frozen", False)]


def network(kind: str, *, training: bool = True) -> Any:
    name, sizes = MODELS[kind]
    return build_tiny(name, **sizes).train(training)


def is_channels_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def watch_norms(model: nn.Module) -> dict[str, list[bool]]:
    """Return, for inputs of batch norms and gradients that reach them, whether they have the format."""
    seen: dict[str, list[bool]] = {"inputs": [], "gradients": []}

    def look(module: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        seen["inputs"].append(is_channels_last(inputs[0]))
        if output.requires_grad:
            output.register_hook(lambda grad: seen["gradients"].append(is_channels_last(grad)))

    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_hook(look)
    return seen


def results(model: Any, dtype: torch.dtype, channels: int = 3) -> dict[str, Tensor]:
    """Return the loss, the logits and all gradients of eight images."""
    draw = torch.Generator().manual_seed(1)
    pixels = torch.randn(8, channels, 64, 64, generator=draw, dtype=dtype)
    output = model(pixel_values=pixels, labels=torch.tensor([0, 1] * 4))
    output.loss.backward()
    gradients = {name: value.grad for name, value in model.named_parameters()}
    return {"loss": output.loss.detach(), "logits": output.logits.detach(), **gradients}


@pytest.mark.parametrize(("mode", "training"), MODES)
@pytest.mark.parametrize(("kind", "norms"), [("resnet", 12), ("mobilenet", 52)])
def test_use_channels_last_gives_every_batch_norm_this_format(kind: str, norms: int, mode: str, training: bool) -> None:
    model = network(kind, training=training)
    assert use_channels_last(model, "cuda") == [f"convolutions in channels-last format: {norms}"]
    seen = watch_norms(model)
    results(model, torch.float32)
    assert seen["inputs"] == [True] * norms
    # The mean over all pixels gives a gradient without format; MobileNet's last activation passes it on.
    assert sum(seen["gradients"]) >= norms - (kind == "mobilenet")


# Rounding grows through the 52 norms of a MobileNet with random weights, so its training is compared in float64 only.
@pytest.mark.parametrize(
    ("kind", "training", "dtype", "close"),
    [
        ("resnet", True, torch.float32, 5e-6),
        ("resnet", False, torch.float32, 1e-6),
        ("mobilenet", False, torch.float32, 1e-6),
        ("resnet", True, torch.float64, 1e-12),
        ("resnet", False, torch.float64, 1e-12),
        ("mobilenet", True, torch.float64, 1e-12),
        ("mobilenet", False, torch.float64, 1e-12),
    ],
)
def test_use_channels_last_changes_no_result(kind: str, training: bool, dtype: torch.dtype, close: float) -> None:
    plain = network(kind, training=training).to(dtype)
    model = copy.deepcopy(plain)
    assert use_channels_last(model, "cuda")
    expected, actual = results(plain, dtype), results(model, dtype)
    assert list(actual) == list(expected)
    largest = max(float(value.abs().max()) for value in expected.values())
    for name, value in expected.items():
        assert float((actual[name] - value).abs().max()) <= close * largest, name


def test_use_channels_last_keeps_names_and_formats_of_weights() -> None:
    plain = network("resnet")
    model = copy.deepcopy(plain)
    assert use_channels_last(model, "cuda")
    results(model, torch.float32)
    expected = {name: (value.shape, value.stride()) for name, value in plain.state_dict().items()}
    assert {name: (value.shape, value.stride()) for name, value in model.state_dict().items()} == expected
    assert all(value.grad.is_contiguous() for value in model.parameters())


def vision_transformer() -> Any:
    return build_tiny("ViTForImageClassification", hidden_size=16, num_hidden_layers=1, num_attention_heads=2)


@pytest.mark.parametrize(
    ("build", "device_type"),
    [
        (lambda: network("resnet"), "cpu"),
        (vision_transformer, "cuda"),
        (lambda: nn.Sequential(nn.BatchNorm2d(3)), "cuda"),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.BatchNorm2d(4)), "cuda"),
    ],
    ids=["cpu", "no batch norm", "no convolution", "group norm"],
)
def test_use_channels_last_leaves_other_models_and_devices_alone(
    build: Callable[[], nn.Module], device_type: str
) -> None:
    model = build()
    assert use_channels_last(model, device_type) == []
    assert not [module for module in model.modules() if module._forward_pre_hooks]


def first_input(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return what the first module of a sequence gets."""
    seen: list[Tensor] = []
    first: Any = model[0]  # type: ignore[index]
    first.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    model(inputs)
    return seen[0]


def test_use_channels_last_of_images_with_one_channel() -> None:
    model = OfTransformers(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
    assert use_channels_last(model, "cuda")
    seen = watch_norms(model)
    model(torch.randn(2, 1, 8, 8))
    assert seen["inputs"] == [True]


def test_use_channels_last_of_an_image_without_rows_of_a_batch_converts_nothing() -> None:
    model = OfTransformers(nn.Conv2d(3, 4, 3), nn.Identity())
    model.add_module("norm", nn.BatchNorm2d(4))
    assert use_channels_last(model, "cuda")
    image = torch.randn(3, 8, 8)
    assert first_input(model[:2], image) is image


def test_use_channels_last_of_a_convolution_that_is_called_with_names_converts_nothing() -> None:
    model = OfTransformers(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    assert use_channels_last(model, "cuda")
    assert model[0](input=torch.randn(2, 3, 8, 8)).shape == (2, 4, 6, 6)


def test_use_channels_last_of_a_frozen_batch_norm_of_a_detector() -> None:
    model = OfTransformers(nn.Conv2d(3, 4, 3), DetrFrozenBatchNorm2d(4))
    assert use_channels_last(model, "cuda") == ["convolutions in channels-last format: 1"]
    assert is_channels_last(model(torch.randn(2, 3, 8, 8)))


def test_use_channels_last_beside_an_adapter_converts_the_convolution_that_is_called() -> None:
    section = {
        "type": "lora",
        "r": 2,
        "target_modules": ["shortcut.convolution"],
        "modules_to_save": ["embedder.embedder"],
    }
    model: Any = add_adapter(network("resnet"), recipe("resnet", adapter=section), keep=[], task_type=None)
    assert use_channels_last(model, "cuda")
    seen = watch_norms(model.train())
    with torch.no_grad():
        model(pixel_values=torch.randn(2, 3, 64, 64))
    assert seen["inputs"] == [True] * 12


def test_use_kernels_on_a_gpu_uses_channels_last_and_cuda_graphs() -> None:
    accelerator, graphs = SimpleNamespace(device=torch.device("cuda")), {"name": "resnet", "cuda_graphs": True}
    hardware: Any = SimpleNamespace(
        accelerator=accelerator, may_compile=lambda model: True, backend=DDP(), ranks=SimpleNamespace(world=1)
    )
    with_graphs = recipe("resnet", task="image_classification", model=graphs)
    lines = use_kernels(network("resnet"), recipe("resnet"), hardware, "none")
    assert "convolutions in channels-last format: 12" in lines and not any("CUDA graphs" in line for line in lines)
    assert use_kernels(network("resnet"), with_graphs, hardware, "none")[-1].startswith("CUDA graphs")
    hardware.backend = FSDP2()
    with pytest.raises(InputError, match="this profile shards weights"):
        use_kernels(network("resnet"), with_graphs, hardware, "none")


class Own(nn.Module):
    """A network of a user, whose `view` needs the usual format."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images).view(len(images), -1)


def test_network_of_a_user_keeps_the_usual_format() -> None:
    model = Own()
    assert use_channels_last(model, "cuda") == []
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 4 * 6 * 6)
