"""Fuse faces: a generator gives the face of a target image the identity of a source image. Several losses.

A row is a face and the name of its person. Each row is a target; its source is another row, drawn from the seed, the
epoch and the row. Four terms are trained, each with a weight of its own (shared/face_swap_model.py). Frozen networks
compute two of them. There is no adversarial term: it would need a second network with an optimizer of its own, which is
updated in turns with the generator.
Shapes: B rows, S height and width of images.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ftcli.config.recipe_model import NO_MODEL
from ftcli.data.label_names import name_of
from ftcli.models.helper_models import RANDOM
from ftcli.runtime.errors import InputError, Problem, RowError
from ftcli.runtime.seeds import seed_of
from ftcli.tasks.protocol import Batch, Row, Term
from ftcli.tasks.shared.identity_pairs import People, index_people, partner_of
from ftcli.tasks.shared.images import check_image, find_image, load_image, read_size

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from torch import Tensor, nn

    from ftcli.config.recipe import Recipe
    from ftcli.config.yaml_document import Keys
    from ftcli.tasks.protocol import Span

SMALLEST = 0.5  # smallest side of a face file, as a share of image_size
LONGEST = 2.0  # largest ratio of the sides of a face file
SAME = "same"  # count of the rows whose source and target are one person
FILE, SHEET = "generator.py", "faces.png"


class Weights(BaseModel):
    """Weights of the terms of the loss."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    identity: float = Field(10.0, ge=0, allow_inf_nan=False, description="1 - cosine of the recogniser's vectors.")
    reconstruction: float = Field(
        10.0, ge=0, allow_inf_nan=False, description="L1 of the pixels, where source and target are one person."
    )
    perceptual: float = Field(
        1.0, ge=0, allow_inf_nan=False, description="Squared difference of features of a frozen network."
    )
    attributes: float = Field(
        10.0, ge=0, allow_inf_nan=False, description="Squared difference of the generator's features of the target."
    )

    @model_validator(mode="after")
    def _check_sum(self) -> Weights:
        if not any(getattr(self, name) for name in type(self).model_fields):
            raise ValueError("all weights are 0, so nothing would be trained: raise one")
        return self


HELPER = "a folder, asset:NAME or a name on the hub of an image model of transformers, or random (random weights)"


class Options(BaseModel):
    """Keys of task_options for face_swap."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    image_size: int = Field(
        64, ge=16, le=1024, multiple_of=8, description="Height and width of images, in pixels; a multiple of 8."
    )
    channels: int = Field(
        32, ge=8, le=512, multiple_of=8, description="Channels of the generator at full resolution; a multiple of 8."
    )
    identity_size: int = Field(128, ge=8, le=4096, description="Width of the vector that describes the source.")
    blocks: int = Field(2, ge=1, le=32, description="Blocks of the generator at its lowest resolution.")
    recogniser: str = Field(RANDOM, min_length=1, description=f"Frozen network of the term identity: {HELPER}.")
    perceptual: str = Field(RANDOM, min_length=1, description=f"Frozen network of the term perceptual: {HELPER}.")
    same_person: float = Field(
        0.3, ge=0, le=1, description="Share of rows whose source is of the same person, drawn from (seed, epoch, row)."
    )
    weights: Weights = Field(default_factory=Weights, description="Weight of each term of the loss.")


class Task:
    """Fusing faces."""

    item: Literal["token", "sample"] = "sample"
    columns: tuple[str, ...] = ("image", "label")
    text_columns: tuple[str, ...] = ("label",)
    file_columns: tuple[str, ...] = ("path",)
    reads_text = False
    auto_class: str | None = None
    peft_type: str | None = None
    pipeline_tag = "image-to-image"
    helper_options: tuple[str, ...] = ("recogniser", "perceptual")
    exported_part = "generator"
    drawn_rows = 8
    metric_names: tuple[str, ...] = (*Weights.model_fields, "similarity", "likeness", "between")
    starting_recipe: Mapping[str, Mapping[str, Any]] = {"optimizer": {"learning_rate": 4e-4}}

    def __init__(self, recipe: Recipe, options: Options) -> None:
        if recipe.data.truncation is not None:
            raise InputError("data.truncation applies to texts, and face_swap has none", hint="delete it")
        self.recipe, self.options = recipe, options
        self.terms = {
            name: Term(weight, SAME if name == "reconstruction" else "items")
            for name, weight in options.weights.model_dump().items()
        }

    @staticmethod
    def recipe_problems(recipe: Recipe, where: Callable[[Keys], str]) -> Iterator[Problem]:
        """Yield a problem for an adapter."""
        if recipe.adapter.type != "none":
            message = f"adapter.type: {recipe.adapter.type} adapts a trained model, but face_swap trains its generator"
            yield Problem(message, where(("adapter", "type")), "delete the section adapter")

    def fingerprint(self) -> str:
        """Return a digest of the option that decides which files are faces."""
        return hashlib.sha256(f"faces of {self.options.image_size} pixels".encode()).hexdigest()

    def survey(self, rows: Dataset) -> dict[str, Any]:
        """Return {"people": number of persons}; raise `InputError` if there is one only."""
        people = {name_of(label) for label in rows.select_columns(["label"])["label"]}
        if len(people) < 2:
            raise InputError(
                f"data.train: all {len(rows)} faces are of one person, {next(iter(people), None)}",
                hint="give each person a folder or a label: the source and the target are then different people",
            )
        return {"people": len(people)}

    def encode(self, row: Row, facts: dict[str, Any]) -> list[Row]:
        """Return one prepared row: {"path", "bytes", "person", "items"}.

        Raises:
            RowError: The image cannot be decoded or is no picture of a face, or it has no person.
        """
        path, data = find_image(row["image"])
        check_image(path, data)
        self._check_size(path, data)
        person = name_of(row["label"])
        if person is None:
            raise RowError("has no label, which names the person")
        return [{"path": path, "bytes": data, "person": person, "items": 1}]

    def _check_size(self, path: str | None, data: bytes | None) -> None:
        """Raise `RowError` for an image that is too small or too long for a face."""
        width, height, _ = read_size(path, data)
        least = round(self.options.image_size * SMALLEST)
        problem = ""
        if min(width, height) < least:
            problem = f"; a face for task_options.image_size {self.options.image_size} needs {least} on each side"
        elif max(width, height) > LONGEST * min(width, height):
            problem = ", which is no cut-out of a face: crop the picture to the face"
        if problem:
            name = "the image" if path is None else f"{path}: the image"
            raise RowError(f"{name} has {width} x {height} pixels{problem}")

    def describe_row(self, row: Row, facts: dict[str, Any]) -> tuple[list[Span], dict[str, str]]:
        """Return no text, and path, size and person of the image."""
        width, height, mode = read_size(row["path"], row["bytes"])
        image = f"{len(row['bytes'])} bytes" if row["path"] is None else row["path"]
        return [], {"image": image, "size": f"{width} x {height} pixels, {mode}", "person": row["person"]}

    def index_rows(self, rows: Dataset) -> People:
        """Return which rows of a split show the same person."""
        return index_people(rows, "person")

    def companions(self, row: Row, index: People) -> list[int]:
        """Return the number of the row that is the source for a target."""
        epoch = row["epoch"] if row["training"] else 0
        chance, draw = (seed_of(self.recipe.seed, epoch, row["id"], part) for part in range(2))
        return [partner_of(index, row["id"], draw, is_same=chance / 2**63 < self.options.same_person)]

    def load_model(self, facts: dict[str, Any], **kwargs: Any) -> tuple[nn.Module, list[str]]:
        """Return the generator with its frozen networks; no module gets new weights later."""
        import torch

        from ftcli.models.load import READ_WEIGHTS

        dtype = torch.float32 if kwargs.get("dtype") in (None, "auto") else kwargs["dtype"]
        starts = kwargs.get("weights") is None and self.recipe.model.name != NO_MODEL

        def read() -> tuple[nn.Module, list[str]]:
            model = self._build(dtype, has_values=True)
            if starts:
                self._load_start(model)
            return model, []

        return READ_WEIGHTS.get()(read, lambda: self._build(dtype, has_values=False))

    def _build(self, dtype: Any, *, has_values: bool) -> nn.Module:
        """Return the generator with weights drawn from the seed, and the frozen networks, each loaded once."""
        import torch

        from ftcli.tasks.shared.face_swap_model import FaceSwapModel
        from ftcli.tasks.shared.image_encoders import load_encoder
        from ftcli.tasks.shared.swap_generator import SwapGenerator

        chosen, seed = self.options, self.recipe.seed
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            generator = SwapGenerator(chosen.image_size, chosen.channels, chosen.identity_size, chosen.blocks)
        helpers: dict[str, nn.Module] = {}
        for key in self.helper_options:
            name = getattr(chosen, key)
            if name not in helpers:
                how = {"seed": seed_of(seed, zlib.crc32(RANDOM.encode())), "dtype": dtype, "has_values": has_values}
                helpers[name] = load_encoder(self.recipe, f"task_options.{key}", name, **how)
        return FaceSwapModel(generator.to(dtype), helpers[chosen.recogniser], helpers[chosen.perceptual])

    def _load_start(self, model: Any) -> None:
        """Load the weights of an exported generator, which model.name names."""
        import json

        from ftcli.data.paths import model_folder
        from ftcli.models.own_model import load_weights

        folder = model_folder(self.recipe.model.name)
        if folder is None:
            raise InputError(
                f"model.name: {self.recipe.model.name} is no local folder",
                hint="name the folder of an exported generator, or delete the key to start from random weights",
            )
        stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        for key, value in model.generator.config.items():
            if stored.get(key) != value:
                raise InputError(
                    f"model.name: the generator in {folder} has {key} {stored.get(key)}, and the recipe {value}",
                    hint=f"set task_options.{key} to {stored.get(key)}" if key in stored else "name another folder",
                )
        load_weights(model.generator, folder)

    def finish_model(self, model: nn.Module) -> None:
        """Change nothing."""

    def save_model(self, model: Any, folder: str) -> None:
        """Write config.json, and generator.py with the code of the generator, which needs torch only."""
        import json

        from ftcli.tasks.shared import swap_generator

        text = json.dumps(model.config, indent=2) + "\n"
        Path(folder, "config.json").write_text(text, encoding="utf-8")
        Path(folder, FILE).write_bytes(Path(swap_generator.__file__).read_bytes())

    def blank(self, row: Row) -> Row:
        """Return the row as padding."""
        return row | {"items": 0}

    def collate(self, rows: list[Row]) -> Batch:
        """Return `source` and `target` `[B, 3, S, S]` float32, `counted` `[B]` float32 and `same` `[B]` bool."""
        import torch

        counted = torch.tensor([float(row["items"]) for row in rows])
        same = torch.tensor([row["companions"][0]["person"] == row["person"] for row in rows])
        return {
            "source": torch.stack([self._pixels(row["companions"][0]) for row in rows]),
            "target": torch.stack([self._pixels(row) for row in rows]),
            "counted": counted,
            "same": same & (counted > 0),
        }

    def _pixels(self, row: Row) -> Tensor:
        """Return the middle square of an image, `[3, S, S]`, values 0 to 1."""
        from ftcli.tasks.shared.swap_generator import to_tensor

        try:
            return to_tensor(load_image(row["path"], row["bytes"]), self.options.image_size)
        except RowError as error:  # the image was valid when rows were prepared
            hint = "restore the image: files must not change while a run reads them"
            raise InputError(str(error), hint=hint) from error

    def count(self, batch: Batch) -> dict[str, Any]:
        """Return the number of rows, and of those whose source and target are one person."""
        return {"items": int(batch["counted"].sum()), SAME: int(batch["same"].sum())}

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Any]:
        """Return the contributions of each row to each term, `[B]` float32."""
        import torch

        measured = model(batch["source"], batch["target"], measures=True)
        is_counted = {SAME: batch["same"], "items": batch["counted"] > 0}
        return {
            name: torch.where(is_counted[term.count_name], measured[name], 0.0) for name, term in self.terms.items()
        }

    def eval_step(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return each term and the cosines of each row, `[B]`; `loss` is the term identity."""
        measured = model(batch["source"], batch["target"], measures=True)
        values = {name: value for name, value in measured.items() if name != "image"}
        return values | {"loss": values["identity"] * batch["counted"], "items": batch["counted"], SAME: batch["same"]}

    def metrics(self, rows: dict[str, np.ndarray]) -> dict[str, float]:
        """Return the mean of each term, and cosines of the recogniser's vectors for pairs of two people.

        `similarity` is that of the fused face and the source, `likeness` that of the fused face and the target, and
        `between` that of source and target. A copy of the target has `similarity` = `between`. `reconstruction` is the
        mean over pairs of one person. A mean over no pair is left out.
        """
        values = rows | {"similarity": 1 - rows["identity"]}
        pairs = {"reconstruction": rows[SAME], **dict.fromkeys(("similarity", "likeness", "between"), ~rows[SAME])}
        chosen = {name: values[name][pairs[name]] if name in pairs else values[name] for name in self.metric_names}
        return {name: float(part.mean(dtype="float64")) for name, part in chosen.items() if len(part)}

    def draw(self, model: nn.Module, batch: Batch) -> dict[str, bytes]:
        """Return a sheet with source, target and fused face of each row, as PNG."""
        from ftcli.tasks.shared.image_sheets import draw_sheet
        from ftcli.tasks.shared.swap_generator import to_image

        columns = {"source": batch["source"], "target": batch["target"]}
        columns["fused"] = model(batch["source"], batch["target"])
        notes = ["one person" if same else "" for same in batch["same"].tolist()]
        return {SHEET: draw_sheet({name: [to_image(face) for face in part] for name, part in columns.items()}, notes)}

    def save_processor(self, folder: str) -> None:
        """Write nothing: generator.py reads images itself."""

    def probe(self, batch: Batch) -> Batch:
        """Return the arguments with which the generator makes images."""
        return {"source": batch["source"], "target": batch["target"]}
