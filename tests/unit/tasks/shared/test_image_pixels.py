"""Colours that change on the device of a batch have the bits of Pillow."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance

from ftcli.config.recipe import Recipe
from ftcli.runtime.errors import InputError
from ftcli.tasks.build import build_task
from ftcli.tasks.shared.image_pixels import BRIGHTNESS, CONTRAST, SATURATION, change_colours

from ....support.cells import cell

PILLOW = {BRIGHTNESS: ImageEnhance.Brightness, CONTRAST: ImageEnhance.Contrast, SATURATION: ImageEnhance.Color}


def images(count: int, height: int = 23, width: int = 31) -> list[Image.Image]:
    """Return images of noise, from dark to bright ones and from grey to colourful ones."""
    draws = np.random.default_rng(0)
    made = []
    for number in range(count):
        low, high = sorted(draws.integers(0, 257, 2))
        pixels = draws.integers(low, max(high, low + 1), (height, width, 3))
        pixels[..., : number % 3] = pixels[..., 2:]
        made.append(Image.fromarray(pixels.astype(np.uint8)))
    return made


def test_changes_in_any_order_have_the_bits_of_pillow() -> None:
    orders = list(itertools.permutations(PILLOW))
    originals, draws = images(60 * len(orders)), random.Random(0)
    kinds = [orders[number % len(orders)] for number in range(len(originals))]
    factors = [[draws.choice((0.0, 1.0, draws.uniform(0, 2), draws.uniform(0, 2))) for _ in PILLOW] for _ in kinds]
    stacked = torch.from_numpy(np.stack(list(map(np.asarray, originals))))
    found = change_colours(stacked, torch.tensor(kinds), torch.tensor(factors))
    assert found.dtype == torch.uint8 and found.shape == stacked.shape and not found.equal(stacked)
    for image, order, row, actual in zip(originals, kinds, factors, found, strict=True):
        for kind, factor in zip(order, row, strict=True):
            image = PILLOW[kind](image).enhance(factor)
        assert np.array_equal(actual.numpy(), np.asarray(image))


@pytest.mark.parametrize("kind", PILLOW)
@pytest.mark.parametrize("level", [0, 1, 127, 254, 255])
def test_images_of_one_colour_have_the_bits_of_pillow(kind: int, level: int) -> None:
    image = Image.new("RGB", (8, 8), (level, 255 - level, level // 2))
    stacked = torch.from_numpy(np.asarray(image).copy())[None]
    for factor in (0.6, 1.4):
        found = change_colours(stacked, torch.tensor([[kind]]), torch.tensor([[factor]]))
        assert np.array_equal(found[0].numpy(), np.asarray(PILLOW[kind](image).enhance(factor)))


SHORTEST_EDGE = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 16}, "do_center_crop": False}


def changed(inputs: Path, folder: Path, file: str, values: dict[str, Any]) -> Recipe:
    """Return a recipe of images whose model has other values in a file."""
    shutil.copytree(inputs / "resnet", folder)
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | values))
    recipe = cell(inputs, "resnet")
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"name": str(folder)})})


def test_model_for_other_images_than_colour_images_is_refused(inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="model.name: the model takes images with 1 channels, and ftcli makes"):
        build_task(changed(inputs, tmp_path / "model", "config.json", {"num_channels": 1}))
    kind = {"image_processor_type": "Siglip2ImageProcessor"}
    with pytest.raises(InputError, match=r"makes pixels of the shape \[\d+, \d+\] of an image, and not an image"):
        build_task(changed(inputs, tmp_path / "patches", "preprocessor_config.json", kind))


def test_images_that_get_different_sizes_are_refused(inputs: Path, tmp_path: Path) -> None:
    task: Any = build_task(changed(inputs, tmp_path / "model", "preprocessor_config.json", SHORTEST_EDGE))
    assert task._processed(images(3), has_size=False).shape == (3, 3, 16, 21)
    with pytest.raises(InputError, match=r"makes images of different sizes \(16 x 16 and 16 x 21\)"):
        task._processed([*images(2), *images(2, height=31)], has_size=False)
