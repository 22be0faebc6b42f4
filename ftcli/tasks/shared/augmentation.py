"""Random changes of training images that follow from (seed, epoch, row) alone, in any process.

Pillow changes the pixels, and image_pixels.py some of the colours. Pillow is installed wherever images are read, and
its results do not depend on the device. The numbers are drawn here, by a hash, because generators of libraries depend
on what they drew before and on their version.
torchvision was not used, because it has no build for torch without CUDA in the package index, and because its pixels
differ from those of the image processor's Pillow backend, with which models are evaluated. albumentations is no longer
maintained, its successor has another licence, and kornia draws from torch's global generator.

Pillow and numpy are imported inside functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ftcli.runtime.seeds import seed_of
from ftcli.tasks.shared.image_pixels import BRIGHTNESS, CONTRAST, SATURATION

if TYPE_CHECKING:
    from PIL.Image import Image

Range = Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=2, max_length=2)]
Share = Annotated[float, Field(gt=0, le=1)]
CROP, COLOUR, POLICY, ERASE, PARTNER = range(1, 6)  # each kind of change draws its own numbers
ATTEMPTS = 10  # to find a crop or an erased rectangle inside an image, as in torchvision
ERASED_SHARE, ERASED_RATIO = (0.02, 0.33), (0.3, 1 / 0.3)  # of the image; Zhong et al. 2017, section 3.2
MAGNITUDES = 10  # RandAugment's magnitude is between 0 and this

Box = tuple[int, int, int, int]  # top, bottom, left and right of a rectangle
NOWHERE: Box = (0, 0, 0, 0)


class RandAugment(BaseModel):
    """Random operations with one magnitude (Cubuk et al. 2019, arXiv 1909.13719)."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    operations: int = Field(2, ge=1, le=14, description="Number of operations in a row, each drawn from 14.")
    magnitude: float = Field(9, ge=0, le=MAGNITUDES, description="Their strength.")


class AugmentationOptions(BaseModel):
    """Keys of task_options for random changes of training images, which follow from (seed, epoch, row)."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    flip: float = Field(
        0.0, ge=0, le=1, description="Probability of mirroring a training image, drawn from (seed, epoch, row)."
    )
    crop_scale: Range | None = Field(
        None,
        description="Train on a random part of each image, resized to the model's size: least and largest share of its "
        "area, such as [0.08, 1.0] (Szegedy et al. 2014). null: the image processor resizes and crops, as in "
        "evaluations.",
    )
    crop_ratio: Range = Field(
        default=[3 / 4, 4 / 3], description="Least and largest width / height of the random part; only with crop_scale."
    )
    color_jitter: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Brightness, contrast and saturation are multiplied by factors up to this far from 1, in random "
        "order.",
    )
    rand_augment: RandAugment | None = Field(
        None, description="Apply random operations: rotation, shear, translation, contrast, solarisation and others."
    )
    random_erasing: float = Field(
        0.0, ge=0, le=1, description="Probability of replacing a rectangle by the mean colour (Zhong et al. 2017)."
    )
    mixup: Share | None = Field(
        None,
        description="Mix each image and its loss with the next row of the step, by a share from Beta(mixup, mixup) "
        "(Zhang et al. 2017). One label or a list of labels per row.",
    )
    cutmix: Share | None = Field(
        None,
        description="Replace a rectangle by that of the next row of the step, and mix the loss by area, with a share "
        "from Beta(cutmix, cutmix) (Yun et al. 2019). With mixup each row draws one of the two.",
    )

    @model_validator(mode="after")
    def _check_crop(self) -> AugmentationOptions:
        for name in ("crop_scale", "crop_ratio"):
            if (pair := getattr(self, name)) is not None and pair[0] > pair[1]:
                raise ValueError(f"{name} is {pair}: the first number is the least one")
        if self.crop_scale is not None and self.crop_scale[1] > 1:
            raise ValueError(f"crop_scale is {self.crop_scale}: a part is at most 1, the whole image")
        if self.crop_scale is None and self.crop_ratio != type(self).model_fields["crop_ratio"].default:
            raise ValueError("crop_ratio has no effect without crop_scale: set crop_scale, or delete it")
        return self


class Draws:
    """Uniform numbers that follow from whole numbers alone."""

    def __init__(self, *parts: int) -> None:
        self._seed, self._count = seed_of(*parts), 0

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        """Return the next number, from `low` up to `high`."""
        self._count += 1
        return low + (high - low) * seed_of(self._seed, self._count) / 2**63

    def below(self, count: int) -> int:
        """Return the next whole number from 0 to `count - 1`."""
        return min(int(self.uniform() * count), count - 1)

    def beta(self, alpha: float) -> float:
        """Return the next number of Beta(alpha, alpha), alpha at most 1, by Johnk's method (1964)."""
        while True:
            x, y = (math.log(max(self.uniform(), 1e-300)) / alpha for _ in range(2))
            largest = max(x, y)  # logarithms, because small alphas underflow
            total = largest + math.log(math.exp(x - largest) + math.exp(y - largest))
            if total <= 0:
                return math.exp(x - total)


class Mixing(NamedTuple):
    """How a row is mixed with its partner.

    Attributes:
        pixel_share: Factor of the row's own pixels; those of the partner have the rest.
        pasted: Rectangle that has the partner's pixels alone.
        loss_share: Factor of the row's own loss.
    """

    pixel_share: float
    pasted: Box
    loss_share: float


NOT_MIXED = Mixing(1.0, NOWHERE, 1.0)


class Augmentation:
    """The random changes that options ask for.

    Args:
        options: `AugmentationOptions`, or an object with some of its keys.
        seed: Seed of the recipe.
        size: Height and width of the model's images.
        resample: Pillow's number of the resampling filter.
        mean: Mean colour from 0 to 1, which fills what an operation moves into the image.
    """

    def __init__(self, options: Any, seed: int, size: tuple[int, int], resample: int, mean: list[float]) -> None:
        fields = AugmentationOptions.model_fields
        for name in fields:
            setattr(self, name, getattr(options, name, fields[name].get_default(call_default_factory=True)))
        self.seed, self.size, self.resample = seed, size, resample
        self.fill = tuple(round(255 * value) for value in mean)

    flip: float
    crop_scale: list[float] | None
    crop_ratio: list[float]
    color_jitter: float
    rand_augment: RandAugment | None
    random_erasing: float
    mixup: float | None
    cutmix: float | None

    @property
    def changes_colours_last(self) -> bool:
        """Whether training images have the model's size before their colours change, and nothing follows."""
        return bool(self.color_jitter) and self.crop_scale is not None and self.rand_augment is None

    def change(self, image: Image, epoch: int, row: int, *, has_own_colours: bool = False) -> Image:
        """Return a training image, mirrored, cropped and resized, with other colours and operations.

        Args:
            image: The decoded image.
            epoch: The epoch.
            row: Number of the row.
            has_own_colours: Whether to leave brightness, contrast and saturation as they are.
        """
        from PIL import ImageOps
        from PIL.Image import Resampling

        is_mirrored = bool(self.flip) and seed_of(self.seed, epoch, row) / 2**63 < self.flip
        is_late = self.crop_scale is not None and self.resample not in (Resampling.NEAREST, Resampling.BOX)
        if is_mirrored and not is_late:
            image = ImageOps.mirror(image)
        if self.crop_scale is not None:
            left, top, right, bottom = _random_part(
                image.size, self.crop_scale, self.crop_ratio, Draws(self.seed, epoch, row, CROP)
            )
            if is_mirrored and is_late:  # the drawn part is one of the mirrored image
                left, right = image.width - right, image.width - left
            image = image.resize(self.size[::-1], self.resample, box=(left, top, right, bottom))
        if is_mirrored and is_late:  # fewer pixels; the filter weighs left and right alike, so the bits are the same
            image = ImageOps.mirror(image)
        if self.color_jitter and not has_own_colours:
            image = _jitter(image, *self.colours(epoch, row))
        if self.rand_augment is not None:
            draws, policy = Draws(self.seed, epoch, row, POLICY), self.rand_augment
            for _ in range(policy.operations):
                operation = OPERATIONS[draws.below(len(OPERATIONS))]
                sign = 1 if draws.uniform() < 0.5 else -1
                image = operation(image, policy.magnitude / MAGNITUDES, sign, self.fill)
        return image

    def colours(self, epoch: int, row: int) -> tuple[list[int], list[float]]:
        """Return the changes of a row's colours in their order (`image_pixels`), and their factors."""
        draws, left = Draws(self.seed, epoch, row, COLOUR), [BRIGHTNESS, CONTRAST, SATURATION]
        kinds, factors = [], []
        while left:
            kinds.append(left.pop(draws.below(len(left))))
            factors.append(draws.uniform(1 - self.color_jitter, 1 + self.color_jitter))
        return kinds, factors

    def erased_box(self, size: tuple[int, int], epoch: int, row: int) -> Box:
        """Return the rectangle of a row that gets the mean colour, 0 in normalised pixels; or `NOWHERE`.

        Args:
            size: Height and width of the pixels.
            epoch: The epoch.
            row: Number of the row.
        """
        draws = Draws(self.seed, epoch, row, ERASE)
        if draws.uniform() >= self.random_erasing:
            return NOWHERE
        height, width = size
        for _ in range(ATTEMPTS):
            area = draws.uniform(*ERASED_SHARE) * height * width
            ratio = math.exp(draws.uniform(*map(math.log, ERASED_RATIO)))
            tall, wide = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
            if 0 < tall < height and 0 < wide < width:
                top, left = draws.below(height - tall + 1), draws.below(width - wide + 1)
                return top, top + tall, left, left + wide
        return NOWHERE

    def mixing(self, size: tuple[int, int], epoch: int, row: int) -> Mixing:
        """Return how a row is mixed with its partner, by mixup or cutmix.

        Args:
            size: Height and width of the pixels.
            epoch: The epoch.
            row: Number of the row.
        """
        draws = Draws(self.seed, epoch, row, PARTNER)
        cuts = draws.uniform() < 0.5 if self.mixup and self.cutmix else self.cutmix is not None
        share = draws.beta((self.cutmix if cuts else self.mixup) or 1.0)
        if not cuts:
            return Mixing(share, NOWHERE, share)
        height, width = size
        part = math.sqrt(1 - share)  # of each side
        middle_y, middle_x = draws.below(height), draws.below(width)
        tall, wide = int(height * part), int(width * part)
        top, bottom = max(middle_y - tall // 2, 0), min(middle_y + (tall + 1) // 2, height)
        left, right = max(middle_x - wide // 2, 0), min(middle_x + (wide + 1) // 2, width)
        return Mixing(1.0, (top, bottom, left, right), 1 - (bottom - top) * (right - left) / (height * width))


def _random_part(
    size: tuple[int, int], scale: list[float], ratio: list[float], draws: Draws
) -> tuple[int, int, int, int]:
    """Return (left, top, right, bottom) of a random part of an image; after ten attempts the largest in the middle."""
    width, height = size
    for _ in range(ATTEMPTS):
        area = width * height * draws.uniform(*scale)
        side = math.exp(draws.uniform(*map(math.log, ratio)))
        wide, tall = round(math.sqrt(area * side)), round(math.sqrt(area / side))
        if 0 < wide <= width and 0 < tall <= height:
            left, top = draws.below(width - wide + 1), draws.below(height - tall + 1)
            return left, top, left + wide, top + tall
    wide, tall = min(width, max(1, round(height * ratio[1]))), min(height, max(1, round(width / ratio[0])))
    left, top = (width - wide) // 2, (height - tall) // 2
    return left, top, left + wide, top + tall


def _jitter(image: Image, kinds: list[int], factors: list[float]) -> Image:
    """Return an image with changed colours. `image_pixels.change_colours` does the same for a batch."""
    from PIL import ImageEnhance

    changes: list[Any] = [ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color]
    for kind, factor in zip(kinds, factors, strict=True):
        image = changes[kind](image).enhance(factor)
    return image


Fill = tuple[int, ...]
Operation = Callable[["Image", float, int, Fill], "Image"]  # (image, magnitude from 0 to 1, sign, colour)


def _enhance(name: str) -> Operation:
    """Return an operation that multiplies a property by up to 0.9 more or less."""

    def operation(image: Image, magnitude: float, sign: int, fill: Fill) -> Image:
        from PIL import ImageEnhance

        changed: Image = getattr(ImageEnhance, name)(image).enhance(1 + 0.9 * magnitude * sign)
        return changed

    return operation


def _affine(*matrix: float) -> Operation:
    """Return an operation that moves pixels by `matrix` times the magnitude; translations are shares of the size."""

    def operation(image: Image, magnitude: float, sign: int, fill: Fill) -> Image:
        from PIL.Image import Resampling, Transform

        a, b, c, d, e, f = (value * magnitude * sign for value in matrix)
        numbers = (1 + a, b, c * image.width, d, 1 + e, f * image.height)
        return image.transform(image.size, Transform.AFFINE, numbers, Resampling.BILINEAR, fillcolor=fill)

    return operation


def _rotate(image: Image, magnitude: float, sign: int, fill: Fill) -> Image:
    from PIL.Image import Resampling

    return image.rotate(30 * magnitude * sign, Resampling.BILINEAR, fillcolor=fill)


def _ops(name: str, argument: Callable[[float], int] | None = None) -> Operation:
    """Return an operation of Pillow's ImageOps, with an argument that follows from the magnitude."""

    def operation(image: Image, magnitude: float, sign: int, fill: Fill) -> Image:
        from PIL import ImageOps

        changed: Image = getattr(ImageOps, name)(image, *([] if argument is None else [argument(magnitude)]))
        return changed

    return operation


# The 14 operations of Cubuk et al. 2019, figure 2, with the ranges of torchvision's RandAugment.
OPERATIONS: tuple[Operation, ...] = (
    lambda image, magnitude, sign, fill: image,
    _ops("autocontrast"),
    _ops("equalize"),
    _rotate,
    _ops("solarize", lambda magnitude: round(256 * (1 - magnitude))),
    _ops("posterize", lambda magnitude: 8 - round(4 * magnitude)),
    *(_enhance(name) for name in ("Color", "Contrast", "Brightness", "Sharpness")),
    _affine(0, 0.3, 0, 0, 0, 0),
    _affine(0, 0, 0, 0.3, 0, 0),
    _affine(0, 0, 150 / 331, 0, 0, 0),
    _affine(0, 0, 0, 0, 0, 150 / 331),
)
