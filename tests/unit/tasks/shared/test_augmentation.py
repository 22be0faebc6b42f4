"""Random changes of images: functions of (seed, epoch, row), with the distributions of their papers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

import ftcli
from ftcli.config.load import load_recipe
from ftcli.config.recipe import Recipe
from ftcli.config.yaml_document import dump_document
from ftcli.data.cache import prepare_rows
from ftcli.data.sampler import TrainOrder
from ftcli.runtime.errors import InputError
from ftcli.tasks.build import build_task
from ftcli.tasks.shared.augmentation import (
    CROP,
    NOWHERE,
    OPERATIONS,
    Augmentation,
    AugmentationOptions,
    Draws,
    RandAugment,
    _random_part,
)
from ftcli.tasks.shared.image_pixels import model_pixels
from ftcli.tasks.shared.images import load_image
from ftcli.testing import save_tiny_vit
from ftcli.training.batches.dataloaders import Collate, Rows

from ....support.counting import count_calls
from ....support.recipes import minimal_values

NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8))
ALL: dict[str, Any] = {
    "flip": 0.5,
    "crop_scale": [0.2, 1.0],
    "color_jitter": 0.4,
    "rand_augment": {"operations": 2, "magnitude": 7},
    "random_erasing": 0.5,
    "mixup": 0.2,
    "cutmix": 1.0,
}
LOSSES = ("targets", "partner_targets", "shares")
MODES = ("RGB", "L", "1", "P", "CMYK", "LA", "RGBA")


def augmentation(**options: Any) -> Augmentation:
    return Augmentation(AugmentationOptions(**options), 3, (16, 16), 2, [0.5, 0.5, 0.5])


def test_change_of_an_image_depends_on_epoch_and_row_only() -> None:
    one, two = augmentation(**ALL), augmentation(**ALL)
    expected = {(epoch, row): np.asarray(one.change(NOISE, epoch, row)) for epoch in (0, 1) for row in range(6)}
    for epoch, row in reversed(expected):
        assert np.array_equal(np.asarray(two.change(NOISE, epoch, row)), expected[epoch, row])
    assert len({value.tobytes() for value in expected.values()}) == len(expected)
    other = Augmentation(AugmentationOptions(**ALL), 4, (16, 16), 2, [0.5] * 3)
    assert any(not np.array_equal(np.asarray(other.change(NOISE, *key)), value) for key, value in expected.items())


@pytest.mark.parametrize("resample", range(6))
def test_mirrored_parts_are_parts_of_the_mirrored_image(resample: int) -> None:
    one = Augmentation(AugmentationOptions(flip=1.0, crop_scale=[0.2, 1.0]), 3, (16, 24), resample, [0.5] * 3)
    for row in range(50):
        left, top, right, bottom = _random_part(NOISE.size, [0.2, 1.0], [3 / 4, 4 / 3], Draws(3, 1, row, CROP))
        mirrored = ImageOps.mirror(NOISE).resize((24, 16), resample, box=(left, top, right, bottom))
        assert np.array_equal(np.asarray(one.change(NOISE, 1, row)), np.asarray(mirrored))


def test_change_without_options_returns_the_image() -> None:
    assert augmentation().change(NOISE, 0, 0) is NOISE


def test_random_part_has_the_share_and_the_ratio_that_are_asked_for() -> None:
    shares, ratios = [], []
    for row in range(300):
        left, top, right, bottom = _random_part((400, 300), [0.08, 1.0], [3 / 4, 4 / 3], Draws(0, row))
        assert 0 <= left < right <= 400 and 0 <= top < bottom <= 300
        shares.append((right - left) * (bottom - top) / 120_000)
        ratios.append((right - left) / (bottom - top))
    assert 0.07 < min(shares) < 0.15 and 0.85 < max(shares) <= 1.0
    assert 0.73 < min(ratios) < 0.8 and 1.25 < max(ratios) < 1.36


@pytest.mark.parametrize("size", [(1, 1), (300, 2), (2, 300)])
def test_random_part_of_a_narrow_image_is_inside_it(size: tuple[int, int]) -> None:
    for row in range(20):
        left, top, right, bottom = _random_part(size, [0.9, 1.0], [3 / 4, 4 / 3], Draws(0, row))
        assert 0 <= left < right <= size[0] and 0 <= top < bottom <= size[1]


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_draws_beta_has_mean_and_variance_of_the_distribution(alpha: float) -> None:
    values = np.array([Draws(1, row).beta(alpha) for row in range(4000)])
    assert abs(values.mean() - 0.5) < 0.02
    assert values.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.05)


@pytest.mark.parametrize("number", range(len(OPERATIONS)))
def test_operation_of_rand_augment_keeps_the_size_and_does_nothing_at_magnitude_zero(number: int) -> None:
    for size in ((1, 1), (300, 7)):
        changed = OPERATIONS[number](Image.new("RGB", size, (90, 10, 200)), 1.0, -1, (128, 128, 128))
        assert changed.size == size and changed.mode == "RGB"
    unchanged = np.array_equal(np.asarray(OPERATIONS[number](NOISE, 0.0, 1, (0, 0, 0))), np.asarray(NOISE))
    assert unchanged or number in (1, 2)  # autocontrast and equalize have no magnitude
    if number:
        assert not np.array_equal(np.asarray(OPERATIONS[number](NOISE, 1.0, 1, (0, 0, 0))), np.asarray(NOISE))


def filled(height: int = 16, width: int = 16, **tensors: Any) -> torch.Tensor:
    """Return the pixels of a batch with two images, one of zeros and one of ones."""
    values = torch.stack([torch.zeros(3, height, width), torch.ones(3, height, width)])
    return model_pixels({"pixel_values": values} | {name: torch.tensor(value) for name, value in tensors.items()})


def test_erased_box_is_one_rectangle_of_some_images_and_becomes_the_mean() -> None:
    shares = []
    for row in range(200):
        box = augmentation(random_erasing=0.25).erased_box((32, 24), 0, row)
        pixels = filled(32, 24, erased=[NOWHERE, box])[1]
        erased = pixels[0] == 0
        shares.append(float(erased.float().mean()))
        top, bottom, left, right = box
        assert (pixels == pixels[0]).all() and erased.sum() == (bottom - top) * (right - left)
        assert erased[top:bottom, left:right].all()
    assert 0.15 < np.mean([share > 0 for share in shares]) < 0.35
    assert max(shares) < 0.4


def test_mixing_takes_pixels_and_loss_in_the_same_share() -> None:
    mixup, cutmix, either = augmentation(mixup=0.4), augmentation(cutmix=1.0), augmentation(mixup=0.4, cutmix=1.0)
    kinds = set()
    for row in range(40):
        for how in (mixup, cutmix, either):
            share, pasted, loss_share = how.mixing((16, 16), 0, row)
            mixed = filled(partners=[1], pixel_shares=[[share, 1 - share]], pasted=[pasted])
            assert mixed.shape == (1, 3, 16, 16) and mixed.mean().item() == pytest.approx(1 - loss_share, abs=1e-6)
            is_cut = pasted != NOWHERE
            assert not is_cut or set(mixed.unique().tolist()) <= {0.0, 1.0}
            kinds.add((how is either, is_cut))
    assert kinds >= {(True, True), (True, False), (False, True), (False, False)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of many sizes and modes in three classes, one of them with one image, and a model."""
    folder = tmp_path_factory.mktemp("images")
    save_tiny_vit(folder / "vit")
    draw = np.random.default_rng(1)
    for index in range(15):
        label = "once" if index == 14 else f"class {index % 2}"
        (folder / "images" / label).mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 255, (3 + 4 * index, 40 - index, 3), dtype=np.uint8)
        mode = MODES[index % len(MODES)]
        image = Image.fromarray(pixels).convert(mode if mode != "LA" else "L").convert(mode)
        image.save(folder / "images" / label / f"{index}.{'tif' if mode == 'CMYK' else 'png'}")
    return folder


def recipe(folder: Path, rows: int = 6, **options: Any) -> Recipe:
    sections = {"model": {"name": str(folder / "vit"), "dropout": 0.0}, "data": {"train": str(folder / "images")}}
    values = minimal_values("image_classification", **sections, batch={"global_size": rows, "micro_size": rows})
    return Recipe.model_validate(values | {"task_options": options})


def batches(folder: Path, micro: int, **options: Any) -> dict[int, tuple[Any, ...]]:
    """Return the pixels, targets and shares of every row of two epochs, by (epoch, id), at a micro size."""
    task = build_task(recipe(folder, **options))
    prepared = prepare_rows(task.recipe, task)  # type: ignore[attr-defined]
    rows, collate = Rows(prepared.train, task, training=True), Collate(task)
    sizes = {"global_size": 6, "micro_size": micro, "seed": 0, "first_step": 0, "steps": 6, "steps_per_epoch": 3}
    found: dict[Any, tuple[Any, ...]] = {}
    for keys in TrainOrder(len(rows), names_next=True, **sizes):
        batch = collate([rows[key] for key in keys])
        ids, pixels = batch["sample_ids"].tolist(), task.probe(batch)["pixel_values"]  # type: ignore[attr-defined]
        for index, (key, number) in enumerate(zip(keys, ids, strict=True)):
            if number >= 0:
                found[key[0], number] = tuple(value[index] for value in (pixels, *(batch[name] for name in LOSSES)))
    return found


def test_collate_of_all_changes_does_not_depend_on_the_micro_size(folder: Path) -> None:
    expected, actual = batches(folder, 6, **ALL), batches(folder, 2, **ALL)
    assert set(actual) == set(expected) and len(expected) == 30  # 15 rows in two epochs, the last step of 3 rows
    assert all(torch.equal(a, b) for key in expected for a, b in zip(actual[key], expected[key], strict=True))
    assert any(0 < float(values[3]) < 1 for values in expected.values())


def test_collate_of_mixed_rows_decodes_each_image_once(folder: Path) -> None:
    task: Any = build_task(recipe(folder, mixup=1.0))
    rows = Rows(prepare_rows(task.recipe, task).train, task, training=True)
    documents = [rows[0, number, number + 1][0] for number in range(5)]
    assert count_calls(lambda: task.collate(documents), load_image) == 6  # the last partner is not in the batch


def changed_by_the_processor(task: Any, row: dict[str, Any]) -> torch.Tensor:
    """Return the pixels of a changed row as the image processor normalises them, with the rectangle set to 0."""
    image = task.augmentation.change(load_image(row["path"], row["bytes"]), row["epoch"], row["id"])
    keeps_size = {"do_resize": False} if task.augmentation.crop_scale is not None else {}
    pixels = task.processor([image], return_tensors="pt", **keeps_size)["pixel_values"][0].clone()
    top, bottom, left, right = task.augmentation.erased_box(tuple(pixels.shape[1:]), row["epoch"], row["id"])
    pixels[:, top:bottom, left:right] = 0
    return pixels


@pytest.mark.parametrize("crops", [True, False])
@pytest.mark.parametrize("do_pad", [True, False])
@pytest.mark.parametrize("operates", [True, False])
def test_training_pixels_are_those_of_the_processor_erased_and_mixed(
    folder: Path, crops: bool, do_pad: bool, operates: bool
) -> None:
    """With `do_pad` the processor makes the pixels on the host; otherwise the batch has 8 bits.

    Without further operations colours change on the device.
    """
    options = ALL | {"crop_scale": [0.2, 1.0] if crops else None}
    task: Any = build_task(recipe(folder, **options if operates else options | {"rand_augment": None}))
    task.processor.do_pad = do_pad
    rows = Rows(prepare_rows(task.recipe, task).train, task, training=True)
    documents = [rows[1, number, number + 1][0] for number in range(6)]
    batch, kinds = task.collate(documents), set()
    found = task.probe(batch)["pixel_values"]
    assert ("colour_changes" in batch) == (crops and not do_pad and not operates)
    assert (batch["images"].dtype == torch.uint8 and len(batch["images"]) == 7) if not do_pad else "images" not in batch
    for row, actual, loss_share in zip(documents, found, batch["shares"], strict=True):
        own, other = (changed_by_the_processor(task, one) for one in (row, row["companions"][0]))
        share, (top, bottom, left, right), expected_share = task.augmentation.mixing(tuple(own.shape[1:]), 1, row["id"])
        mixed = own * share + other * (1 - share)
        mixed[:, top:bottom, left:right] = other[:, top:bottom, left:right]
        assert torch.allclose(actual, mixed, rtol=0, atol=1e-5)
        assert loss_share.item() == pytest.approx(expected_share, abs=1e-6)
        kinds.add(bottom > 0)
    assert kinds == {True, False}  # both ways of mixing


@pytest.mark.parametrize("do_pad", [True, False])
def test_erased_pixels_are_the_mean_colour_without_normalisation(folder: Path, do_pad: bool) -> None:
    task: Any = build_task(recipe(folder, random_erasing=1.0))
    task.processor.do_normalize, task.processor.do_pad = False, do_pad
    rows = Rows(prepare_rows(task.recipe, task).train, task, training=True)
    batch = task.collate([rows[0, number][0] for number in range(3)])
    for pixels, (top, bottom, left, right) in zip(task.probe(batch)["pixel_values"], batch["erased"], strict=True):
        colour = torch.tensor(task.processor.image_mean).view(3, 1, 1).expand(3, int(bottom - top), int(right - left))
        assert torch.allclose(pixels[:, top:bottom, left:right], colour, rtol=0, atol=0.51 / 255)


def test_loss_of_mixed_rows_is_the_share_of_both_losses(folder: Path) -> None:
    task: Any = build_task(recipe(folder, mixup=1.0, label_smoothing=0.1, class_weights={"once": 3.0}))
    prepared = prepare_rows(task.recipe, task)
    model = task.load_model(prepared.facts, dtype=torch.float32)[0].eval()
    rows = Rows(prepared.train, task, training=True)
    batch = task.collate([rows[0, 0, 14][0], rows[0, 14][0], rows[0, -1][0]])
    assert batch["shares"].tolist()[1:] == [1.0, 1.0] and 0 < batch["shares"][0] < 1
    logits = model(**task.probe(batch)).logits
    nll = -logits.log_softmax(-1)
    own, other = nll[0, batch["targets"][0]], 3 * nll[0, batch["partner_targets"][0]]
    share = batch["shares"][0]
    losses = task.loss(model, batch)["nll"]
    assert losses[0].item() == pytest.approx((share * own + (1 - share) * other).item(), rel=1e-5)
    assert losses[1].item() == pytest.approx(3 * nll[1, batch["targets"][1]].item(), rel=1e-5)
    assert losses[2] == 0 and task.count(batch) == 2


def test_rows_beside_an_excluded_one_are_not_mixed(folder: Path) -> None:
    task: Any = build_task(recipe(folder, mixup=1.0))
    prepared = prepare_rows(task.recipe, task)
    rows = Rows(prepared.train, task, training=True, excluded={prepared.train[1]["id"]})
    batch = task.collate([rows[0, 0, 1][0], rows[0, 1, 2][0], rows[0, 2, 3][0]])
    assert batch["shares"].tolist()[:2] == [1.0, 1.0] and 0 < batch["shares"][2] < 1
    assert batch["partner_targets"][2] == prepared.train[3]["target"] and task.count(batch) == 2


def test_collate_of_evaluation_rows_changes_nothing(folder: Path) -> None:
    plain, *changed = (build_task(recipe(folder, **options)) for options in ({}, ALL, ALL | {"rand_augment": None}))
    prepared = prepare_rows(plain.recipe, plain)  # type: ignore[attr-defined]
    first, *others = (Collate(task)([Rows(prepared.train, task, training=False)[0, 3]]) for task in (plain, *changed))
    for other in others:
        assert set(first) == set(other) and torch.equal(first["images"], other["images"])


BAD: list[tuple[dict[str, Any], str]] = [
    ({"crop_scale": [1.0, 0.1]}, "the first number is the least one"),
    ({"crop_scale": [0.5, 1.5]}, "a part is at most 1, the whole image"),
    ({"crop_ratio": [0.5, 2.0]}, "crop_ratio has no effect without crop_scale"),
    ({"mixup": 1.5}, "mixup is 1.5, and must be a number, above 0 and at most 1"),
    ({"rand_augment": {"magnitude": 11}}, "rand_augment.magnitude is 11"),
    ({"color_jiter": 0.4}, "did you mean 'color_jitter'"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_load_recipe_with_impossible_changes_names_the_key(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    sections = {"model": {"name": "m"}, "data": {"train": "rows"}}
    values = minimal_values("image_classification", **sections) | {"task_options": options}
    (tmp_path / "r.yaml").write_text(dump_document(json.loads(json.dumps(values))))
    with pytest.raises(InputError) as caught:
        load_recipe(tmp_path / "r.yaml")
    assert message in str(caught.value) and "task_options" in str(caught.value)


def test_task_that_mixes_one_row_per_step_or_numbers_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match=r"task_options.mixup mixes rows of a step, and batch.global_size is 1"):
        build_task(recipe(folder, rows=1, mixup=0.2))
    with pytest.raises(InputError, match=r"task_options.cutmix mixes classes, and problem_type is regression"):
        build_task(recipe(folder, cutmix=1.0, problem_type="regression"))


def test_check_of_mixed_rows_names_the_place_of_a_step_with_one_row(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(dump_document(recipe(folder, rows=1, mixup=0.2, cutmix=0.2).model_dump(mode="json")))
    line = 1 + path.read_text().splitlines().index("  mixup: 0.2")
    with pytest.raises(InputError) as caught:
        ftcli.check(path, cpu=True)
    first = caught.value.problems[0]
    assert (first.where, first.hint) == (f"{path}:{line}", "raise batch.global_size, or delete mixup")
    assert [problem.what.split()[0] for problem in caught.value.problems] == [
        "task_options.mixup",
        "task_options.cutmix",
    ]


def test_rand_augment_has_the_papers_defaults() -> None:
    assert (RandAugment().operations, RandAugment().magnitude) == (2, 9)
