"""Frozen networks that describe images: a vector for each image, and features at several depths.

They are helper networks of a loss (protocol.py): gradients pass through them to the image, and none of their weights is
trained. This module imports torch, so tasks import it inside functions.

Shapes: B images, D width of the vector.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ftcli.models.helper_models import RANDOM, configuration, load_helper
from ftcli.models.load import load_image_processor
from ftcli.runtime.errors import InputError

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe


WIDTHS = (32, 64, 128, 256)  # channels of the random network, each at half the resolution of the one before
SMALL = 1e-5


class FrozenEncoder(nn.Module):
    """A network without trained weights, always in evaluation mode, with the normalisation of its images.

    Args:
        network: Returns (vectors `[B, D]`, features) for normalised images.
        size: Height and width of its images; None for any size.
        mean: Mean of each channel.
        std: Standard deviation of each channel.
    """

    is_helper = True
    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, size: tuple[int, int] | None, mean: list[float], std: list[float]) -> None:
        super().__init__()
        self.network, self.size = network, size
        self.register_buffer("mean", torch.tensor(mean).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(1, 3, 1, 1), persistent=False)
        self.requires_grad_(False).train(False)

    def train(self, mode: bool = True) -> FrozenEncoder:
        """Stay in evaluation mode, so that running statistics do not change."""
        super().train(False)
        return self

    def forward(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return vectors `[B, D]` and a list of features, all float32, for images `[B, 3, S, S]` with values 0 to 1."""
        x = images.float()
        if self.size is not None and tuple(x.shape[-2:]) != self.size:
            x = nn.functional.interpolate(x, self.size, mode="bilinear", align_corners=False)
        x = (x - self.mean) / self.std
        vectors, features = self.network(x.to(next(self.network.parameters()).dtype))
        return vectors.float(), [part.float() for part in features]


class LoadedEncoder(nn.Module):
    """A model of transformers for images."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the pooled output `[B, D]` and the output of every layer."""
        output = self.model(pixel_values=images, output_hidden_states=True)
        last = output.last_hidden_state  # [B, D, height, width] or [B, patches, D]
        pooled = getattr(output, "pooler_output", None)
        if pooled is None:
            pooled = last.mean(dim=1) if last.ndim == 3 else last.mean(dim=(2, 3))
        return pooled.flatten(1), list(getattr(output, "hidden_states", None) or [last])


class RandomEncoder(nn.Module):
    """Convolutions with random weights: they respond to edges and shapes, and know nothing about faces."""

    def __init__(self) -> None:
        super().__init__()
        inputs = (3, *WIDTHS[:-1])
        levels = [nn.Conv2d(a, b, 3, 2, padding=1) for a, b in zip(inputs, WIDTHS, strict=True)]
        for level in levels:
            nn.init.kaiming_normal_(level.weight, nonlinearity="leaky_relu")
            nn.init.zeros_(level.bias)  # type: ignore[arg-type]
        self.levels = nn.ModuleList(levels)

    def forward(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the centred features of the last level as vectors, and the features of every level.

        Images are standardised, because otherwise all vectors would point in the direction of the mean image.
        """
        x = (images - images.mean(dim=(1, 2, 3), keepdim=True)) / (images.std(dim=(1, 2, 3), keepdim=True) + SMALL)
        features = []
        for level in self.levels:
            x = nn.functional.leaky_relu(level(x), 0.2)
            features.append(x)
        flat = x.flatten(1)
        return flat - flat.mean(dim=1, keepdim=True), features


def load_encoder(recipe: Recipe, key: str, name: str, *, seed: int, dtype: torch.dtype, has_values: bool) -> nn.Module:
    """Load the frozen encoder that a key of task_options names.

    Args:
        recipe: The recipe of the run.
        key: The key, such as task_options.recogniser.
        name: `random`, a folder, an asset or a name on the hub.
        seed: Seed of a random network.
        dtype: Dtype of the weights.
        has_values: Whether to read the weights. Without, only the shapes of the result are used.

    Returns:
        The encoder: images with values 0 to 1 -> vectors and features.

    Raises:
        InputError: The model is missing, is not a model for colour images, or its files disagree about their size.
    """
    if name == RANDOM:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network: nn.Module = RandomEncoder()
        return FrozenEncoder(network.to(dtype), None, [0.5] * 3, [0.25] * 3)
    processor = load_image_processor(recipe.model.model_copy(update={"name": name, "revision": None}), key=key)
    size = _input_size(key, name, processor, configuration(recipe, key, name))
    model = load_helper("AutoModel", recipe, key, name, dtype=dtype, has_values=has_values)
    mean, std = (list(getattr(processor, part, None) or default) for part, default in _DEFAULTS)
    return FrozenEncoder(LoadedEncoder(model).to(dtype), size, mean, std)


_DEFAULTS = (("image_mean", [0.0] * 3), ("image_std", [1.0] * 3))  # of a processor that does not normalise


def _input_size(key: str, name: str, processor: Any, config: Any) -> tuple[int, int]:
    """Return (height, width) of a model's images; raise `InputError` if it takes others than the processor makes."""
    channels = getattr(config, "num_channels", 3)
    if channels != 3:
        raise InputError(
            f"{key}: {name} takes images with {channels} channels, and faces have 3",
            hint="name a model for colour images, or random",
        )
    is_cropped = getattr(processor, "do_center_crop", False) and getattr(processor, "crop_size", None)
    sizes = processor.crop_size if is_cropped else processor.size
    edge = sizes.get("shortest_edge")
    made = (sizes.get("height", edge), sizes.get("width", edge))
    own = getattr(config, "image_size", None) if hasattr(config, "patch_size") else None  # others take any size
    own = (own, own) if isinstance(own, int) else own
    if None in made or (own is not None and tuple(own) != made):
        wanted = "images of any size" if own is None else f"images of {own[0]} x {own[1]} pixels"
        raise InputError(
            f"{key}: {name} takes {wanted}, but its preprocessor_config.json makes them {made[0]} x {made[1]}",
            hint="write the model's own size into the processor's `size`, or name another model",
        )
    return made
