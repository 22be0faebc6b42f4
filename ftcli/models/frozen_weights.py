"""Compute a digest of the base weights of a run from samples, which takes little time at each start.

For frozen weights at most 1 MiB of each tensor is read: small tensors whole, larger ones as 16 samples of 64 KiB at
equal distances. A model that was trained further, merged or rounded is therefore recognised. A change of a few values
inside a large tensor is not. The digest depends neither on the folder nor on the distribution of tensors over files.
`weights_digest` does not depend on the format of the files either. trained_on.py compares it.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ftcli.config.recipe_model import NO_MODEL
from ftcli.data.paths import model_folder
from ftcli.models.files import weight_files

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe


FORMULA = "samples-1"  # the formula of `frozen_digest`, which checkpoints of earlier versions store
SAMPLE_BYTES = 1 << 16
SAMPLES = 16  # per tensor; a file of another format is divided into 16 ranges with 16 samples each
END_BYTES = 1 << 12  # of trained weights only the first and the last bytes are read
PICKLED = (".bin", ".pt", ".pth")
# safetensors' names of dtypes.
DTYPES = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.int16": "I16",
    "torch.int8": "I8",
    "torch.uint8": "U8",
    "torch.bool": "BOOL",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
}
HEADS = re.compile(r"(^|\.)(lm_head|embed_out|output|decoder)(\.decoder)?\.(weight|bias)$")  # may repeat another tensor
BUFFERS = re.compile(r"(^|\.)(position_ids|inv_freq|masked_bias|attn\.bias)$")  # old files hold these constants
VOLATILE = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")  # keys of config.json that may change


def frozen_digest(recipe: Recipe) -> str | None:
    """Return the digest that earlier versions stored for an adapter run: of config.json and samples of the weights.

    Args:
        recipe: The recipe, with resolved commits.

    Returns:
        32 hexadecimal digits. None if the whole model is trained, or if its files are not on this machine.
    """
    folder = model_files_folder(recipe) if recipe.adapter.type != "none" else None
    return None if folder is None else folder_digest(folder)


def folder_digest(folder: Path) -> str:
    """Return the digest of `frozen_digest` for a model's folder."""
    settings = model_settings(folder)
    content: dict[str, Any] = {"config": settings} if settings else {}
    for path in weight_files(folder):
        if path.is_file():
            content |= dict(_tensors(path))
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def weights_digest(folder: Path, *, frozen: bool) -> str | None:
    """Return a digest of the weights in a model's folder, which does not depend on the format of the files.

    Args:
        folder: The folder.
        frozen: Whether the weights are not trained. Of trained weights only the ends of each tensor are read.

    Returns:
        32 hexadecimal digits; None if a weight file is missing or cannot be read.
    """
    content: dict[str, Any] = {}
    size, count = (SAMPLE_BYTES, SAMPLES) if frozen else (END_BYTES, 2)
    for path in weight_files(folder):
        tensors = _pickled_tensors if path.suffix in PICKLED else _tensors
        try:
            content |= dict(tensors(path, size, count))
        except (OSError, ValueError, RuntimeError, pickle.UnpicklingError):  # loading the model reports it
            return None
    values = list(content.values())
    for name in [name for name in content if HEADS.search(name) and values.count(content[name]) > 1]:
        del content[name]  # the copy of a tied weight, which safetensors files leave out
    kept = {name: value for name, value in content.items() if not BUFFERS.search(name)}
    return hashlib.blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=16).hexdigest() if kept else None


def model_settings(folder: Path) -> dict[str, Any]:
    """Return config.json of a model's folder without the keys that may change; empty without the file."""
    config = folder / "config.json"
    if not config.is_file():
        return {}
    return {key: value for key, value in json.loads(config.read_bytes()).items() if key not in VOLATILE}


def model_files_folder(recipe: Recipe) -> Path | None:
    """Return the folder of the model, perhaps in the cache of the hub; None if it is not on this machine."""
    return files_folder(recipe.model.name, recipe.model.revision)


def files_folder(name: str, revision: str | None) -> Path | None:
    """Return the folder of a model, perhaps in the cache of the hub; None if it is not on this machine.

    Args:
        name: Its name or folder.
        revision: Its commit on the hub; None for a folder.
    """
    folder = None if name == NO_MODEL else model_folder(name)
    if folder is not None or revision is None:
        return folder
    from huggingface_hub.constants import HF_HUB_CACHE

    own = Path(HF_HUB_CACHE, "--".join(["models", *name.split("/")]), "snapshots", revision)
    return own if own.is_dir() else None


def _tensors(path: Path, sample: int = SAMPLE_BYTES, samples: int = SAMPLES) -> Iterator[tuple[str, Any]]:
    """Yield (name, dtype, shape and digest) of each tensor; for a file that is not safetensors, digests of ranges."""
    with path.open("rb") as file:
        size = path.stat().st_size
        if path.suffix != ".safetensors":
            length = -(-size // SAMPLES)
            starts = range(0, size, length or 1)
            yield path.name, [_sampled(file, start, min(length, size - start)) for start in starts]
            return
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                yield (
                    name,
                    [
                        entry["dtype"],
                        entry["shape"],
                        _sampled(file, 8 + length + start, end - start, sample, samples),
                    ],
                )


def _pickled_tensors(path: Path, sample: int, samples: int) -> Iterator[tuple[str, Any]]:
    """Yield what `_tensors` yields for the same tensors in a safetensors file. PyTorch unpickles tensors only."""
    import io

    import torch

    try:
        values = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except RuntimeError:  # the format of PyTorch before 1.6 cannot be mapped
        values = torch.load(path, map_location="cpu", weights_only=True)
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
            digest = _sampled(io.BytesIO(data), 0, len(data), sample, samples)
            yield name, [DTYPES.get(str(value.dtype), str(value.dtype)), list(value.shape), digest]


def _sampled(file: BinaryIO, start: int, size: int, sample: int = SAMPLE_BYTES, samples: int = SAMPLES) -> str:
    """Return a digest of a range of a file: of all bytes, or of `samples` samples including the end of the range."""
    digest = hashlib.blake2b(digest_size=16)
    whole = size <= sample * samples
    for number in range(1 if whole else samples):
        file.seek(start if whole else start + number * (size - sample) // (samples - 1))
        digest.update(file.read(size if whole else sample))
    return digest.hexdigest()
