"""Decode images to upright 8-bit RGB, in the same way when rows are prepared and when they are trained.

An image that Pillow cannot decode raises `RowError` with the name of the file. Pillow is imported inside functions.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ftcli.runtime.errors import RowError
from ftcli.runtime.reader_errors import reason

if TYPE_CHECKING:
    from datasets import Dataset
    from PIL.Image import Image


Result = TypeVar("Result")

ORIENTATION = 0x0112  # Exif tag
SCALED_16_BITS = ("PNG", "PPM")  # formats in which pixels of mode I have 16 bits and use the whole range
DRAFT = 8  # `check_image` decodes JPEGs at 1 / 8 of their size, which finds damaged files too


def find_image(value: Any) -> tuple[str | None, bytes | None]:
    """Return (path, None) for an image file, or (None, encoded bytes).

    Args:
        value: A path, encoded bytes, a mapping with `bytes` or `path` as `datasets` stores images, or an opened image.

    Raises:
        RowError: The value is not an image.
    """
    if isinstance(value, dict):
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    if isinstance(value, str):
        return value, None
    if isinstance(value, bytes):
        return None, value
    if not hasattr(value, "save"):
        raise RowError("has no image" if value is None else f"has {type(value).__name__} in place of an image")
    buffer = io.BytesIO()
    rgb = _convert_errors(None, lambda: _upright_rgb(value))
    rgb.save(buffer, format="PNG")
    return None, buffer.getvalue()


def load_image(path: str | None, data: bytes | None) -> Image:
    """Decode an image to RGB, rotated according to its Exif orientation.

    Args:
        path: File of the image, if `data` is None.
        data: Encoded bytes of the image.

    Returns:
        The decoded image.

    Raises:
        RowError: The image cannot be decoded; the message names the file.
    """
    return _convert_errors(path, lambda: _decode(path, data, is_draft=False))


def check_image(path: str | None, data: bytes | None) -> None:
    """Check that an image can be decoded. JPEGs are decoded at 1 / 8 of their size.

    Raises:
        RowError: The image cannot be decoded.
    """
    _convert_errors(path, lambda: _decode(path, data, is_draft=True))


def read_size(path: str | None, data: bytes | None) -> tuple[int, int, str]:
    """Return (width, height, mode) from the header of an image.

    Raises:
        RowError: The file is not an image.
    """

    def read() -> tuple[int, int, str]:
        with _open_image(path, data) as image:
            return image.width, image.height, image.mode

    return _convert_errors(path, read)


def disable_decoding(rows: Dataset) -> Dataset:
    """Return the rows with encoded images. Otherwise `datasets` decodes them, where an error cannot name the row."""
    from datasets import Image

    if isinstance(rows.features.get("image"), Image):
        return rows.cast_column("image", Image(decode=False))
    return rows


def _convert_errors(path: str | None, work: Callable[[], Result]) -> Result:
    """Return the result of `work`; convert errors of decoders to `RowError`."""
    try:
        return work()
    except (RowError, MemoryError) as error:
        if path is None or isinstance(error, MemoryError):
            raise
        raise RowError(f"{path}: {error}") from None
    except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error, zlib.error and more
        raise RowError(f"{'' if path is None else f'{path}: '}cannot read image: {reason(error)}") from error


def _open_image(path: str | None, data: bytes | None) -> Image:
    """Open an image without decoding its pixels."""
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(data) if data is not None else str(path))
    except UnidentifiedImageError:  # Pillow's message may have the address of a buffer
        raise RowError("cannot read image: unknown format") from None


def _decode(path: str | None, data: bytes | None, *, is_draft: bool) -> Image:
    """Decode an image to upright RGB; as a draft, JPEGs at a smaller size."""
    with _open_image(path, data) as image:
        if is_draft:
            image.draft(None, (max(1, image.width // DRAFT), max(1, image.height // DRAFT)))
        image.load()
        return _upright_rgb(image)


def _upright_rgb(image: Image) -> Image:
    """Return an image as RGB, rotated and mirrored according to its Exif orientation."""
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    try:
        turn = turns.get(image.getexif().get(ORIENTATION, 1))
    except Exception:  # the pixels may be valid although the Exif data are not
        turn = None
    rgb = _as_rgb(image)
    return rgb if turn is None else rgb.transpose(turn)


def _as_rgb(image: Image) -> Image:
    """Return an image as RGB, with 16-bit pixels scaled; Pillow would clip them to 255."""
    import numpy as np
    from PIL.Image import fromarray

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in SCALED_16_BITS):
        pixels = np.asarray(image).astype(np.uint32)
        return fromarray(((pixels + 128) // 257).astype(np.uint8)).convert("RGB")  # 65535 / 255 is 257
    if image.mode in ("I", "F"):
        low, high = image.getextrema()
        if not 0 <= low <= high <= 255:  # type: ignore[operator]
            raise RowError(f"image has pixels from {low:g} to {high:g}: save it with 8 or 16 bits per pixel")
        if image.mode == "F" and 0 < high <= 1:  # type: ignore[operator]  # rounded, all pixels would be black
            raise RowError(f"image has decimal pixels from {low:g} to {high:g}: save it with 8 or 16 bits per pixel")
    return image if image.mode == "RGB" else image.convert("RGB")  # which would copy an RGB image
