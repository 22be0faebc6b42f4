"""Write weights into safetensors files of limited size, one weight at a time.

Only the shards that are not complete are in memory. Weights get the names and the split that transformers uses in
files, which differ from those in some models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.runtime.errors import InputError
from ftcli.runtime.patches import declare

if TYPE_CHECKING:
    from torch import Tensor


SHARD_SIZE = "5GB"
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
WEIGHT_NAMES = declare(
    __name__,
    "weight-names-in-files",
    library="transformers",
    versions=">=5.17,<5.25",
    purpose="Renames and splits one weight at a time into the layout of transformers' files",
    without="Final weights and exports could have names that transformers does not read, so they are refused.",
    alternative="`save_pretrained(state_dict=...)`, which needs all weights in host memory at once.",
    apis=(
        "transformers.core_model_loading:revert_weight_conversion",
        "transformers:PreTrainedModel._keys_to_ignore_on_save",
    ),
    required=True,
)
# Names of weights in the model, and the values that replace them in files.
Group = tuple[list[str], dict[str, "Tensor"]]


def shard_bytes(text: str) -> int:
    """Return a size such as 5GB or 500MB in bytes; raise `InputError` for any other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(KB|MB|GB)", text.strip().upper())
    size = int(float(match[1]) * UNITS[match[2]]) if match else 0
    if size <= 0:
        raise InputError(f"--shard-size {text}: not a size", hint="as 5GB or 500MB")
    return size


def save_weights(
    model: Any, expected: Mapping[str, Tensor], values: Iterable[tuple[str, Tensor]], folder: Path, most: int
) -> None:
    """Write weights as transformers reads them: one file, or several files with an index.

    A weight that is larger than `most` gets its own file.

    Args:
        model: The transformers model; None: names are already those of the files.
        expected: Name in the model -> tensor on the meta device with the shape and dtype of the weight.
        values: (name, weight) in the order of `expected`.
        folder: Existing folder for the files.
        most: Largest size of a file in bytes.

    Raises:
        RuntimeError: A weight is missing, or its shape or dtype is not the one in `expected`.
    """
    from huggingface_hub import split_state_dict_into_shards_factory
    from safetensors.torch import save_file

    if model is not None:
        WEIGHT_NAMES.require()
    groups = _groups(model, expected)
    group_of = {name: group for group in groups for name in group[0]}
    plan = split_state_dict_into_shards_factory(
        {name: value for _, targets in groups for name, value in targets.items()},
        get_storage_size=lambda value: value.nbytes,  # a weight may be a part of a storage on the meta device
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=most,
    )
    files, place = plan.filename_to_tensors, plan.tensor_to_filename
    pending: dict[str, Tensor] = {}
    shards: dict[str, dict[str, Tensor]] = {file: {} for file in files}
    for name, value in values:
        if name not in group_of:
            continue
        if value.shape != expected[name].shape or value.dtype != expected[name].dtype:
            actual, needed = (f"{list(item.shape)} {item.dtype}" for item in (value, expected[name]))
            raise RuntimeError(f"{name} is {actual}, not {needed}")
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
        count = sum(value.numel() for _, targets in groups for value in targets.values())
        index = {"metadata": {"total_parameters": count} | plan.metadata, "weight_map": dict(sorted(place.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _groups(model: Any, expected: Mapping[str, Tensor]) -> list[Group]:
    """Return the smallest sets of weights that files must combine, in the order in which the sets are complete."""
    if model is None:
        return [([name], {name: value}) for name, value in expected.items()]
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_save", None) or ()]
    together: dict[str, list[str]] = {}  # the first name in files -> names in the model
    for name, value in expected.items():
        if not any(pattern.search(name) for pattern in ignored):
            together.setdefault(min(_in_files(model, {name: value})), []).append(name)
    order = {name: number for number, name in enumerate(expected)}
    sources = sorted(together.values(), key=lambda names: order[names[-1]])
    return [(names, _in_files(model, {name: expected[name] for name in names})) for names in sources]


def _in_files(model: Any, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights with the names and the split of transformers' files, as `save_pretrained` writes them."""
    from transformers.core_model_loading import revert_weight_conversion

    renamed: dict[str, Tensor] = values if model is None else revert_weight_conversion(model, values)
    return renamed
