"""Images as they are trained: upright, 8 bits, and whole when rows are prepared; errors name the file."""

from __future__ import annotations

import io
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, Features, Value, disable_progress_bars
from datasets import Image as ImageFeature
from PIL import Image
from pyarrow import parquet

from ftcli.config.recipe import Recipe
from ftcli.config.recipe_data import Source
from ftcli.data.cache import PreparedRows, prepare_rows
from ftcli.data.cached_counts import cached_row_counts
from ftcli.data.image_folders import folder_digest, image_files
from ftcli.data.sources import check_source, read_rows
from ftcli.runtime.errors import InputError, RowError
from ftcli.tasks.build import build_task
from ftcli.tasks.shared.images import check_image, find_image, load_image
from ftcli.testing import save_tiny_vit

from ....support.recipes import minimal_values

NOISE = np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def bomb() -> bytes:
    """Return a PNG whose header says that it has 179 million pixels."""
    whole = encoded(Image.new("1", (1, 1)), "PNG")
    header = (14_000).to_bytes(4, "big") + (13_000).to_bytes(4, "big") + whole[24:29]
    import zlib

    return whole[:16] + header + zlib.crc32(b"IHDR" + header).to_bytes(4, "big") + whole[33:]


WHOLE = {
    "one pixel": encoded(Image.new("RGB", (1, 1)), "JPEG"),
    "seven pixels high": encoded(Image.new("RGB", (300, 7)), "JPEG"),
    "jpeg": encoded(Image.fromarray(NOISE), "JPEG"),
    "cmyk": encoded(Image.fromarray(NOISE).convert("CMYK"), "JPEG"),
    "png": encoded(Image.fromarray(NOISE), "PNG"),
}
BROKEN = {
    "jpeg": WHOLE["jpeg"][: len(WHOLE["jpeg"]) // 2],
    "png": WHOLE["png"][: len(WHOLE["png"]) // 2],
    "bomb": bomb(),
    "text": b"<html>",
    "empty": b"",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_check_image_refuses_what_cannot_be_decoded_and_names_the_file(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(BROKEN[kind])
    for check in (check_image, load_image):
        with pytest.raises(RowError, match="cannot read image: "):
            check(None, BROKEN[kind])
        with pytest.raises(RowError, match=r"/a.jpg: cannot read image: "):
            check(str(path), None)
    (tmp_path / "b.jpg").symlink_to("nowhere")
    with pytest.raises(RowError, match=r"/b.jpg: cannot read image: no such file"):
        check_image(str(tmp_path / "b.jpg"), None)


@pytest.mark.parametrize("kind", WHOLE)
def test_check_image_accepts_what_can_be_decoded(kind: str) -> None:
    check_image(None, WHOLE[kind])
    assert load_image(None, WHOLE[kind]).mode == "RGB"


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_load_image_scales_16_bits_to_8(kind: str) -> None:
    pixels = np.array([[0, 128, 129, 257, 20_000, 65_535]], dtype=np.uint16)
    loaded = np.asarray(load_image(None, encoded(Image.fromarray(pixels), kind)))
    assert loaded[0].tolist() == [[value] * 3 for value in (0, 0, 1, 1, 78, 255)]


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_load_image_of_32_bits_is_refused_beyond_255(kind: Any) -> None:
    small = np.array([[0, 255]], dtype=kind)
    assert np.asarray(load_image(None, encoded(Image.fromarray(small), "TIFF")))[0].tolist() == [[0] * 3, [255] * 3]
    with pytest.raises(RowError, match=r"image has pixels from 0 to 65280: save it with 8 or 16 bits"):
        load_image(None, encoded(Image.fromarray(small * 256), "TIFF"))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_load_image_applies_the_exif_orientation(kind: str, orientation: int) -> None:
    from PIL import ImageOps

    image = Image.fromarray(NOISE)
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(image, kind, exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    assert load_image(None, data).tobytes() == expected.tobytes()
    assert load_image(None, data).size == ((60, 40) if orientation < 5 else (40, 60))


def test_find_image_takes_every_form_of_an_image() -> None:
    assert find_image("a.png") == find_image({"path": "a.png", "bytes": None}) == ("a.png", None)
    assert find_image(b"x") == find_image({"path": "a.png", "bytes": b"x"}) == (None, b"x")
    opened = Image.open(io.BytesIO(WHOLE["cmyk"]))
    path, data = find_image(opened)
    assert path is None and load_image(None, data).tobytes() == load_image(None, WHOLE["cmyk"]).tobytes()
    for nothing in (None, {"path": None, "bytes": None}, 5):
        with pytest.raises(RowError, match="has no image|has int in place of an image"):
            find_image(nothing)


def images(folder: Path) -> Path:
    for number in range(6):
        path = folder / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (number, 0, 0)).save(path)
    return folder


def test_image_files_leave_out_hidden_files_and_folders(tmp_path: Path) -> None:
    folder = images(tmp_path / "images")
    paths = image_files(folder)
    for hidden in (".ipynb_checkpoints/0.png", "a/.ipynb_checkpoints/0.png", "a/._0.png", ".git/x/0.png"):
        path = folder / hidden
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    assert image_files(folder) == paths and {label for _, label in paths} == {"a", "b"}


def test_image_files_follow_links_to_folders_and_images(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "images", images(tmp_path / "elsewhere")
    (folder / "b").mkdir(parents=True)
    (folder / "a").symlink_to(elsewhere / "a")
    (folder / "b" / "one.png").symlink_to(elsewhere / "b" / "0.png")
    linked = [(folder / "a" / file.name, "a") for file, label in image_files(elsewhere) if label == "a"]
    assert linked and image_files(folder) == [*linked, (folder / "b" / "one.png", "b")]


@pytest.mark.parametrize("links", [{"a/around": "."}, {"a/around": "a"}, {"a/to_b": "b", "b/to_a": "a"}])
def test_image_files_with_a_link_cycle_is_refused(links: dict[str, str], tmp_path: Path) -> None:
    folder = images(tmp_path / "images")
    for link, target in links.items():
        (folder / link).symlink_to((folder / target).resolve())
    with pytest.raises(InputError, match=r"links to .*, which contains it") as error:
        image_files(folder)
    assert error.value.problems[0].where.startswith(str(folder))


def test_image_files_with_an_undecodable_name_is_refused(tmp_path: Path) -> None:
    folder = images(tmp_path / "images")
    with open(os.fsencode(folder / "a") + b"/\xff.png", "wb") as file:
        file.write(WHOLE["png"])
    with pytest.raises(InputError, match=r"a/\\udcff.png: the name of this image is not UTF-8 text"):
        read_rows(Source(path=str(folder)), {})


def tree(folder: Path, *files: str) -> Path:
    """Write images, and other files where the name has another ending."""
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(WHOLE["png"] if name.endswith(".png") else b"x")
    return folder


SUCH_AS = "name the folder of one split, such as data.train: "


def test_image_files_label_is_the_first_folder_however_deep_an_image_is(tmp_path: Path) -> None:
    names = ("cat/indoor/1.png", "cat/outdoor/far/2.png", "dog/indoor/3.png", "dog/4.png", "train/5.png")
    found = image_files(tree(tmp_path / "animals", *names))
    assert [(path.name, label) for path, label in found] == [
        *(("1.png", "cat"), ("2.png", "cat"), ("4.png", "dog"), ("3.png", "dog"), ("5.png", "train"))
    ]
    found = image_files(tree(tmp_path / "vehicles", "train1/1.png", "train2/2.png", "test1/deep/3.png"))
    assert [label for _, label in found] == ["test1", "train1", "train2"]


@pytest.mark.parametrize(
    ("names", "found", "hint"),
    [
        (("train/cat/1.png", "train/dog/2.png", "test/cat/3.png"), ("test", "train"), SUCH_AS + "{}/train; its"),
        (("train2017/cat/1.png", "val_images/cat/3.png"), ("train2017", "val_images"), SUCH_AS + "{}/train2017; its"),
        (("Train/cat/1.png", "Val/cat/3.png"), ("Train", "Val"), SUCH_AS + "{}/Train; its"),
        (("train/cat/1.png", "cat/2.png"), ("train",), SUCH_AS + "{}/train; its"),
        (
            ("all/train/a/1.png", "all/test/a/2.png"),
            ("all/test", "all/train"),
            SUCH_AS + "{}/all/train; its",
        ),
        (("cat/train/1.png", "cat/test/2.png"), ("cat/test", "cat/train"), "give each split a folder of its own"),
        (("train/1.png", "test/2.png"), ("test", "train"), "give each split a folder of its own"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_image_files_of_a_folder_with_splits_is_refused(
    names: tuple[str, ...], found: tuple[str, ...], hint: str, tmp_path: Path
) -> None:
    folder = tree(tmp_path, *names)
    with pytest.raises(InputError, match="contains folders of splits, whose images would be mixed") as error:
        image_files(folder)
    (problem,) = error.value.problems
    assert problem.what.endswith(": " + ", ".join(str(folder / name) for name in found))
    assert str(problem.hint).startswith(hint.format(folder))
    if found[0].count("/") == 0:
        with pytest.raises(InputError, match="contains folders of splits"):  # before all images are listed
            check_source(Source(path=str(folder)), {})


def change_a_pixel(path: Path) -> None:
    """Change a byte of an image without changing its size and modification time."""
    times, content = path.stat(), bytearray(path.read_bytes())
    time.sleep(0.02)  # the clock of a file system may tick 100 times a second
    content[-20] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (times.st_size, times.st_mtime_ns)


def test_folder_digest_notices_pixels_that_change_under_the_same_size_and_time(tmp_path: Path) -> None:
    folder = images(tmp_path / "images")
    (folder / "a" / "gone.png").symlink_to("nowhere")
    before = folder_digest(folder)
    assert folder_digest(folder) == before
    change_a_pixel(folder / "a" / "0.png")
    assert folder_digest(folder) != before


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    disable_progress_bars()
    return save_tiny_vit(tmp_path_factory.mktemp("models") / "vit")


def recipe_of(model: Path, train: Path, **data: Any) -> Recipe:
    return Recipe.model_validate(
        minimal_values(
            "image_classification",
            model={"name": str(model)},
            data={"train": str(train)} | data,
            batch={"global_size": 2},
        )
    )


def prepared(recipe: Recipe) -> PreparedRows:
    return prepare_rows(recipe, build_task(recipe))


def test_prepare_rows_of_broken_images_reports_or_skips_them(model: Path, tmp_path: Path) -> None:
    folder = images(tmp_path / "images")
    (folder / "a" / "0.jpg").write_bytes(BROKEN["jpeg"])
    (folder / "a" / "gone.png").symlink_to("nowhere")
    with pytest.raises(InputError, match=r"a/0.jpg: cannot read image: .*truncated"):
        prepared(recipe_of(model, folder))
    recipe = recipe_of(model, folder, max_bad_rows=2)
    assert len(prepared(recipe).train) == 6
    assert cached_row_counts(recipe) == {"train": 6}
    Image.new("RGB", (4, 4)).save(folder / "b" / "new.png")
    assert cached_row_counts(recipe) is None  # the plan was of another folder
    assert len(prepared(recipe).train) == 7


def test_prepare_rows_logs_files_of_an_image_folder_that_are_not_used_by_reason(model: Path, tmp_path: Path) -> None:
    names = ("top.png", "a/.DS_Store", ".cache/b/c.png", "a/x.HEIC", "read.me", "b/plain", "none/x", "a/deep/1.png")
    folder = tree(images(tmp_path / "images"), *names)
    (line,) = prepared(recipe_of(model, folder)).log_lines
    assert line.startswith(
        "data.train images: a folder per label (not used: .heic files: 1, .me files: 1, hidden files: 2, "
        "images outside of a label's folder: 1, other files: 2; folders without images: none; "
        "images of deeper folders, with the label of the first folder: 1), "
    )


def table_of_images(folder: Path, suffix: str) -> Path:
    """Write a table whose rows name the images of a new folder."""
    for number in range(6):
        Image.new("RGB", (16, 16), (number, 0, 0)).save(folder / f"{number}.bmp")
    rows = [{"image": str(folder / f"{number}.bmp"), "label": "ab"[number % 2]} for number in range(6)]
    path = folder / f"rows{suffix}"
    if suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    elif suffix == ".csv":
        path.write_text("image,label\n" + "".join(f"{row['image']},{row['label']}\n" for row in rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_prepare_rows_of_a_table_notices_changed_images(suffix: str, model: Path, tmp_path: Path) -> None:
    recipe = recipe_of(model, table_of_images(tmp_path, suffix))
    first, again = prepared(recipe), prepared(recipe)
    assert again.folder == first.folder  # unchanged images: the rows are used again
    assert cached_row_counts(recipe) == {"train": 6}
    change_a_pixel(tmp_path / "3.bmp")
    assert cached_row_counts(recipe) is None
    changed = prepared(recipe)
    assert changed.folder != first.folder and changed.fingerprint != first.fingerprint
    assert cached_row_counts(recipe) == {"train": 6}
    change_a_pixel(tmp_path / "3.bmp")  # back to the first pixels, at another time
    assert prepared(recipe).fingerprint == first.fingerprint


@pytest.mark.parametrize("is_mapping", [False, True])
def test_prepare_rows_of_a_table_notices_a_repaired_image(is_mapping: bool, model: Path, tmp_path: Path) -> None:
    table = table_of_images(tmp_path, ".jsonl")
    with table.open("a") as file:
        file.write(json.dumps({"image": "no\0path", "label": "a"}) + "\n")
    if is_mapping:  # as `datasets` stores images
        rows = [json.loads(line) for line in table.read_text().splitlines()]
        table.write_text("".join(json.dumps(row | {"image": {"path": row["image"]}}) + "\n" for row in rows))
    recipe = recipe_of(model, table, max_bad_rows=2)
    whole = (tmp_path / "3.bmp").read_bytes()
    (tmp_path / "3.bmp").unlink()
    assert len(prepared(recipe).train) == 5
    (tmp_path / "3.bmp").write_bytes(whole)
    assert cached_row_counts(recipe) is None
    assert len(prepared(recipe).train) == 6
    assert cached_row_counts(recipe) == {"train": 6}


def test_load_image_changed_during_a_run_names_the_file(model: Path, tmp_path: Path) -> None:
    folder = images(tmp_path / "images")
    recipe = recipe_of(model, folder)
    task, rows = build_task(recipe), prepared(recipe)
    (folder / "a" / "0.png").write_bytes(BROKEN["png"])
    with pytest.raises(InputError, match=r"a/0.png: cannot read image: "):
        task.collate([rows.train[0] | {"epoch": 0, "training": True}])


@pytest.mark.parametrize("is_feature", [True, False])
def test_images_in_parquet_count_as_bad_rows_one_by_one(is_feature: bool, model: Path, tmp_path: Path) -> None:
    contents = [WHOLE["cmyk"], WHOLE["jpeg"], BROKEN["jpeg"], WHOLE["png"], BROKEN["text"]]
    values = [{"bytes": content, "path": f"{n}.jpg"} for n, content in enumerate(contents)]
    columns = {"image": values, "label": ["a", "b", "a", "b", "a"]}
    path = tmp_path / "rows.parquet"
    if is_feature:
        Dataset.from_dict(columns, Features({"image": ImageFeature(), "label": Value("string")})).to_parquet(str(path))
    else:
        parquet.write_table(pa.table(columns | {"image": contents}), path)
    with pytest.raises(InputError, match=r"row 3 of .*rows.parquet: cannot read image: .*truncated"):
        prepared(recipe_of(model, path))
    rows = prepared(recipe_of(model, path, max_bad_rows=2))
    assert [row["bytes"] for row in rows.train] == [contents[0], contents[1], contents[3]]


def test_load_image_of_decimal_pixels_up_to_one_is_refused() -> None:
    image = Image.fromarray(np.full((4, 4), 0.5, dtype=np.float32))
    with pytest.raises(RowError, match=r"decimal pixels from 0.5 to 0.5"):
        load_image(None, encoded(image, "TIFF"))


@pytest.mark.parametrize(
    ("changes", "is_plain"),
    [
        ({}, True),
        ({"do_normalize": False}, True),
        ({"do_rescale": False}, True),
        ({"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "rescale_factor": 1 / 128}, True),
        ({"image_mean": 0.4, "image_std": 0.2}, True),
        ({"image_processor_type": "MobileViTImageProcessor", "do_flip_channel_order": True}, False),
        ({"image_processor_type": "EfficientNetImageProcessor", "include_top": True}, False),
        ({"do_pad": True}, False),
    ],
)
def test_pixels_of_images_are_those_of_the_processor(changes: dict[str, Any], is_plain: bool, tmp_path: Path) -> None:
    """Some processors change the order of colours, or normalise twice. Their own code then makes the pixels."""
    import torch

    config = save_tiny_vit(tmp_path / "vit") / "preprocessor_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    recipe = recipe_of(config.parent, tmp_path)
    task: Any = build_task(recipe.model_copy(update={"task_options": {"crop_scale": [0.5, 1.0]}}))
    assert task.has_8_bits == is_plain
    height, width = task.augmentation.size
    sizes = [(width, height), (2 * width + 5, height + 9)]
    images = [Image.effect_noise(size, 90).convert("RGB") for size in sizes]
    given = {"path": None, "target": 0, "items": 1, "training": False}
    batch = task.collate([given | {"bytes": encoded(image, "PNG")} for image in images])
    expected = task.processor(images, return_tensors="pt")["pixel_values"]
    found = task.probe(batch)["pixel_values"]
    assert found.is_contiguous() and found.dtype == expected.dtype == torch.float32
    assert torch.allclose(found, expected, rtol=0, atol=1e-5)
    assert ("images" in batch) == is_plain == ("pixel_values" not in batch)
