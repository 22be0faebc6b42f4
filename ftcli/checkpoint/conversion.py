"""Convert trained weights to another dtype and shard size, for `ftcli export`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.checkpoint.hf_shards import save_weights
from ftcli.config.recipe_model import Model
from ftcli.data.revisions import is_on_hub
from ftcli.models.adapter_folder import BASE_CONFIG
from ftcli.runtime.errors import InputError
from ftcli.runtime.reader_errors import first_line

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def convert_model(final: Path, folder: Path, dtype_name: str, most: int) -> None:
    """Write the weights of one folder into another folder, in another dtype and with another shard size.

    Args:
        final: A folder with safetensors files.
        folder: Folder for the new files; its config.json gets the dtype.
        dtype_name: A dtype of torch, such as bfloat16. Only floating-point tensors are converted.
        most: Largest size of a shard in bytes.

    Raises:
        InputError: A file is damaged.
    """
    from contextlib import ExitStack

    import torch
    from safetensors import SafetensorError, safe_open

    dtype = getattr(torch, dtype_name)
    with ExitStack() as opened:
        files = []
        for path in sorted(final.glob("*.safetensors")):
            try:
                files.append(opened.enter_context(safe_open(path, framework="pt")))
            except SafetensorError as error:
                raise InputError(f"{path} is damaged: {error}", hint="export a checkpoint of the run") from error
        origin = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - no mapping

        targets = {}
        for name, file in origin.items():
            stored = file.get_slice(name)
            target_dtype = dtype if "F" in stored.get_dtype() else file.get_tensor(name).dtype
            targets[name] = torch.empty(stored.get_shape(), dtype=target_dtype, device="meta")
        values = ((name, file.get_tensor(name).to(targets[name].dtype)) for name, file in origin.items())
        save_weights(None, targets, values, folder, most)
    name_dtype(folder / "config.json", dtype_name)


def cast_values(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in a dtype; integers, such as the counters of batch norms, stay as they are.

    Args:
        value: Any tensor.
        dtype: A floating-point dtype.
    """
    return value.to(dtype) if value.is_floating_point() else value


def convert_adapter(path: Path, dtype: str) -> None:
    """Convert the weights of an adapter to another dtype, in place.

    Args:
        path: A safetensors file.
        dtype: Name of a dtype of torch.
    """
    import torch
    from safetensors.torch import load_file, save_file

    values = {name: cast_values(value, getattr(torch, dtype)) for name, value in load_file(path).items()}
    save_file(values, path, metadata={"format": "pt"})


def name_dtype(config: Path, dtype: str) -> None:
    """Write the dtype of the weights into a model's configuration, if the file exists.

    Args:
        config: The config.json. The folder of a task's own module may have none.
        dtype: Name of a dtype of torch.
    """
    if not config.exists():
        return

    def named(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: dtype if key == "dtype" and inner else named(inner) for key, inner in value.items()}

    settings = named(json.loads(config.read_text(encoding="utf-8"))) | {"dtype": dtype}
    config.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def name_base_revision(config: Path, model: Model) -> None:
    """Write the revision of the base into an adapter's configuration, which older versions of ftcli left out."""
    settings = json.loads(config.read_text(encoding="utf-8"))
    if settings.get("revision") is None and model.revision is not None and is_on_hub(model.name):
        config.write_text(json.dumps(settings | {"revision": model.revision}, indent=2) + "\n", encoding="utf-8")


def name_base_rows(folder: Path, new_tokens: Sequence[str]) -> None:
    """Write the base's number of tokens into an adapter's configuration of it. Older versions wrote the resized one.

    Args:
        folder: Folder of the adapter. Nothing is done without such a configuration.
        new_tokens: `model.new_tokens` of the recipe. Nothing is done without any.

    Raises:
        InputError: The configuration of the base cannot be read.
    """
    path = folder / BASE_CONFIG / "config.json"
    if not new_tokens or not path.exists():
        return
    from transformers import PretrainedConfig

    adapter = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    name, revision = adapter["base_model_name_or_path"], adapter.get("revision")
    try:
        own, _ = PretrainedConfig.get_config_dict(name, revision=revision)
    except OSError as error:  # transformers' error for everything that it cannot find
        message = f"the configuration of the base model {name} cannot be read: {first_line(error)}"
        raise InputError(message, hint="restore the base model") from error
    settings = json.loads(path.read_text(encoding="utf-8"))
    for part, of_base in ((settings, own), (settings.get("text_config"), own.get("text_config"))):
        if isinstance(part, dict) and isinstance(of_base, dict) and "vocab_size" in of_base:
            part["vocab_size"] = of_base["vocab_size"]
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
