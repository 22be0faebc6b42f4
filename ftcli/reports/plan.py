"""Plan a run for each profile without a GPU, without weights and without torch: `ftcli plan`.

The module collects what is known of model, rows and GPUs. forecast.py turns that into memory and times for one profile,
and plan_text.py into text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.models.estimates.shape import ModelSize, measure_model
from ftcli.models.estimates.step_time import LENGTH_SPREAD
from ftcli.models.estimates.step_work import Rows
from ftcli.models.files import parse_json_object
from ftcli.reports.forecast import Forecast, Target, forecast
from ftcli.runtime.devices import count_gpus, first_gpu
from ftcli.runtime.errors import InputError
from ftcli.runtime.gpus import GPU, find_gpu, measured_speeds_path, require_gpu, with_measured_speeds

if TYPE_CHECKING:
    from ftcli.config.profile import Profile
    from ftcli.config.recipe import Recipe


ASSUMED_GPUS = 8  # of one machine, where none is visible
ON_THE_HUB = "is a name on the hub, and its config.json is not on this machine (ftcli fetch RECIPE)"


@dataclass(frozen=True)
class PlanReport:
    """Result of `ftcli plan`.

    Attributes:
        recipe: Path of the recipe.
        target: The run and the GPUs.
        forecasts: One for each profile, in the order they were named.
        price: Price of one GPU for one hour; None if not given.
        missing: What is not known, and how to provide it.
        notes: What was assumed.
    """

    recipe: str
    target: Target
    forecasts: list[Forecast]
    price: float | None = None
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def fastest(self) -> Forecast | None:
        """The forecast with the most tokens per second of those that fit; None if no time is known or nothing fits."""
        able = [one for one in self.forecasts if one.time is not None and one.fits]
        return max(able, key=lambda one: one.tokens_per_second or 0, default=None)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for `--json`."""
        from ftcli.reports.plan_text import as_dict

        return as_dict(self)

    def lines(self) -> list[str]:
        """Return the report as text."""
        from ftcli.reports.plan_text import lines

        return lines(self)


def plan(
    recipe: str | Path,
    profiles: Sequence[str | Path] = (),
    *,
    gpus: int | None = None,
    gpu: str | None = None,
    memory_gb: float | None = None,
    price: float | None = None,
    overrides: Sequence[str] = (),
) -> PlanReport:
    """Plan a recipe for several profiles: memory by part, what fits, time per step, hours and cost. Needs no GPU.

    Args:
        recipe: A recipe file, or the name of a shipped recipe.
        profiles: Names or paths of Accelerate configs. Empty: the shipped profiles for one machine.
        gpus: Number of GPUs. None: those that are visible, else 8.
        gpu: Name of the GPU, such as "H100" or "RTX 4090". None: that of this machine.
        memory_gb: Memory of a GPU in GB of 2^30 bytes. None: that of the GPU.
        price: Price of one GPU for one hour, in any currency.
        overrides: Changes of the recipe such as "train.max_steps=10", applied in order.

    Returns:
        The report. `lines()` is its text, `as_dict()` its values.

    Raises:
        InputError: The recipe or a profile is invalid, a local model folder does not exist or has an adapter only, or
            the table has no such GPU and its memory is not given.

    Example:
        >>> report = ftcli.plan("recipe.yaml", ["ddp", "fsdp"], gpus=8, gpu="H100", price=2.5)
        >>> for line in report.lines():
        ...     print(line)
        >>> report.fastest.profile
    """
    from ftcli.config.load import find_recipe, load_recipe
    from ftcli.config.profile import list_profiles, load_profile
    from ftcli.data.cached_counts import cached_lengths

    _check_numbers(gpus=gpus, memory=memory_gb, price=price)
    path = find_recipe(recipe)
    loaded = load_recipe(path, overrides)
    named = [load_profile(name) for name in dict.fromkeys(profiles)]
    chosen: list[Profile] = named or [profile for profile in list_profiles() if profile.num_machines == 1]
    missing: list[str] = []
    notes: list[str] = []
    size, model_type = _model(loaded, missing)
    device, capacity = _gpu(gpu, memory_gb, missing)
    count = _gpu_count(gpus, notes)
    typical = () if loaded.data.packing else tuple(cached_lengths(loaded))
    rows, lengths, longest = _rows(loaded, size, typical, notes)
    if device is not None and loaded.precision not in device.products:
        missing.append(f"times: {device.name} has no {loaded.precision.removesuffix('_pure')} products")
    if any(profile.num_machines > 1 for profile in chosen):
        notes.append("the network between machines is not known: times are those of one machine's links")
    target = Target(loaded, size, model_type, rows, lengths, longest, device, capacity, count, typical)
    forecasts = [forecast(profile, target) for profile in chosen]
    notes += _notes_of_frozen_weights(forecasts)
    if any(one.plan is not None and one.plan.steps is None for one in forecasts):
        missing.append("hours: the number of rows is not known (ftcli tokenize RECIPE, or set train.max_steps)")
    return PlanReport(str(path), target, forecasts, price, missing, notes)


def _check_numbers(**numbers: float | None) -> None:
    """Raise `InputError` for an option that is not a finite number above 0."""
    for name, value in numbers.items():
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"--{name} is {value}", hint="it must be a number above 0")


def _model(recipe: Recipe, missing: list[str]) -> tuple[ModelSize | None, str | None]:
    """Return the size and the type of the recipe's model; None for what is not known, with a line in `missing`."""
    from ftcli.config.recipe_model import NO_MODEL
    from ftcli.config.task_registry import is_custom_task
    from ftcli.data.paths import model_folder
    from ftcli.models.adapter_folder import check_no_adapter

    name = recipe.model.name
    if not is_custom_task(recipe.task):  # a user's task may load an adapter itself
        check_no_adapter(recipe.model)
    if name == NO_MODEL:
        missing.append("memory and times: the task builds its own model")
        return None, None
    folder = model_folder(name) or _cached_folder(name, recipe.model.revision)
    if folder is None:
        missing.append(f"memory and times: model {name} {ON_THE_HUB}")
        return None, None
    config = folder / "config.json"
    values = parse_json_object(config, config.read_bytes()) if config.is_file() else {}
    kind, size = values.get("model_type"), measure_model(folder, recipe)
    if size.shape is None:
        missing.append(f"activations, logits and times: {config} of type {kind} has no sizes of a transformer")
    if not size.trained:
        missing.append(f"memory and times: {folder} has neither safetensors files nor the sizes of a transformer")
        return None, None
    return size, kind if isinstance(kind, str) else None


def _cached_folder(name: str, revision: str | None) -> Path | None:
    """Return the folder of a hub model in the cache of this machine that has a config.json; None without one."""
    from ftcli.data.hub_commits import cached_repository

    repository = cached_repository(name, "model")
    reference = repository / "refs" / (revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else revision or ""
    folder = repository / "snapshots" / commit
    return folder if commit and (folder / "config.json").is_file() else None


def _gpu(name: str | None, memory_gb: float | None, missing: list[str]) -> tuple[GPU | None, int | None]:
    """Return the GPU and its memory in bytes; None for what is not known, with a line in `missing`."""
    here = first_gpu() if name is None and memory_gb is None else None
    capacity = None if memory_gb is None else int(memory_gb * 2**30)
    if name is not None:
        gpu = require_gpu(name) if capacity is None else find_gpu(name)
    else:
        gpu = None if here is None else find_gpu(here[0])
    if here is not None:
        capacity = here[1]
        gpu = None if gpu is None else with_measured_speeds(gpu, measured_speeds_path())
    if gpu is None and capacity is None:
        missing.append("fit and times: no GPU is visible here (--gpu NAME, or --memory GB for the memory alone)")
    elif gpu is None:
        named = name or (here[0] if here else None)
        missing.append(f"times: {named or 'the GPU'} is not in the table of GPUs (--gpu NAME names one that is)")
    else:
        gpu = replace(gpu, memory=capacity or gpu.memory)
        capacity = gpu.memory
    return gpu, capacity


def _notes_of_frozen_weights(forecasts: Sequence[Forecast]) -> list[str]:
    """Return what becomes of frozen weights, one line for all profiles with the same answer."""
    profiles: dict[str, list[str]] = {}
    for one in forecasts:
        if one.frozen is not None:
            profiles.setdefault(one.frozen, []).append(one.profile)
    return [f"{', '.join(names)}: {line}" for line, names in profiles.items()]


def _gpu_count(gpus: int | None, notes: list[str]) -> int:
    """Return the number of GPUs."""
    if gpus is not None:
        return gpus
    if visible := count_gpus():
        return visible
    notes.append(f"{ASSUMED_GPUS} GPUs are assumed, because none is visible here (--gpus N)")
    return ASSUMED_GPUS


def _rows(
    recipe: Recipe, size: ModelSize | None, typical: Sequence[int], notes: list[str]
) -> tuple[int | None, Rows, int]:
    """Return the number of training rows, their lengths and the tokens of the longest, if possible from the cache."""
    from ftcli.config.task_registry import task_class
    from ftcli.data.cached_counts import cached_row_counts
    from ftcli.tasks.protocol import properties_of

    longest = recipe.data.max_length * properties_of(task_class(recipe.task)).answers_per_row
    try:
        counts = cached_row_counts(recipe) or {}
    except InputError:  # a missing file is reported by `ftcli check`
        counts = {}
    rows = counts.get("train")
    if size is not None and size.shape is not None and (patches := size.shape.patches) is not None:
        notes.append("decoding of images is not counted")
        return rows, Rows(patches, patches), patches
    if rows and "documents" in counts:
        tokens = counts["tokens"]
        return rows, Rows(tokens / rows, LENGTH_SPREAD * tokens / counts["documents"]), longest
    if rows and typical:
        total = sum(typical)
        return rows, Rows(total / len(typical), sum(tokens**2 for tokens in typical) / total), longest
    if properties_of(task_class(recipe.task)).reads_text:
        kind = "packed rows are full, with one document each" if recipe.data.packing else "rows have the full length"
        notes.append(f"{kind}, until `ftcli tokenize RECIPE` prepared them")
    return rows, Rows(longest, longest), longest
