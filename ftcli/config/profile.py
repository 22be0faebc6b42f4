"""Load a profile, a plain Accelerate configuration that describes hardware only.

Keys that may affect the loss are refused. Accelerate ignores unknown nested keys, and prefers several others to the
arguments of the program. Both are errors here, with the line of the key. A bare `accelerate launch` exports its
configuration to the environment, and the same rules apply to that. Light: never imports torch or accelerate.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from ftcli.config.plan import derive_shards
from ftcli.config.profile_schema import ENVIRONMENT, EXPORTED_ANYWAY, REFUSED, SECTION_OF, SECTIONS, profile_problems
from ftcli.config.yaml_document import Document, Keys, by_place, dump_document, read_document
from ftcli.runtime.errors import MOST_PROBLEMS, InputError, Problem, shortened
from ftcli.runtime.reader_errors import reading, user_path
from ftcli.runtime.resources import find_file, shipped_files
from ftcli.runtime.whole_numbers import whole_number

KIND = "accelerate_configs"
# Parts of a rank's gradients under ZeRO-3, and their least and largest elements. The optimizer steps on each part.
PARTS, LEAST_PART, LARGEST_PART = 8, 50_000_000, 1_000_000_000


def gradient_part(elements: int) -> int:
    """Return the elements of a rank whose gradients ZeRO-3 allocates and steps together, for a rank with `elements`."""
    return min(max(elements // PARTS, LEAST_PART), LARGEST_PART)


@dataclass(frozen=True)
class ShardCounts:
    """The number of processes over which weights, gradients and optimizer state are sharded; 0 means in host memory."""

    weights: int = 1
    gradients: int = 1
    optimizer: int = 1
    zero_stage: int = 0  # stage of DeepSpeed; 0 for other backends
    gradient_parts: bool = False  # ZeRO-3 allocates gradients in parts (`gradient_part`)

    @property
    def shards_on_gpus(self) -> bool:
        """Whether weights are sharded and all shards, also those of the optimizer state, stay on the GPUs."""
        return self.weights > 1 and self.optimizer > 0

    @property
    def has_master_weights(self) -> bool:
        """Whether the optimizer has its own copy of the weights. Stage 3 updates the weights of the model itself."""
        return self.zero_stage in (1, 2) or (self.is_stage_3 and self.weights == 0)

    @property
    def is_stage_3(self) -> bool:
        """Whether the backend is ZeRO-3, whose linear layer stores no 16-bit weight for the backward pass."""
        return self.zero_stage == 3


@dataclass(frozen=True)
class Profile:
    """The hardware settings of a run.

    `path` is None and `source` is "environment" if the profile was read from the environment of a bare launch. Else
    `source` is "file". `values` is the Accelerate configuration.
    """

    name: str
    path: Path | None
    values: dict[str, Any]
    source: str = "file"

    @property
    def distributed_type(self) -> str:
        """NO, MULTI_GPU, FSDP or DEEPSPEED, as Accelerate names them."""
        return str(self.values["distributed_type"])

    @property
    def num_processes(self) -> int | None:
        """Number of processes on all machines, if the file sets it; the shipped profiles do not."""
        value = self.values.get("num_processes")
        return None if value is None else int(value)

    @property
    def num_machines(self) -> int:
        """Number of machines in the file; 1 by default."""
        return int(self.values.get("num_machines") or 1)

    @property
    def mesh(self) -> tuple[int, int]:
        """(Copies of the model, processes per copy). `plan.derive_shards` replaces 1 process per copy."""
        section = self.values.get("parallelism_config") or {}
        sizes = (section.get(f"parallelism_config_dp_{name}_size") or 1 for name in ("replicate", "shard"))
        copies, shards = sizes
        return int(copies), int(shards)

    @property
    def may_move_embeddings(self) -> bool:
        """Whether each process may have frozen embeddings in host memory: in one process and under ddp."""
        return self.distributed_type in ("NO", "MULTI_GPU")

    @property
    def offloads_optimizer(self) -> bool:
        """Whether DeepSpeed stores the optimizer state in host memory."""
        return self._zero()[1] != "none"

    @property
    def offloads_zero(self) -> bool:
        """Whether DeepSpeed stores optimizer state or weights in host memory."""
        return self._zero()[1:] != ("none", "none")

    @property
    def offloads_shards(self) -> bool:
        """Whether FSDP stores shards and optimizer state in host memory."""
        section = self.values.get("fsdp_config") or {}
        return self.distributed_type == "FSDP" and section.get("fsdp_offload_params") is True

    @property
    def is_stage_3(self) -> bool:
        """Whether DeepSpeed shards the weights and gathers them in hooks (ZeRO-3)."""
        return self._zero()[0] == 3

    @property
    def gathers_weights(self) -> bool:
        """Whether ranks hold shards of the weights and gather them for each micro-batch (FSDP, ZeRO-3)."""
        return self.distributed_type == "FSDP" or (self.distributed_type == "DEEPSPEED" and self.is_stage_3)

    @property
    def reads_weights_once(self) -> bool:
        """Whether one process reads the weights and sends them to all others."""
        if self.distributed_type == "FSDP":
            return (self.values.get("fsdp_config") or {}).get("fsdp_cpu_ram_efficient_loading") is True
        return self.is_stage_3 and (self.values.get("deepspeed_config") or {}).get("zero3_init_flag") is True

    @property
    def change_to_gather_once(self) -> str | None:
        """The key and value by which weights are gathered once for a micro-batch; None if no key does this."""
        section = self.values.get("fsdp_config") or {}
        key = "fsdp_reshard_after_forward"
        gathers_twice = self.distributed_type == "FSDP" and section.get(key, True) is True
        return f"fsdp_config.{key}: false" if gathers_twice else None

    def _zero(self) -> tuple[int, str, str]:
        """Return (stage, device of the optimizer, device of the weights) of a DeepSpeed profile."""
        section = self.values.get("deepspeed_config") or {}
        if (zero := self._zero_of_file) is not None:
            devices = ((zero.get(f"offload_{name}") or {}).get("device", "none") for name in ("optimizer", "param"))
            return int(zero.get("stage") or 0), *devices
        devices = (section.get(f"offload_{name}_device") or "none" for name in ("optimizer", "param"))
        return int(section.get("zero_stage", 2)), *devices  # 2 is Accelerate's default

    def shard_counts(self, processes: int) -> ShardCounts:
        """Return the numbers of shards of weights, gradients and optimizer state.

        Args:
            processes: Number of processes of the run.
        """
        if self.distributed_type == "FSDP":
            section, shards = self.values.get("fsdp_config") or {}, derive_shards(*self.mesh, processes)
            if self.offloads_shards:
                return ShardCounts(0, 0, 0)
            is_replicated = section.get("fsdp_reshard_after_forward") is False
            return ShardCounts(1 if is_replicated else shards, shards, shards)
        if self.distributed_type != "DEEPSPEED":
            return ShardCounts()
        stage, optimizer, weights = self._zero()
        shards = processes if optimizer == "none" else 0
        weight_shards = 1 if stage < 3 else processes if weights == "none" else 0
        has_parts = stage == 3 and shards > 0 and "sub_group_size" not in (self._zero_of_file or {})
        gradients, state = (shards if stage >= least else 1 for least in (2, 1))
        return ShardCounts(weight_shards, gradients, state, stage, gradient_parts=has_parts)

    @property
    def _zero_of_file(self) -> dict[str, Any] | None:
        """The section `zero_optimization` of the DeepSpeed file; None if the profile names no file."""
        file = (self.values.get("deepspeed_config") or {}).get("deepspeed_config_file")
        return None if file is None else read_document(file).values.get("zero_optimization") or {}

    def as_yaml(self) -> str:
        """Return the profile as the text of profile.yaml in a run folder, which `load_profile` can read."""
        return f"# profile {self.name}, source: {self.source}\n{dump_document(self.values)}"


def advise_profile(distributed_type: str) -> str:
    """Return a hint that names profiles which need less memory per GPU than one of this type."""
    if distributed_type not in ("FSDP", "DEEPSPEED"):
        return "train with --profile fsdp or zero3 on several GPUs: they share weights and optimizer state"
    return "use more GPUs, or --profile fsdp_offload or zero3_offload: optimizer state on the host"


def load_profile(name: str | Path) -> Profile:
    """Return the profile in a file, or the shipped profile of this name.

    Args:
        name: Path of a file, or name of a shipped profile such as `fsdp`.

    Raises:
        InputError: The file does not exist or is not a valid profile. The error holds all problems.
    """
    if not str(name):
        raise InputError("the name of a profile is empty", hint="`ftcli show profiles` lists the profiles")
    path = find_file(user_path(name, "--profile"), KIND, "profile")
    source = read_document(path)
    document = _with_prefixes(replace(source, values=copy.deepcopy(source.values)))
    if "task" in document.values and "distributed_type" not in document.values:
        raise InputError(
            "this is a recipe, not a profile", where=document.name, hint="`ftcli show profiles` lists the profiles"
        )
    # The search stops at the limit, so that a file with thousands of problems is not read to its end.
    problems = [*document.problems, *islice(profile_problems(document), MOST_PROBLEMS + 1)]
    places = {problem.where for problem in problems}
    problems += [problem for problem in _yaml_1_1_problems(path, source) if problem.where not in places]
    if problems:
        raise InputError(sorted(problems, key=by_place))
    return Profile(path.stem, path, document.values)


def list_profiles() -> list[Profile]:
    """Return the profiles that come with ftcli."""
    return [load_profile(path) for path in shipped_files(KIND).values()]


def profile_from_environment(environ: Mapping[str, str]) -> Profile:
    """Return the profile that a bare `accelerate launch` exported to this process.

    Args:
        environ: Environment variables of the process.

    Raises:
        InputError: The configuration has a refused or invalid key. The place is the name of the variable.
    """
    document = Document(ENVIRONMENT, {}, {})
    values: dict[str, Any] = document.values

    def take(variable: str, *keys: str, text: str | None = None) -> None:
        section = values.setdefault(keys[0], {}) if len(keys) == 2 else values
        section[keys[-1]] = _parse(environ[variable] if text is None else text)
        document.places[keys] = f"environment {variable}"

    values["distributed_type"] = "NO"
    document.places[("distributed_type",)] = "environment"
    if "WORLD_SIZE" in environ:
        take("WORLD_SIZE", "num_processes")
        values["distributed_type"] = "MULTI_GPU"
    if _true(environ, "ACCELERATE_USE_FSDP"):
        values["distributed_type"] = "FSDP"
    if _true(environ, "ACCELERATE_USE_DEEPSPEED"):
        values["distributed_type"] = "DEEPSPEED"
    if environ.get("ACCELERATE_MIXED_PRECISION", "no") != "no":  # "no" is the launcher's default
        take("ACCELERATE_MIXED_PRECISION", "mixed_precision")
    if environ.get("ACCELERATE_DYNAMO_BACKEND", "NO").upper() != "NO":
        take("ACCELERATE_DYNAMO_BACKEND", "dynamo_config", "dynamo_backend")
        document.places[("dynamo_config",)] = "environment ACCELERATE_DYNAMO_BACKEND"
    if _true(environ, "ACCELERATE_USE_MEGATRON_LM"):
        take("ACCELERATE_USE_MEGATRON_LM", "megatron_lm_config")
    for variable, keys in _exported_names(environ, values["distributed_type"]):
        if environ[variable] != EXPORTED_ANYWAY.get(variable):
            take(variable, *keys)
    if section := SECTION_OF.get(values["distributed_type"]):
        values.setdefault(section, {})
    if problems := [*profile_problems(document)]:
        raise InputError(problems)
    return Profile(ENVIRONMENT, None, values, source=ENVIRONMENT)


def profile_of_process(environ: Mapping[str, str]) -> Profile:
    """Return the profile of a training process: the one that ftcli's launcher set, else the one in the environment."""
    return load_profile(environ["FTCLI_PROFILE"]) if "FTCLI_PROFILE" in environ else profile_from_environment(environ)


def find_user_default(environ: Mapping[str, str]) -> Path | None:
    """Return Accelerate's default file of the user, if it exists. A bare launch without --config_file reads it."""
    cache = environ.get("HF_HOME") or os.path.join(environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    folder = Path(cache).expanduser() / "accelerate"
    candidates = [folder / name for name in ("default_config.yaml", "default_config.json")]
    return next((path for path in candidates if path.is_file()), None)


def _exported_names(environ: Mapping[str, str], kind: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield (variable, key path) of each setting that Accelerate's launcher exported for a distributed type."""
    known = [f"{section}.{key}" for section, keys in SECTIONS.items() for key in keys] + list(REFUSED)
    for section, key in (name.split(".") for name in known if "." in name):
        if section == "parallelism_config":
            variable = key.upper() if _true(environ, "ACCELERATE_USE_PARALLELISM_CONFIG") else ""
        elif section == "fsdp_config":
            variable = key.upper().replace("_LAYER_CLS_", "_CLS_") if kind == "FSDP" else ""
        elif key.startswith("gradient_"):
            variable = f"ACCELERATE_{key.upper()}"  # Accelerate reads these under every distributed type
        else:
            variable = f"ACCELERATE_DEEPSPEED_{key.removeprefix('deepspeed_').removesuffix('_flag').upper()}"
            variable = variable if kind == "DEEPSPEED" else ""
        if variable in environ:
            yield variable, (section, key)


def _with_prefixes(document: Document) -> Document:
    """Return the document with the prefix `fsdp_` added to keys of fsdp_config that lack it, as Accelerate does."""
    section = document.values.get("fsdp_config")
    if isinstance(section, dict):
        for key in [key for key in section if not key.startswith("fsdp")]:
            name, place = f"fsdp_{key}", document.where(("fsdp_config", key))
            if name in section:
                message = f"fsdp_config has both {shortened(key, 60)} and {shortened(name, 60)}, which are the same"
                document.problems.append(Problem(message, place, "keep one of the two"))
            section[name] = section.pop(key)
            document.places[("fsdp_config", name)] = place
    return document


def _yaml_1_1_problems(path: Path, document: Document) -> Iterator[Problem]:
    """Yield the values that Accelerate reads differently, because it reads YAML 1.1, in which NO is false."""
    if path.suffix == ".json":
        return
    try:
        with reading(path):
            values_1_1 = yaml.safe_load(path.read_text(encoding="utf-8-sig")) or {}
    except InputError as error:
        mark = getattr(error.__cause__, "problem_mark", None)
        place = document.where(()) if mark is None else f"{path}:{mark.line + 1}"
        message = f"Accelerate reads YAML 1.1, and this file {error.problems[0].what}"
        yield Problem(message, place, "put text in quotes, and write dates and merge keys out")
        return

    def differences(value: Any, value_1_1: Any, keys: Keys) -> Iterator[Problem]:
        if isinstance(value, dict) and isinstance(value_1_1, dict):
            for key in value:
                yield from differences(value[key], value_1_1.get(key), (*keys, key))
        elif isinstance(value, str) and value != value_1_1:
            message = f"Accelerate reads {value} as {str(value_1_1).lower()} here"
            yield Problem(message, document.where(keys), f'put it in quotes: "{value}"')

    yield from differences(document.values, values_1_1, ())


def _parse(text: str) -> Any:
    """Return the value that the launcher exported as this text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    number = whole_number(text)
    return None if text == "None" else text if number is None else number


def _true(environ: Mapping[str, str], name: str) -> bool:
    """Return whether an environment variable is set to true."""
    return environ.get(name, "false").lower() in ("true", "1")
