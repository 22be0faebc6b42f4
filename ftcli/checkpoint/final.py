"""Write final weights in the form that plain transformers and peft load.

A run writes `final/` and a probe: fixed inputs with the logits of the trained model. An export (export.py) must
reproduce these logits.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.checkpoint.folder import read_state
from ftcli.config.recipe import Recipe
from ftcli.data.revisions import is_on_hub
from ftcli.models.adapter_folder import (
    adapter_settings,
    base_of,
    label_settings,
)
from ftcli.models.adapters import CONFIG, WEIGHTS
from ftcli.models.files import header_problem, weight_files
from ftcli.models.own_model import names_in_files, record_cut_tie, save_config
from ftcli.models.trained_on import TOKENIZER_PARTS, check_trained_on, differences, trained_on
from ftcli.runtime.checkpoint_names import PROBE, final_step
from ftcli.runtime.errors import InputError, shortened
from ftcli.runtime.log import log_line
from ftcli.runtime.reader_errors import reading
from ftcli.runtime.run_folder import RunFolder

if TYPE_CHECKING:
    from torch import Tensor

    from ftcli.config.recipe_model import Model


def find_probe(run: RunFolder, checkpoint: Path | None) -> Path | None:
    """Return the probe of a run's final weights, or of a checkpoint if it was computed with the same weights.

    A probe that a power cut left empty or truncated is logged and not used.
    """
    from safetensors import SafetensorError, safe_open

    path = run.path / PROBE
    if not path.is_file() or not run.final.is_dir():
        return None
    try:
        with safe_open(path, framework="pt"):
            pass
    except (OSError, SafetensorError) as error:
        log_line(f"{path} is damaged and not used ({error}): the export is compared by its weights only")
        return None
    return path if checkpoint is None or final_step(run.path) == read_state(checkpoint)["step"] else None


def write_model(task: Any, model: Any, values: Iterator[tuple[str, Tensor]], folder: Path) -> None:
    """Write the configuration and the weights of a whole model; `values` is consumed one weight at a time."""
    import torch

    from ftcli.checkpoint.hf_shards import SHARD_SIZE, save_weights, shard_bytes
    from ftcli.models.structure import full_shape

    persistent = model.state_dict()
    buffers = {name: buffer.detach() for name, buffer in model.named_buffers() if name in persistent}
    shapes = {name: (full_shape(parameter), parameter.dtype) for name, parameter in model.named_parameters()}
    shapes |= {name: (buffer.shape, buffer.dtype) for name, buffer in buffers.items()}
    expected = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in shapes.items()}

    def all_values() -> Iterator[tuple[str, Tensor]]:
        yield from values
        for name, buffer in buffers.items():
            yield name, buffer.cpu()

    save_config(task, model, folder)
    record_cut_tie(model, expected, folder)
    save_weights(names_in_files(model), expected, all_values(), folder, shard_bytes(SHARD_SIZE))


def last_metrics(folder: RunFolder) -> dict[str, float]:
    """Return the metrics of a run's last evaluation; empty without one."""
    rows = [{name: value for name, value in row.items() if name.startswith("eval/")} for row in folder.metrics()]
    return {name.removeprefix("eval/"): value for name, value in next((row for row in rows[::-1] if row), {}).items()}


def check_final_files(final: Path, *, is_adapter: bool, has_config: bool) -> None:
    """Check that final weights are safetensors files with valid headers, as ftcli writes them.

    Args:
        final: Folder of final weights.
        is_adapter: Whether the run trained an adapter.
        has_config: Whether a whole model has a config.json, as those of transformers.

    Raises:
        InputError: A file is missing or damaged, or the weights are pickled.
    """
    hint = "restore it from a copy, or export a checkpoint of the run: `ftcli show RUN` lists them"
    files = [final / CONFIG, final / WEIGHTS] if is_adapter else weight_files(final) or [final / "model.safetensors"]
    files += [final / "config.json"] if has_config and not is_adapter else []
    pickled = [path.name for path in sorted(final.iterdir()) if path.suffix in (".bin", ".pt", ".pth")]
    for path in files:
        if path.is_file() and path.suffix in (".safetensors", ".json"):
            continue
        if pickled:
            raise InputError(f"{final} has pickled weights ({pickled[0]}), which are not exported", hint=hint)
        raise InputError(f"{path} is missing", hint=hint)
    for path in files:
        if path.suffix == ".safetensors" and (problem := header_problem(path)):
            raise InputError(f"{path} is damaged: {problem}", hint=hint)


def check_base(run: RunFolder, recipe: Recipe) -> None:
    """Check the base model of a run's final adapter against what the run was trained on.

    Args:
        run: The run folder.
        recipe: Recipe of the run. Its model is not read if the adapter names another folder, as after a move.

    Raises:
        InputError: The base is another one. A run without an adapter is not compared, because `final/` is complete.
    """
    if (run.final / "adapter_config.json").is_file():
        # A model outside transformers has no name in this file.
        name = adapter_settings(run.final).get("base_model_name_or_path") or recipe.model.name
        check_trained_on(trained_on(run.final), name, recipe.model.revision, hint="restore the old model")


def describe_other_base(recipe: Recipe) -> list[str]:
    """Return a log line for each difference between a recipe's model and the base of the adapter in `adapter.path`.

    Args:
        recipe: The recipe, with resolved commits.

    Returns:
        Without a record of ftcli, names and commits on the hub are compared.
    """
    if not recipe.adapter.path:
        return []
    folder, model = Path(recipe.adapter.path), recipe.model
    stored = trained_on(folder)
    found = differences(stored, model.name, model.revision, parts=("weights", "config", *TOKENIZER_PARTS))
    base = base_of(folder)
    if stored is None and base is not None and is_on_hub(base[0]) and is_on_hub(model.name):
        before, now = (f"{name} at {revision}" if revision else name for name, revision in (base, _known(model, base)))
        found = [f"it was trained on {before}, and model.name is {now}"] * (before != now)
    return [f"warning: adapter.path: {each}" for each in found]


def _known(model: Model, base: tuple[str, str | None]) -> tuple[str, str | None]:
    """Return name and revision of a model; without the revision if that of the base is not known."""
    return model.name, model.revision if base[1] else None


def load_plain(
    auto_class: str,
    folder: Path,
    labels: int = 0,
    dtype: str = "float32",
    *,
    trust_remote_code: bool = False,
    revision: str | None = None,
    whole_base: bool = False,
) -> Any:
    """Return the model or the adapted model in `folder` on the host, loaded by transformers and peft alone.

    Args:
        auto_class: Name of transformers' class that loads the model.
        folder: Folder with a whole model or an adapter.
        labels: Width of a classifier's head that is part of the adapter; 0: the base has its own head.
        dtype: Name of a torch dtype; auto keeps the dtype of the files.
        trust_remote_code: Whether code of the model may run.
        revision: Revision of an adapter's base if its configuration has none, as in folders of older versions.
        whole_base: Whether an adapter's base must have all weights of the class in its files.

    Raises:
        InputError: The model has its own code, which is not trusted, or an adapter's base lacks weights.
    """
    from ftcli.config.trust import code_refused
    from ftcli.models.hub import check_named_code, correct_tie, keep_soft_capping

    trust = {"trust_remote_code": trust_remote_code}  # not None, because transformers would ask on a terminal
    check_named_code(str(folder), revision, trusted=trust_remote_code)
    auto = getattr(importlib.import_module("transformers"), auto_class)
    config = folder / "adapter_config.json"
    if not config.exists():
        with code_refused(str(folder)):
            return keep_soft_capping(auto.from_pretrained(folder, dtype=dtype, **trust)).eval()
    from peft import PeftModel

    head: dict[str, Any] = label_settings(folder) or ({"num_labels": labels} if labels else {})
    head |= {"ignore_mismatched_sizes": True} if head else {}
    adapter = adapter_settings(folder, needs_base=True)
    name = adapter["base_model_name_or_path"]
    at = {"revision": adapter.get("revision") or revision} if is_on_hub(name) else {}
    try:
        with code_refused(name):
            base, info = auto.from_pretrained(name, dtype=dtype, output_loading_info=True, **trust, **at, **head)
    except OSError as error:  # transformers' error for everything that it cannot find
        raise InputError(
            f"the base model {name} of the adapter in {folder} cannot be loaded: {shortened(str(error), 200)}",
            hint=f"restore it, or name its new place at base_model_name_or_path in {config}",
        ) from error
    if whole_base and (missing := sorted(info["missing_keys"])):
        raise InputError(
            f"the base model {name} of the adapter in {folder} lacks weights of a {type(base).__name__}: "
            f"{len(missing)} are missing, the first is {missing[0]}",
            hint="the adapter was trained for another kind of model, or the base's files are damaged",
        )
    with code_refused(name):
        _make_room(correct_tie(keep_soft_capping(base)), folder, trust)
    with reading(folder, "the adapter does not fit its base model"), code_refused(str(folder)):
        return PeftModel.from_pretrained(base, str(folder)).eval()


def _make_room(base: Any, folder: Path, trust: dict[str, bool]) -> None:
    """Add embedding rows for the adapter's new tokens to a base model; the adapter contains their values."""
    from transformers import AutoTokenizer

    if (folder / "tokenizer_config.json").exists():
        tokens = len(AutoTokenizer.from_pretrained(folder, **trust))
        if tokens > base.get_input_embeddings().num_embeddings:
            base.resize_token_embeddings(tokens, mean_resizing=False)
