"""Measure the distance of the final weights of two runs, from their files. Light: never imports torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


def distance(run: Path, reference: Path, reach: float) -> float | None:
    """Return the root mean square difference of the weights in two folders, divided by `reach`.

    Args:
        run: A folder of safetensors files.
        reference: The folder to compare with.
        reach: Sum of the learning rates of all steps, about the largest distance that AdamW moves a weight. Unrelated
            runs with the same start have a result of about 1 or more.

    Returns:
        The distance; None if files, names or shapes differ.
    """
    squares, numbers = 0.0, 0
    names = [sorted(path.name for path in folder.glob("*.safetensors")) for folder in (run, reference)]
    if names[0] != names[1]:
        return None
    for name in names[0]:
        mine, other = (StoredValues(folder / name) for folder in (run, reference))
        if mine.shapes != other.shapes:
            return None
        for key in sorted(other.shapes):
            squares += float(((mine.read(key) - other.read(key)) ** 2).sum())
            numbers += math.prod(other.shapes[key])
    return (squares / max(numbers, 1)) ** 0.5 / (reach or 1.0)


class StoredValues:
    """Reads the tensors of one safetensors file as numpy arrays, including bfloat16, which numpy does not have."""

    def __init__(self, path: Path) -> None:
        import numpy as np

        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        self._entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + length)
        self.shapes = {name: tuple(entry["shape"]) for name, entry in self._entries.items()}

    def read(self, name: str) -> Any:
        """Return one tensor's values, flattened, as float64 `[n]`."""
        entry = self._entries[name]
        first, last = entry["data_offsets"]
        content = self._bytes[first:last]
        if entry["dtype"] == "BF16":  # bfloat16 is the upper half of a float32
            return (content.view("<u2").astype("<u4") << 16).view("<f4").astype("float64")
        return content.view(f"<{entry['dtype'][0].lower()}{int(entry['dtype'][1:]) // 8}").astype("float64")
