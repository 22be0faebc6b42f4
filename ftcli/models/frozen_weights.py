"""Compute a digest of the frozen base weights of an adapter run, which takes little time at each start.

At most 1 MiB of each tensor is read: small tensors whole, larger ones as 16 samples of 64 KiB at equal distances. A
model that was trained further, merged or rounded is therefore recognised. A change of a few values inside a large
tensor is not. The digest depends neither on the folder nor on the distribution of tensors over files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ftcli.data.paths import model_folder
from ftcli.models.files import weight_files
from ftcli.runtime.errors import InputError

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe


FORMULA = "samples-1"  # stored with the digest; change it if the same weights would get another digest
SAMPLE_BYTES = 1 << 16
SAMPLES = 16  # per tensor; a file of another format is divided into 16 ranges with 16 samples each
VOLATILE = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")  # keys of config.json that may change


def frozen_digest(recipe: Recipe) -> str | None:
    """Return a digest of the base model of an adapter run: its configuration and samples of its weights.

    Args:
        recipe: The recipe, with resolved commits.

    Returns:
        32 hexadecimal digits. None if the whole model is trained, or if its files are not on this machine.
    """
    folder = model_files_folder(recipe) if recipe.adapter.type != "none" else None
    if folder is None:
        return None
    settings = model_settings(folder)
    content: dict[str, Any] = {"config": settings} if settings else {}
    for path in weight_files(folder):
        if path.is_file():
            content |= dict(_tensors(path))
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def frozen_entry(recipe: Recipe, digest: str | None) -> dict[str, Any] | None:
    """Return the entry of state.json for the frozen weights; None without a digest."""
    return None if digest is None else {"formula": FORMULA, "name": recipe.model.name, "digest": digest}


def check_frozen(state: Mapping[str, Any], recipe: Recipe, digest: str | None) -> None:
    """Check that a model has the frozen weights with which a checkpoint's adapter was trained.

    Args:
        state: The checkpoint's state.json.
        recipe: The recipe whose model is used now.
        digest: `frozen_digest` of that recipe.

    Raises:
        InputError: The digests differ. Checkpoints without a digest, or with another formula, are not compared.
    """
    before = state.get("frozen") or {}
    if digest is None or before.get("formula") != FORMULA or before["digest"] == digest:
        return
    raise InputError(
        f"the frozen weights of {recipe.model.name} are not those with which the adapter was trained: "
        f"digest {before['digest']} then (of {before['name']}), {digest} now",
        hint="restore the old model, or use --resume-anyway to train with the new one",
    )


def model_settings(folder: Path) -> dict[str, Any]:
    """Return config.json of a model's folder without the keys that may change; empty without the file."""
    config = folder / "config.json"
    if not config.is_file():
        return {}
    return {key: value for key, value in json.loads(config.read_bytes()).items() if key not in VOLATILE}


def model_files_folder(recipe: Recipe) -> Path | None:
    """Return the folder of the model, perhaps in the cache of the hub; None if it is not on this machine."""
    folder = model_folder(recipe.model.name)
    if folder is not None or recipe.model.revision is None:
        return folder
    from huggingface_hub.constants import HF_HUB_CACHE

    own = Path(HF_HUB_CACHE, "--".join(["models", *recipe.model.name.split("/")]), "snapshots", recipe.model.revision)
    return own if own.is_dir() else None


def _tensors(path: Path) -> Iterator[tuple[str, Any]]:
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
                yield name, [entry["dtype"], entry["shape"], _sampled(file, 8 + length + start, end - start)]


def _sampled(file: BinaryIO, start: int, size: int) -> str:
    """Return a digest of a range of a file: of all bytes, or of `SAMPLES` samples including the end of the range."""
    digest = hashlib.blake2b(digest_size=16)
    whole = size <= SAMPLE_BYTES * SAMPLES
    for number in range(1 if whole else SAMPLES):
        file.seek(start if whole else start + number * (size - SAMPLE_BYTES) // (SAMPLES - 1))
        digest.update(file.read(size if whole else SAMPLE_BYTES))
    return digest.hexdigest()
