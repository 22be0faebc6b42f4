"""Draw images side by side on one sheet, as PNG. Pillow is imported inside functions."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

GAP, TITLE = 6, 18  # pixels between images, and height of a line of text
LEAST_SIDE = 128  # smaller images are enlarged by a whole factor to about this size


def draw_sheet(columns: Mapping[str, Sequence[Image]], notes: Sequence[str]) -> bytes:
    """Return a sheet with one row for each set of images.

    Args:
        columns: Images of R rows by title of the column, all of the same size.
        notes: A text below each row, `""` for none.

    Returns:
        The sheet as PNG.
    """
    from PIL import Image, ImageDraw
    from PIL.Image import Resampling

    width, height = next(iter(columns.values()))[0].size
    factor = max(1, round(LEAST_SIDE / max(width, height)))
    width, height = width * factor, height * factor
    step = height + TITLE + GAP
    sheet = Image.new("RGB", (GAP + len(columns) * (width + GAP), TITLE + GAP + len(notes) * step), "white")
    pen = ImageDraw.Draw(sheet)
    for column, (title, images) in enumerate(columns.items()):
        left = GAP + column * (width + GAP)
        pen.text((left, GAP // 2), title, fill="black")
        for row, image in enumerate(images):
            sheet.paste(image.resize((width, height), Resampling.NEAREST), (left, TITLE + row * step))
    for row, note in enumerate(notes):
        pen.text((GAP, TITLE + row * step + height + 2), note, fill="black")
    buffer = io.BytesIO()
    sheet.save(buffer, format="PNG")
    return buffer.getvalue()
