"""Write and read the files of an adapter besides its tensors: the task type, and a configuration with label names.

The configuration of the base model has neither the number of labels of the adapter's head nor their names. ftcli
therefore adds a configuration. transformers treats a folder with a config.json as a whole model, so the configuration
is in a folder of its own.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.data.label_names import number_name, same_labels
from ftcli.data.paths import local_path
from ftcli.data.revisions import is_on_hub
from ftcli.models.new_tokens import rows_before
from ftcli.models.structure import saved_buffers
from ftcli.models.trained_on import trained_on
from ftcli.runtime.errors import InputError, Problem, shortened
from ftcli.runtime.log import log_line
from ftcli.runtime.process import current_rank
from ftcli.runtime.reader_errors import reading
from ftcli.runtime.torn_files import read_object

if TYPE_CHECKING:
    from torch import Tensor

    from ftcli.config.recipe_model import Model


BASE_CONFIG = "base_config"  # folder of the base's config.json, for AutoConfig.from_pretrained(subfolder=...)
LABEL_KEYS = ("id2label", "label2id", "problem_type")
PEFT_HEADS = ("classifier", "score")  # modules that peft treats as the head if a task type is set


def write_adapter(model: Any, values: dict[str, Tensor], folder: Path, task_type: str | None) -> None:
    """Write an adapter in peft's format, with the configuration that is needed to build its base model.

    Args:
        model: The peft model.
        values: Trained tensors by their names in the model. Buffers among them replace those of the model.
        folder: Folder to write into.
        task_type: peft's name of the task, written if the adapter's configuration has none; None writes nothing.
    """
    # peft writes modules_to_save with their buffers, such as the statistics of batch norms.
    buffers = {name: value for name, value in saved_buffers(model).items() if ".modules_to_save." in name}
    model.save_pretrained(folder, state_dict=buffers | values, save_embedding_layers=False)
    base = model.get_base_model()
    path = folder / "adapter_config.json"
    adapter_config = json.loads(path.read_text(encoding="utf-8"))
    heads = adapter_config.get("modules_to_save") or []
    if adapter_config.get("task_type") is None and task_type is not None:
        loadable_heads = _loadable_heads(base, heads)
        if loadable_heads is not None:
            adapter_config |= {"task_type": task_type, "modules_to_save": loadable_heads}
            path.write_text(json.dumps(adapter_config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if has_label_names(getattr(base, "config", None)):
        config = copy.deepcopy(base.config)
        config.architectures = [type(base).__name__]
        if hasattr(config, "quantization_config"):  # a setting of this training, not of the base model
            del config.quantization_config
        if (rows := rows_before(base)) is not None:  # so the base is loaded as it is, and resized then
            config.get_text_config().vocab_size = rows
        config.save_pretrained(folder / BASE_CONFIG)
        _remove_dtype(folder / BASE_CONFIG / "config.json")


def has_adapter_only(folder: Path) -> bool:
    """Return whether a folder holds an adapter without its base."""
    return (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()


def base_of(folder: Path) -> tuple[str, str | None] | None:
    """Return the base of the adapter in a folder.

    Args:
        folder: Any folder.

    Returns:
        Name and, on the hub, commit of the base. None if the folder holds no adapter, or one beside its base.
    """
    config = read_object(folder / "adapter_config.json") if has_adapter_only(folder) else None
    name = (config or {}).get("base_model_name_or_path")
    if config is None or not isinstance(name, str) or not name:
        return None
    if not is_on_hub(name):
        return name, None
    stored = trained_on(folder) or {}
    return name, config.get("revision") or (stored.get("revision") if stored.get("name") == name else None)


def check_no_adapter(section: Model) -> None:
    """Raise `InputError` if a recipe names the folder of an adapter as its model.

    transformers would load the base with the adapter inside, and `final/` would be the weights of a part of that.
    """
    folder = local_path(section.name)
    if folder is None or not has_adapter_only(folder):
        return
    base = base_of(folder)
    of, name = ("", "its base model") if base is None else (f" of {base[0]}", base[0])
    raise InputError(
        f"model.name: {section.name} is an adapter{of}, not a model",
        hint=f"set model.name: {name} and adapter.path: {section.name}, or name an export with --merge",
    )


def adapter_settings(folder: Path, *, needs_base: bool = False) -> dict[str, Any]:
    """Return adapter_config.json of a folder, if it is of a LoRA adapter.

    Args:
        folder: Folder of an adapter.
        needs_base: Whether it has to name a base model. That of a model outside transformers has no name.

    Raises:
        InputError: The file is damaged, or of another kind of adapter, or names a library that peft would import.
    """
    path = folder / "adapter_config.json"
    with reading(path):
        settings = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError("it is not a JSON object")
    if (kind := settings.get("peft_type")) != "LORA":
        raise InputError(f"{path} is of a {shortened(str(kind), 60)} adapter", hint="ftcli loads LoRA adapters only")
    if settings.get("megatron_config") or settings.get("megatron_core") not in (None, "megatron.core"):
        raise InputError(f"{path} is of an adapter for Megatron", hint="ftcli loads plain LoRA adapters only")
    if needs_base and not isinstance(settings.get("base_model_name_or_path"), str):
        raise InputError(f"{path} names no base model", hint="write it at base_model_name_or_path")
    return settings


def has_label_names(config: Any) -> bool:
    """Return whether a configuration has names for its labels other than transformers' LABEL_0, LABEL_1, ..."""
    names = getattr(config, "id2label", None) or {}
    return _has_real_names(list(names.values()))


def _has_real_names(labels: Sequence[str]) -> bool:
    """Return whether any label has a name other than transformers' default."""
    return any(name != f"LABEL_{index}" for index, name in enumerate(labels))


def label_settings(folder: Path) -> dict[str, Any]:
    """Return the label settings of a folder of weights.

    Args:
        folder: Folder of a model or an adapter.

    Returns:
        Keyword arguments for `from_pretrained`; empty without labels. `id2label` has integers as keys.
    """
    for path in (folder / "config.json", folder / BASE_CONFIG / "config.json"):
        if path.is_file():
            config = json.loads(path.read_text(encoding="utf-8"))
            settings = {key: config[key] for key in LABEL_KEYS if config.get(key) is not None}
            if "id2label" in settings:
                settings["id2label"] = {int(index): name for index, name in settings["id2label"].items()}
            return settings
    return {}


def check_labels(folder: Path | None, labels: list[str], *, continues: bool = False) -> None:
    """Compare the labels of trained weights with those of the rows.

    Args:
        folder: Folder of the trained weights; None if they are not on this machine.
        labels: Names of the classes in the rows, by index of the logit.
        continues: Whether the weights are trained further. Their head may then get other labels: a head with another
            number of labels is replaced, and other names are logged. No label may move to another logit.

    Raises:
        InputError: The labels differ, so that logits would get wrong names.
    """
    trained = [] if folder is None else list(label_settings(folder).get("id2label", {}).values())
    if folder is None or not _has_real_names(trained) or same_labels(trained, labels):
        return
    before, now = shortened(str(trained)), shortened(str(labels))
    if continues and (len(trained) != len(labels) or not _moves(trained, labels)):
        if len(trained) == len(labels) and current_rank() == 0:
            log_line(f"the head of {folder} was trained for the labels {before}, and continues with {now}")
        return
    raise InputError(
        f"the weights in {folder} were trained for the labels {before}, but the rows have {now}",
        hint="list the labels of the weights in task_options.labels, or restore the training rows",
    )


def _moves(trained: Sequence[str], labels: Sequence[str]) -> bool:
    """Return whether a label is in both lists at different places; case and white space around it do not matter."""
    before, now = ([number_name(name) or name.strip().casefold() for name in each] for each in (trained, labels))
    return any(name in now and now.index(name) != index for index, name in enumerate(before))


def _remove_dtype(path: Path) -> None:
    """Remove dtypes from a configuration file, so that the base is loaded in the dtype of its own files."""

    def without(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: without(inner) for key, inner in value.items() if key not in ("dtype", "torch_dtype")}

    config = without(json.loads(path.read_text(encoding="utf-8")))
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _loadable_heads(base: Any, heads: list[str]) -> list[str] | None:
    """Return `modules_to_save` in a form that peft can load with a task type; None if there is none.

    With a task type peft saves modules called classifier or score as a whole. It would wrap submodules of such a
    module a second time. The module replaces its submodules if all its weights are in them, and if no other name
    matches one of them.
    """
    modules, inside = [], set()
    for head in heads:
        names = head.split(".")
        owner = next((".".join(names[: n + 1]) for n, name in enumerate(names[:-1]) if name in PEFT_HEADS), None)
        modules.append(owner or head)
        if owner is not None:
            parameters = [name for name, _ in _base_parameters(base, owner)]
            if not all(any(name.startswith(f"{each}.") for each in heads) for name in parameters):
                return None
            inside.update(parameters)
    others = [name for name in modules if name in heads]
    if any(f".{other}." in f".{name}" for other in others for name in inside):
        return None
    return list(dict.fromkeys(modules))


def _base_parameters(base: Any, owner: str) -> list[tuple[str, Any]]:
    """Return (name without peft's wrappers, parameter) of every parameter in a module of the base."""
    wrappers = ("original_module", "modules_to_save", "default", "base_layer")
    return [
        (".".join(module for module in name.split(".") if module not in wrappers), parameter)
        for name, parameter in base.named_parameters()
        if name.startswith(f"{owner}.")
    ]


def token_problems(folder: Path, new_tokens: Sequence[str]) -> list[Problem]:
    """Return a problem if the trained rows of an adapter belong to other tokens: they are stored by number only.

    Args:
        folder: The folder of the adapter.
        new_tokens: New tokens of the recipe, in their order.
    """
    file = folder / "tokenizer.json"
    if not new_tokens or not file.is_file():
        return []
    with reading(file):
        added = json.loads(file.read_text(encoding="utf-8")).get("added_tokens", [])
        numbers = {token["content"]: token["id"] for token in added}
    stored = sorted((token for token in new_tokens if token in numbers), key=lambda token: numbers[token])
    if stored == list(new_tokens):
        return []
    hint = "give the tokens of that adapter, in their order"
    missing = [token for token in new_tokens if token not in numbers]
    what = f"it has no {missing[0]}" if missing else f"its order is {', '.join(stored)}"
    return [Problem(f"model.new_tokens: {file} has other tokens than the recipe: {what}", hint=hint)]


def check_token_rows(folder: Path, rows: Mapping[str, Sequence[int]]) -> None:
    """Check that the trained rows of tokens in an adapter are those of the run, which has them in the same order.

    Args:
        folder: The folder of the adapter.
        rows: Rows that the run trains, by name of the module.

    Raises:
        InputError: The adapter has other rows.
    """
    file = folder / "adapter_config.json"
    stored = (json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}).get("trainable_token_indices")
    lists = (list(stored.values()) if isinstance(stored, dict) else [stored]) if stored else []
    differing = [(before, list(now)) for before in lists for now in rows.values() if before != list(now)]
    if differing:
        before, here = (shortened(str(ids), 100) for ids in differing[0])
        raise InputError(
            f"model.new_tokens: {file} has the rows {before} of the embeddings, but those of the recipe's new tokens "
            f"are {here}",
            hint="give the tokens of that adapter in their order, and the tokenizer of its base model",
        )
