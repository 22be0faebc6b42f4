"""Profiles: what is refused and why, with its line; our keys against Accelerate itself; bare launches."""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import importlib.util
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands import launch as accelerate_launch
from accelerate.commands.config import config_args
from accelerate.utils import launch as launch_environment

from ftcli.config.compatibility import check_pair
from ftcli.config.profile import (
    Profile,
    find_user_default,
    list_profiles,
    load_profile,
    profile_from_environment,
)
from ftcli.config.profile_schema import EXPORTED_ANYWAY, REFUSED, SECTIONS, TOP
from ftcli.config.recipe import Recipe
from ftcli.config.recipe_data import Data, Source
from ftcli.config.recipe_model import Model
from ftcli.config.recipe_training import Batch, Faults, Optimizer, Train
from ftcli.runtime.errors import InputError
from ftcli.runtime.resources import shipped_files, shipped_folder

TYPES = {
    "single": "NO",
    "ddp": "MULTI_GPU",
    "ddp_multi_node": "MULTI_GPU",
    "fsdp": "FSDP",
    "fsdp_multi_node": "FSDP",
    "fsdp_offload": "FSDP",
    "hsdp": "FSDP",
    "zero2": "DEEPSPEED",
    "zero3": "DEEPSPEED",
    "zero3_multi_node": "DEEPSPEED",
    "zero3_offload": "DEEPSPEED",
}
NAMES = sorted(TYPES)
GOOD = {
    "DDP": "distributed_type: MULTI_GPU\n",
    "FSDP": "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n",
    "ZERO": "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n",
}


def a_recipe(precision: Any = "fp32") -> Recipe:
    return Recipe(
        task="sft",
        precision=precision,
        model=Model(name="m"),
        data=Data(train=Source(path="rows.jsonl")),
        batch=Batch(global_size=8),
        train=Train(max_steps=1),
        optimizer=Optimizer(learning_rate=1e-4),
    )


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def problems_of(text: str) -> list[str]:
    """Return every problem of a profile's text as printed."""
    Path("p.yaml").write_text(text)
    with pytest.raises(InputError) as caught:
        load_profile("p.yaml")
    return [str(problem) for problem in caught.value.problems]


# What ships


def test_check_pair_shipped_profiles_are_the_design_s_and_fix_neither_processes_nor_precision() -> None:
    profiles = {profile.name: profile for profile in list_profiles()}
    assert {name: profile.distributed_type for name, profile in profiles.items()} == TYPES
    for profile in profiles.values():
        assert profile.num_processes is None and "mixed_precision" not in profile.values
        assert profile.source == "file" and check_pair(a_recipe(), profile) == []


@pytest.mark.parametrize("path", sorted(shipped_folder("accelerate_configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_load_profile_every_line_of_a_shipped_profile_is_commented(path: Path) -> None:
    bare = [line for line in path.read_text().splitlines() if "#" not in line and not line.endswith("_config:")]
    assert bare == []


@pytest.mark.parametrize("name", NAMES)
def test_accelerate_reads_a_shipped_profile_as_we_do(name: str) -> None:
    profile = load_profile(name)
    theirs = config_args.load_config_from_file(str(profile.path)).to_dict()
    for key, value in profile.values.items():
        assert theirs[key] == value, key


def test_load_profile_profiles_for_several_machines_differ_from_the_others_in_machines_only() -> None:
    machines = {"num_machines": 2, "main_process_port": 29500, "rdzv_backend": "static"}
    for name in ("ddp", "fsdp", "zero3"):
        assert load_profile(f"{name}_multi_node").values == load_profile(name).values | machines


def test_load_profile_profiles_on_the_host_differ_from_the_others_in_that_and_in_who_reads() -> None:
    zero = load_profile("zero3").values
    offload = {"offload_optimizer_device": "cpu", "offload_param_device": "cpu"}
    assert load_profile("zero3_offload").values == zero | {"deepspeed_config": zero["deepspeed_config"] | offload}
    fsdp = load_profile("fsdp").values
    section = fsdp["fsdp_config"] | {"fsdp_offload_params": True, "fsdp_cpu_ram_efficient_loading": False}
    assert load_profile("fsdp_offload").values == fsdp | {"fsdp_config": section}


def test_copies_of_the_model_are_read_from_a_profile() -> None:
    assert load_profile("fsdp").mesh == (1, 1)
    assert load_profile("hsdp").mesh == (2, 1)
    Path("p.yaml").write_text(f"{GOOD['FSDP']}parallelism_config:\n  parallelism_config_dp_shard_size: 4\n")
    assert load_profile("p.yaml").mesh == (1, 4)


def test_validate_launch_command_ignores_the_rendezvous_of_a_profile() -> None:
    Path("p.yaml").write_text(f"{GOOD['DDP']}num_machines: 2\nrdzv_backend: c10d\n")
    parser = accelerate_launch.launch_command_parser()
    line = ["--config_file", "p.yaml", "--num_processes", "2"]
    assert accelerate_launch._validate_launch_command(parser.parse_args([*line, "x.py"]))[0].rdzv_backend == "static"
    line += ["--rdzv_backend", "c10d"]
    assert accelerate_launch._validate_launch_command(parser.parse_args([*line, "x.py"]))[0].rdzv_backend == "c10d"


@pytest.mark.parametrize("name", NAMES)
def test_load_profile_profile_written_into_a_run_folder_loads_again(name: str) -> None:
    profile = load_profile(name)
    Path("profile.yaml").write_text(profile.as_yaml())
    assert load_profile("profile.yaml").values == profile.values
    assert yaml.safe_load(profile.as_yaml()) == profile.values
    assert profile.as_yaml().startswith(f"# profile {name}, source: file\n")


def test_load_profile_profile_of_one_s_own_may_fix_the_number_of_processes() -> None:
    Path("p.yaml").write_text(f"{GOOD['DDP']}num_processes: 4\nnum_machines: 2\n")
    profile = load_profile("p.yaml")
    assert (profile.num_processes, profile.num_machines, profile.name) == (4, 2, "p")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("fsdpp", "'fsdpp' is neither a profile file nor the name of a shipped profile\n    did you mean 'fsdp'?"),
        (
            "xyz",
            "'xyz' is neither a profile file nor the name of a shipped profile\n"
            "    give a file, or one of ddp, ddp_multi_node, fsdp, ",
        ),
        (
            "./x.yaml",
            "'x.yaml' is neither a profile file nor the name of a shipped profile\n    did you mean 'y.yaml'?",
        ),
    ],
)
def test_load_profile_with_an_unknown_name_is_refused(name: str, problem: str) -> None:
    Path("y.yaml").write_text("")
    with pytest.raises(InputError) as caught:
        load_profile(name)
    assert str(caught.value).startswith(problem)


# What is refused


def test_load_profile_reports_all_mistakes_in_file_order() -> None:
    assert problems_of(
        "distributed_type: FSDP\nnum_proceses: 2\nnum_machines: 1\nnum_machines: 1\nfsdp_config:\n"
        "  fsdp_version: 2\n  fsdp_offload_params: yes\n"
    ) == [
        "p.yaml:2: unknown key 'num_proceses'\n    did you mean 'num_processes'?",
        "p.yaml:4: duplicate key 'num_machines', first given in line 3\n    keep one of the two",
        "p.yaml:7: fsdp_config.fsdp_offload_params is 'yes' (text), and must be true or false\n    write true",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "1: distributed_type is missing\n    one of NO, MULTI_GPU, FSDP, DEEPSPEED"),
        (
            "distributed_type: NO\n",
            '1: Accelerate reads NO as false here\n    put it in quotes: "NO"',
        ),
        (
            "distributed_type: MULTI_GP\n",
            "1: distributed_type is 'MULTI_GP' (text), and must be NO or MULTI_GPU or FSDP or DEEPSPEED\n"
            "    did you mean 'MULTI_GPU'?",
        ),
        ("distributed_type:\n", "1: distributed_type is missing\n    one of NO, "),
        ("DDP+num_processes: 0", "2: num_processes is 0, and must be a whole number, 1 or more"),
        ("DDP+machine_rank: -1", "2: machine_rank is -1, and must be a whole number, 0 or more"),
        ("DDP+num_processes: true", "2: num_processes is true, and must be a whole number, 1 or more"),
        ("DDP+gpu_ids: 0", "2: gpu_ids is 0, and must be text"),
        ("DDP+main_process_ip: 10", "2: main_process_ip is 10, and must be text"),
        (
            "DDP+compute_environment: AMAZON_SAGEMAKER",
            "2: compute_environment is 'AMAZON_SAGEMAKER' (text), and must be LOCAL_MACHINE",
        ),
        (
            "DDP+fsdp_config: {fsdp_version: 2}",
            "2: fsdp_config has no effect under distributed_type MULTI_GPU\n",
        ),
        ("DDP+fsdp_version: 2", "2: unknown key 'fsdp_version'\n    it belongs in fsdp_config"),
        ("DDP+use_cpu: true", "2: 'use_cpu' is not allowed in a profile\n    to run on the CPU, give --cpu"),
        (
            "DDP+dynamo_config: {dynamo_backend: inductor}",
            "2: 'dynamo_config' is not allowed in a profile\n    set it in",
        ),
        ("DDP+dynamo_backend: inductor", "2: unknown key 'dynamo_backend'\n    set it in the recipe"),
        ("DDP+downcast_bf16: true", "2: 'downcast_bf16' is not allowed in a profile\n    set it in the recipe"),
        (
            "DDP+fp8_config: {fp8_backend: TE}",
            "2: 'fp8_config' is not allowed in a profile\n    set it in the recipe",
        ),
        (
            "DDP+mpirun_config: {mpirun_hostfile: h}",
            "2: 'mpirun_config' is not allowed in a profile\n    processes are",
        ),
        ("DDP+fp16: true", "2: unknown key 'fp16'\n    precision is the recipe's: delete it"),
        (
            "FSDP+  fsdp_reshard_after_forwrd: true",
            "4: unknown key 'fsdp_config.fsdp_reshard_after_forwrd', which Accelerate would silently ignore\n"
            "    did you mean 'fsdp_reshard_after_forward'?",
        ),
        (
            "FSDP+  zero_stage: 3",
            "4: unknown key 'fsdp_config.fsdp_zero_stage', which Accelerate would silently ",
        ),
        (
            "FSDP+  num_processes: 2",
            "4: unknown key 'fsdp_config.fsdp_num_processes', which Accelerate would ",
        ),
        (
            "FSDP+  fsdp_activation_checkpointing: true",
            "4: 'fsdp_config.fsdp_activation_checkpointing' is not allowed in a profile\n"
            "    set model.gradient_checkpointing in the recipe",
        ),
        (
            "FSDP+  fsdp_sharding_strategy: FULL_SHARD",
            "4: 'fsdp_config.fsdp_sharding_strategy' is not allowed in a profile\n    that is FSDP 1: delete it",
        ),
        (
            "FSDP+  fsdp_backward_prefetch_policy: BACKWARD_PRE",
            "4: unknown key 'fsdp_config.fsdp_backward_prefetch_policy', which Accelerate would "
            "silently ignore\n"
            "    that is FSDP 1: delete it",
        ),
        (
            "FSDP+  fsdp_ignored_modules: head",
            "4: 'fsdp_config.fsdp_ignored_modules' is not allowed in a profile\n",
        ),
        (
            "FSDP+  fsdp_state_dict_type: SHARDED",
            "4: fsdp_config.fsdp_state_dict_type is 'SHARDED' (text), and must be SHARDED_STATE_DICT or FULL",
        ),
        (
            "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 1\n",
            "3: fsdp_config.fsdp_version is 1, and must be 2\n    FSDP 1 is not supported; `accelerate to-fsdp2`",
        ),
        (
            "distributed_type: FSDP\nfsdp_config:\n  fsdp_offload_params: false\n",
            "2: fsdp_config.fsdp_version is missing\n    add fsdp_version: 2; without it Accelerate takes FSDP 1",
        ),
        ("distributed_type: FSDP\n", "1: distributed_type FSDP needs the section fsdp_config"),
        ("distributed_type: DEEPSPEED\n", "1: distributed_type DEEPSPEED needs the section deepspeed_config"),
        (
            "FSDP+parallelism_config:\n  tp_size: 2",
            "5: unknown key 'parallelism_config.tp_size', which Accelerate would silently ignore\n",
        ),
        (
            "FSDP+parallelism_config:\n  dp_replicate_size: 2",
            "5: unknown key 'parallelism_config.dp_replicate_size', which Accelerate would silently ignore\n"
            "    did you mean 'parallelism_config_dp_replicate_size'?",
        ),
        (
            "FSDP+parallelism_config:\n  parallelism_config_tp_size: 2",
            "5: 'parallelism_config.parallelism_config_tp_size' is not allowed in a profile\n    tensor, context and ",
        ),
        (
            "ZERO+  gradient_accumulation_steps: 4",
            "4: 'deepspeed_config.gradient_accumulation_steps' is not allowed in a profile\n"
            "    derived from the recipe's batch.global_size, never written: delete it",
        ),
        (
            "ZERO+  gradient_clipping: 1.0",
            "4: 'deepspeed_config.gradient_clipping' is not allowed in a profile\n    set optimizer.max_grad_norm in",
        ),
        (
            "ZERO+  offload_optimizer_device: nvme",
            "4: deepspeed_config.offload_optimizer_device is 'nvme' (text), and must be none or cpu",
        ),
        (
            "ZERO+  offload_param_nvme_path: /scratch",
            "4: 'deepspeed_config.offload_param_nvme_path' is not allowed in a profile\n    accelerate launch drops it",
        ),
        (
            "ZERO+  deepspeed_multinode_launcher: pdsh",
            "4: deepspeed_config.deepspeed_multinode_launcher is 'pdsh' (text), and must be standard",
        ),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: true\n",
            "3: deepspeed_config.zero_stage is true, and must be 0 or 1 or 2 or 3",
        ),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n  zero3_init_flag: true\n",
            "4: deepspeed_config.zero3_init_flag has no effect at zero_stage 2\n    set it to false, or zero_stage to",
        ),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n  offload_param_device: cpu\n",
            "4: deepspeed_config.offload_param_device has no effect at zero_stage 2\n    set it to none, or zero_",
        ),
        (
            "ZERO+  deepspeed_config_file: gone.json",
            "3: deepspeed_config.zero_stage cannot be combined with deepspeed_config_file\n    set it in that file",
        ),
    ],
)
def test_load_profile_mistake_has_its_line_number(text: str, problem: str) -> None:
    kind, plus, rest = text.partition("+")
    assert problems_of(GOOD[kind] + rest + "\n" if plus else text)[0].startswith(f"p.yaml:{problem}")


def test_load_profile_of_a_file_from_accelerate_config_succeeds() -> None:
    Path("p.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndebug: false\ndistributed_type: FSDP\ndowncast_bf16: 'no'\n"
        "enable_cpu_affinity: false\nfsdp_config:\n  fsdp_activation_checkpointing: false\n"
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_cpu_ram_efficient_loading: true\n"
        "  fsdp_offload_params: false\n  fsdp_reshard_after_forward: true\n"
        "  fsdp_state_dict_type: SHARDED_STATE_DICT\n  fsdp_version: 2\nmachine_rank: 0\n"
        "main_training_function: main\nmixed_precision: bf16\nnum_machines: 1\nnum_processes: 2\n"
        "rdzv_backend: static\nsame_network: true\ntpu_env: []\ntpu_use_cluster: false\ntpu_use_sudo: false\n"
        "use_cpu: false\n"
    )
    profile = load_profile("p.yaml")
    assert profile.num_processes == 2
    assert check_pair(a_recipe("bf16"), profile) == []


@pytest.mark.parametrize("name", ["zero3_offload", "fsdp_offload"])
def test_check_pair_of_whole_frozen_weights_refuses_profiles_without_them(name: str) -> None:
    recipe = a_recipe("bf16")
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"shard_frozen": False})})
    (problem,) = check_pair(recipe, load_profile(name))
    assert "model.shard_frozen: false cannot run on this profile" in problem.what and problem.hint
    for other in ("fsdp", "hsdp", "ddp", "zero2", "zero3", "single"):
        assert check_pair(recipe, load_profile(other)) == []


def test_check_pair_of_whole_frozen_weights_refuses_weights_on_the_host_alone() -> None:
    section = "{zero_stage: 3, offload_param_device: cpu, offload_optimizer_device: none, zero3_init_flag: false}"
    Path("host.yaml").write_text(f"distributed_type: DEEPSPEED\ndeepspeed_config: {section}\n")
    recipe = a_recipe("bf16")
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"shard_frozen": False})})
    (problem,) = check_pair(recipe, load_profile("host.yaml"))
    assert "model.shard_frozen: false" in problem.what


@pytest.mark.parametrize("name", ["fsdp", "zero2", "zero3", "fsdp_offload"])
def test_check_pair_of_embeddings_on_the_host_refuses_profiles_that_shard(name: str) -> None:
    recipe = a_recipe("bf16")
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"embeddings_on_host": True})})
    (problem,) = check_pair(recipe, load_profile(name))
    assert "model.embeddings_on_host cannot run on this profile" in problem.what and "ddp" in problem.hint
    assert [check_pair(recipe, load_profile(other)) for other in ("single", "ddp")] == [[], []]


def test_check_pair_of_bf16_pure_and_deepspeed_offload_is_refused() -> None:
    Path("ds.json").write_text('{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}')
    section = "{deepspeed_config_file: ds.json, zero3_init_flag: false}"
    Path("file.yaml").write_text(f"distributed_type: DEEPSPEED\ndeepspeed_config: {section}\n")
    for name in ("zero3_offload", "file.yaml"):
        (problem,) = check_pair(a_recipe("bf16_pure"), load_profile(name))
        assert "bf16_pure" in problem.what and "fsdp_offload" in problem.hint
        assert check_pair(a_recipe("bf16"), load_profile(name)) == []
    for name in ("zero3", "zero2", "fsdp_offload"):
        assert check_pair(a_recipe("bf16_pure"), load_profile(name)) == []


def test_moments_of_8_bits_are_refused_where_weights_are_flattened_or_on_the_host() -> None:
    packed = a_recipe().model_copy(update={"optimizer": Optimizer(name="adamw_8bit", learning_rate=1e-4)})
    for name in ("zero2", "zero3", "zero3_offload", "fsdp_offload"):
        (problem,) = check_pair(packed, load_profile(name))
        assert "adamw_8bit cannot run on this profile" in problem.what and "ddp or fsdp" in problem.hint
    for name in ("single", "ddp", "fsdp", "hsdp"):
        assert check_pair(packed, load_profile(name)) == []


def test_keys_of_fsdp_config_may_lack_their_prefix_as_accelerate_allows() -> None:
    Path("p.yaml").write_text("distributed_type: FSDP\nfsdp_config: {version: 2, offload_params: false}\n")
    assert load_profile("p.yaml").values["fsdp_config"] == {"fsdp_version": 2, "fsdp_offload_params": False}


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (
            {"zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW"}},
            "'optimizer' is not allowed in a ",
        ),
        (
            {"zero_optimization": {}, "scheduler": {}},
            "'scheduler' is not allowed in a profile's DeepSpeed file\n",
        ),
        (
            {"zero_optimization": {}, "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.1}}},
            "'optimizer' is not allowed in a profile's DeepSpeed file\n    set optimizer in the recipe",
        ),
        (
            {"zero_optimization": {}, "optimizer": {"type": "Lamb", "params": {"lr": "auto"}}},
            "'optimizer' is not allowed in a profile's DeepSpeed file\n",
        ),
        (
            {"zero_optimization": {}, "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-5}}},
            "'scheduler' is not allowed in a profile's DeepSpeed file\n",
        ),
        (
            {"zero_optimization": {}, "gradient_clipping": 1.0},
            "'gradient_clipping' is not allowed in a profile's",
        ),
        (
            {"zero_optimization": {}, "gradient_accumulation_steps": 4},
            "'gradient_accumulation_steps' is not allowed",
        ),
        ({"zero_optimization": {}, "train_batch_size": 8}, "'train_batch_size' is not allowed in a profile's"),
        (
            {"zero_optimization": {}, "train_micro_batch_size_per_gpu": 8},
            "'train_micro_batch_size_per_gpu' is not",
        ),
        (
            {"zero_optimization": {}, "bf16": {"enabled": True}},
            "'bf16' is not allowed in a profile's DeepSpeed file",
        ),
        (
            {"zero_optimization": {}, "fp16": {"enabled": "auto", "loss_scale": 128}},
            "'fp16' is not allowed in a profile's DeepSpeed",
        ),
        (
            {"zero_optimization": {}, "activation_checkpointing": {}},
            "'activation_checkpointing' is not allowed in",
        ),
        (
            {"zero_optimization": {}, "zero_optimisation": {}},
            "'zero_optimisation' is not one of the hardware keys",
        ),
        ({"zero_optimization": "auto"}, "zero_optimization must be a section"),
        ({"zero_optimization": {"stage": "auto"}}, "zero_optimization.stage is 'auto', and must be 0, 1, 2 or 3\n"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage is 4, and must be 0, 1, 2 or 3\n"),
        ({"zero_optimization": {"offload_param": "cpu"}}, "zero_optimization.offload_param must be a section with a"),
        ({"zero_optimization": {"offload_optimizer": {"device": "auto"}}}, "zero_optimization.offload_optimizer must"),
        ({"steps_per_print": 1}, "zero_optimization is missing\n    Accelerate needs its stage there"),
    ],
)
def test_load_profile_with_a_deepspeed_file_that_changes_the_curve_is_refused(
    config: dict[str, Any], problem: str
) -> None:
    Path("ds.json").write_text(json.dumps(config, indent=1))
    problems = problems_of("distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n")
    assert len(problems) == 1 and problems[0].split(": ", 1)[1].startswith(problem)
    assert problems[0].startswith("ds.json:")


def test_drop_auto_removes_only_values_that_are_auto() -> None:
    from ftcli.config.deepspeed_file import drop_auto

    zero = {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto", "overlap_comm": True}
    zero["offload_optimizer"] = {"device": "cpu", "pin_memory": "auto"}
    drop_auto(zero)
    assert zero == {"stage": 3, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}}


def test_load_profile_with_a_deepspeed_file_of_facts_about_machines_is_accepted() -> None:
    config = {
        "zero_optimization": {"stage": 3, "overlap_comm": True},
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
        "aio": {"thread_count": 2},
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}},
    }
    Path("ds.json").write_text(json.dumps(config))
    Path("p.yaml").write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n  zero3_init_flag: true\n"
    )
    assert load_profile("p.yaml").values["deepspeed_config"]["deepspeed_config_file"] == "ds.json"


def test_load_profile_with_a_missing_or_broken_deepspeed_file_is_refused() -> None:
    text = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n"
    assert problems_of(text) == [
        "p.yaml:3: no DeepSpeed file 'ds.json'\n    a relative path starts at the current folder"
    ]
    Path("ds.json").write_text('{"zero_optimization": {\n')
    assert problems_of(text)[0].startswith("ds.json:2: not valid YAML: ")


# Recipe and profile together


@pytest.mark.parametrize(
    ("precision", "given", "fits"),
    [
        ("fp32", "no", True),
        ("fp32", "bf16", False),
        ("bf16", "bf16", True),
        ("bf16", "no", False),
        ("bf16", "fp16", False),
    ],
)
def test_check_pair_with_a_profile_s_precision_must_be_the_recipe_s(precision: str, given: str, fits: bool) -> None:
    Path("p.yaml").write_text(f"{GOOD['DDP']}mixed_precision: '{given}'\n")
    problems = [str(problem) for problem in check_pair(a_recipe(precision), load_profile("p.yaml"))]
    assert problems == (
        []
        if fits
        else [
            f"p.yaml: mixed_precision is {given}\n"
            f"    the recipe has precision: {precision}; remove mixed_precision from the profile"
        ]
    )


def test_load_profile_of_deepspeed_without_the_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = load_profile("zero3")
    real_find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "deepspeed" else real_find_spec(name, *rest)
    )
    assert [problem.what for problem in check_pair(a_recipe(), profile)] == [
        "this profile needs DeepSpeed, which is not installed"
    ]
    assert check_pair(a_recipe(), load_profile("fsdp")) == []


def test_check_pair_with_a_deepspeed_that_cannot_skip_a_step_is_refused_for_that_policy_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    skips = a_recipe().model_copy(update={"faults": Faults(non_finite="skip")})
    undoes = a_recipe().model_copy(update={"faults": Faults(non_finite="rollback")})
    zero2 = load_profile("zero2")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.19.8")
    assert check_pair(skips, zero2) == []
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.19.2")
    (problem,) = check_pair(skips, zero2)
    assert "faults.non_finite is skip, and DeepSpeed 0.19.2" in problem.what and "stop or rollback" in problem.hint
    assert check_pair(undoes, zero2) == [] and check_pair(skips, load_profile("fsdp")) == []


# Our lists of keys against the installed Accelerate


def arguments_read(function: Any) -> Iterator[str]:
    """Yield every X of `args.X` and `getattr(args, "X")` in the source of one of Accelerate's functions."""
    for node in ast.walk(ast.parse(inspect.getsource(function))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "args":
            yield node.attr
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            yield str(ast.literal_eval(node.args[1]))


def our_keys(section: str) -> set[str]:
    return set(SECTIONS[section]) | {key.split(".")[1] for key in REFUSED if key.startswith(f"{section}.")}


def test_top_level_keys_are_those_of_accelerate_s_cluster_config() -> None:
    theirs = {field.name for field in dataclasses.fields(config_args.ClusterConfig)}
    ours = set(TOP) | set(SECTIONS) | {key for key in REFUSED if "." not in key}
    assert ours == theirs


def test_fsdp_keys_are_those_that_the_launcher_exports() -> None:
    theirs = {name for name in arguments_read(launch_environment.prepare_multi_gpu_env) if name.startswith("fsdp_")}
    assert our_keys("fsdp_config") == theirs


def test_parallelism_keys_are_those_that_the_launcher_exports() -> None:
    theirs = set(arguments_read(launch_environment.prepare_extend_env_parallelism_config))
    assert our_keys("parallelism_config") == theirs


def test_deepspeed_keys_are_those_that_the_launcher_reads() -> None:
    read = set(arguments_read(launch_environment.prepare_deepspeed_cmd_env))
    parser = accelerate_launch.launch_command_parser()
    groups = {group.title: group for group in parser._action_groups}
    offered = {action.dest for action in groups["DeepSpeed Arguments"]._group_actions}
    assert our_keys("deepspeed_config") == offered
    dropped = offered - read
    assert dropped == {"offload_optimizer_nvme_path", "offload_param_nvme_path"}, "refused because they are dropped"
    assert not dropped & set(SECTIONS["deepspeed_config"])


def test_load_profile_refuses_nested_keys_that_accelerate_ignores() -> None:
    Path("p.yaml").write_text(f"{GOOD['FSDP']}  fsdp_reshard_after_forwrd: true\nnum_processes: 1\n")
    parser = accelerate_launch.launch_command_parser()
    args = parser.parse_args(["--config_file", "p.yaml", "script.py"])
    accelerate_launch._validate_launch_command(args)
    assert args.fsdp_reshard_after_forwrd is True  # set, and read by nobody


# A bare launch


def exported(profile: Path, *arguments: str) -> dict[str, str]:
    """Return what Accelerate's launcher, and torchrun below it, would export for a profile to one rank."""
    parser = accelerate_launch.launch_command_parser()
    args = parser.parse_args(["--config_file", str(profile), *arguments, "-m", "ftcli"])
    args, defaults, from_file = accelerate_launch._validate_launch_command(args)
    if args.use_deepspeed:
        fields = list(defaults.deepspeed_config) + ["mixed_precision"] * from_file
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        _, environment = launch_environment.prepare_deepspeed_cmd_env(args)
    elif args.use_fsdp or args.multi_gpu:
        environment = launch_environment.prepare_multi_gpu_env(args)
    else:
        return dict(launch_environment.prepare_simple_launcher_cmd_env(args)[1])
    return {**environment, "WORLD_SIZE": str(args.num_processes), "RANK": "0", "LOCAL_RANK": "0"}


@pytest.mark.parametrize("name", NAMES)
def test_profile_from_environment_with_a_bare_launch_of_a_shipped_profile_is_read_back_from_its_environment(
    name: str,
) -> None:
    file = load_profile(name)
    assert file.path is not None
    loaded = profile_from_environment(exported(file.path, "--num_processes", "1" if name == "single" else "2"))
    assert (loaded.name, loaded.source, loaded.path) == ("environment", "environment", None)
    assert loaded.distributed_type == file.distributed_type
    assert loaded.num_processes == (None if name == "single" else 2)
    assert "mixed_precision" not in loaded.values
    for section in ("fsdp_config", "deepspeed_config", "parallelism_config"):
        for key, value in file.values.get(section, {}).items():
            if key != "deepspeed_multinode_launcher":  # a matter of the launcher, which is done
                assert loaded.values[section][key] == value, key
    Path("profile.yaml").write_text(loaded.as_yaml())
    assert load_profile("profile.yaml").values == loaded.values


@pytest.mark.parametrize(
    ("text", "arguments", "problem"),
    [
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_version: 1}\n",
            (),
            "environment FSDP_VERSION: fsdp_config.fsdp_version is 1, and must be 2",
        ),
        (
            f"{GOOD['FSDP']}  fsdp_activation_checkpointing: true\n",
            (),
            "environment FSDP_ACTIVATION_CHECKPOINTING: 'fsdp_config.fsdp_activation_checkpointing' is not allowed",
        ),
        (
            f"{GOOD['FSDP']}  fsdp_ignored_modules: head\n",
            (),
            "environment FSDP_IGNORED_MODULES: 'fsdp_config.fsdp_ignored_modules' is not allowed in a profile",
        ),
        (
            f"{GOOD['ZERO']}  gradient_accumulation_steps: 4\n",
            (),
            "environment ACCELERATE_GRADIENT_ACCUMULATION_STEPS: 'deepspeed_config.gradient_accumulation_steps' is not",
        ),
        (
            f"{GOOD['ZERO']}  gradient_clipping: 0.5\n",
            (),
            "environment ACCELERATE_GRADIENT_CLIPPING: 'deepspeed_config.gradient_clipping' is not allowed",
        ),
        (
            GOOD["DDP"],
            ("--dynamo_backend", "inductor"),
            "environment ACCELERATE_DYNAMO_BACKEND: 'dynamo_config' is not allowed in a profile",
        ),
    ],
)
def test_profile_from_environment_with_a_bare_launch_follows_the_rules_of_a_file(
    text: str, arguments: tuple[str, ...], problem: str
) -> None:
    Path("p.yaml").write_text(text)
    with pytest.raises(InputError) as caught:
        profile_from_environment(exported(Path("p.yaml"), "--num_processes", "2", *arguments))
    assert str(caught.value).startswith(problem)
    assert len(caught.value.problems) == 1


def test_accumulation_in_the_environment_is_refused_under_every_type() -> None:
    environ = {"WORLD_SIZE": "2", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}
    with pytest.raises(InputError, match="gradient_accumulation_steps' is not allowed in a profile") as caught:
        profile_from_environment(environ)
    assert len(caught.value.problems) == 1


def test_check_pair_of_a_bare_launch_compares_its_precision_with_the_recipe() -> None:
    Path("p.yaml").write_text(GOOD["DDP"])
    loaded = profile_from_environment(exported(Path("p.yaml"), "--num_processes", "2", "--mixed_precision", "bf16"))
    assert check_pair(a_recipe("bf16"), loaded) == []
    assert [str(problem) for problem in check_pair(a_recipe("fp32"), loaded)] == [
        "environment: mixed_precision is bf16\n"
        "    the recipe has precision: fp32; remove mixed_precision from the profile"
    ]


def test_exported_anyway_equals_the_variables_that_the_launcher_always_sets() -> None:
    Path("p.yaml").write_text(GOOD["FSDP"])
    environment = exported(Path("p.yaml"), "--num_processes", "2")
    always = {name: value for name, value in EXPORTED_ANYWAY.items() if name.startswith("FSDP_")}
    assert {name: environment[name] for name in always} == always


def test_profile_from_environment_without_a_launcher_is_one_process() -> None:
    assert profile_from_environment({}) == Profile(
        "environment", None, {"distributed_type": "NO"}, source="environment"
    )


def test_accelerate_s_user_wide_default_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"HF_HOME": str(folder / "hf")}
    assert find_user_default(environ) is None
    (folder / "hf" / "accelerate").mkdir(parents=True)
    default = folder / "hf" / "accelerate" / "default_config.yaml"
    default.write_text(GOOD["DDP"])
    assert find_user_default(environ) == default
    ours = find_user_default({"XDG_CACHE_HOME": str(folder / "none")})
    assert ours is None


def test_user_default_place_of_the_user_wide_default_is_accelerate_s_own(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setenv("HF_HOME", str(folder))
    specification = importlib.util.find_spec(config_args.__name__)
    assert specification is not None and specification.loader is not None
    fresh = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(fresh)
    Path(fresh.default_yaml_config_file).parent.mkdir(parents=True)
    Path(fresh.default_yaml_config_file).write_text(GOOD["DDP"])
    assert find_user_default({"HF_HOME": str(folder)}) == Path(fresh.default_yaml_config_file)


def test_load_profile_of_a_recipe_file_reports_one_error() -> None:
    with pytest.raises(InputError, match="this is a recipe, not a profile\n    `ftcli show profiles`") as caught:
        load_profile(shipped_files("recipes")["quickstart"])
    assert len(caught.value.problems) == 1
