"""Load models through transformers, with errors that name the cause."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.config.recipe_model import NO_MODEL
from ftcli.config.trust import CONFIGS, check_configs, code_refused
from ftcli.data.paths import MODEL_KEY, local_path, model_folder
from ftcli.data.revisions import is_on_hub
from ftcli.models.adapter_folder import base_of
from ftcli.models.structure import embeddings_and_head
from ftcli.models.trained_on import check_trained_on, trained_on
from ftcli.runtime.errors import InputError
from ftcli.runtime.patches import declare

if TYPE_CHECKING:
    from ftcli.config.recipe_model import Model


NEEDS = {
    "AutoTokenizer": " It needs a tokenizer.json.",
    "AutoImageProcessor": " It needs a preprocessor_config.json.",
}

ATTENTION = declare(
    __name__,
    "attention-of-a-model",
    library="transformers",
    versions=">=5.17,<5.25",
    purpose="Reads the name of the attention that a model uses",
    without="The attention of a model cannot be checked, so no model is loaded.",
    alternative="None: `set_attn_implementation` sets the name, and no public function returns it.",
    apis=("transformers:PreTrainedConfig._attn_implementation",),
    required=True,
)


def attention_of(model: Any) -> str | None:
    """Return the name of the attention that a model uses, such as sdpa; None for a model without this choice."""
    name: str | None = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return name


def keep_soft_capping(model: Any, requested: str | None = None) -> Any:
    """Replace sdpa by eager attention in a model that soft-caps attention scores (Gemma 2).

    In transformers before 5.21, sdpa is the default for these models and ignores the cap silently. Later versions use
    eager attention and refuse sdpa.

    Args:
        model: A transformers model.
        requested: `model.attn_implementation` of the recipe.

    Returns:
        The same model.

    Raises:
        InputError: The recipe requests sdpa.
    """
    capped = any(getattr(module, "attn_logit_softcapping", None) is not None for module in model.modules())
    ATTENTION.require()
    if not capped or attention_of(model) != "sdpa":
        return model
    if requested == "sdpa":
        problem = f"model.attn_implementation: sdpa ignores the soft-capping of {type(model).__name__}"
        raise InputError(problem, hint="set it to eager, or remove it")
    model.set_attn_implementation("eager")
    return model


def correct_tie(model: Any) -> Any:
    """Correct `tie_word_embeddings` in the configuration of a model whose files have both embeddings and head.

    transformers loads both, but would tie them when it resizes the embeddings.

    Args:
        model: A transformers model.

    Returns:
        The same model.
    """
    weights = [getattr(module, "weight", None) for module in embeddings_and_head(model)]
    if all(weight is not None for weight in weights) and len({id(weight) for weight in weights}) == 2:
        for config in (model.config, model.config.get_text_config()):
            if getattr(config, "tie_word_embeddings", False):
                config.tie_word_embeddings = False
    return model


def check_named_code(name: str, revision: str | None, *, trusted: bool) -> None:
    """Refuse a model, or an adapter with its base, that names a kernel to download or weights outside of its folder.

    transformers asks for consent to run a model's own code, but not for kernels.

    Args:
        name: Name or folder of a model or an adapter.
        revision: Its revision on the hub, or that of the base of an adapter in a folder.
        trusted: Whether the user consented to its code.

    Raises:
        InputError: There is such a kernel and `trusted` is false, or a shard lies elsewhere.
    """
    seen: set[str] = set()
    while name not in seen:  # the base of an adapter may be an adapter
        seen.add(name)
        folder = _local_or_cached(name, revision, fetch=not trusted)
        if folder is None:
            return
        check_configs(folder, trusted=trusted)
        base = base_of(folder)
        if base is not None:
            name, revision = base[0], base[1] or revision


def _local_or_cached(name: str, revision: str | None, *, fetch: bool) -> Path | None:
    """Return a local model folder, or the folder in the hub's cache with the configurations of a model on the hub.

    Args:
        name: Name or folder of the model.
        revision: Its revision on the hub.
        fetch: Whether to download the configurations of a model on the hub.
    """
    if (path := local_path(name)) is not None:
        return path if path.is_dir() else None
    if not fetch or not is_on_hub(name):
        return None
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    folder = None
    for config in CONFIGS[:2]:
        try:
            if try_to_load_from_cache(name, config, revision=revision) is not None:  # a path, or known to be missing
                found = try_to_load_from_cache(name, config, revision=revision)
                folder = Path(found).parent if isinstance(found, str) else folder
            else:
                folder = Path(hf_hub_download(name, config, revision=revision)).parent
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError):  # loading the model reports it
            continue
    return folder


def checked_base_revision(folder: Path | None) -> str | None:
    """Return the commit of the base of the adapter in a local folder, after a check that the base is the same.

    Args:
        folder: The folder; None for a model on the hub.

    Returns:
        The commit; None if the folder holds no adapter or names no commit.

    Raises:
        InputError: The base has changed since the adapter was trained.
    """
    base = None if folder is None else base_of(folder)
    if folder is None or base is None:
        return None
    check_trained_on(trained_on(folder), *base, hint="restore the old model")
    return base[1]


def load_from_hub(auto: Any, section: Model, *, key: str = MODEL_KEY, **kwargs: Any) -> Any:
    """Load a model, a configuration or a processor with `auto.from_pretrained`.

    Args:
        auto: One of transformers' Auto classes.
        section: The model section of the recipe: name, revision, trust in its code.
        key: The key that names the model, for messages.
        **kwargs: Further arguments of `from_pretrained`.

    Returns:
        The result of `from_pretrained`: with `output_loading_info=True` a pair of the model and a dictionary.

    Raises:
        InputError: The model is not found, is damaged, or does not fit the class.
    """
    from safetensors import SafetensorError

    if section.name == NO_MODEL:
        raise InputError(f"{key} is missing", hint="set it: this task loads its model or its processor by name")
    folder = model_folder(section.name, key)
    revision = section.revision if folder is None else None
    if auto.__name__ not in NEEDS:
        check_named_code(section.name, revision, trusted=section.trust_remote_code)
        revision = checked_base_revision(folder) or revision
    elif folder is not None:
        check_configs(folder, trusted=section.trust_remote_code)
    if revision is not None:
        kwargs["revision"] = revision
    name = section.name if folder is None else str(folder.absolute())
    is_adapter = folder is not None and not (folder / "config.json").is_file()
    misfits = (KeyError, TypeError, RuntimeError, AttributeError) if is_adapter else ()  # of settings and tensors
    try:
        with code_refused(section.name):
            loaded = auto.from_pretrained(name, trust_remote_code=section.trust_remote_code, **kwargs)
    except (OSError, ValueError, ImportError, SafetensorError, *misfits) as error:
        if isinstance(error, OSError) and folder is None and not _is_cached(section):
            raise InputError(
                f"{key}: {section.name} is neither on this machine nor reachable on the hub",
                hint="check the spelling; a relative path starts at the current folder; for a model on the hub run "
                "`ftcli fetch RECIPE` on a machine with a network",
            ) from error
        reason = re.split(" If you were trying| from one of:", str(error).strip().splitlines()[0])[0]
        raise InputError(
            f"{key}: {auto.__name__} cannot load {section.name}: {reason}",
            hint=f"check that the model is complete and fits this task.{NEEDS.get(auto.__name__, '')}",
        ) from error
    model = loaded[0] if isinstance(loaded, tuple) else loaded  # a tuple also has the keys missing in the files
    if hasattr(model, "set_attn_implementation"):
        correct_tie(keep_soft_capping(model, section.attn_implementation))
    return loaded


def _is_cached(section: Model) -> bool:
    """Return whether the cache of this machine has at least the configuration of a model on the hub."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(section.name, "config.json", revision=section.revision), str)
    except HFValidationError:  # not a valid name on the hub
        return False
