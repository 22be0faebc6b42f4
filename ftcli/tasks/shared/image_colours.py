"""Change brightness, contrast and saturation of a batch of images on its device, with the bits of Pillow.

Pillow would need a quarter of the time in which a loader process prepares an image. Each change is a blend of the image
with another one, `other + factor * (image - other)`: with black for brightness, with the mean grey for contrast, and
with the grey image for saturation (Pillow's ImageEnhance and libImaging/Blend.c). All steps are exact in float32,
except the product and the sum of the blend, which are rounded as in Pillow because they are two operations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

BRIGHTNESS, CONTRAST, SATURATION = range(3)
GREY = (19595, 38470, 7471)  # 65536 times the shares of red, green and blue (libImaging/Convert.c)


def change_colours(images: Tensor, kinds: Tensor, factors: Tensor) -> Tensor:
    """Return images with changed colours, `[N, height, width, 3]` uint8. The device is not waited for.

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
