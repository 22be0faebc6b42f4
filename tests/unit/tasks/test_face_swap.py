"""Fused faces: the terms against their formulas, pairs that depend on the seed alone, and every refusal."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image

import ftcli
from ftcli.config.load import load_recipe
from ftcli.data.cache import prepare_rows
from ftcli.launch.preflight import check_inputs
from ftcli.models.helper_models import helper_names
from ftcli.runtime.errors import InputError
from ftcli.runtime.seeds import PADDING
from ftcli.tasks.build import build_task
from ftcli.tasks.face_swap import Task
from ftcli.tasks.shared.face_swap_model import FaceSwapModel
from ftcli.tasks.shared.identity_pairs import index_people, partner_of
from ftcli.tasks.shared.images import load_image, read_size
from ftcli.tasks.shared.swap_generator import upright_rgb
from ftcli.training.batches.dataloaders import Rows
from ftcli.training.prepared_data import prepare_data

from ...support.cells import cell
from ...support.runner import MakeInputs


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    """Return a folder of this module's own, because its tests write into it."""
    return make_inputs()


class Doubles(torch.nn.Module):
    """Stands for a frozen network: its vectors are the first two pixels, its features all pixels and their halves."""

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return images.flatten(1)[:, :2], [images, images / 2]


class Fixed(torch.nn.Module):
    """Stands for a generator: makes the given image, and has the pixels as features."""

    def __init__(self, image: torch.Tensor) -> None:
        super().__init__()
        self.image, self.encoder = image, lambda images: [images]

    def forward(self, source: torch.Tensor, target: torch.Tensor, *, with_attributes: bool) -> Any:
        return self.image, [target]


def test_terms_of_a_fused_face_equal_their_formulas() -> None:
    def face(*pixels: float) -> torch.Tensor:
        return torch.tensor(pixels).view(1, 1, 2, 2)

    fused, source, target = face(0.6, 0.8, 0.0, 0.0), face(1.0, 0.0, 0.5, 0.5), face(0.0, 1.0, 0.0, 1.0)
    model: Any = FaceSwapModel(Fixed(fused), Doubles(), Doubles())  # type: ignore[arg-type]
    values = model(source, target, measures=True)
    assert values["identity"].tolist() == pytest.approx([1 - 0.6])  # of (.6, .8) and (1, 0)
    assert values["likeness"].tolist() == pytest.approx([0.8])
    assert values["between"].tolist() == pytest.approx([0.0])
    assert values["reconstruction"].tolist() == pytest.approx([(0.6 + 0.2 + 0 + 1) / 4])
    assert values["perceptual"].tolist() == pytest.approx([0.35 / 0.5])  # the mean square of the target is 0.5
    assert values["attributes"].tolist() == pytest.approx([0.5 * (0.36 + 0.04 + 1) / 4])


def people(*names: str) -> Any:
    return index_people(Dataset.from_dict({"person": list(names)}), "person")


def test_partner_of_every_draw_is_another_row_of_the_same_or_of_another_person() -> None:
    index = people("b", "a", "b", "c", "b", "a")
    same = [{partner_of(index, row, draw, is_same=True) for draw in range(60)} for row in range(6)]
    assert same == [{2, 4}, {5}, {0, 4}, {3}, {0, 2}, {1}]  # a person with one picture is paired with it
    other = [{partner_of(index, row, draw, is_same=False) for draw in range(60)} for row in range(6)]
    assert other == [{1, 3, 5}, {0, 2, 3, 4}, {1, 3, 5}, {0, 1, 2, 4, 5}, {1, 3, 5}, {0, 2, 3, 4}]
    assert partner_of(people("a", "a"), 0, 7, is_same=False) == 1  # there is nobody else


def drawn(inputs: Path, epoch: int = 0, **changes: Any) -> list[tuple[int, bool]]:
    """Return (source, whether it is the same person) of each training row in one epoch."""
    recipe = cell(inputs, "faces", **changes)
    task: Any = build_task(recipe)
    rows = Rows(prepare_rows(recipe, task).train, task, training=True)
    documents = [rows[epoch, number][0] for number in range(len(rows))]
    batch = task.collate(documents)
    return [(row["companions"][0]["id"], same) for row, same in zip(documents, batch["same"].tolist(), strict=True)]


def test_pairs_depend_on_seed_epoch_and_row_alone(inputs: Path) -> None:
    first = drawn(inputs)
    assert drawn(inputs, batch={"global_size": 4, "micro_size": 1}) == first
    assert drawn(inputs, epoch=1) != first and drawn(inputs, seed=1) != first
    assert 0.2 < np.mean([same for _, same in first]) < 0.8  # same_person is 0.5


def test_images_of_every_mode_and_size_become_squares_of_three_channels(inputs: Path) -> None:
    recipe = cell(inputs, "faces")
    task: Any = build_task(recipe)
    rows = prepare_rows(recipe, task).train
    modes = {read_size(row["path"], None)[2] for row in rows}  # type: ignore[index,call-overload]
    assert modes == {"RGB", "L", "RGBA"}
    pixels = torch.stack([task._pixels(row) for row in rows])
    assert pixels.shape[1:] == (3, 16, 16) and float(pixels.min()) >= 0 and float(pixels.max()) <= 1


def test_helper_networks_are_frozen_loaded_once_and_stay_in_evaluation_mode(inputs: Path) -> None:
    options = cell(inputs, "faces").task_options | {"perceptual": str(inputs / "mobilenet")}  # with running statistics
    both = options | {"recogniser": options["perceptual"]}
    for chosen, is_shared in ((options, False), (both, True)):
        run = ftcli.prepare(cell(inputs, "faces", task_options=chosen), cpu=True)
        model: Any = run.hardware.unwrap(run.model)
        assert (model.recogniser is model.perceptual) == is_shared
        statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for _ in ftcli.steps(run):
            assert model.generator.training
            assert not any(module.training for module in model.perceptual.modules())
        assert all(torch.equal(buffer, statistics[name]) for name, buffer in model.named_buffers())
        trained = {id(p) for group in run.optimizer.param_groups for p in group["params"]}
        assert trained == {id(p) for p in model.generator.parameters()}
        shards = list(run.hardware.state_shards(run.model, run.optimizer))
        assert {shard.name.partition(".")[0] for shard in shards} == {"generator"}


def changed(inputs: Path, **options: Any) -> dict[str, Any]:
    recipe = cell(inputs, "faces")
    return {"task_options": recipe.task_options | options}


def written(folder: Path, **sections: Any) -> Path:
    path = folder / "recipe.yaml"
    values = cell(folder, "faces").model_dump(mode="json", exclude_unset=True)
    path.write_text(json.dumps(values | {"task_options": dict(values["task_options"])} | sections))
    return path


WRONG_OPTIONS = {
    "not a multiple of 8": ({"image_size": 20}, "task_options.image_size.*multiple of 8"),
    "all weights 0": (
        {"weights": {"identity": 0.0, "reconstruction": 0.0, "perceptual": 0.0, "attributes": 0.0}},
        "task_options.weights.*all weights are 0.*raise one",
    ),
    "misspelt": (
        {"weights": {"idenity": 1.0}},
        "unknown key 'idenity' in task_options.weights.*did you mean 'identity'",
    ),
    "share above 1": ({"same_person": 1.5}, "task_options.same_person"),
}


@pytest.mark.parametrize("kind", WRONG_OPTIONS)
def test_options_that_are_wrong_are_refused_with_their_key(kind: str, inputs: Path) -> None:
    options, message = WRONG_OPTIONS[kind]
    with pytest.raises(InputError, match=f"(?s){message}"):
        build_task(cell(inputs, "faces", **changed(inputs, **options)))


def test_recipes_that_cannot_train_a_generator_are_refused(inputs: Path) -> None:
    with pytest.raises(InputError, match="(?s)adapter.type: lora.*delete the section adapter"):
        build_task(cell(inputs, "faces", adapter={"type": "lora"}))
    data = {"train": str(inputs / "faces"), "truncation": "drop"}
    with pytest.raises(InputError, match="data.truncation applies to texts"):
        build_task(cell(inputs, "faces", data=data))
    streaming = {"train": str(inputs / "faces"), "streaming": True}
    with pytest.raises(InputError, match="(?s)data.streaming: .*set data.streaming to false"):
        prepare_data(cell(inputs, "faces", data=streaming), trains=True, dry_run=False)


COMPANIONS = """
from ftcli.tasks.sft import Options
from ftcli.tasks.sft import Task as Sft


class Task(Sft):
    def index_rows(self, rows):
        return len(rows)

    def companions(self, row, index):
        return [(row["id"] + 1) % index, (row["id"] + 2) % index]
"""


def test_companions_of_a_task_come_with_its_rows_but_not_from_a_stream(inputs: Path) -> None:
    (inputs / "companions.py").write_text(COMPANIONS)
    task = str(inputs / "companions.py")
    data = prepare_data(cell(inputs, "sft-tied", task=task), trains=True, dry_run=False)
    rows = Rows(data.rows.train, data.task, training=True)
    for number in (0, len(rows) - 1):
        expected = [data.rows.train[(number + further) % len(rows)] for further in (1, 2)]
        seen = {"epoch": 3, "training": True}
        assert rows[3, number][0]["companions"] == [row | seen for row in expected]
    without = Rows(data.rows.train, data.task, training=True, excluded={data.rows.train[1]["id"]})
    first, second = without[0, 0][0]["companions"]
    assert first["id"] == PADDING and second["id"] == data.rows.train[2]["id"]
    streaming = {"train": str(inputs / "chats.jsonl"), "streaming": True, "max_length": 128}
    with pytest.raises(InputError, match="(?s)which a stream does not have.*set data.streaming to false"):
        prepare_data(cell(inputs, "sft-tied", task=task, data=streaming), trains=True, dry_run=False)


def prepared(folder: Path, inputs: Path, faces: dict[str, tuple[int, int]], labels: dict[str, Any]) -> Any:
    """Prepare rows of a table of faces: name of the file -> its size, and its label."""
    rows = []
    for name, size in faces.items():
        Image.new("RGB", size).save(folder / name)
        rows.append({"image": str(folder / name), "label": labels.get(name, name)})
    (folder / "faces.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = cell(inputs, "faces", data={"train": str(folder / "faces.jsonl")})
    return prepare_rows(recipe, build_task(recipe))


GOOD = {"a.png": (16, 16), "b.png": (30, 16)}
WRONG_FACES = {
    "too small": ({"c.png": (7, 30)}, {}, r"row 3 of .*/c.png: the image has 7 x 30 pixels; a face .* needs 8 on each"),
    "a banner": (
        {"c.png": (80, 20)},
        {},
        r"row 3 of .*/c.png: the image has 80 x 20 pixels, which .*crop the picture",
    ),
    "no label": ({"c.png": (16, 16)}, {"c.png": " "}, r"row 3 of .*: has no label, which names the person"),
    "one person": ({}, {"a.png": "x", "b.png": "x"}, "all 2 faces are of one person, x.*give each person a folder"),
}


@pytest.mark.parametrize("kind", WRONG_FACES)
def test_faces_that_are_wrong_are_refused_with_row_and_file(kind: str, inputs: Path, tmp_path: Path) -> None:
    faces, labels, message = WRONG_FACES[kind]
    with pytest.raises(InputError, match=f"(?s){message}"):
        prepared(tmp_path, inputs, GOOD | faces, labels)


def test_faces_of_the_smallest_size_are_used(inputs: Path, tmp_path: Path) -> None:
    assert len(prepared(tmp_path, inputs, {"a.png": (8, 16), "b.png": (8, 8)}, {}).train) == 2


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_check_of_a_missing_or_incomplete_helper_names_its_key(inputs: Path, tmp_path: Path) -> None:
    for key in Task.helper_options:
        with pytest.raises(InputError, match=rf"(?s)task_options.{key}: no model folder at .*did you mean 'vit'"):
            check_inputs(cell(inputs, "faces", **changed(inputs, **{key: str(inputs / "vitt")})))
    shutil.copytree(inputs / "vit", tmp_path / "vit")
    options = changed(inputs, recogniser=str(tmp_path / "vit"))
    check_inputs(cell(inputs, "faces", **options))
    (tmp_path / "vit" / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"task_options.recogniser: .*/vit has no weights"):
        check_inputs(cell(inputs, "faces", **options))
    with pytest.raises(InputError, match=r"(?s)asset:fases: there is no asset 'fases'.*did you mean 'faces'"):
        check_inputs(cell(inputs, "faces", **changed(inputs, recogniser="asset:fases")))
    shipped = load_recipe("smoke/face_swap")
    assert helper_names(shipped) == {"task_options.perceptual": "asset:mobilenet-v2"}  # random ones have no files
    assert helper_names(cell(inputs, "vit")) == {}


WRONG_HELPERS = {
    "another input size": ("preprocessor_config.json", {"size": {"height": 32, "width": 32}}, "16 x 16.*makes them 32"),
    "one channel": ("config.json", {"num_channels": 1}, "takes images with 1 channels, and faces have 3"),
    "more layers": ("config.json", {"num_hidden_layers": 3}, r"lacks \d+ weights, the first is layers.2"),
    "no processor": ("preprocessor_config.json", None, "AutoImageProcessor cannot load.*preprocessor_config"),
}


@pytest.mark.parametrize("kind", WRONG_HELPERS)
def test_helper_network_that_does_not_fit_is_refused_with_its_key(kind: str, inputs: Path, tmp_path: Path) -> None:
    file, changes, message = WRONG_HELPERS[kind]
    shutil.copytree(inputs / "vit", tmp_path / "vit")
    if changes is None:
        (tmp_path / "vit" / file).unlink()
    else:
        edit(tmp_path / "vit" / file, **changes)
    recipe = cell(inputs, "faces", **changed(inputs, recogniser=str(tmp_path / "vit")))
    with pytest.raises(InputError, match=rf"(?s)task_options.recogniser: .*{message}"):
        build_task(recipe).load_model({})


def test_recipe_without_a_model_is_valid_only_for_tasks_that_build_it(inputs: Path) -> None:
    assert load_recipe(written(inputs)).model.name == "none"
    with pytest.raises(InputError, match=r"'model.name' is missing|model.name is missing"):
        load_recipe(written(inputs, task="image_classification", model={}, task_options={}))


def test_exported_generator_reads_images_as_training_does(tmp_path: Path) -> None:
    """Photographs of telephones are stored rotated; Pillow alone clips pixels with 16 bits."""
    draw = np.random.default_rng(0)
    colours = Image.fromarray(draw.integers(0, 256, (6, 4, 3), dtype=np.uint8))
    rotated = Image.Exif()
    rotated[0x0112] = 6
    colours.save(tmp_path / "rotated.png", exif=rotated)
    colours.convert("LA").save(tmp_path / "grey.png")
    deep = np.concatenate([np.arange(0, 65536, 257) + n for n in (-129, -128, 0, 127, 128)]).clip(0, 65535)
    Image.fromarray(deep.astype(np.uint16)[None]).save(tmp_path / "deep.png")
    for path in tmp_path.iterdir():
        with Image.open(path) as image:
            actual = upright_rgb(image)
        expected = load_image(str(path), None)
        assert actual.mode == "RGB" and actual.size == expected.size and actual.tobytes() == expected.tobytes(), path
    assert load_image(str(tmp_path / "rotated.png"), None).size == (6, 4)
