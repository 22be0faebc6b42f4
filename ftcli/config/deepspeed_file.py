"""Check DeepSpeed's own JSON file, which a profile may name. Light: never imports torch or DeepSpeed.

The file describes hardware. What the recipe sets may be there in the style of transformers' documentation, with `auto`
in place of a value: the values are then those of the recipe.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ftcli.config.yaml_document import Document, read_document
from ftcli.runtime.errors import InputError, Problem, nearest, shortened

# Keys of a DeepSpeed file that describe hardware. All others are refused.
JSON_KEYS = (
    "zero_optimization",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "aio",
    "comms_logger",
    "flops_profiler",
    "wall_clock_breakdown",
    "steps_per_print",
    "dump_state",
    "memory_breakdown",
)
_PRECISION = ("set precision in the recipe", ({"enabled": False}, {"enabled": "auto"}))
# Keys that a section of the file may have beside `enabled: auto`, with the values in the documentation of transformers.
# They are not read, because the recipe sets the precision and ftcli scales losses itself.
JSON_DEFAULTS: dict[str, dict[str, object]] = {
    "fp16": {
        "auto_cast": False,
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
}
JSON_REFUSED: dict[str, tuple[str, tuple[object, ...]]] = {
    "optimizer": ("set optimizer in the recipe; the file may have type AdamW, and auto for all params", ()),
    "scheduler": ("set schedule in the recipe; the file may have a type, and auto for all params", ()),
    "gradient_clipping": ("set optimizer.max_grad_norm in the recipe", ("auto",)),
    "gradient_accumulation_steps": ("derived from the recipe's batch.global_size, never written", ("auto",)),
    "train_batch_size": ("set batch.global_size in the recipe", ("auto",)),
    "train_micro_batch_size_per_gpu": ("set batch.micro_size in the recipe", ("auto",)),
    "bf16": _PRECISION,
    "fp16": _PRECISION,
    "amp": _PRECISION,
    "torch_autocast": _PRECISION,
    "activation_checkpointing": ("set model.gradient_checkpointing in the recipe", ()),
    "communication_data_type": ("gradients are always summed in float32", ()),
    "gradient_predivide_factor": ("it scales gradients", ()),
    "prescale_gradients": ("it scales gradients", (False,)),
    "elasticity": ("it changes the batch size", ({"enabled": False},)),
}
# Sections that the file may have if it leaves every value open, with the types in the documentation of transformers.
# The optimizer of every recipe is an AdamW. The schedule is that of the recipe, whatever the type.
LEFT_OPEN = {"optimizer": ("AdamW", "auto"), "scheduler": ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "auto")}


def is_left_open(key: str, value: Any) -> bool:
    """Return whether a section of the file has a known type and `auto` for all its values.

    Args:
        key: Key of the section.
        value: The section.
    """
    if key not in LEFT_OPEN or not isinstance(value, dict) or not set(value) <= {"type", "params"}:
        return value == "auto" and key in LEFT_OPEN
    params = value.get("params")  # without any, DeepSpeed's defaults would be meant
    is_open = isinstance(params, dict) and bool(params) and all(item == "auto" for item in params.values())
    return is_open and value.get("type") in LEFT_OPEN[key]


def drop_left_open(config: dict[str, Any]) -> None:
    """Remove the sections that leave every value open from DeepSpeed's configuration, so that the recipe's are used."""
    for key in LEFT_OPEN:
        if is_left_open(key, config.get(key)):
            del config[key]


STAGES = (0, 1, 2, 3)
DEVICES = ("none", "cpu", "nvme")  # of offloaded shards


def drop_auto(section: dict[str, Any]) -> None:
    """Remove the values "auto" from a section of DeepSpeed's configuration, which Accelerate would replace.

    The values of `DeepSpeed.configure` or DeepSpeed's defaults then apply.
    """
    for key, value in list(section.items()):
        if value == "auto":
            del section[key]
        elif isinstance(value, dict):
            drop_auto(value)


def file_problems(file: str, where: str) -> Iterator[Problem]:
    """Yield the problems of DeepSpeed's own file. Accelerate reads its path relative to the current folder.

    Args:
        file: Path of the file.
        where: Place of its path in the profile.
    """
    if not Path(file).is_file():
        yield Problem(f"no DeepSpeed file '{file}'", where, "a relative path starts at the current folder")
        return
    try:
        document = read_document(file)
    except InputError as error:
        yield from error.problems
        return
    yield from document.problems
    for key, value in document.values.items():
        hint, harmless = JSON_REFUSED.get(key, ("", ()))
        if key in JSON_KEYS or _without_defaults(key, value) in harmless or is_left_open(key, value):
            continue
        if key in JSON_REFUSED:
            message = f"'{key}' is not allowed in a profile's DeepSpeed file"
        else:
            message = f"'{key}' is not one of the hardware keys that a DeepSpeed file may have"
            hint = nearest(key, JSON_KEYS) or f"known: {', '.join(JSON_KEYS)}"
        yield Problem(message, document.where((key,)), hint)
    if "zero_optimization" not in document.values:
        yield Problem("zero_optimization is missing", document.where(()), "Accelerate needs its stage there")
    else:
        yield from _zero_problems(document.values["zero_optimization"], document)


def _zero_problems(zero: Any, document: Document) -> Iterator[Problem]:
    """Yield the problems of the section about shards: values that ftcli reads from it."""
    key = "zero_optimization"
    if not isinstance(zero, dict):
        yield Problem(f"{key} must be a section", document.where((key,)), 'write {"stage": 2}, or another stage')
        return
    stage = zero.get("stage") or 0
    if isinstance(stage, bool) or stage not in STAGES:
        message = f"{key}.stage is {shortened(repr(stage))}, and must be 0, 1, 2 or 3"
        yield Problem(message, document.where((key, "stage")), "write the number: the profile has to choose the stage")
    for name in ("offload_optimizer", "offload_param"):
        section = zero.get(name) or {}
        device = section.get("device", "none") if isinstance(section, dict) else None
        if device not in DEVICES:
            message = f"{key}.{name} must be a section with a device: {', '.join(DEVICES)}"
            yield Problem(message, document.where((key, name)), 'write {"device": "cpu"}, or remove it')


def _without_defaults(key: str, value: Any) -> Any:
    """Return a value of a DeepSpeed file without the keys that have the value of transformers' documentation."""
    if not isinstance(value, dict):
        return value
    defaults = JSON_DEFAULTS.get(key, {})
    return {name: item for name, item in value.items() if name not in defaults or item != defaults[name]}
