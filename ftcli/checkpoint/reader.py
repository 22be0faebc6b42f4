"""Read ranges of the tensors of a checkpoint."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ftcli.runtime.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor


class CheckpointReader:
    """Reads any range of a flattened tensor from the files of a checkpoint. Use as a context manager.

    Args:
        folder: The checkpoint.
        files: Names of its safetensors files.
    """

    def __init__(self, folder: Path, files: list[str]) -> None:
        from safetensors import safe_open

        self.folder, self._open = folder, ExitStack()
        self._ranges: dict[str, list[tuple[int, int, Any]]] = {}  # kind/name -> (start, end, slice of a file)
        for file in files:
            content = self._open.enter_context(safe_open(folder / file, framework="pt"))
            for key in content.keys():  # noqa: SIM118 - not a mapping
                tensor, _, start = key.rpartition("@")
                values = content.get_slice(key)
                end = int(start) + values.get_shape()[0]
                self._ranges.setdefault(tensor, []).append((int(start), end, values))

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self._ranges.clear()
        self._open.close()

    def has(self, kind: str, name: str) -> bool:
        """Return whether any element of a tensor is stored.

        Args:
            kind: weight, buffer or a moment.
            name: Name of the parameter or buffer.
        """
        return f"{kind}/{name}" in self._ranges

    def read(self, kind: str, name: str, start: int, length: int) -> Tensor:
        """Return elements [start, start + length) of a flattened tensor.

        Args:
            kind: weight, buffer or a moment.
            name: Name of the parameter or buffer.
            start: Index of the first element.
            length: Number of elements.

        Returns:
            `[length]`, on the host, in the stored dtype.

        Raises:
            InputError: Some of the elements are not stored.
        """
        values, position, end = [], start, start + length
        for first, last, stored in sorted(self._ranges.get(f"{kind}/{name}", []), key=lambda item: item[:2]):
            if first <= position < min(last, end):
                values.append(stored[position - first : min(last, end) - first])
                position = min(last, end)
        if position != end:
            raise InputError(
                f"{self.folder} lacks elements from {position} on of {kind} {name}",
                hint="use another checkpoint: this one was not saved completely",
            )
        return torch.cat(values) if values else torch.empty(0)
