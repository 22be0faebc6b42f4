"""Pack ranges of flattened tensors into safetensors files in host memory.

A file is a header and one contiguous buffer of bytes, which is written without further copies. The writer of
safetensors makes two more copies and holds Python's global lock meanwhile, so training would stop.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from ftcli.hardware.optimizer_state import StateShard


FILE_BYTES = 256 * 2**20  # largest size of a file; a power of two, because CUDA allocates pinned memory in such sizes
DTYPES = {  # names in the header: github.com/huggingface/safetensors, "Format"
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
FileContents = list[tuple[str, "Tensor"]]  # (key in the file, values `[n]` of the running model)


@dataclass(frozen=True)
class TensorFile:
    """The content of one safetensors file.

    Attributes:
        header: The file up to the first tensor.
        data: The bytes of all tensors, uint8 `[n]`, on the host.
    """

    header: bytes
    data: Tensor


def split_into_files(shards: Iterable[StateShard]) -> Iterator[FileContents]:
    """Divide the elements that this rank saves into files. All files but the last have the full size.

    Args:
        shards: The state of this rank.

    Yields:
        The keys and tensors of one file.
    """
    contents: FileContents = []
    room = FILE_BYTES
    for shard in shards:
        for kind, tensor in shard.tensors.items():
            flat, size, first = tensor.detach().reshape(-1), tensor.element_size(), shard.saved.start
            while first < shard.saved.stop:
                last = min(first + room // size, shard.saved.stop)
                if last > first:
                    contents.append((f"{kind}/{shard.name}@{shard.start + first}", flat[first:last]))
                    room -= size * (last - first)
                    first = last
                else:
                    yield contents
                    contents, room = [], FILE_BYTES
    if contents:
        yield contents


def saved_bytes(shards: Iterable[StateShard]) -> int:
    """Return the number of bytes that this rank saves."""
    return sum((p.saved.stop - p.saved.start) * t.element_size() for p in shards for t in p.tensors.values())


def copy_to_host(contents: FileContents) -> TensorFile:
    """Copy the tensors of a file to the host. Copies from a GPU are complete after `wait_for_copies`.

    The host memory is pinned, which makes the copy faster. torch reuses it for the next checkpoint.

    Args:
        contents: Keys and tensors of a file.

    Returns:
        The content of the file.
    """
    ordered = sorted(contents, key=lambda item: -item[1].element_size())  # aligns each tensor to its element size
    total = sum(values.nbytes for _, values in ordered)
    data = torch.empty(total, dtype=torch.uint8, pin_memory=any(values.is_cuda for _, values in ordered))
    entries: dict[str, Any] = {}
    start = 0
    for key, values in ordered:
        end = start + values.nbytes
        data[start:end].copy_(values.view(torch.uint8), non_blocking=True)
        entries[key] = {"dtype": DTYPES[values.dtype], "shape": list(values.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return TensorFile(len(text).to_bytes(8, "little") + text, data)


def wait_for_copies() -> None:
    """Wait until the copies that `copy_to_host` started are complete."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
