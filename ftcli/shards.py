"""Weights on their way into safetensors files, one at a time: never more than one shard of them is held.

Names change on the way, for transformers' files do not always name and cut weights as its models do. This module
knows neither where weights come from nor what they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

SHARD_SIZE = "5GB"
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
Group = tuple[list[str], dict[str, "Tensor"]]  # weights of the model, and what a file holds instead of them


def shard_bytes(text: str) -> int:
    """Return a size such as 5GB or 500MB in bytes; raises `InputError` for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(KB|MB|GB)", text.strip().upper())
    size = int(float(match[1]) * UNITS[match[2]]) if match else 0
    if size <= 0:
        raise InputError(f"--shard-size {text}: not a size", hint="as 5GB or 500MB")
    return size


def save_weights(
    model: Any, wanted: Mapping[str, Tensor], values: Iterable[tuple[str, Tensor]], folder: Path, most: int
) -> None:
    """Write `values` as transformers reads them: files of at most `most` bytes each, with an index if several.

    `wanted` has the shape and dtype of every value, on the meta device, under its name in `model`, in the order in
    which `values` come. `model` None: names are those of the files already. A weight larger than `most` gets a file
    of its own. Raises `RuntimeError` for a value that is missing or not what was wanted.
    """
    from safetensors.torch import save_file

    groups = _groups(model, wanted)
    group_of = {name: group for group in groups for name in group[0]}
    files = _plan(groups, most)
    place = {name: file for file, names in files.items() for name in names}
    pending: dict[str, Tensor] = {}
    shards: dict[str, dict[str, Tensor]] = {file: {} for file in files}
    for name, value in values:
        if name not in group_of:
            continue
        if value.shape != wanted[name].shape or value.dtype != wanted[name].dtype:
            found, asked = (f"{list(item.shape)} {item.dtype}" for item in (value, wanted[name]))
            raise RuntimeError(f"{name} is {found}, not {asked}")
        pending[name] = value
        sources = group_of[name][0]
        if all(source in pending for source in sources):
            for target, made in _in_files(model, {source: pending.pop(source) for source in sources}).items():
                file = place[target]
                shards[file][target] = made.contiguous()
                if len(shards[file]) == len(files[file]):
                    save_file(shards.pop(file), folder / file, metadata={"format": "pt"})
    if pending or shards:
        missing = sorted({name for group in groups for name in group[0]} - pending.keys())
        raise RuntimeError(f"weights are missing, one of {missing[:3]}")
    if len(files) > 1:
        sizes = [value for _, targets in groups for value in targets.values()]
        total = {
            "total_parameters": sum(value.numel() for value in sizes),
            "total_size": sum(value.nbytes for value in sizes),
        }
        index = {"metadata": total, "weight_map": dict(sorted(place.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _plan(groups: list[Group], most: int) -> dict[str, list[str]]:
    """Return file -> names of the weights in it, filled in the order in which weights come."""
    shards: list[list[str]] = [[]]
    size = 0
    for _, targets in groups:
        for name, value in targets.items():
            if size and size + value.nbytes > most:
                shards.append([])
                size = 0
            shards[-1].append(name)
            size += value.nbytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{n:05d}-of-{len(shards):05d}.safetensors": names for n, names in enumerate(shards, start=1)}


def _groups(model: Any, wanted: Mapping[str, Tensor]) -> list[Group]:
    """Return the smallest sets of weights that go into files together, in the order in which they are complete."""
    if model is None:
        return [([name], {name: value}) for name, value in wanted.items()]
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_save", None) or ()]
    together: dict[str, list[str]] = {}  # the first name in files -> names in the model
    for name, value in wanted.items():
        if not any(pattern.search(name) for pattern in ignored):
            together.setdefault(min(_in_files(model, {name: value})), []).append(name)
    order = {name: number for number, name in enumerate(wanted)}
    sources = sorted(together.values(), key=lambda names: order[names[-1]])
    return [(names, _in_files(model, {name: wanted[name] for name in names})) for names in sources]


def _in_files(model: Any, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return some weights as transformers' files name and cut them: what `save_pretrained` does to all at once."""
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, Tensor] = values if model is None else revert_weight_conversion(model, values)
    return found
