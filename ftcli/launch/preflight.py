"""Check a recipe and its inputs before processes are started, without loading a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from ftcli.runtime.errors import InputError, Problem, collect_problems
from ftcli.runtime.installed import is_installed
from ftcli.runtime.patches import names_left_out
from ftcli.tasks.protocol import properties_of

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe


def check_bitsandbytes(recipe: Recipe, *, cpu: bool) -> list[Problem]:
    """Return why this machine cannot use 4-bit weights or 8-bit moments, if the recipe has them."""
    from ftcli.runtime.devices import count_gpus

    features = {}  # feature that needs the package -> (alternative, override for a machine without a GPU)
    if recipe.model.quantization is not None:
        features["model.quantization"] = "remove the section", "model.quantization=null"
    if recipe.optimizer.name == "adamw_8bit":
        features["optimizer.name: adamw_8bit"] = "set it to adamw", "optimizer.name=adamw"
    problems = []
    for feature, (alternative, override) in features.items():
        if not is_installed("bitsandbytes"):
            hint = f"pip install bitsandbytes (ftcli's extra `quantization`), or {alternative}"
            problems.append(Problem(f"{feature} needs bitsandbytes, which is not installed", hint=hint))
        if cpu or not count_gpus():
            hint = f"train on a machine with a GPU; to try the recipe here, --set {override}"
            problems.append(Problem(f"{feature} needs a GPU", hint=hint))
    return problems


def check_inputs(recipe: Recipe, *, cpu: bool = False, is_elsewhere: bool = False) -> None:
    """Check the model, the data and the adapter of a recipe on this machine, without loading the model.

    Args:
        recipe: The recipe.
        cpu: Whether the run uses the CPU.
        is_elsewhere: Whether the run uses the GPUs and packages of another machine. They are not checked here.

    Raises:
        InputError: A file is missing or invalid, this machine cannot run what the recipe requests, or an unknown patch
            is left out. The error holds the problems of the model, of all sources of data and of the prompts together.
    """
    from ftcli.config.plan import check_rows_of_a_pass
    from ftcli.config.task_registry import find_task, is_custom_task, task_class
    from ftcli.data.chat.template_variables import check_recipe
    from ftcli.data.first_rows import check_first_rows, hub_key_problems
    from ftcli.data.row_counts import check_row_counts
    from ftcli.models.adapters import adapter_problems
    from ftcli.models.estimates.memory_saving import check_host_table
    from ftcli.models.kernels.compile import check_compile
    from ftcli.models.kernels.document_attention import check_attention
    from ftcli.models.kernels.float8 import check_float8
    from ftcli.models.kernels.liger import check_liger
    from ftcli.models.positions import check_positions
    from ftcli.models.quantised_files import quantised_problems
    from ftcli.runtime.devices import count_gpus
    from ftcli.tasks.shared.metric_names import check_metric

    if problems := [
        *adapter_problems(recipe.adapter, recipe.model.new_tokens),
        *hub_key_problems(recipe),
        *quantised_problems(recipe),
        *([] if is_elsewhere else check_bitsandbytes(recipe, cpu=cpu) + check_float8(recipe, cpu=cpu)),
        *collect_problems([names_left_out, *_file_checks(recipe)]),
    ]:
        raise InputError(problems)
    check_rows_of_a_pass(recipe)
    check_recipe(recipe)
    check_compile(recipe)
    check_liger(recipe, local_model_type(recipe.model.name), on_gpu=not cpu and count_gpus() > 0)
    if not is_custom_task(recipe.task):  # a user's task may import anything, so the process that trains checks it
        check_attention(recipe, find_task(recipe.task).Task)
        check_metric(recipe, find_task(recipe.task).Task)
    describe_formats(recipe)
    check_first_rows(recipe)
    check_positions(recipe)
    check_host_table(recipe)
    properties = properties_of(task_class(recipe.task))
    splits = (recipe.data.truncation or properties.default_truncation) == "split"
    check_row_counts(recipe, may_split=splits or properties.makes_several_rows or is_custom_task(recipe.task))


def _file_checks(recipe: Recipe) -> Iterator[Callable[[], object]]:
    """Yield the checks of the model's files, of each source of rows and of the prompts."""
    from ftcli.config.task_registry import is_custom_task
    from ftcli.data.paths import model_folder
    from ftcli.data.sources import check_source
    from ftcli.data.streaming.corpus import check_corpus
    from ftcli.inference.prompts import recipe_prompts
    from ftcli.models.files import check_model_files
    from ftcli.models.helper_models import helper_names

    data = recipe.data
    if is_custom_task(recipe.task):  # a user's task may build a model without these files
        yield partial(model_folder, recipe.model.name)
    else:
        yield partial(_check_model, recipe)
    for key, helper in helper_names(recipe).items():
        yield partial(check_model_files, helper, has_tokenizer=False, key=key)
    check_train = check_corpus if data.streaming else check_source
    for check, sources in ((check_train, data.named_sources("train")), (check_source, data.named_sources("eval"))):
        for key, source in sources:
            yield partial(check, source, data.columns_of(source), most_bad=data.max_bad_rows, key=key)
    yield partial(recipe_prompts, recipe.evaluate.generate)


def _check_model(recipe: Recipe) -> None:
    """Check the files of the recipe's model; of an adapter, which is no model, nothing else is reported."""
    from ftcli.config.task_registry import task_class
    from ftcli.models.adapter_folder import check_no_adapter
    from ftcli.models.files import check_model_files

    check_no_adapter(recipe.model)
    needs_tokenizer = properties_of(task_class(recipe.task)).needs_tokenizer
    check_model_files(recipe.model.name, has_tokenizer=needs_tokenizer)


def local_model_type(name: str) -> str | None:
    """Return the `model_type` in config.json of a local model; None for a hub name or an unreadable file."""
    from ftcli.data.paths import model_folder

    folder = model_folder(name)
    if folder is None or not (folder / "config.json").is_file():
        return None
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError, RecursionError):  # loading the model raises an error with the reason
        return None
    return config.get("model_type") if isinstance(config, dict) else None


def describe_formats(recipe: Recipe) -> dict[str, str]:
    """Return the row format or the columns of each source, recognised from its first row, and what is not used.

    The result is empty for a user's own task, which is not imported here.

    Returns:
        Descriptions by name of the source, such as "data.train".

    Raises:
        InputError: The columns of a source match no format of the task.
    """
    from ftcli.config.task_registry import find_task, is_custom_task
    from ftcli.data.formats import described, described_columns, recognise, with_usual_names
    from ftcli.data.paths import labels_of
    from ftcli.data.sources import first_columns
    from ftcli.data.streaming.corpus import columns_of_stream

    descriptions: dict[str, str] = {}
    if is_custom_task(recipe.task):
        return descriptions
    task = find_task(recipe.task).Task
    kinds = properties_of(task).formats
    for split in ("train", "eval"):
        sources = recipe.data.named_sources(split)
        labels = labels_of([source for _, source in sources])
        for (key, source), label in zip(sources, labels, strict=True):
            name = f"data.{split}" + (f" {label}" if len(sources) > 1 else "")
            is_stream = split == "train" and recipe.data.streaming
            read_columns = columns_of_stream if is_stream else first_columns
            stored_columns = read_columns(source, most_bad=recipe.data.max_bad_rows)
            if stored_columns is None and not kinds:
                continue
            if stored_columns is None:
                descriptions[name] = f"{source.path}: format unknown until rows are prepared"
                continue
            mapped = recipe.data.columns_of(source)
            if not is_stream:
                mapped = with_usual_names(task, mapped, stored_columns, where=f"{key}: {source.path}")
            expected_names: dict[str, list[str]] = {}
            for expected, stored in mapped.items():
                expected_names.setdefault(stored, []).append(expected)
            columns = [name for column in stored_columns for name in expected_names.get(column, [column])]
            if not kinds:
                descriptions[name] = f"{source.path}: {described_columns(task, columns)}"
                continue
            row_format = recognise(columns, kinds, f"{key}: {source.path}")
            descriptions[name] = f"{source.path}: {described(row_format, columns, kinds)}"
    return descriptions
