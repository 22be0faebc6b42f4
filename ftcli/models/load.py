"""Load models and processors through transformers.

The module imports transformers inside functions only.
"""

from __future__ import annotations

import importlib
import re
import zlib
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.data.paths import MODEL_KEY
from ftcli.models.adapter_folder import check_labels, check_no_adapter
from ftcli.models.frozen_weights import model_files_folder
from ftcli.models.hub import keep_soft_capping, load_from_hub
from ftcli.models.quantised_files import check_loaded
from ftcli.runtime.errors import InputError
from ftcli.runtime.patches import declare
from ftcli.runtime.seeds import seed_of

if TYPE_CHECKING:
    from torch import nn

    from ftcli.config.recipe import Recipe
    from ftcli.config.recipe_model import Model


# Reads a model with weights, given `read`, which returns the model with its weights, and `build`, which returns it
# without values. By default every process reads. The setup of a run replaces the function if one rank reads for all.
READ_WEIGHTS: ContextVar[Callable[..., tuple[Any, list[str]]]] = ContextVar(
    "READ_WEIGHTS", default=lambda read, build: read()
)
NEW_HEADS = declare(
    __name__,
    "new-heads",
    library="transformers",
    versions=">=5.17,<5.25",
    purpose="Draws the weights of a new head again, from the seed and the name of its module alone",
    without="New heads would depend on the order of loading, so they are refused.",
    alternative="`initialize_weights()` draws all modules in their order, so values depend on what was drawn before.",
    apis=(
        "transformers.modeling_utils:PreTrainedModel._init_weights",
        "transformers.modeling_utils:PreTrainedModel._initialize_weights._is_hf_initialized",
    ),
    required=True,
)
# EfficientNet has drop_connect_rate, CvT and MGP-STR drop_rate and attention_drop_rate, SwiftFormer drop_mlp_rate.
_DROPOUT_KEY = re.compile(r"dropout|_pdrop|drop_?path|(^|_)drop(_\w+)?_rate$")
MAX_NEW_FRACTION = 0.2  # of the parameters; with more new ones the weights belong to another architecture


# Ends of the names of classes whose heads score a text.
CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice")


def load_image_processor(section: Model, key: str = MODEL_KEY) -> Any:
    """Return the image processor of the model that a key names.

    It has the Pillow backend, whose pixels do not depend on torchvision.
    """
    # Imported from its own module, because transformers 5.17 exports it only if torchvision is installed.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    return load_from_hub(AutoImageProcessor, section, key=key, backend="pil")


def load_model(
    auto_class: str,
    recipe: Recipe,
    *,
    new_head: bool,
    dtype: Any,
    labels: list[str] | None = None,
    problem_type: str | None = None,
    weights: Path | None = None,
) -> tuple[nn.Module, list[str]]:
    """Load a model through one of transformers' Auto classes.

    New weights are drawn from the recipe's seed and their names. Rows of new tokens are the mean of the old rows.

    Args:
        auto_class: Name of the class, such as AutoModelForCausalLM.
        recipe: The recipe of the run.
        new_head: Whether the task adds a head, so that its weights may be missing in the files.
        dtype: Dtype of the weights. "auto" uses the dtype of the files and does not quantise.
        labels: Names of the classes of a classifier.
        problem_type: transformers' name for the way from logits to scores. It replaces that of the model.
        weights: Folder of trained weights. A whole model there replaces the recipe's model; an adapter does not.

    Returns:
        The model on the host, and the names of modules with new weights.

    Raises:
        InputError: The model is not found, is an adapter, has a head for the same labels in another order, or its
            weights belong to another architecture.
    """
    import torch

    from ftcli.models.new_tokens import initialise_new_rows, resize_embeddings

    section = recipe.model
    is_trained = weights is not None and (weights / "config.json").exists()
    if weights is not None and is_trained:
        section = section.model_copy(update={"name": str(weights.absolute()), "revision": None})
    check_no_adapter(section)
    if labels is not None:
        check_labels(weights or model_files_folder(recipe), labels, continues=weights is None)
    kwargs = _from_pretrained_options(recipe, section, dtype, labels, problem_type)
    torch.manual_seed(recipe.seed)
    auto = getattr(importlib.import_module("transformers"), auto_class)

    def read() -> tuple[Any, list[str]]:
        loaded, info = load_from_hub(auto, section, **kwargs)
        resize_embeddings(loaded, recipe)
        return loaded, sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])})

    def build() -> Any:
        return resize_embeddings(_build_empty(auto, section, kwargs), recipe)

    # 4-bit weights have a quantization state, which is created while reading and cannot be broadcast.
    model, new = read() if "quantization_config" in kwargs else READ_WEIGHTS.get()(read, build)
    if dtype != "auto":
        check_loaded(model, recipe)
    heads = sorted({name.rpartition(".")[0] for name in new})
    _check_architecture(model, new, section.name, new_head=new_head)
    _check_causal(model, section.name)
    for name in heads:
        _initialise_module(model, name, recipe.seed)
    if not is_trained:
        initialise_new_rows(model, recipe)
    return model, heads


def load_answering_model(auto_class: str, section: Model) -> Any:
    """Load a model that answers prompts, in float32 and evaluation mode, on the host.

    Args:
        auto_class: Name of transformers' class that loads the model.
        section: The model's name, and whether its code may run.

    Raises:
        InputError: The model is not found, weights are missing in its files, or its tokens see later tokens.
    """
    import torch

    auto = getattr(importlib.import_module("transformers"), auto_class)
    model, info = load_from_hub(auto, section, dtype=torch.float32, output_loading_info=True)
    hint = "name a model that generates text, with all its weights"
    _check_architecture(model, sorted(info["missing_keys"]), section.name, new_head=False, hint=hint)
    for name in model.config.architectures or []:  # with tied embeddings nothing is missing
        if name.endswith(CLASSIFIERS):
            raise InputError(f"model.name: {section.name} is a {name}, which answers no prompts", hint=hint)
    _check_causal(model, section.name)
    return model.eval()


def _from_pretrained_options(
    recipe: Recipe, section: Model, dtype: Any, labels: list[str] | None, problem_type: str | None
) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` besides the name. Reads the configuration if dropout is set."""
    kwargs: dict[str, Any] = {"dtype": dtype, "output_loading_info": True}
    if recipe.model.attn_implementation is not None:
        kwargs["attn_implementation"] = recipe.model.attn_implementation
    if labels is not None:
        kwargs["id2label"] = dict(enumerate(labels))
        kwargs["label2id"] = {label: index for index, label in enumerate(labels)}
        kwargs["num_labels"] = len(labels)
        kwargs["ignore_mismatched_sizes"] = True
    if problem_type is not None:
        kwargs["problem_type"] = problem_type
    if recipe.model.dropout is not None:
        kwargs["config"] = _without_dropout(section, kwargs)
    if recipe.model.quantization is not None and dtype != "auto":
        kwargs |= quantization_options(recipe)
    return kwargs


def quantization_options(recipe: Recipe) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that load linear layers in 4 bits on this process's device.

    The packed weights are stored with the dtype of the other frozen weights, because FSDP does not shard integers.
    """
    from accelerate import PartialState
    from transformers import BitsAndBytesConfig

    from ftcli.models.precision import COMPUTE, frozen_dtype

    assert recipe.model.quantization is not None
    config = BitsAndBytesConfig(
        **recipe.model.quantization.model_dump(),
        bnb_4bit_compute_dtype=COMPUTE[recipe.precision],
        bnb_4bit_quant_storage=frozen_dtype(recipe),
    )
    return {"quantization_config": config, "device_map": {"": PartialState().device}}


def _initialise_module(model: Any, name: str, seed: int) -> None:
    """Draw the weights of a new module from its model's distribution, seeded by (seed, name) only.

    The values that transformers drew while loading depend on all values drawn before.
    """
    import torch

    NEW_HEADS.require()
    module = model.get_submodule(name)
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            parameter._is_hf_initialized = False  # transformers skips parameters that have this mark
        torch.manual_seed(seed_of(seed, zlib.crc32(name.encode())))
        model._init_weights(module)


def _build_empty(auto: Any, section: Model, kwargs: dict[str, Any]) -> Any:
    """Return the model that `auto.from_pretrained` would load, without reading its weights."""
    config = kwargs.get("config") or _load_config(section, kwargs)
    model = auto.from_config(config, dtype=kwargs["dtype"], trust_remote_code=section.trust_remote_code)
    return keep_soft_capping(model, section.attn_implementation)


def _load_config(section: Model, kwargs: dict[str, Any]) -> Any:
    """Load the model's configuration. Settings of the configuration are moved out of `kwargs`, in place."""
    from transformers import AutoConfig

    names = ("id2label", "label2id", "num_labels", "problem_type", "attn_implementation")
    return load_from_hub(AutoConfig, section, **{name: kwargs.pop(name) for name in names if name in kwargs})


def load_configuration(section: Model) -> dict[str, Any]:
    """Return a model's configuration as plain values, without its weights."""
    values: dict[str, Any] = _load_config(section, {}).to_dict()
    return values


def _without_dropout(section: Model, kwargs: dict[str, Any]) -> Any:
    """Return the model's configuration with every dropout probability set to the recipe's."""
    from huggingface_hub.errors import StrictDataclassError

    config = _load_config(section, kwargs)
    assert section.dropout is not None
    for owner, key in _dropout_keys(config):
        before = getattr(owner, key)
        # transformers declares some probabilities as whole numbers (MPT, LeViT), and refuses 0.0 there.
        is_whole = section.dropout == 0 and isinstance(before, int)
        value = 0 if is_whole else section.dropout
        try:
            setattr(owner, key, type(before)([value] * len(before)) if isinstance(before, list | tuple) else value)
        except StrictDataclassError as error:
            raise InputError(
                f"model.dropout: {key} of the model's configuration cannot be {section.dropout:g}, because "
                "transformers declares it as a whole number",
                hint="set model.dropout to 0, or delete it",
            ) from error
    return config


def largest_dropout(model: Any) -> float:
    """Return the largest dropout probability in a model's configuration; 0 without one."""
    config = getattr(model, "config", None)
    if config is None:
        return 0.0
    found = [getattr(owner, key) for owner, key in _dropout_keys(config)]
    return max((float(p) for one in found for p in (one if isinstance(one, list | tuple) else [one])), default=0.0)


def _dropout_keys(config: Any) -> list[tuple[Any, str]]:
    """Return (configuration or nested configuration, key) of every dropout probability, or list of them (CvT)."""
    owners = (config, *(value for value in vars(config).values() if hasattr(value, "to_dict")))
    return [
        (owner, key)
        for owner in owners
        for key, value in vars(owner).items()
        if _DROPOUT_KEY.search(key) and _are_probabilities(value if isinstance(value, list | tuple) else [value])
    ]


def _are_probabilities(values: Sequence[Any]) -> bool:
    return bool(values) and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _check_architecture(
    model: nn.Module,
    new: list[str],
    name: str,
    *,
    new_head: bool,
    hint: str = "name a model that fits this task, or another task",
) -> None:
    """Raise `InputError` if too many weights are new, or any weight without a new head."""
    sizes = {key: parameter.numel() for key, parameter in model.named_parameters()}
    fraction = sum(sizes.get(key, 0) for key in new) / max(1, sum(sizes.values()))
    if fraction > MAX_NEW_FRACTION or (new and not new_head):
        raise InputError(
            f"model.name: the weights of {name} do not fit a {type(model).__name__}: "
            f"{len(new)} are missing, the first is {new[0]}",
            hint=hint,
        )


def _check_causal(model: Any, name: str) -> None:
    """Raise `InputError` for an encoder's weights in a model that generates text; tokens would see later ones.

    transformers loads such weights without a message. Tokens of XLNet see later ones unless each call names an order.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    config: Any = model.config
    generates = hasattr(model, "can_generate") and model.can_generate()
    if not generates or getattr(config, "is_encoder_decoder", False):
        return
    is_encoder = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", True)
    if is_encoder or config.model_type == "xlnet":
        raise InputError(
            f"model.name: {name} is an encoder ({config.model_type}), in which tokens attend to later tokens",
            hint="name a causal language model, which this task needs",
        )
