"""Add LoRA adapters through peft.

An adapter is always built from the recipe. The values of an existing adapter are loaded into it afterwards, so that an
error can name the tensor that does not fit. Independent of the backend.
"""

from __future__ import annotations

import json
import math
import re
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.models.adapter_folder import check_labels, check_token_rows, has_label_names, token_problems
from ftcli.models.module_names import is_in, is_saved
from ftcli.models.structure import base_model_of, embeddings_and_head
from ftcli.runtime.errors import InputError, Problem, shortened
from ftcli.runtime.patches import declare
from ftcli.runtime.reader_errors import reading
from ftcli.runtime.seeds import seed_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ftcli.config.recipe import Recipe
    from ftcli.config.recipe_model import Adapter


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Settings that change the output of an adapter but not the names and shapes of its tensors.
COMPARED_KEYS = ("r", "lora_alpha", "use_rslora", "use_dora")
# Settings of peft without a key in the recipe, with the only supported value.
SUPPORTED_VALUES: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "rank_pattern": {},
    "alpha_pattern": {},
    "alora_invocation_tokens": None,  # an activated LoRA begins at these tokens
    "arrow_config": None,
    "use_qalora": False,
    "use_bdlora": None,
}
PATTERNS = ("rank_pattern", "alpha_pattern")  # peft writes them itself if it joins the names of experts' weights

SWITCH = declare(
    __name__,
    "adapter-switch",
    library="peft",
    versions=">=0.19,<0.22",
    purpose="Switches adapters off inside of `disable_adapter`",
    without="`disable_adapter` is refused.",
    alternative="peft's `disable_adapter`, which changes `requires_grad`; a sharded model may keep that.",
    apis=(
        "peft.tuners.tuners_utils:BaseTunerLayer._disable_adapters",
        "peft.utils.other:AuxiliaryTrainingWrapper._disable_adapters",
    ),
    required=True,
)
# Initialisations of peft that subtract the adapter from the base weights.
INITS_THAT_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def add_adapter(
    model: nn.Module, recipe: Recipe, *, keep: list[str], task_type: str | None, weights: Path | None = None
) -> nn.Module:
    """Add the recipe's adapter to a model. Only the adapter, new heads and rows of new tokens are trained.

    New heads and the recipe's `modules_to_save` are trained and saved whole. Of the embeddings, only the rows of new
    tokens are trained and saved. Trained weights, and the buffers of what is saved whole, get the recipe's dtype. New
    adapter weights depend on the seed and their names only, so they are equal on every process.

    Args:
        model: The model, not prepared.
        recipe: The recipe of the run.
        keep: Names of new heads.
        task_type: peft's name of the task; None leaves it out.
        weights: Folder of an adapter to load; None loads that of `adapter.path`, if set.

    Returns:
        The peft model, or `model` itself without an adapter.

    Raises:
        InputError: A name in the recipe matches no module, or the folder has another adapter or other labels.
    """
    if recipe.adapter.type == "none":
        return model  # importing peft takes a second on each rank
    from peft import LoraConfig, get_peft_model

    from ftcli.data.revisions import is_on_hub
    from ftcli.models.adapter_targets import Names, check_adapted, check_unadaptable, outermost, refused
    from ftcli.models.new_tokens import new_token_rows
    from ftcli.models.precision import trained_dtype
    from ftcli.models.unreached import unreached_parts

    section, dtype = recipe.adapter, trained_dtype(recipe)
    names = Names.of(model)
    saved_modules = outermost(names, [*keep, *section.modules_to_save])
    left_out = [*section.exclude_modules, *unreached_parts(model, recipe)]
    others = [name for name in names.modules if is_saved(name, saved_modules) and not is_in(name, saved_modules)]
    excluded = _suffix_pattern([*saved_modules, *others, *left_out, *names.unadaptable])
    check_unadaptable(names, section)
    parameters, token_rows = names.target_parameters(section), new_token_rows(model, recipe)
    config = LoraConfig(
        task_type=task_type,
        r=section.r,
        lora_alpha=section.lora_alpha,  # type: ignore[arg-type]  # peft takes floats, its annotation says int
        lora_dropout=section.lora_dropout,
        use_rslora=section.use_rslora,
        use_dora=section.use_dora,
        target_modules=_without(section.target_modules, parameters),
        target_parameters=parameters or None,
        modules_to_save=saved_modules or None,
        exclude_modules=excluded,
        trainable_token_indices=token_rows or None,
        revision=recipe.model.revision if is_on_hub(recipe.model.name) else None,  # of the base model
    )
    try:
        with warnings.catch_warnings():  # peft applies these patterns to parameters of experts, but looks at modules
            warnings.filterwarnings("ignore", message=r"The following (rank|alpha)_pattern keys did not match")
            # `describe_cut_tie` says what happens to the two weights, and exports are right.
            warnings.filterwarnings("ignore", message=r"Model has `tie_word_embeddings=True` and a tied layer")
            wrapped = get_peft_model(model, config, autocast_adapter_dtype=False)
    except (TypeError, ValueError) as error:
        raise refused(names, section, left_out, saved_modules, error) from error
    check_adapted(names, wrapped, section, left_out, excluded)
    _check_magnitudes(wrapped)
    for name, parameter in wrapped.named_parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
        if ".lora_A." in name or ".lora_embedding_B." in name:  # the other matrix is zero at first
            _initialise_matrix(name, parameter, recipe.seed)
    for module in [module for name, module in wrapped.named_modules() if ".modules_to_save." in name]:
        for key, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():  # batch norm takes weights and statistics of one dtype only
                setattr(module, key, buffer.to(dtype))
    folder = weights or (Path(section.path) if section.path else None)
    if folder is not None:
        _check_folder(wrapped, folder, recipe, token_rows)
        load_adapter_weights(wrapped, folder)
    return wrapped


def _check_folder(wrapped: Any, folder: Path, recipe: Recipe, token_rows: dict[str, list[int]]) -> None:
    """Raise `InputError` if the adapter in a folder has other labels, tokens or patterns than that of the run."""
    config: Any = getattr(base_model_of(wrapped), "config", None)
    if has_label_names(config):
        check_labels(folder, list(config.id2label.values()))
    if problems := token_problems(folder, recipe.model.new_tokens):
        raise InputError(problems)
    _check_patterns(wrapped, folder)
    check_token_rows(folder, token_rows)


def _check_magnitudes(model: nn.Module) -> None:
    """Raise `InputError` if DoRA would divide by zero: the weights of an output are all zero, as in padding or pruning.

    Ranks whose weights have no values yet (meta tensors) check nothing.
    """
    zeros: dict[str, int] = {}  # name of a module -> its first output without weights
    for name, parameter in model.named_parameters():
        module, _, is_magnitude = name.partition(".lora_magnitude_vector.")
        if is_magnitude and not parameter.is_meta and len(found := (parameter == 0).flatten().nonzero()):
            zeros[module.removeprefix("base_model.model.")] = int(found[0])
    if zeros:
        first, names = next(iter(zeros)), ", ".join(zeros)
        raise InputError(
            f"adapter.use_dora: all weights of output {zeros[first]} of {first} are zero, and DoRA divides by their "
            "norm",
            hint=f"remove use_dora, or add to adapter.exclude_modules: {shortened(names, 300)}",
        )


def describe_cut_tie(model: Any) -> list[str]:
    """Return a log line if an adapter makes two weights of the tied embeddings and head of its base.

    Args:
        model: The model, with or without an adapter, not prepared.
    """
    base = base_model_of(model)
    ends = embeddings_and_head(base)
    if base is model or not ends or not getattr(base.config, "tie_word_embeddings", False):
        return []
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import ModulesToSaveWrapper

    trained = [isinstance(end, LoraLayer | ModulesToSaveWrapper) for end in ends]
    if not any(trained):
        return []
    which = "each is" if all(trained) else f"only the {'embeddings are' if trained[0] else 'head is'}"
    return [
        f"the embeddings and the head are one weight in the base model; {which} trained with the adapter, so they "
        "become two weights, and a merged export has tie_word_embeddings: false"
    ]


@contextmanager
def disable_adapter(model: nn.Module) -> Iterator[None]:
    """Return a context in which the model computes without its adapter and without gradients.

    The context works under every profile, before and after the trained forward pass, and in `eval_step`. peft's own
    `disable_adapter` changes `requires_grad` of every adapter weight, and a sharded model may keep that change. This
    function changes the switch in each adapter layer only. It is not a collective. Under sharded profiles every
    process must run the same forward passes inside the context.

    Args:
        model: The model that `loss` or `eval_step` of a task was called with, prepared or not.

    Raises:
        InputError: The model has no adapter, so its base weights are trained and no longer available.

    Example:
        with ftcli.disable_adapter(model):
            reference = model(**batch)["nll"]
    """
    import torch
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    SWITCH.require()
    layers: list[Any] = [m for m in model.modules() if isinstance(m, BaseTunerLayer | AuxiliaryTrainingWrapper)]
    if not layers:
        raise InputError("disable_adapter: the model has no adapter", hint="set adapter.type: lora in the recipe")
    before = [layer._disable_adapters for layer in layers]
    try:
        for layer in layers:
            layer._disable_adapters = True
        with torch.no_grad():
            yield
    finally:
        for layer, was_disabled in zip(layers, before, strict=True):
            layer._disable_adapters = was_disabled


def adapter_problems(section: Adapter, new_tokens: Sequence[str] = ()) -> list[Problem]:
    """Return why the adapter in `adapter.path` cannot be trained further. Reads small files, without torch.

    Args:
        section: The adapter section of the recipe.
        new_tokens: New tokens of the recipe, in their order.

    Returns:
        One problem for a missing file, or for each setting that differs; empty if there is none.
    """
    if section.path is None:
        return []
    file = Path(section.path) / CONFIG
    if not file.is_file():
        return [Problem(f"adapter.path: no {CONFIG} in {section.path}", hint="name the folder of an adapter")]
    if not (file.parent / WEIGHTS).is_file():
        problem = f"adapter.path: no {WEIGHTS} in {section.path}"
        return [Problem(problem, hint="other formats are not supported: save the adapter as safetensors")]
    with reading(file):
        config = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
    problems = [
        Problem(f"adapter.{key} is {getattr(section, key)}, but {file} has {stored}", hint="set it to the file's value")
        for key in COMPARED_KEYS
        if (stored := config.get(key, False)) != getattr(section, key)  # older files do not have use_rslora, use_dora
    ]
    unsupported = [key for key, value in SUPPORTED_VALUES.items() if (config.get(key) or value) != value]
    problems += token_problems(file.parent, new_tokens)
    if config.get("target_parameters"):  # `add_adapter` compares the patterns with those of the model
        unsupported = [key for key in unsupported if key not in PATTERNS]
    if str(config.get("init_lora_weights", "")).startswith(INITS_THAT_CHANGE_THE_BASE):
        unsupported.append("init_lora_weights")
    return problems + [
        Problem(f"adapter.path: {file} has {key} {config[key]}", hint="use a plain LoRA adapter") for key in unsupported
    ]


def _check_patterns(model: Any, folder: Path) -> None:
    """Raise `InputError` if the adapter in a folder has other patterns than those that peft gives this model."""
    path = folder / CONFIG
    stored = (json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}) or {}
    for key in PATTERNS:
        before, now = stored.get(key) or {}, getattr(model.peft_config["default"], key) or {}
        if before != now:
            raise InputError(
                f"{path} has {key} {before}, but an adapter of this recipe has {now}",
                hint=f"compare adapter.target_modules with its {CONFIG}; or use a plain LoRA adapter",
            )


def _without(targets: str | list[str], names: list[str]) -> str | list[str]:
    """Return `target_modules` without the names of parameters, which peft takes separately."""
    return targets if isinstance(targets, str) else [name for name in targets if name not in names]


def _suffix_pattern(names: list[str]) -> str | None:
    """Return a regular expression for modules whose names end with one of `names`, and for their submodules."""
    return rf"(.*\.)?({'|'.join(map(re.escape, names))})(\..*)?" if names else None


def _initialise_matrix(name: str, parameter: nn.Parameter, seed: int) -> None:
    """Draw a matrix from peft's distribution (Kaiming uniform; normal for embeddings), seeded by (seed, name).

    peft draws the matrices one after the other on the device, so its values depend on the hardware and the backend.
    """
    import torch

    generator = torch.Generator().manual_seed(seed_of(seed, zlib.crc32(name.encode())))
    values = torch.empty(parameter.shape)
    if ".lora_A." in name:
        torch.nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
    else:
        torch.nn.init.normal_(values, generator=generator)
    with torch.no_grad():
        parameter.copy_(values)


def load_adapter_weights(model: nn.Module, folder: Path) -> None:
    """Load the values of a folder into an adapter.

    Every rank compares names and shapes, so that all ranks raise the same error. Ranks whose weights have no values
    yet (meta tensors) load nothing.

    Args:
        model: The peft model.
        folder: Folder with adapter_model.safetensors.

    Raises:
        InputError: The file cannot be read, or a tensor does not fit; the message names the first one.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        values = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{folder / WEIGHTS} cannot be read: {error}") from error
    parameters: dict[str, Tensor] = get_peft_model_state_dict(model, save_embedding_layers=False)
    for name in [*parameters, *values]:
        expected, stored = (None if name not in side else list(side[name].shape) for side in (parameters, values))
        if expected != stored:
            raise InputError(
                f"{folder} has another adapter: {name} is {stored or 'missing'} in the folder, "
                f"and {expected or 'not trained'} in this recipe",
                hint=f"compare adapter.target_modules, modules_to_save and model.new_tokens with its {CONFIG}",
            )
    if not any(parameter.is_meta for parameter in model.parameters()):
        set_peft_model_state_dict(model, values)
