"""The files of a checkpoint as they lie in memory: stretches of flattened tensors, packed, copied to the host.

A part is one safetensors file: a header, and one row of bytes which is written as it is. (safetensors' own writer
makes two more copies of everything, and Python's lock is held meanwhile, so that training would stand still.)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from .hardware.state import Piece

PART_BYTES = 256 * 2**20  # most bytes of one file; a power of two, which is what CUDA's host memory comes in
DTYPES = {  # as the header names them: github.com/huggingface/safetensors, "Format"
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
Stretches = list[tuple[str, "Tensor"]]  # (key of the file, live values `[n]`)


@dataclass(frozen=True)
class Part:
    """One file, on the host."""

    header: bytes
    data: Tensor  # uint8 `[n]`


def stretches(pieces: Iterable[Piece]) -> Iterator[Stretches]:
    """Yield what this rank saves, one file's worth at a time; cut so that every file but the last is full."""
    part: Stretches = []
    room = PART_BYTES
    for piece in pieces:
        for kind, tensor in piece.tensors.items():
            flat, size, first = tensor.detach().reshape(-1), tensor.element_size(), piece.kept.start
            while first < piece.kept.stop:
                last = min(first + room // size, piece.kept.stop)
                if last > first:
                    part.append((f"{kind}/{piece.name}@{piece.start + first}", flat[first:last]))
                    room -= size * (last - first)
                    first = last
                else:
                    yield part
                    part, room = [], PART_BYTES
    if part:
        yield part


def size_on_host(pieces: Iterable[Piece]) -> int:
    """Return the bytes of all that this rank saves."""
    return sum((p.kept.stop - p.kept.start) * t.element_size() for p in pieces for t in p.tensors.values())


def copy(part: Stretches) -> Part:
    """Return a part's values as they are now; those from a GPU are there after `wait_for_copies`.

    Memory for them is page-locked, which makes the copy several times faster; torch keeps it for the next time.
    """
    ordered = sorted(part, key=lambda item: -item[1].element_size())  # each then lies at a multiple of its size
    total = sum(values.nbytes for _, values in ordered)
    data = torch.empty(total, dtype=torch.uint8, pin_memory=any(values.is_cuda for _, values in ordered))
    described: dict[str, Any] = {}
    at = 0
    for key, values in ordered:
        end = at + values.nbytes
        data[at:end].copy_(values.view(torch.uint8), non_blocking=True)
        described[key] = {"dtype": DTYPES[values.dtype], "shape": list(values.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    return Part(len(text).to_bytes(8, "little") + text, data)


def wait_for_copies() -> None:
    """Wait until the copies that `copy` started are on the host."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
