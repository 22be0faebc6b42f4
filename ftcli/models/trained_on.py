"""Know what a run, a checkpoint or a folder of weights was trained on, and compare it with what there is now.

It is the base's name and commit, its configuration, a digest of its weights, the settings of its image processor, and
digests of its tokenizer.
A checkpoint stores it in state.json under `frozen`, a run in environment.json under `trained_on`, and `final/` and
exports of adapters in trained_on.json. Every command that opens such a folder compares it here. Edits that change no
result are not differences: other places and formats of the same weights, keys of config.json that no model reads, and
defaults that are written out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.config.task_registry import is_custom_task, task_class
from ftcli.models.frozen_weights import FORMULA as EARLIER_FORMULA
from ftcli.models.frozen_weights import VOLATILE, files_folder, folder_digest, weights_digest
from ftcli.runtime.checkpoint_names import STATE, checkpoints_of
from ftcli.runtime.errors import InputError, Problem, shortened
from ftcli.runtime.redaction import redact
from ftcli.runtime.torn_files import read_object
from ftcli.tasks.protocol import properties_of

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe


TRAINED_ON = "trained_on.json"
ENVIRONMENT = "environment.json"  # of a run
FORMULA = "base-1"  # stored with each entry; change it if the same base would get another entry
HINT = "restore the old model, or use --resume-anyway to train with the new one"
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
# Keys of config.json that change neither the values of a model nor its training by ftcli.
HARMLESS = {
    *VOLATILE,
    *("architectures", "use_cache", "bos_token_id", "eos_token_id", "id2label", "label2id", "initializer_range"),
    *("return_dict", "output_attentions", "output_hidden_states", "task_specific_params", "tokenizer_class", "prefix"),
    *("attn_implementation", "_attn_implementation", "torchscript", "finetuning_task", "_commit_hash"),
}
HARMLESS_OF_PROCESSOR = {
    *("image_processor_type", "feature_extractor_type", "processor_class", "_processor_class", "_valid_processor_keys"),
    *("use_fast", "backend", "return_tensors", "device", "disable_grouping", "data_format", "input_data_format"),
}
# Key of an entry -> its name in messages.
TOKENIZER_PARTS = {"vocabulary": "tokenizer", "vocabulary_files": "tokenizer", "template": "chat template"}
VOCABULARY_FILES = (  # of tokenizers without a tokenizer.json
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *("spm.model", "tekken.json", "added_tokens.json"),
)
READ_ANYWAY = ("quantization_config",)  # read by transformers although no configuration declares it


def identity_of(recipe: Recipe) -> dict[str, Any] | None:
    """Return what a run of a recipe starts from.

    Args:
        recipe: The recipe, with resolved commits.

    Returns:
        JSON values; None if the model's files are not on this machine, or if the task builds its own model.
    """
    reads_images = is_custom_task(recipe.task) or not properties_of(task_class(recipe.task)).reads_text
    folder = files_folder(recipe.model.name, recipe.model.revision)
    # Rows of text do not reach the towers of such a model, so they are not in the checkpoints (unreached.py).
    has_towers = folder is not None and "text_config" in (read_object(folder / "config.json") or {})
    frozen = recipe.adapter.type != "none" or (has_towers and not reads_images)
    return _identity(recipe.model.name, recipe.model.revision, frozen, reads_images)


def trained_on(folder: Path) -> dict[str, Any] | None:
    """Return what a folder was trained on; None if nothing stores it.

    Args:
        folder: A checkpoint, a run, or a folder of weights: `final/` of a run or an export.

    Raises:
        InputError: The file beside an adapter is damaged.
    """
    if (folder / STATE).exists():
        return _of_state(read_object(folder / STATE))
    for path in (folder / TRAINED_ON, folder / "final" / TRAINED_ON):
        if (entry := read_object(path)) is not None:
            if entry.get("formula") == FORMULA and not _is_whole(entry):
                raise InputError(
                    f"{path} is damaged", hint="restore the file; without it the base model is not compared"
                )
            return entry
    for path in (folder / ENVIRONMENT, folder.parent / ENVIRONMENT):
        if (entry := (read_object(path) or {}).get("trained_on")) is not None:
            return dict(entry)
    newest = [*checkpoints_of(folder)[-1:], *checkpoints_of(folder.parent)[-1:]]  # as earlier versions wrote it
    return _of_state(read_object(newest[0] / STATE)) if newest else None


def write_trained_on(folder: Path, entry: Mapping[str, Any] | None) -> None:
    """Write what the adapter in a folder was trained on: `identity_of` its run. Nothing without an entry."""
    if entry is not None:
        (folder / TRAINED_ON).write_text(json.dumps(redact(dict(entry)), indent=1) + "\n", encoding="utf-8")


def differences(
    stored: Mapping[str, Any] | None,
    name: str,
    revision: str | None,
    *,
    now: Mapping[str, Any] | None = None,
    parts: tuple[str, ...] = ("weights", "config", "processor"),
) -> list[str]:
    """Compare what a folder was trained on with a model.

    Args:
        stored: The entry of `trained_on`; None compares nothing.
        name: Name or folder of the model.
        revision: Its commit, if it is on the hub.
        now: `identity_of` a recipe with this model, if it is known.
        parts: What is compared, of weights, config, processor, vocabulary and template. Weights are compared only if
            they were frozen. The last two are for folders without a tokenizer of their own; a resume compares rows.

    Returns:
        One sentence for each difference; empty if there is none, or if the model is not on this machine.
    """
    stored = stored or {}
    if stored.get("formula") == EARLIER_FORMULA and "weights" in parts:
        folder = files_folder(name, revision)
        digest = stored["digest"] if folder is None else folder_digest(folder)
        return [] if digest == stored["digest"] else [_other_weights(name, stored, stored["digest"], digest)]
    if stored.get("formula") != FORMULA:
        return []
    now = now or _identity(name, revision, stored["frozen"], "processor" in stored)
    if now is None:
        return []
    found = []
    before, after = stored["weights"], now["weights"]
    if "weights" in parts and stored["frozen"] and before and after and before != after:
        found.append(_other_weights(name, stored, before, after))
    if "config" in parts and (changes := config_changes(stored["config"], now["config"])):
        found.append(f"config.json of {name} is not the one of the run ({'; '.join(changes)})")
    old, new = stored.get("processor"), now.get("processor")
    if "processor" in parts and old is not None and new is not None and (changes := _changes(old, new)):
        found.append(f"the image processor of {name} is not the one of the run ({'; '.join(changes)})")
    for part, called in TOKENIZER_PARTS.items():
        if part.removesuffix("_files") in parts and stored.get(part) and now.get(part) and stored[part] != now[part]:
            found.append(f"the {called} of {name} is not the one of the run")
    return found


def check_trained_on(
    stored: Mapping[str, Any] | None, name: str, revision: str | None, *, hint: str = HINT, **options: Any
) -> None:
    """Check that a model is the one that a folder was trained on; the arguments are those of `differences`.

    Raises:
        InputError: There is a difference.
    """
    if found := differences(stored, name, revision, **options):
        raise InputError([Problem(each, hint=hint) for each in found])


def is_same_base(stored: Mapping[str, Any] | None, recipe: Recipe) -> bool:
    """Return whether a recipe's model certainly is the one that a folder was trained on, whatever its place."""
    stored, now = stored or {}, identity_of(recipe)
    if now is None or differences(stored, recipe.model.name, recipe.model.revision, now=now):
        return False
    if stored.get("formula") == EARLIER_FORMULA:
        return True
    return stored.get("formula") == FORMULA and stored["weights"] is not None and stored["weights"] == now["weights"]


def config_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the differences of two config.json that can change results, each as `key: old -> new`."""
    if not _changes(old, new):
        return []
    declared: set[str] | None = None
    if old.get("model_type") == new.get("model_type") and not {"auto_map"} & {*old, *new}:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        try:
            kind: Any = CONFIG_MAPPING[old["model_type"]]
            declared = {*kind().to_dict(), *READ_ANYWAY}
            old, new = (_without_harmless(kind.from_dict(dict(each)).to_dict()) for each in (old, new))
        except Exception:  # a configuration that this version cannot read: loading the model reports it
            declared = None
    return _changes(old, new, declared)


def _identity(name: str, revision: str | None, frozen: bool, reads_images: bool) -> dict[str, Any] | None:
    """Return what a run starts from; None if the model is not on this machine."""
    folder = files_folder(name, revision)
    if folder is None:
        return None
    entry = {
        "formula": FORMULA,
        "name": name,
        "revision": revision,
        "frozen": frozen,
        "config": _without_harmless(read_object(folder / "config.json") or {}),
        "weights": weights_digest(folder, frozen=frozen),
        **_tokenizer_digests(folder),
    }
    return entry | {"processor": _processor_settings(folder)} if reads_images else entry


def _processor_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of a model's image processor that change pixels."""
    for name in PROCESSOR_FILES:
        settings = read_object(folder / name)
        if settings is not None and (name != PROCESSOR_FILES[0] or "image_processor" in settings):
            settings = settings.get("image_processor", settings)
            named = {key: value for key, value in settings.items() if value is not None}
            return {key: value for key, value in named.items() if key not in HARMLESS_OF_PROCESSOR}
    return {}


def _tokenizer_digests(folder: Path) -> dict[str, str]:
    """Return digests of the ids that a tokenizer gives to texts, and of its chat template.

    Those of a tokenizer.json do not depend on how a version of transformers writes it. Without one, the files of the
    vocabulary are compared as they are.
    """
    path = folder / "chat_template.jinja"
    template = (read_object(folder / "tokenizer_config.json") or {}).get("chat_template")
    template = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else template
    digests = _vocabulary_digest(folder)
    return digests if template is None or not digests else digests | {"template": _digest(template)}


def _vocabulary_digest(folder: Path) -> dict[str, str]:
    """Return {"vocabulary": digest of tokenizer.json}, or {"vocabulary_files": digest}; empty if there are no files."""
    file = read_object(folder / "tokenizer.json") or {}
    model = file.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list):
        files = {n: (folder / n).read_bytes() for n in VOCABULARY_FILES if (folder / n).is_file()}
        found = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        return {"vocabulary_files": _digest(found)} if found and not file else {}
    merges, added = model.get("merges"), file.get("added_tokens")
    merges = merges if isinstance(merges, list) else []
    pairs = [" ".join(map(str, pair)) if isinstance(pair, list) else pair for pair in merges]  # versions write both
    added = added if isinstance(added, list) else []
    tokens = sorted(([each.get("id"), each.get("content")] for each in added if isinstance(each, dict)), key=str)
    return {"vocabulary": _digest([model["vocab"], pairs, tokens])}


def _digest(value: Any) -> str:
    """Return a short digest of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def _is_whole(entry: Mapping[str, Any]) -> bool:
    """Return whether an entry has every key with a value of its kind."""
    kinds = {"name": str, "frozen": bool, "config": dict, "weights": str | None, "processor": dict}
    return all(isinstance(entry.get(key, {} if key == "processor" else 0), kind) for key, kind in kinds.items())


def _of_state(state: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the entry of a checkpoint's state.json."""
    return (state or {}).get("frozen")


def _other_weights(name: str, stored: Mapping[str, Any], before: str, after: str) -> str:
    """Return the sentence about other frozen weights."""
    return (
        f"the frozen weights of {name} are not those with which the run was trained: "
        f"digest {before} then (of {stored['name']}), {after} now"
    )


def _without_harmless(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration and its nested ones without keys that change no result."""
    return {
        key: _without_harmless(value) if isinstance(value, dict) else value
        for key, value in settings.items()
        if key not in HARMLESS
    }


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], declared: set[str] | None = None) -> list[str]:
    """Return `key: old -> new` for each key with other values; only for keys in `declared`, if given."""
    keys = [key for key in dict.fromkeys([*old, *new]) if declared is None or key in declared]
    return [
        f"{key}: {_shown(old, key)} -> {_shown(new, key)}"
        for key in keys
        if old.get(key) != new.get(key) or (key in old) != (key in new)
    ]


def _shown(values: Mapping[str, Any], key: str) -> str:
    """Return a value for a message."""
    return shortened(json.dumps(values[key])) if key in values else "absent"
