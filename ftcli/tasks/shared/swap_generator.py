"""Fuse two faces: a network that gives the face of a target image the identity of a source image.

This file needs torch only, and Pillow and safetensors to read and write files. Final weights and exports contain a copy
of it as generator.py, beside config.json and model.safetensors. There it can be run and imported:

    python generator.py source.png target.png fused.png

    import generator
    network = generator.load("exported")  # the folder
    fused = network(source, target)  # float32 [B, 3, size, size], values 0 to 1

The target is encoded at several resolutions, which keep pose, expression and background. The source is encoded to one
vector, which sets mean and scale of the decoder's channels: the design of FaceShifter (Li et al. 2019,
arXiv:1912.13457) in small. All norms are over the channels of one image, so images of a batch do not mix.

Shapes: B images, S their size, C channels, Z width of the vector.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

LEVELS = 3  # resolutions below the full one; the size of images is a multiple of 2^LEVELS
GROUPS = 8  # of channels in a norm


def conv(inputs: int, outputs: int, stride: int = 1, *, bias: bool = False) -> nn.Conv2d:
    """Return a convolution of 3 x 3 pixels. A bias has no effect before a norm, and its gradient is rounding only."""
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=bias)


def norm(channels: int) -> nn.GroupNorm:
    """Return a norm without weights, so that features cannot become small as a whole."""
    return nn.GroupNorm(GROUPS, channels, affine=False)


class Encoder(nn.Module):
    """Encode images at LEVELS + 1 resolutions."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        strides = [1] + [2] * LEVELS
        inputs = [3, *widths[:-1]]
        self.levels = nn.ModuleList(conv(a, b, s) for a, b, s in zip(inputs, widths, strides, strict=True))
        self.norms = nn.ModuleList(map(norm, widths))

    def forward(self, images: Tensor) -> list[Tensor]:
        """Return normalised features `[B, C, S, S]`, then those of each lower resolution."""
        features = []
        x = images
        for level, normalise in zip(self.levels, self.norms, strict=True):
            x = normalise(level(x))
            features.append(x)
            x = nn.functional.silu(x)
        return features


class AdaptiveBlock(nn.Module):
    """Convolve features, and set mean and scale of the result by a vector."""

    def __init__(self, inputs: int, outputs: int, identity: int) -> None:
        super().__init__()
        self.conv, self.norm = conv(inputs, outputs), norm(outputs)
        self.style = nn.Linear(identity, 2 * outputs)

    def forward(self, features: Tensor, identity: Tensor) -> Tensor:
        """Return `[B, outputs, S, S]` for features `[B, inputs, S, S]` and vectors `[B, Z]`."""
        scale, shift = self.style(identity)[:, :, None, None].chunk(2, dim=1)
        return nn.functional.silu(self.norm(self.conv(features)) * (1 + scale) + shift)


class SwapGenerator(nn.Module):
    """Make the fused face of a source and a target.

    Args:
        image_size: Height and width of images in pixels, a multiple of 8.
        channels: Channels at the full resolution, a multiple of 8.
        identity_size: Width of the vector of the source.
        blocks: Blocks at the lowest resolution.
    """

    def __init__(self, image_size: int, channels: int, identity_size: int, blocks: int) -> None:
        super().__init__()
        self.config: dict[str, Any] = {
            "model_type": "swap_generator",
            "image_size": image_size,
            "channels": channels,
            "identity_size": identity_size,
            "blocks": blocks,
        }
        widths = [channels * min(2**level, 4) for level in range(LEVELS + 1)]
        self.encoder = Encoder(widths)
        self.identity_encoder = Encoder(widths)
        self.identity = nn.Linear(widths[-1], identity_size)
        self.middle = nn.ModuleList(AdaptiveBlock(widths[-1], widths[-1], identity_size) for _ in range(blocks))
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))  # from the lowest resolution to the full one
        self.enlarge = nn.ModuleList(conv(low, 4 * high, bias=True) for low, high in pairs)
        self.join = nn.ModuleList(AdaptiveBlock(2 * high, high, identity_size) for _, high in pairs)
        self.output = conv(channels, 3, bias=True)

    def forward(self, source: Tensor, target: Tensor, *, with_attributes: bool = False) -> Any:
        """Fuse faces.

        Args:
            source: Images whose identity is used, `[B, 3, S, S]`, values 0 to 1.
            target: Images whose pose, expression and background are kept, `[B, 3, S, S]`.
            with_attributes: Also return the features of the target.

        Returns:
            The fused images `[B, 3, S, S]`, values 0 to 1; with attributes a pair of them and a list of features.
        """
        dtype = self.output.weight.dtype
        vectors = self.identity_encoder(source.to(dtype))[-1]
        identity = self.identity(nn.functional.silu(vectors).mean(dim=(2, 3)))
        attributes = self.encoder(target.to(dtype))
        x = nn.functional.silu(attributes[-1])
        for block in self.middle:
            x = x + block(x, identity)
        for enlarge, join, skipped in zip(self.enlarge, self.join, attributes[-2::-1], strict=True):
            x = nn.functional.pixel_shuffle(enlarge(x), 2)
            x = join(torch.cat([x, skipped], dim=1), identity)
        image = torch.sigmoid(self.output(x).float())
        return (image, attributes) if with_attributes else image


def load(folder: str | Path) -> SwapGenerator:
    """Load a generator from a folder with config.json and model.safetensors, in evaluation mode."""
    from safetensors.torch import load_file

    config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
    names = ("image_size", "channels", "identity_size", "blocks")
    network = SwapGenerator(**{name: config[name] for name in names})
    weights: dict[str, Tensor] = {}
    for path in sorted(Path(folder).glob("model*.safetensors")):
        weights |= load_file(path)
    network.load_state_dict(weights)
    return network.eval()


def to_tensor(image: Any, size: int) -> Tensor:
    """Return the largest square in the middle of an RGB image of Pillow, as float32 `[3, size, size]`, 0 to 1."""
    from PIL.Image import Resampling

    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    square = image.resize((size, size), Resampling.BICUBIC, box=(left, top, left + side, top + side))
    pixels = torch.frombuffer(bytearray(square.tobytes()), dtype=torch.uint8)
    return pixels.view(size, size, 3).permute(2, 0, 1).float() / 255


def upright_rgb(image: Any) -> Any:
    """Return an image of Pillow as RGB with 8 bits: rotated as its Exif data require, with 16-bit pixels scaled."""
    from PIL import ImageOps

    is_scaled = image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))
    upright = ImageOps.exif_transpose(image)
    if is_scaled:  # 65535 / 255 is 257; Pillow would clip values to 255
        upright = upright.convert("I").point(lambda value: value * (1 / 257) + 128.5 / 257).convert("L")
    return upright.convert("RGB")


def to_image(pixels: Tensor) -> Any:
    """Return an image of Pillow for values 0 to 1, `[3, H, W]`."""
    from PIL.Image import frombytes

    values = (pixels.detach().float().clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().cpu()
    return frombytes("RGB", (values.shape[1], values.shape[0]), bytes(values.flatten().tolist()))


def main(source: str, target: str, result: str) -> None:
    """Fuse two image files into a third one."""
    from PIL import Image

    network = load(Path(__file__).parent)
    size = network.config["image_size"]
    faces = []
    for path in (source, target):
        with Image.open(path) as image:
            faces.append(to_tensor(upright_rgb(image), size)[None])
    with torch.no_grad():
        to_image(network(*faces)[0]).save(result)


if __name__ == "__main__":
    main(*sys.argv[1:])
