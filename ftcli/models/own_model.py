"""Save, load and probe models that transformers does not provide.

A task with `auto_class = None` builds the module itself. The weights are saved in model.safetensors under the names of
parameters and persistent buffers. `save_model` of the task may write more files. `probe_output` selects the tensor that
an exported model must reproduce. The module imports torch inside functions only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.models.structure import embeddings_and_head
from ftcli.runtime.errors import InputError
from ftcli.tasks.protocol import properties_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ftcli.config.recipe import Recipe


OUTPUTS = ("logits", "last_hidden_state")  # attributes of transformers' outputs to use as a probe; the first one found


def save_config(task: Any, model: Any, folder: Path) -> None:
    """Write the files of a model except its weights: with `save_model` of the task, or with transformers.

    Args:
        task: The task of the run; None uses transformers.
        model: The model, not prepared.
        folder: Folder to write into; it is created.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if hasattr(task, "save_model"):
        task.save_model(model, str(folder))
    elif hasattr(model, "save_pretrained"):
        model.save_pretrained(folder, state_dict={})


def record_cut_tie(model: Any, names: Iterable[str], folder: Path) -> None:
    """Write `tie_word_embeddings: false` into config.json if the files have both embeddings and head.

    transformers reads both weights since version 5. Older versions and other programs tie what the configuration says.

    Args:
        model: The model, with or without layers of an adapter in it.
        names: Names of the weights in the files, without peft's parts.
        folder: Folder with config.json. Nothing is changed without the file.
    """
    path, ends = folder / "config.json", embeddings_and_head(model)
    weights = {f"{name}.weight" for name, module in model.named_modules() if any(module is end for end in ends)}
    if len(weights) < 2 or not weights.issubset(names) or not path.is_file():
        return

    def without_tie(config: dict[str, Any]) -> dict[str, Any]:
        inner = {key: without_tie(value) if isinstance(value, dict) else value for key, value in config.items()}
        return inner | ({"tie_word_embeddings": False} if config.get("tie_word_embeddings") else {})

    config = without_tie(json.loads(path.read_text(encoding="utf-8")))
    if getattr(
        getattr(model, "config", None), "tie_word_embeddings", False
    ):  # also if it is the default, which the file leaves out
        config["tie_word_embeddings"] = False
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def exported_part(task: Any, model: Any) -> Any:
    """Return the part of a model that final weights and exports contain: a submodule that the task names, or all of it.

    Args:
        task: The task of the run; None for a model that is exported as a whole.
        model: The model, not prepared or without its wrapper.
    """
    name = "" if task is None else properties_of(task).exported_part
    return model.get_submodule(name) if name else model


def names_in_files(model: Any) -> Any:
    """Return the model if transformers may rename its weights in files; None if files have the parameters' names."""
    return model if hasattr(model, "save_pretrained") else None


def probe_tensor(task: Any, output: Any) -> Tensor | None:
    """Return the tensor of a model's output with which exports are compared.

    Args:
        task: The task, with or without `probe_output`.
        output: The output of the model's forward.

    Returns:
        The tensor, or None if there is none. Exports are then compared by their weights only.

    Raises:
        InputError: `probe_output` does not return a tensor.
    """
    import torch

    if hasattr(task, "probe_output"):
        tensor = task.probe_output(output)
        if not isinstance(tensor, torch.Tensor):
            raise InputError(
                f"the task's method `probe_output` returned an object of type {type(tensor).__name__}, not a tensor",
                hint="return a torch.Tensor from the model's output, for instance its logits",
            )
        return tensor
    for name in OUTPUTS:
        if isinstance(value := getattr(output, name, None), torch.Tensor):
            return value
    return output if isinstance(output, torch.Tensor) else None


def load_weights(model: nn.Module, folder: Path) -> None:
    """Load the weights and persistent buffers of a folder into a model. Meta tensors stay as they are.

    Args:
        model: The model.
        folder: Folder with model.safetensors or its shards.

    Raises:
        InputError: A tensor is missing, unexpected or has another shape; the message names the first one.
    """
    import torch

    tensors = {**dict(model.named_parameters()), **_persistent_buffers(model)}
    stored = dict(read_tensors(folder))
    for name in [*tensors, *stored]:
        expected, actual = (None if name not in side else list(side[name].shape) for side in (tensors, stored))
        if expected != actual:
            raise InputError(
                f"the weights in {folder} do not fit: {name} is {actual or 'missing'}, but the model has {expected}"
            )
    with torch.no_grad():
        for name, value in stored.items():
            if not tensors[name].is_meta:
                tensors[name].copy_(value)


def load_model(task: Any, recipe: Recipe, facts: dict[str, Any], weights: Path | None) -> tuple[Any, list[str]]:
    """Load the model of a task; if the task builds its own module, also the trained weights of a folder.

    Args:
        task: The task of the run.
        recipe: The recipe of the run.
        facts: The task's results from the rows.
        weights: Folder of trained weights; None starts from the recipe's model.

    Returns:
        The model on the host, and the names of modules with new weights.

    Raises:
        InputError: The folder has no trained model.
    """
    from ftcli.models.precision import load_dtype

    builds_itself, adds_adapter = getattr(task, "auto_class", "") is None, recipe.adapter.type != "none"
    if weights is not None and not builds_itself and not adds_adapter and not (weights / "config.json").is_file():
        raise InputError(
            f"weights: {weights} has no config.json, so it is no folder of a trained model",
            hint="name the folder `final` of a run without an adapter, or an export; for a checkpoint use `resume`",
        )
    model, heads = task.load_model(facts, dtype=load_dtype(recipe), weights=weights)
    if weights is not None and builds_itself and not adds_adapter:
        load_weights(exported_part(task, model), weights)
    return model, heads


def read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, value) of every tensor in the safetensors files of a folder.

    Raises:
        InputError: The folder has no weights, or a file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise InputError(f"{folder} has no weights", hint="name the folder of final weights or of an export")
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - no mapping
                    yield name, file.get_tensor(name)
        except SafetensorError as error:
            raise InputError(f"{path} is damaged: {error}", hint="export a checkpoint of the run") from error


def _persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that `state_dict` contains, by name."""
    state = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name in state}
