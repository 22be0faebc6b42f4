"""Declare the keys of a profile, their values, the rules between them, and the reasons for refused keys.

Accelerate silently ignores unknown nested keys, so ftcli has its own lists. A test compares them with the keys that the
installed launcher of Accelerate reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ftcli.config.deepspeed_file import file_problems
from ftcli.config.yaml_document import Document
from ftcli.runtime.errors import Problem, nearest, shortened

ENVIRONMENT = "environment"  # the name of a document that was read from the environment of a bare launch

SECTION_OF = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config"}

BOOL, INT, COUNT, TEXT = "true or false", "a whole number, 0 or more", "a whole number, 1 or more", "text"
Kind = str | tuple[object, ...]  # one of the four above, or the allowed values

TYPES = ("NO", "MULTI_GPU", "FSDP", "DEEPSPEED")

# Keys of the top level. Accelerate raises an error for unknown ones.
TOP: dict[str, Kind] = {
    "compute_environment": ("LOCAL_MACHINE",),
    "distributed_type": TYPES,
    "mixed_precision": ("no", "fp16", "bf16", "fp8"),  # check_pair compares it with the recipe's precision
    "debug": BOOL,
    "num_processes": COUNT,
    "num_machines": COUNT,
    "machine_rank": INT,
    "gpu_ids": TEXT,
    "main_process_ip": TEXT,
    "main_process_port": INT,
    "rdzv_backend": ("static", "c10d"),  # dropped by accelerate launch; our launcher passes it on
    "same_network": BOOL,
    "main_training_function": TEXT,
    "enable_cpu_affinity": BOOL,
}

# Sections: the keys that Accelerate's launcher reads, with the prefix it adds.
SECTIONS: dict[str, dict[str, Kind]] = {
    "fsdp_config": {
        "fsdp_version": (2,),
        "fsdp_reshard_after_forward": BOOL,
        "fsdp_auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
        "fsdp_transformer_layer_cls_to_wrap": TEXT,
        "fsdp_min_num_params": INT,
        "fsdp_state_dict_type": ("SHARDED_STATE_DICT", "FULL_STATE_DICT"),
        "fsdp_offload_params": BOOL,
        "fsdp_cpu_ram_efficient_loading": BOOL,
    },
    "deepspeed_config": {
        "zero_stage": (0, 1, 2, 3),
        "zero3_init_flag": BOOL,
        "zero3_save_16bit_model": BOOL,
        "offload_optimizer_device": ("none", "cpu"),
        "offload_param_device": ("none", "cpu"),
        "deepspeed_config_file": TEXT,
        "deepspeed_moe_layer_cls_names": TEXT,
        "deepspeed_multinode_launcher": ("standard",),  # torchrun on every machine; pdsh and the others need ssh
    },
    "parallelism_config": {
        "parallelism_config_dp_replicate_size": COUNT,
        "parallelism_config_dp_shard_size": COUNT,
    },
}

# Refused keys of Accelerate: the hint, and the values without effect that `accelerate config` writes and that may stay.
_RECIPE = "set it in the recipe, so that changing the profile does not affect the loss"
_FSDP1 = "that is FSDP 1: delete it"
_CHECKPOINTING = "set model.gradient_checkpointing in the recipe"
_TPU = "TPUs are not supported: delete it"
_SSH = "machines are started one by one, each with its own command: delete it"
_PARALLEL = "tensor, context and sequence parallelism are not supported: delete it"
_DROPPED = "accelerate launch drops it: offloading to NVMe is not supported this way"
REFUSED: dict[str, tuple[str, tuple[object, ...]]] = {
    "use_cpu": ("to run on the CPU, give --cpu", (False,)),
    "dynamo_config": (_RECIPE, ({}, None)),
    "fp8_config": (_RECIPE, ({}, None)),
    "downcast_bf16": (_RECIPE, (False, "no")),
    "megatron_lm_config": ("Megatron-LM is not supported: choose fsdp or zero3", ({}, None)),
    "mpirun_config": ("processes are started by torchrun: delete it", ({}, None)),
    "tpu_name": (_TPU, (None,)),
    "tpu_zone": (_TPU, (None,)),
    "tpu_use_cluster": (_TPU, (False,)),
    "tpu_use_sudo": (_TPU, (False,)),
    "tpu_vm": (_TPU, (None, [])),
    "tpu_env": (_TPU, (None, [])),
    "command_file": (_TPU, (None,)),
    "commands": (_TPU, (None,)),
    "fsdp_config.fsdp_activation_checkpointing": (_CHECKPOINTING, (False,)),
    "fsdp_config.fsdp_activation_checkpointing_offload": (_CHECKPOINTING, (False,)),
    "fsdp_config.fsdp_ignored_modules": ("their gradients would not be averaged over processes", (None,)),
    "fsdp_config.fsdp_sharding_strategy": (f"{_FSDP1}; FSDP 2 has fsdp_reshard_after_forward", ()),
    "fsdp_config.fsdp_backward_prefetch": (_FSDP1, ()),
    "fsdp_config.fsdp_forward_prefetch": (_FSDP1, ()),
    "fsdp_config.fsdp_use_orig_params": (_FSDP1, ()),
    "fsdp_config.fsdp_sync_module_states": (_FSDP1, ()),
    "deepspeed_config.gradient_accumulation_steps": (
        "derived from the recipe's batch.global_size, never written: delete it",
        ("auto",),
    ),
    "deepspeed_config.gradient_clipping": ("set optimizer.max_grad_norm in the recipe", ("auto",)),
    "deepspeed_config.offload_optimizer_nvme_path": (_DROPPED, (None, "none")),
    "deepspeed_config.offload_param_nvme_path": (_DROPPED, (None, "none")),
    "deepspeed_config.deepspeed_hostfile": (_SSH, (None,)),
    "deepspeed_config.deepspeed_inclusion_filter": (_SSH, (None,)),
    "deepspeed_config.deepspeed_exclusion_filter": (_SSH, (None,)),
    **{
        f"parallelism_config.parallelism_config_{name}": (_PARALLEL, harmless)
        for name, harmless in {
            "tp_size": (1,),
            "cp_size": (1,),
            "cp_backend": ("torch",),
            "cp_comm_strategy": ("allgather",),
            "sp_size": (1,),
            "sp_backend": ("deepspeed",),
            "sp_seq_length": (None,),
            "sp_seq_length_is_variable": (None, True),
            "sp_attn_implementation": (None, "sdpa"),
        }.items()
    },
}
# Common other names of keys, with the hint.
RENAMED = {
    "fsdp_backward_prefetch_policy": _FSDP1,
    "fp16": "precision is the recipe's: delete it",
    "bf16": "precision is the recipe's: delete it",
    "dynamo_backend": _RECIPE,
    "num_gpus": "that is num_processes, or --num-processes of ftcli train",
    "nproc_per_node": "that is num_processes over all machines, or --num-processes of ftcli train",
    "nnodes": "that is num_machines, or --num-machines of ftcli train",
}
OWNERS = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED", "parallelism_config": "FSDP"}

# Variables that Accelerate's launcher always exports: keys of FSDP 1, which FSDP 2 does not read.
EXPORTED_ANYWAY = {
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "none",
}


def profile_problems(document: Document) -> Iterator[Problem]:
    """Yield every problem of a profile, each with its place.

    Args:
        document: The document of the profile.
    """
    values = document.values
    kind = values.get("distributed_type")
    if kind is None:
        hint = f"one of {', '.join(TYPES)}"
        yield Problem("distributed_type is missing", document.where(()), hint)
    for key, value in values.items():
        yield from _key_problems(document, (key,), value, TOP, SECTIONS)
        if key in SECTIONS and isinstance(value, dict):
            for inner, inner_value in value.items():
                yield from _key_problems(document, (key, inner), inner_value, SECTIONS[key], {})
            if kind in TYPES and value and kind != OWNERS[key] and document.name != ENVIRONMENT:
                hint = f"delete it, or set distributed_type: {OWNERS[key]}"
                yield Problem(f"{key} has no effect under distributed_type {kind}", document.where((key,)), hint)
    section = SECTION_OF.get(str(kind), "")
    if section and not isinstance(values.get(section), dict):
        where = document.where((section,) if section in values else ("distributed_type",))
        yield Problem(f"distributed_type {kind} needs the section {section}", where)
    elif kind == "FSDP" and "fsdp_version" not in values["fsdp_config"]:
        hint = "add fsdp_version: 2; without it Accelerate takes FSDP 1"
        yield Problem("fsdp_config.fsdp_version is missing", document.where(("fsdp_config",)), hint)
    elif kind == "DEEPSPEED":
        yield from _deepspeed_problems(document, values["deepspeed_config"])


def _key_problems(
    document: Document,
    keys: tuple[str, ...],
    value: Any,
    known: Mapping[str, Kind],
    sections: Mapping[str, Any],
) -> Iterator[Problem]:
    """Yield the problem of one key if the key is refused or unknown, or its value is invalid."""
    name, key, where = ".".join(keys), keys[-1], document.where(keys)
    if name in REFUSED:
        hint, harmless = REFUSED[name]
        if value not in harmless:
            yield Problem(f"'{name}' is not allowed in a profile", where, hint)
    elif key in sections:
        if not isinstance(value, dict) and value is not None:
            yield Problem(f"{name} is {_show(value)}, and must be a section of keys", where)
    elif key not in known:
        message = f"unknown key '{name}'" + (", which Accelerate would silently ignore" if len(keys) > 1 else "")
        yield Problem(message, where, _unknown_hint(keys, [*known, *sections]))
    elif value is None and key != "distributed_type":
        return
    elif (must := _must_be(value, known[key])) is not None:
        yield Problem(f"{name} is {_show(value)}, and must be {must}", where, _value_hint(key, value, known[key]))


def _unknown_hint(keys: tuple[str, ...], known: list[str]) -> str:
    """Return the hint for an unknown key."""
    key = keys[-1]
    if key in RENAMED:
        return RENAMED[key]
    for refused, (hint, _) in REFUSED.items():  # a refused key is refused in every section
        if refused.rpartition(".")[2] == key:
            return hint
    for section, inner in SECTIONS.items():
        if key in inner and section != keys[0]:
            return f"it belongs in {section}"
    if len(keys) > 1 and key in TOP:
        return "it belongs at the top level"
    prefixed = f"{keys[0].removesuffix('config')}{key}"
    if prefixed.startswith("parallelism_"):
        prefixed = f"parallelism_config_{key}"
    return nearest(key, known) or nearest(prefixed, known) or f"known: {', '.join(known)}"


def _value_hint(key: str, value: Any, kind: Kind) -> str:
    """Return the hint for an invalid value."""
    if key == "fsdp_version":
        return "FSDP 1 is not supported; `accelerate to-fsdp2` converts its files"
    if kind == BOOL and str(value).lower() in ("yes", "on", "true", "1", "no", "off", "false", "0"):
        return f"write {'true' if str(value).lower() in ('yes', 'on', 'true', '1') else 'false'}"
    return nearest(value, map(str, kind)) if isinstance(value, str) and isinstance(kind, tuple) else ""


def _must_be(value: Any, kind: Kind) -> str | None:
    """Return what a value must be, as text; None if the value is valid."""
    if isinstance(kind, tuple):
        fits = any(value == choice and isinstance(value, bool) is isinstance(choice, bool) for choice in kind)
        return None if fits else " or ".join(map(str, kind))
    whole = isinstance(value, int) and not isinstance(value, bool)
    fits = {BOOL: isinstance(value, bool), INT: whole and value >= 0, COUNT: whole and value >= 1}.get(
        kind, isinstance(value, str)
    )
    return None if fits else kind


def _deepspeed_problems(document: Document, section: dict[str, Any]) -> Iterator[Problem]:
    """Yield the problems between keys of the section deepspeed_config, and those of DeepSpeed's own file."""

    def where(key: str) -> str:
        return document.where(("deepspeed_config", key))

    stage, file = section.get("zero_stage", 2), section.get("deepspeed_config_file")
    if isinstance(file, str):
        allowed = ("deepspeed_config_file", "zero3_init_flag", "deepspeed_multinode_launcher")
        for key in section:
            if key not in (*allowed, "deepspeed_moe_layer_cls_names"):
                message = f"deepspeed_config.{key} cannot be combined with deepspeed_config_file"
                yield Problem(message, where(key), "set it in that file")
        yield from file_problems(file, where("deepspeed_config_file"))
        return
    if section.get("zero3_init_flag") is True and stage != 3:
        message = f"deepspeed_config.zero3_init_flag has no effect at zero_stage {stage}"
        yield Problem(message, where("zero3_init_flag"), "set it to false, or zero_stage to 3")
    if section.get("offload_param_device", "none") != "none" and stage != 3:
        message = f"deepspeed_config.offload_param_device has no effect at zero_stage {stage}"
        yield Problem(message, where("offload_param_device"), "set it to none, or zero_stage to 3")


def _show(value: Any) -> str:
    """Return a value as text for a message."""
    if isinstance(value, bool):
        return str(value).lower()
    text = shortened(str(value), 100)
    return "empty" if value is None else f"'{text}' (text)" if isinstance(value, str) else text
