"""Loading weights and processors through transformers, with errors that say what to do.

Knows nothing of tasks' losses, of hardware or of the loop; every function imports transformers when called.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import InputError
from .rows import model_folder

if TYPE_CHECKING:
    from torch import nn

    from .recipe import Model, Recipe

MOST_NEW = 0.2  # share of new parameters above which the weights were made for another architecture


def quiet_libraries() -> None:
    """Leave errors to transformers and datasets, and progress bars to where a person watches one process.

    What other libraries say of their own future to each other is no news for whoever trains a model.
    """
    import datasets
    import transformers

    for module in ("torch.distributed", "transformers", "accelerate", "deepspeed", "peft"):
        warnings.filterwarnings("ignore", category=FutureWarning, module=module.replace(".", r"\."))
    transformers.logging.set_verbosity_error()
    datasets.logging.set_verbosity_error()
    if not sys.stderr.isatty() or os.environ.get("LOCAL_RANK", "0") != "0":
        transformers.utils.logging.disable_progress_bar()
        datasets.disable_progress_bars()


def load_tokenizer(section: Model) -> Any:
    """Return the model's tokenizer with a padding token; raises `InputError` when there is none."""
    from transformers import AutoTokenizer

    tokenizer = load_from_hub(AutoTokenizer, section)
    if tokenizer.pad_token_id is None:  # masks go by position, so any token will do
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        raise InputError(f"the tokenizer of {section.name} has neither a padding nor an end token")
    return tokenizer


def load_image_processor(section: Model) -> Any:
    """Return the model's image processor on Pillow, which gives the same pixels with and without torchvision."""
    from transformers import AutoImageProcessor

    return load_from_hub(AutoImageProcessor, section, backend="pil")


def load_model(
    auto_class: str,
    recipe: Recipe,
    *,
    new_head: bool,
    dtype: Any,
    labels: list[str] | None = None,
    weights: Path | None = None,
) -> tuple[nn.Module, list[str]]:
    """Return (model, names of modules whose weights are new) built by transformers' `auto_class`.

    Full weights in `weights` replace the recipe's model; an adapter there does not. New weights are drawn from the
    recipe's seed. Raises `InputError` for a model that is not found, or whose weights were made for another
    architecture.
    """
    import torch

    section = recipe.model
    if weights is not None and (weights / "config.json").exists():
        section = section.model_copy(update={"name": str(weights.absolute()), "revision": None})
    kwargs: dict[str, Any] = {"dtype": dtype, "output_loading_info": True}
    if recipe.model.attn_implementation is not None:
        kwargs["attn_implementation"] = recipe.model.attn_implementation
    if labels is not None:
        kwargs["id2label"] = dict(enumerate(labels))
        kwargs["label2id"] = {label: index for index, label in enumerate(labels)}
        kwargs["num_labels"] = len(labels)
        kwargs["ignore_mismatched_sizes"] = True
    if recipe.model.dropout is not None:
        kwargs["config"] = _without_dropout(section, kwargs)
    torch.manual_seed(recipe.seed)
    auto = getattr(importlib.import_module("transformers"), auto_class)
    model, info = load_from_hub(auto, section, **kwargs)
    new = sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])})
    _check_architecture(model, new, section.name, new_head=new_head)
    if recipe.model.batch_norm == "frozen":
        freeze_batch_norm(model)
    return model, sorted({name.rpartition(".")[0] for name in new})


def _without_dropout(section: Model, kwargs: dict[str, Any]) -> Any:
    """Return the model's configuration with every dropout probability set to the recipe's."""
    from transformers import AutoConfig

    names = ("id2label", "label2id", "num_labels", "attn_implementation")
    given = {name: kwargs.pop(name) for name in names if name in kwargs}
    config = load_from_hub(AutoConfig, section, **given)
    for part in (config, *(value for value in vars(config).values() if hasattr(value, "to_dict"))):
        for key, value in list(vars(part).items()):
            is_probability = isinstance(value, int | float) and not isinstance(value, bool)
            if is_probability and ("dropout" in key or "_pdrop" in key or "drop_path" in key):
                setattr(part, key, section.dropout)
    return config


def freeze_batch_norm(model: nn.Module) -> None:
    """Keep the running statistics of every batch normalisation as they are, in training too."""
    import torch

    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.eval()
            module.train = lambda mode=True, module=module: module  # type: ignore[method-assign,misc]


def _check_architecture(model: nn.Module, new: list[str], name: str, *, new_head: bool) -> None:
    sizes = {key: parameter.numel() for key, parameter in model.named_parameters()}
    share = sum(sizes.get(key, 0) for key in new) / max(1, sum(sizes.values()))
    if share > MOST_NEW or (new and not new_head):
        raise InputError(
            f"model.name: the weights of {name} are not those of a {type(model).__name__}: "
            f"{len(new)} are missing, the first is {new[0]}",
            hint="is it the right model for this task?",
        )


def load_from_hub(auto: Any, section: Model, **kwargs: Any) -> Any:
    """Return `auto.from_pretrained` of a model; raises `InputError` for a name that is wrong or does not fit."""
    folder = model_folder(section.name)
    if folder is None and section.revision is not None:
        kwargs["revision"] = section.revision
    name = section.name if folder is None else str(folder)
    try:
        return auto.from_pretrained(name, trust_remote_code=section.trust_remote_code, **kwargs)
    except OSError as error:
        raise InputError(
            f"model.name: {section.name} is neither on this machine nor reachable on the hub",
            hint="check the spelling, or run `ftcli fetch RECIPE` where there is a network",
        ) from error
    except ValueError as error:
        text = str(error).splitlines()[0]
        if "Unrecognized" in text or "Unrecognised" in text:
            raise InputError(f"model.name: {section.name} does not fit {auto.__name__}: {text}") from error
        raise
