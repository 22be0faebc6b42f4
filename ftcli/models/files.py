"""Check that a local model folder is complete: all weight files at full size, and a tokenizer if one is needed.

Only names, sizes and headers of files are read, so that an incomplete download is reported before the model loads. The
module never imports torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ftcli.data.paths import MODEL_KEY, model_folder
from ftcli.runtime.errors import InputError
from ftcli.runtime.reader_errors import reading

WEIGHTS = ("model.safetensors", "adapter_model.safetensors", "pytorch_model.bin", "adapter_model.bin")
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
TOKENIZER_PATTERNS = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json", "spiece*")
INCOMPLETE_HINT = "the model may be incomplete: download or copy it again"


def check_model_files(name: str, *, has_tokenizer: bool, key: str = MODEL_KEY) -> None:
    """Check the files of a model in a local folder; models on the hub are not checked.

    Args:
        name: Name of the model in the recipe.
        has_tokenizer: Whether the task needs a tokenizer.
        key: The key of the recipe that has the name, for messages.

    Raises:
        InputError: A file is missing or too short; the message names the first one.
    """
    folder = model_folder(name, key)
    if folder is None:
        return
    files = weight_files(folder)
    if not files and not any(path.suffix in WEIGHT_SUFFIXES for path in folder.iterdir()):
        hint = "the folder needs model.safetensors, or shards with model.safetensors.index.json"
        raise InputError(f"{key}: {name} has no weights", hint=hint)
    if missing := [path.name for path in files if not path.is_file()]:
        problem = f"{key}: {len(missing)} of {len(files)} weight files of {name} are missing, first {missing[0]}"
        raise InputError(problem, hint=INCOMPLETE_HINT)
    for path in files:
        if path.suffix == ".safetensors":
            size, expected = path.stat().st_size, _expected_size(path)
            if size < expected:
                raise InputError(f"{key}: {path} ends after {size:,} of {expected:,} bytes", hint=INCOMPLETE_HINT)
    if has_tokenizer and not any(next(folder.glob(pattern), None) for pattern in TOKENIZER_PATTERNS):
        problem = f"{key}: {name} has no tokenizer, which this task needs"
        raise InputError(problem, hint="copy its tokenizer.json and tokenizer_config.json there, or name another model")


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a model folder, in transformers' order of preference; shards may be missing."""
    for name in WEIGHTS:
        if (folder / name).is_file():
            return [folder / name]
        if (index := folder / f"{name}.index.json").is_file():
            with reading(index, INCOMPLETE_HINT):
                shards = parse_json_object(index, index.read_bytes()).get("weight_map", {})
                return [folder / shard for shard in sorted(set(shards.values()))]
    return []


def stored_shapes(folder: Path) -> dict[str, list[int]]:
    """Return the shape of every tensor in a model's safetensors files, from their headers.

    Raises:
        InputError: A file has no valid header.
    """
    files = [path for path in weight_files(folder) if path.suffix == ".safetensors" and path.is_file()]
    shapes: dict[str, list[int]] = {}
    for path in files:
        with reading(path, INCOMPLETE_HINT):
            shapes |= {name: [int(size) for size in entry["shape"]] for name, entry in _header(path).items()}
    return shapes


def header_problem(path: Path) -> str:
    """Return why a safetensors file cannot be complete, from its header; "" if it can."""
    try:
        size, expected = path.stat().st_size, _expected_size(path)
    except InputError:
        return "it has no valid header"
    return f"it ends after {size:,} of {expected:,} bytes" if size < expected else ""


def _header(path: Path) -> dict[str, Any]:
    """Return the entries of a safetensors header, by name of the tensor."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = parse_json_object(path, file.read(length) if length <= path.stat().st_size else b"")
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def _expected_size(path: Path) -> int:
    """Return the size in bytes that a safetensors file has according to its header."""
    with reading(path, INCOMPLETE_HINT):
        ends = [int(entry["data_offsets"][1]) for entry in _header(path).values()]
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little") + max(ends, default=0)


def parse_json_object(path: Path, content: bytes) -> dict[str, Any]:
    """Parse bytes of a model's file as a JSON object.

    Args:
        path: The file, for the message.
        content: The bytes.

    Raises:
        InputError: The bytes are not a JSON object.
    """
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"model.name: {path} cannot be read", hint=INCOMPLETE_HINT) from error
    if not isinstance(value, dict):
        raise InputError(f"model.name: {path} cannot be read", hint=INCOMPLETE_HINT)
    return value
