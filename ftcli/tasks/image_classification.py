"""Classify images: one label, several labels or a number per row. The loss is a mean over rows.

Images are processed by the model's Hugging Face image processor with the Pillow backend, so pixels do not depend on
torchvision. They are RGB with 8 bits, rotated as their Exif data require; 16-bit pixels are scaled. Every image is
decoded once when rows are prepared, so that a broken image is reported then (`data.max_bad_rows`). Random changes of
training images follow from (seed, epoch, row) and are made where rows are collated, in loader processes with
`data.workers`. Batches have images with 8 bits. `probe` changes colours, normalises, erases and mixes on the device.
Shapes: B rows, C labels.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from ftcli.runtime.errors import InputError, Problem, RowError
from ftcli.tasks.protocol import Batch, Row
from ftcli.tasks.shared.augmentation import NOT_MIXED, Augmentation, AugmentationOptions
from ftcli.tasks.shared.classification import CLASSIFICATION_METRICS, survey_labels
from ftcli.tasks.shared.image_pixels import check_sizes, image_size, model_pixels, normalisation_of, stack_images
from ftcli.tasks.shared.images import check_image, disable_decoding, find_image, load_image, read_size
from ftcli.tasks.shared.label_options import REGRESSION, LabelOptions, option
from ftcli.tasks.shared.problem_types import (
    UNCOMPARED_METRICS,
    blank_target,
    collate_targets,
    is_real,
    metric_names_of,
    problem_of,
)

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from PIL.Image import Image
    from torch import Tensor, nn

    from ftcli.config.recipe import Recipe
    from ftcli.config.yaml_document import Keys
    from ftcli.data.mixture import SourceRows
    from ftcli.tasks.protocol import Span


class Options(AugmentationOptions, LabelOptions):
    """Keys of task_options for image_classification."""


class Task:
    """Image classification and regression."""

    item: Literal["token", "sample"] = "sample"
    columns: tuple[str, ...] = ("image", "label")
    text_columns: tuple[str, ...] = ("label",)  # label_columns.py decides which labels are numbers
    reads_text = False
    auto_class = "AutoModelForImageClassification"
    has_fixed_forward = True
    peft_type: str | None = None
    pipeline_tag = "image-classification"
    starting_recipe: Mapping[str, Mapping[str, Any]] = {
        "model": {"batch_norm": "frozen"},
        "optimizer": {"learning_rate": 2e-4},
    }
    answer_columns: tuple[str, ...] = ("target",)
    file_columns: tuple[str, ...] = ("path",)
    metric_names: tuple[str, ...] = CLASSIFICATION_METRICS
    uncompared_metrics: tuple[str, ...] = UNCOMPARED_METRICS
    metric_names_of = staticmethod(metric_names_of)

    def __init__(self, recipe: Recipe, options: Options) -> None:
        from ftcli.models.load import load_configuration, load_image_processor

        if recipe.data.truncation is not None:
            raise InputError("data.truncation applies to texts, and image_classification has none", hint="delete it")
        self.recipe, self.options = recipe, options
        self.problem, self.problem_type = problem_of(options), option(options, "problem_type")
        self.metric_names = self.problem.metric_names
        if self.problem.terms is not None:  # other modules look for this attribute
            self.terms = self.problem.terms
        self.processor = load_image_processor(recipe.model)
        self.size = image_size(self.processor, load_configuration(recipe.model))
        self.mixes = bool(getattr(options, "mixup", None) or getattr(options, "cutmix", None))

    @staticmethod
    def recipe_problems(recipe: Recipe, where: Callable[[Keys], str]) -> Iterator[Problem]:
        """Yield the reasons why rows cannot be mixed by mixup or cutmix."""
        for name in ("mixup", "cutmix"):
            if not recipe.task_options.get(name):
                continue
            place = where(("task_options", name))
            if recipe.batch.global_size == 1:
                message = f"task_options.{name} mixes rows of a step, and batch.global_size is 1"
                yield Problem(message, place, f"raise batch.global_size, or delete {name}")
            if recipe.task_options.get("problem_type") == REGRESSION:
                message = f"task_options.{name} mixes classes, and problem_type is regression"
                yield Problem(message, place, f"delete {name}")

    @cached_property
    def augmentation(self) -> Augmentation:
        """The random changes of training images, to the size that the processor gives an image."""
        from PIL import Image

        resample = getattr(self.processor, "resample", None)
        resample = int(Image.Resampling.BILINEAR if resample is None else resample)
        mean = getattr(self.processor, "image_mean", None) or 0.5
        mean = [mean] * 3 if isinstance(mean, (int, float)) else list(mean)  # one number stands for all channels
        return Augmentation(self.options, self.recipe.seed, self.size, resample, mean)

    def fingerprint(self) -> str:
        """Return a constant digest, because prepared rows contain encoded images and pixels are computed per batch."""
        return hashlib.sha256(b"image rows hold references").hexdigest()

    def survey(self, rows: Dataset) -> dict[str, Any]:
        """Return {"labels": names of the classes} for the rows of one source with one label per row."""
        return {"labels": survey_labels(rows, self.options.labels)}

    def survey_parts(self, parts: list[SourceRows]) -> tuple[list[SourceRows], dict[str, Any]]:
        """Return the rows with labels as class names, and {"labels": names of the classes}."""
        encoded = {id(part.rows): disable_decoding(part.rows) for part in parts}
        parts = [replace(part, rows=encoded[id(part.rows)]) for part in parts]
        return self.problem.survey(parts)

    def encode(self, row: Row, facts: dict[str, Any]) -> list[Row]:
        """Return one prepared row: {"path", "bytes", "target", "items"}.

        Raises:
            RowError: The image cannot be decoded, or the label is unknown.
        """
        path, data = find_image(row["image"])
        check_image(path, data)
        return [{"path": path, "bytes": data, "target": self._target(row, facts), "items": 1}]

    def _target(self, row: Row, facts: dict[str, Any]) -> Any:
        """Return the index of a row's label, for each class whether the row has it, or a number."""
        return self.problem.target(row, facts)

    def describe_row(self, row: Row, facts: dict[str, Any]) -> tuple[list[Span], dict[str, str]]:
        """Return no text, and path, size and label of the image."""
        width, height, mode = read_size(row["path"], row["bytes"])
        size = f"{width} x {height} pixels, {mode}"
        image = f"{len(row['bytes'])} bytes" if row["path"] is None else row["path"]
        return [], {"image": image, "size": size, "label": self.problem.describe(row["target"], facts)}

    def count_answers(self, rows: Dataset, facts: dict[str, Any]) -> dict[str, int]:
        """Return the number of prepared rows of each label."""
        return self.problem.count_answers(rows, facts)

    def index_rows(self, rows: Dataset) -> None:
        """Return nothing: the companion of a row is the next one of its step."""

    def companions(self, row: Row, index: None) -> list[int]:
        """Return the number of the row that mixup and cutmix mix a row with, if there is one."""
        return [row["next"]] if self.mixes and row["next"] is not None else []

    def facts_of_rows(self, rows: Dataset, facts: dict[str, Any]) -> dict[str, Any]:
        """Return the facts with balanced class weights."""
        return self.problem.facts_of_rows(rows, facts)

    def use_facts(self, facts: dict[str, Any]) -> None:
        """Use the class weights of the rows that a finished run was trained on."""
        self.problem.take_facts(facts)

    def load_model(self, facts: dict[str, Any], **kwargs: Any) -> tuple[nn.Module, list[str]]:
        """Return the model with a head of C labels, and the names of its new modules."""
        from ftcli.models.load import load_model

        self.problem.take_facts(facts)
        self.metric_names = self.problem.metric_names
        head = {"new_head": True, "labels": facts["labels"], "problem_type": self.problem_type}
        return load_model(self.auto_class, self.recipe, **head, **kwargs)

    def finish_model(self, model: nn.Module) -> None:
        """Freeze the embedding of masked patches (DINOv2), which is not used and would never get a gradient."""
        for name, parameter in model.named_parameters():
            if name.split(".")[-1] == "mask_token":
                parameter.requires_grad_(False)

    def blank(self, row: Row) -> Row:
        """Return the row as padding, with a target that the loss ignores."""
        return row | {"target": blank_target(row["target"]), "items": 0}

    def collate(self, rows: list[Row]) -> Batch:
        """Return `targets` `[B]` int64 and the tensors of `image_pixels`, from which `probe` makes pixels, on the host.

        With mixup or cutmix, training rows also have `partner_targets` and `shares` `[B]` float32 of their own losses.
        Padding, and a row whose companion is excluded, are not mixed.
        """
        import torch

        targets = {"targets": collate_targets(rows)}
        if not (self.mixes and rows[0]["training"]):
            return targets | self._images(rows)[0]
        partners = [next((c for c in row["companions"] if row["items"] and c["items"]), None) for row in rows]
        others = [partner or row for row, partner in zip(rows, partners, strict=True)]
        # The partner of a row is nearly always the next row of the batch, so each image is decoded once.
        places = {(row["epoch"], row["id"]): number for number, row in enumerate(rows)}
        images = [*rows]
        for partner in filter(None, partners):
            if places.setdefault((partner["epoch"], partner["id"]), len(images)) == len(images):
                images.append(partner)
        numbers = [
            number if partner is None else places[partner["epoch"], partner["id"]]
            for number, partner in enumerate(partners)
        ]
        pixels, size = self._images(images)
        mixed = [
            NOT_MIXED if partner is None else self.augmentation.mixing(size, row["epoch"], row["id"])
            for row, partner in zip(rows, partners, strict=True)
        ]
        return (
            targets
            | pixels
            | {
                "partners": torch.tensor(numbers),
                "pixel_shares": torch.tensor([[one.pixel_share, 1 - one.pixel_share] for one in mixed]),
                "pasted": torch.tensor([one.pasted for one in mixed]),
                "partner_targets": collate_targets(others),
                "shares": torch.tensor([one.loss_share for one in mixed]),
            }
        )

    def _images(self, rows: list[Row]) -> tuple[Batch, tuple[int, int]]:
        """Return the images of rows as tensors of `image_pixels`, changed at random in training, and their size."""
        import torch

        images = map(self._image, rows)
        training = rows[0]["training"]
        has_size = training and self.augmentation.crop_scale is not None  # the model's size already
        if not self.has_8_bits:
            pixels = self._processed(list(images), has_size=has_size)
            batch, size = {"pixel_values": pixels}, pixels.shape[2:]
        else:
            stacked = stack_images(images) if has_size else self._resized(list(images))
            batch, size = {"images": stacked, "normalisation": normalisation_of(self.processor)}, stacked.shape[1:3]
            if training and self.changes_colours_on_device:
                kinds, factors = zip(*(self.augmentation.colours(row["epoch"], row["id"]) for row in rows), strict=True)
                batch |= {"colour_changes": torch.tensor(kinds), "colour_factors": torch.tensor(factors)}
        height, width = size
        if training and self.augmentation.random_erasing:
            from ftcli.tasks.shared.image_pixels import mean_colour

            boxes = [self.augmentation.erased_box((height, width), row["epoch"], row["id"]) for row in rows]
            batch |= {"erased": torch.tensor(boxes), **mean_colour(self.processor, self.augmentation.fill)}
        return batch, (height, width)

    def _processed(self, images: list[Image], *, has_size: bool) -> Tensor:
        """Return the pixels that the processor makes of images; with `has_size` it does not change their size."""
        return self._apply(images, ("do_resize", "do_center_crop") if has_size else ())

    def _resized(self, images: list[Image]) -> Tensor:
        """Return what the processor makes of images before it normalises them, `[N, height, width, channels]`."""
        return self._apply(images, ("do_rescale", "do_normalize")).movedim(1, -1)

    def _apply(self, images: list[Image], leave_out: tuple[str, ...]) -> Tensor:
        """Return the result of the processor without some of its parts."""
        how = {key: False for key in leave_out if getattr(self.processor, key, None) is not None}
        try:
            pixels: Tensor = self.processor(images, return_tensors="pt", **how)["pixel_values"]
        except ValueError:
            check_sizes(self.processor, images)
            raise
        return pixels

    @property
    def changes_colours_on_device(self) -> bool:
        """Whether `image_pixels` changes brightness, contrast and saturation, and not a loader process."""
        return self.augmentation.changes_colours_last and self.has_8_bits

    @cached_property
    def has_8_bits(self) -> bool:
        """Whether the processor does nothing but rescale and normalise images after they have the model's size.

        Then batches have images with 8 bits. Some processors change the order of colours, add constants, or fill up
        images with 0 at last. So their results for images of noise are compared.
        """
        import torch
        from PIL import Image

        def noise(height: int, width: int) -> list[Image.Image]:
            return [Image.frombytes("RGB", (width, height), random.Random(0).randbytes(3 * height * width))]

        height, width = self.augmentation.size
        has_size, other = noise(height, width), noise(2 * height + 3, height + width)
        normalisation = normalisation_of(self.processor)
        for found, expected in (
            (stack_images(has_size), self._processed(has_size, has_size=True)),
            (self._resized(other), self._processed(other, has_size=False)),
        ):
            if found.dtype != torch.uint8 or found.movedim(-1, 1).shape != expected.shape:
                return False
            pixels = model_pixels({"images": found, "normalisation": normalisation})
            if not torch.allclose(pixels, expected.to(pixels.dtype), rtol=0, atol=1e-5):
                return False
        return not getattr(self.processor, "do_pad", False)

    def _image(self, row: Row) -> Image:
        """Return the decoded image of a row, changed at random in training."""
        try:
            image = load_image(row["path"], row["bytes"])
        except RowError as error:  # the image was valid when rows were prepared
            raise InputError(
                str(error), hint="restore the image: files must not change while a run reads them"
            ) from error
        if not row["training"]:
            return image
        return self.augmentation.change(image, row["epoch"], row["id"], has_own_colours=self.changes_colours_on_device)

    def count(self, batch: Batch) -> int:
        """Return the number of rows that are not padding."""
        return int(is_real(batch["targets"]).sum())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor | dict[str, Tensor]:
        """Return the loss of each row `[B]` float32, 0 for padding; or both terms of a smoothed one.

        The loss of a mixed row is `share * own loss + (1 - share) * loss with the partner's target`.
        """
        logits = model(**self.probe(batch)).logits
        own = self.problem.loss(logits, batch["targets"])
        if "shares" not in batch:
            return own
        other, shares = self.problem.loss(logits, batch["partner_targets"]), batch["shares"]
        if isinstance(own, dict) and isinstance(other, dict):
            return {name: own[name] * shares + other[name] * (1 - shares) for name in own}
        mixed: Tensor = own * shares + other * (1 - shares)
        return mixed

    def eval_step(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return loss and items `[B]`, and target and prediction, `[B]` or `[B, C]`."""
        return self.problem.eval_rows(model(**self.probe(batch)).logits, batch["targets"])

    def metrics(self, rows: dict[str, np.ndarray]) -> dict[str, float]:
        """Return the metrics of the problem's kind, such as accuracy, F1 or squared error."""
        return self.problem.metrics(rows)

    def save_processor(self, folder: str) -> None:
        """Write the image processor."""
        self.processor.save_pretrained(folder)

    def probe(self, batch: Batch) -> Batch:
        """Return the arguments of the model: the pixels of each row, normalised and mixed, on the batch's device.

        They have the dtype of trained weights, because a convolution without autocast takes one dtype only.
        """
        from ftcli.models.precision import trained_dtype

        return {"pixel_values": model_pixels(batch).to(trained_dtype(self.recipe))}
