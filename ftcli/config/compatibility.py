"""Check whether a recipe can run on a profile, although each is valid by itself. Light: never imports torch."""

from __future__ import annotations

import re
from importlib import metadata
from typing import TYPE_CHECKING

from ftcli.runtime.errors import Problem
from ftcli.runtime.installed import is_installed

if TYPE_CHECKING:
    from ftcli.config.profile import Profile
    from ftcli.config.recipe import Recipe

SKIPPING_DEEPSPEED = (0, 19, 8)  # tested to skip non-finite steps, in every precision and with offloading
PROFILE_PRECISION = {"bf16": "bf16", "fp16": "fp16"}  # recipe's precision -> Accelerate's; all others are "no"


def check_pair(recipe: Recipe, profile: Profile) -> list[Problem]:
    """Return the problems of a valid recipe together with a valid profile.

    Args:
        recipe: The recipe.
        profile: The profile that the recipe is to run on.

    Returns:
        The problems; an empty list if the recipe can run on the profile.
    """
    problems = []
    where = str(profile.path or profile.source)
    mixed_precision = profile.values.get("mixed_precision")
    if mixed_precision is not None and mixed_precision != PROFILE_PRECISION.get(recipe.precision, "no"):
        hint = f"the recipe has precision: {recipe.precision}; remove mixed_precision from the profile"
        problems.append(Problem(f"mixed_precision is {mixed_precision}", where, hint))
    problems += _packing_problems(recipe, profile, where)
    if profile.distributed_type == "DEEPSPEED" and not is_installed("deepspeed"):
        hint = "pip install deepspeed, or choose the profile fsdp"
        problems.append(Problem("this profile needs DeepSpeed, which is not installed", where, hint))
    elif profile.distributed_type == "DEEPSPEED" and recipe.faults.non_finite == "skip":
        problems += _skip_problems(metadata.version("deepspeed"), where)
    if profile.distributed_type == "DEEPSPEED" and profile.offloads_optimizer and recipe.precision == "bf16_pure":
        message = "precision is bf16_pure, and DeepSpeed then offloads only its own optimizer, which needs a compiler"
        problems.append(Problem(message, where, "use precision: bf16, or the profile fsdp_offload"))
    if profile.distributed_type == "DEEPSPEED" and recipe.precision == "fp8":
        message = "precision is fp8, which was not tested under DeepSpeed"
        problems.append(Problem(message, where, "use precision: bf16, or the profile fsdp"))
    if recipe.model.embeddings_on_host is True and not profile.may_move_embeddings:
        message = "model.embeddings_on_host cannot run on this profile, which shards weights"
        problems.append(Problem(message, where, "use the profile single or ddp, or delete the key"))
    if recipe.model.shard_frozen is False:
        problems += _frozen_problems(profile, where)
    return problems


def check_trackers(recipe: Recipe) -> list[Problem]:
    """Return a problem for each tracker, and for a report, without an installed package.

    Accelerate would silently leave a tracker out. A report is written after the run, when it is too late to install.
    """
    packages = {"tensorboard": ("tensorboard", "tensorboardX")}
    hint = "pip install 'ftcli[report]', or remove log.report"
    missing = recipe.log.report and not is_installed("bokeh")
    return [Problem("log.report: bokeh is not installed", hint=hint)] * missing + [
        Problem(f"log.trackers: {name} is not installed", hint=f"pip install {name}, or remove it from log.trackers")
        for name in recipe.log.trackers
        if not any(is_installed(package) for package in packages.get(name, (name,)))
    ]


def _frozen_problems(profile: Profile, where: str) -> list[Problem]:
    """Return a problem if frozen weights are to be whole on the GPUs, and the profile has no whole weights there."""
    if not (profile.offloads_shards or (profile.is_stage_3 and profile.offloads_zero)):
        return []
    message = "model.shard_frozen: false cannot run on this profile: it keeps shards in host memory"
    return [Problem(message, where, "remove the key, or choose fsdp, zero3 or ddp")]


def _packing_problems(recipe: Recipe, profile: Profile, where: str) -> list[Problem]:
    """Return why a profile cannot run 4-bit weights or 8-bit optimizer state.

    The scales of 4-bit weights are not parameters, so ZeRO loses them. The blocks of 8-bit moments must each belong to
    one parameter on a GPU.
    """
    flattens = profile.distributed_type == "DEEPSPEED"
    if not flattens and not profile.offloads_shards:
        return []
    packed = {}  # key -> (reason under ZeRO, reason with shards in host memory, hint)
    if recipe.model.quantization is not None:
        packed["model.quantization"] = (
            "ZeRO flattens weights, and 4-bit weights lose their scales",
            "the scales of 4-bit weights stay on the GPU when shards are offloaded to the host",
            "choose single, ddp or fsdp",
        )
    if recipe.optimizer.name == "adamw_8bit":
        packed["optimizer.name: adamw_8bit"] = (
            "ZeRO updates flat partitions, in which a block of 256 values spans several parameters",
            "its kernels need a GPU, and shards are offloaded to the host",
            "choose single, ddp or fsdp, or adamw",
        )
    return [
        Problem(f"{key} cannot run on this profile: {flat if flattens else on_host}", where, hint)
        for key, (flat, on_host, hint) in packed.items()
    ]


def _skip_problems(installed: str, where: str) -> list[Problem]:
    """Return a problem if this DeepSpeed was not tested to skip a step. It updates weights inside `backward`."""
    if tuple(int(number) for number in re.findall(r"\d+", installed)[:3]) >= SKIPPING_DEEPSPEED:
        return []
    tested = ".".join(map(str, SKIPPING_DEEPSPEED))
    hint = f"set faults.non_finite to stop or rollback, or install deepspeed {tested} or newer"
    message = f"faults.non_finite is skip, and DeepSpeed {installed} was not tested to skip a non-finite step"
    return [Problem(message, where, hint)]
