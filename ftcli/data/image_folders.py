"""List the images of a folder with their labels.

The label of an image is the name of the folder directly in the source: `images/cat/indoor/1.png` is a cat. A source
that is divided into splits, such as `images/train/cat/1.png`, is refused: a recipe names the folder of one split.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ftcli.data.cache_key import file_state
from ftcli.data.paths import FORMATS
from ftcli.runtime.errors import InputError
from ftcli.runtime.reader_errors import reason

MOST_OTHERS = 10_000  # allowed number of files in a folder of images that are not images
ROW_FILES = FORMATS.keys() - {".json", ".txt"}  # those two may be anything
EXPECTED = "expected one sub-folder per label with image files in it"
IMAGES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
SPLITS = {
    *("train", "training", "train_set", "training_set"),
    *("test", "testing", "test_set", "eval", "evaluation"),
    *("val", "valid", "validation", "validation_set", "dev", "development", "holdout"),
}
LIKE_SPLITS = re.compile(rf"({'|'.join(sorted(SPLITS))})[\W_]*(\d+|images?|data|split|folder)")  # such as train2017
HIDDEN, NO_LABEL = "hidden files", "images outside of a label's folder"  # reasons why files are not used


@dataclass(frozen=True)
class ImageFolder:
    """The images of a folder.

    Attributes:
        images: (file, label) of each image, sorted by path.
        unused: Reason -> number of files that are not used.
        empty: Names of folders for labels without images.
        deeper: Number of images that lie in a sub-folder of their label's folder.
    """

    images: list[tuple[Path, str]]
    unused: dict[str, int]
    empty: list[str]
    deeper: int

    def describe(self) -> str:
        """Return what a user should know about the folder in one line; "" if every file is an image with its label."""
        remarks = [f"not used: {_counts(self.unused)}"] if any(self.unused.values()) else []
        if self.empty:
            remarks.append(f"folders without images: {', '.join(self.empty)}")
        if self.deeper:
            remarks.append(f"images of deeper folders, with the label of the first folder: {self.deeper:,}")
        return f"a folder per label ({'; '.join(remarks)})" if remarks else ""


def list_images(folder: Path) -> ImageFolder:
    """List the images below a folder.

    Args:
        folder: Folder with one sub-folder per label.

    Raises:
        InputError: The folder cannot be listed, contains no images or mostly other files, or is divided into splits.
    """
    unused: Counter[str] = Counter()
    found = sorted(_walk(folder, unused))
    if not found:
        raise no_images(folder, unused)
    _require_no_splits(folder, {inner for _, inner in found})
    labels = {inner[0] for _, inner in found}
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    return ImageFolder(
        [(path, inner[0]) for path, inner in found],
        dict(unused),
        sorted(set(names) - labels),
        sum(len(inner) > 1 for _, inner in found),
    )


def image_files(folder: Path) -> list[tuple[Path, str]]:
    """Return (file, label) of each image below a folder, sorted by path. Arguments and errors are `list_images`'s."""
    return list_images(folder).images


def check_image_folder(folder: Path, key: str) -> None:
    """Check that a folder has an image, and no folders of splits, without listing all of it.

    Args:
        folder: Folder with one sub-folder per label.
        key: The recipe's key of the source, for messages.

    Raises:
        InputError: There is no image, or a folder directly in it is one of several splits.
    """
    unused: Counter[str] = Counter()
    if next(_walk(folder, unused), None) is None:
        raise no_images(folder, unused, key)
    with os.scandir(folder) as entries:
        tops = [entry.path for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    suspects = [top for top in tops if _resembles_split(os.path.basename(top))]
    inner: set[tuple[str, ...]] = {(os.path.basename(top),) for top in tops if top not in suspects}
    for top in suspects:
        inner |= {(os.path.basename(top), *below) for _, below in _walk(Path(top), Counter(), is_label=True)}
    _require_no_splits(folder, inner)


def walk_images(folder: Path) -> Iterator[Path]:
    """Yield the images in the sub-folders of a folder, in the order of the file system.

    Hidden files and folders such as `.ipynb_checkpoints` are left out. Links to folders and images are followed.

    Args:
        folder: Folder with one sub-folder per label.

    Raises:
        InputError: A folder cannot be listed, a link leads to a folder that contains it, the path of an image is not
            UTF-8 text, or most of many files are not images. The last limit stops the listing of a folder such as `/`.
    """
    return (path for path, _ in _walk(folder, Counter()))


def _walk(folder: Path, unused: Counter[str], *, is_label: bool = False) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield (image, names of the folders between `folder` and the image); counts other files by reason.

    Images directly in `folder` count as unused, unless it `is_label`.
    """

    def fail(error: OSError) -> None:
        raise InputError(f"cannot be listed: {reason(error)}", where=str(error.filename))

    images = others = 0
    for parent, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        for name in folders:
            if name.startswith("."):
                unused[HIDDEN] += sum(len(files) for *_, files in os.walk(Path(parent, name)))
            else:
                _check_link(folder, Path(parent, name))
        folders[:] = [name for name in folders if not name.startswith(".")]
        inner = Path(parent).relative_to(folder).parts
        for name in names:
            suffix = os.path.splitext(name)[1].lower()
            if name.startswith("."):
                unused[HIDDEN] += 1
            elif suffix not in IMAGES:
                others += 1
                unused[f"{suffix or 'other'} files"] += 1
            elif not inner and not is_label:
                unused[NO_LABEL] += 1
            else:
                images += 1
                yield _utf8_path(parent, name), inner
        if others > MOST_OTHERS and others > images:
            raise InputError(
                f"{folder.absolute()} is not a folder of images: {images:,} of its first {images + others:,} files "
                "are images",
                hint=EXPECTED,
            )


def _require_no_splits(folder: Path, inner: Collection[tuple[str, ...]]) -> None:
    """Raise `InputError` if images lie in folders of splits.

    A folder directly in `folder` is a split if it has the name of one, and all of its images lie in sub-folders, or all
    other folders have such names too. A deeper folder is one if it has the name. If all images lie in sub-folders,
    folders with names such as train2017 are splits too, unless other folders have other names.

    Args:
        folder: Folder with one sub-folder per label.
        inner: For each folder with images, the names of the folders from `folder` to it.
    """
    splits = {names[: at + 1] for names in inner for at in range(1, len(names)) if names[at].lower() in SPLITS}
    tops = {names[0] for names in inner}
    are_all = all(top.lower() in SPLITS for top in tops)
    splits |= {(top,) for top in tops if top.lower() in SPLITS and (are_all or (top,) not in inner)}
    if tops and all(_resembles_split(top) and (top,) not in inner for top in tops):
        splits |= {(top,) for top in tops}
    if splits:
        shown = sorted(os.path.join(folder, *names) for names in splits)
        message = f"{folder.absolute()} contains folders of splits, whose images would be mixed: {_first(shown)}"
        hint = "give each split a folder of its own that has one folder per label, or rename folders that are no splits"
        if any(len(names) > len(split) and names[: len(split)] == split for split in splits for names in inner):
            hint = f"name the folder of one split, such as data.train: {_training(shown)}; its folders are the labels"
        raise InputError(message, hint=hint)


def _resembles_split(name: str) -> bool:
    """Return whether a folder has the name of a split, perhaps with a year or a word behind it."""
    return name.lower() in SPLITS or LIKE_SPLITS.fullmatch(name.lower()) is not None


def _first(names: list[str]) -> str:
    """Return the first names as text for a message."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4:,} more" if names[4:] else "")


def _training(paths: Iterable[str]) -> str:
    """Return the path whose name begins with train, else the first."""
    return min(paths, key=lambda path: (not os.path.basename(path).lower().startswith("train"), path))


def _check_link(top: Path, folder: Path) -> None:
    """Raise `InputError` for a link below `top` to a folder above the link, because listing would never end."""
    if not folder.is_symlink():
        return
    target, parent = folder.resolve(), folder
    while parent != top:
        parent = parent.parent
        if parent.resolve().is_relative_to(target):
            raise InputError(f"links to {target}, which contains it", where=str(folder), hint="remove the link")


def _utf8_path(folder: str, name: str) -> Path:
    """Return the path of a file; raise `InputError` if it is not UTF-8 text, because tables store text only."""
    path = Path(folder, name)
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise InputError("the name of this image is not UTF-8 text", where=str(path), hint="rename it") from None
    return path


def folder_digest(folder: Path) -> str:
    """Return a digest of the paths, sizes and times of all images in a folder.

    The images are not read; see `file_state`. A dangling link is reported when rows are prepared.
    """
    listing = [(str(file.absolute()), label, *file_state(file)) for file, label in image_files(folder)]
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()


def no_images(folder: Path, unused: Mapping[str, int], key: str = "") -> InputError:
    """Return the error for a folder without images in its sub-folders, with what it contains."""
    found = f" (it has {_counts(unused)})" if any(unused.values()) else ""
    tables = sorted(path.name for path in folder.iterdir() if path.suffix in ROW_FILES and path.is_file())
    hint = f"a folder is a source of images only; name the file of rows, such as {tables[0]}" if tables else EXPECTED
    start = f"{key}: " if key else ""
    return InputError(f"{start}{folder.absolute()} contains no images{found}", hint=hint)


def _counts(unused: Mapping[str, int]) -> str:
    """Return numbers of files by reason as text."""
    return ", ".join(f"{why}: {count:,}" for why, count in sorted(unused.items()) if count)
