"""Make the pixels for the model from the images of a batch: normalised, erased and mixed, on the batch's device.

A batch has images with 8 bits, a quarter of the bytes of float32. So loader processes write, and the host copies, a
quarter. What changes colours, and pixels after normalising, is part of the batch as small tensors, and is applied here.

A batch of images has these tensors. B: rows, N: images, which are those of the rows in their order, and then partners
that are no row of the batch.

| name | shape | meaning |
|---|---|---|
| `images` | `[N, height, width, 3]` uint8 | the images |
| `colour_changes` | `[N, changes]` int64 | changes of brightness, contrast and saturation; absent without them |
| `colour_factors` | `[N, changes]` float32 | their factors |
| `normalisation` | `[2, 3]` float32 | factor and summand of each channel |
| `pixel_values` | `[N, channels, height, width]` | instead of both: the pixels of a processor that does more |
| `erased` | `[N, 4]` int64 | rectangles (top, bottom, left, right) of the mean colour; absent without random erasing |
| `mean_colour` | `[3]` float32 | their pixels; absent where they are 0, because the pixels are normalised |
| `partners` | `[B]` int64 | number of the image that a row is mixed with; absent without mixing, as the next two |
| `pixel_shares` | `[B, 2]` float32 | factors of the own and of the partner's pixels |
| `pasted` | `[B, 4]` int64 | rectangles that have the partner's pixels alone |
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ftcli.runtime.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from ftcli.tasks.protocol import Batch

BRIGHTNESS, CONTRAST, SATURATION = range(3)
GREY = (19595, 38470, 7471)  # 65536 times the shares of red, green and blue (libImaging/Convert.c)


def image_size(processor: Any, config: dict[str, Any]) -> tuple[int, int]:
    """Return the (height, width) that a model's image processor gives square images.

    Args:
        processor: The image processor of the model.
        config: Values of the model's configuration.

    Raises:
        InputError: The model does not take colour images, or the processor makes no images, but patches.
    """
    from PIL.Image import new

    if (channels := config.get("num_channels") or 3) != 3:
        raise InputError(
            f"model.name: the model takes images with {channels} channels, and ftcli makes images with 3",
            hint="name a model for colour images",
        )
    made = processor([new("RGB", (64, 64))], return_tensors="np")["pixel_values"].shape
    if len(made) != 4:
        raise InputError(
            f"model.name: the image processor makes pixels of the shape {list(made[1:])} of an image, and not an image",
            hint="name a model whose processor makes images of one height and width",
        )
    return made[2], made[3]


def check_sizes(processor: Any, images: Iterable[Image]) -> None:
    """Check that an image processor makes images of one size.

    Raises:
        InputError: It makes images of different sizes.
    """
    made = sorted({processor([image], return_tensors="np")["pixel_values"].shape[2:] for image in images})
    if len(made) > 1:
        sizes = " and ".join(f"{height} x {width}" for height, width in made[:2])
        raise InputError(
            f"model.name: the image processor makes images of different sizes ({sizes}), which cannot be in one batch",
            hint="set `size` in preprocessor_config.json to a height and a width, or `do_center_crop` to true",
        )


def stack_images(images: Iterable[Image]) -> Tensor:
    """Return RGB images of one size as `[N, height, width, 3]` uint8; in a loader process, in shared memory.

    Args:
        images: The images. Each is released before the next one is taken, so an iterator needs less memory.
    """
    import numpy
    import torch
    from torch.utils.data import default_collate

    stacked: Tensor = default_collate([torch.from_numpy(numpy.array(image)) for image in images])
    return stacked


def normalisation_of(processor: Any) -> Tensor:
    """Return factor and summand of each channel, `[2, 3]` float32, with which an image processor normalises.

    Args:
        processor: The image processor of a model.
    """
    import torch

    scale, shift = torch.ones(3), torch.zeros(3)
    if getattr(processor, "do_rescale", False):
        scale = scale * processor.rescale_factor
    if getattr(processor, "do_normalize", False):
        # One number stands for all channels.
        mean, deviation = (torch.tensor(values).expand(3) for values in (processor.image_mean, processor.image_std))
        scale, shift = scale / deviation, -mean / deviation
    return torch.stack([scale, shift])


def mean_colour(processor: Any, colour: tuple[int, ...]) -> dict[str, Tensor]:
    """Return {"mean_colour": pixels of a colour `[3]`} if a processor does not normalise; its mean is 0 otherwise."""
    import torch

    if getattr(processor, "do_normalize", False):
        return {}
    return {"mean_colour": normalisation_of(processor)[0] * torch.tensor(colour)}


def model_pixels(batch: Batch) -> Tensor:
    """Return the pixels of each row, `[B, channels, height, width]` float32. The device is not waited for.

    Args:
        batch: Tensors of a batch of images, as above, on any device.
    """
    pixels: Tensor
    if "images" in batch:
        scale, shift = batch["normalisation"].view(2, 3, 1, 1)
        # They are put into the order of channels while they have 8 bits. Multiplying and adding are two operations,
        # because devices differ in whether one operation rounds the product before it adds.
        images = batch["images"]
        if "colour_changes" in batch:
            images = change_colours(images, batch["colour_changes"], batch["colour_factors"])
        values = images.permute(0, 3, 1, 2).contiguous()
        pixels = values.float().mul_(scale).add_(shift)
    else:
        pixels = batch["pixel_values"]
    if "erased" in batch:
        inside = _inside(batch["erased"], pixels)
        if "mean_colour" in batch:
            pixels = batch["mean_colour"].view(-1, 1, 1).where(inside, pixels)
        else:
            pixels = pixels.masked_fill(inside, 0)
    if "partners" not in batch:
        return pixels
    own, other = batch["pixel_shares"].view(-1, 2, 1, 1, 1).unbind(1)
    pasted = _inside(batch["pasted"], pixels)
    own, other = own.masked_fill(pasted, 0), other.masked_fill(pasted, 1)
    return pixels[: len(own)] * own + pixels.index_select(0, batch["partners"]) * other


def _inside(boxes: Tensor, pixels: Tensor) -> Tensor:
    """Return which pixels are inside of the rectangle `[N, 4]` of their image: `[N, 1, height, width]` bool."""
    import torch

    top, bottom, left, right = boxes.view(-1, 4, 1, 1, 1).unbind(1)
    y = torch.arange(pixels.shape[2], device=pixels.device).view(-1, 1)
    x = torch.arange(pixels.shape[3], device=pixels.device)
    return (y >= top) & (y < bottom) & (x >= left) & (x < right)


def change_colours(images: Tensor, kinds: Tensor, factors: Tensor) -> Tensor:
    """Return images with changed colours, `[N, height, width, 3]` uint8. The device is not waited for.

    In a loader process, Pillow needs a quarter of the time of an image for this. The bits are those of Pillow. Each
    change is a blend of the image with another one, `other + factor * (image - other)`: with black for brightness, with
    the mean grey for contrast, and with the grey image for saturation (Pillow's ImageEnhance and libImaging/Blend.c).
    All steps are exact in float32, except the product and the sum of the blend, which are rounded as in Pillow because
    they are two operations.

    Args:
        images: `[N, height, width, 3]` uint8, red, green and blue.
        kinds: The changes of each image in their order, `[N, changes]` int64.
        factors: The factor of each change, `[N, changes]` float32; 1 changes nothing.
    """
    import torch

    values = images.float()
    for kind, factor in zip(kinds.unbind(1), factors.unbind(1), strict=True):
        kind, factor = kind.view(-1, 1, 1), factor.view(-1, 1, 1, 1)
        grey = _grey(values)
        mean = (grey.sum((1, 2), keepdim=True, dtype=torch.float64) / grey[0].numel() + 0.5).floor().float()
        other = grey.where(kind == SATURATION, mean).masked_fill(kind == BRIGHTNESS, 0).unsqueeze(3)
        values = (values - other).mul_(factor).add_(other).clamp_(0, 255).floor_()
    return values.to(images.dtype)


def _grey(values: Tensor) -> Tensor:
    """Return the grey values of images, whole numbers `[N, height, width]` float32. Sums stay below 2 ** 24."""
    red, green, blue = (values[..., channel] * share for channel, share in enumerate(GREY))
    return (red + green + blue + 0x8000).div_(0x10000).floor_()
