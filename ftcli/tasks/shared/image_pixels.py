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
| `erased` | `[N, 4]` int64 | rectangles (top, bottom, left, right) that become 0; absent without random erasing |
| `partners` | `[B]` int64 | number of the image that a row is mixed with; absent without mixing, as the next two |
| `pixel_shares` | `[B, 2]` float32 | factors of the own and of the partner's pixels |
| `pasted` | `[B, 4]` int64 | rectangles that have the partner's pixels alone |
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ftcli.tasks.shared.image_colours import change_colours

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from ftcli.tasks.protocol import Batch


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
        pixels = pixels.masked_fill(_inside(batch["erased"], pixels), 0)
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
