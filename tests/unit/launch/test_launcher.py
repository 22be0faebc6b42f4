"""How many processes, which command line, what is refused before anything starts; and one real launch."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ftcli.config.load import load_recipe
from ftcli.config.profile import Profile, load_profile
from ftcli.launch import accelerate_command, launcher, worker_recipe
from ftcli.launch.machines import Machines, machine_problems
from ftcli.launch.processes import check_devices, count_processes
from ftcli.launch.supervisor import LaunchError, supervise
from ftcli.reports import check
from ftcli.runtime.devices import count_gpus
from ftcli.runtime.errors import InputError
from ftcli.runtime.run_folder import DRY_RUN, RunFolder

ROOT = Path(__file__).resolve().parents[3]
LAUNCH_MARKS = (
    "FTCLI_LAUNCHED",
    "TORCHELASTIC_RUN_ID",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "ACCELERATE_USE_CPU",
)

RECIPE = """
task: sft
model: {name: no/such-model}
data: {train: rows.jsonl}
batch: {global_size: 4}
train: {max_steps: 2}
optimizer: {learning_rate: 1e-4}
"""


@pytest.fixture(autouse=True)
def not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCH_MARKS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 24)
    return path


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")


@pytest.mark.parametrize(
    ("visible", "count"),
    [("", 0), ("0", 1), ("0,2,5", 3), ("-1", 0), ("0,-1,2", 1), ("GPU-8f2e,GPU-77aa", 2)],
)
def test_count_gpus_is_the_number_of_visible_devices(visible: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus() == count


def test_gpus_are_counted_from_the_drivers_own_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: X (UUID: GPU-1)'\necho '  MIG 1g: y'\necho 'GPU 1: X (UUID: GPU-2)'\n")
    program.chmod(0o755)
    assert count_gpus() == 2


def test_launcher_with_a_machine_without_a_driver_has_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert count_gpus() == 0


def test_launcher_default_is_every_visible_gpu_of_every_machine(four_gpus: None) -> None:
    assert count_processes(load_profile("fsdp"), None) == 4
    assert count_processes(load_profile("fsdp"), None, num_machines=2) == 8
    assert count_processes(load_profile("ddp"), 3) == 3


def test_launcher_with_a_profile_without_distribution_has_exactly_one_process(four_gpus: None) -> None:
    assert count_processes(load_profile("single"), None) == 1
    assert count_processes(None, 1) == 1
    with pytest.raises(InputError, match="profile single has exactly one process, --num-processes is 2"):
        count_processes(load_profile("single"), 2)
    with pytest.raises(InputError, match="without a profile a run has exactly one process"):
        count_processes(None, 2)


@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero3"])
def test_launcher_without_gpus_names_the_option_cpu(name: str, no_gpu: None) -> None:
    with pytest.raises(InputError, match="--cpu --num-processes 2"):
        count_processes(load_profile(name), None)
    assert "--cpu --num-processes 2" in str(check_devices(load_profile(name), 2)[0])
    assert count_processes(load_profile(name), None, cpu=True) == 2
    assert count_processes(load_profile(name), 1, cpu=True) == 1
    assert not check_devices(load_profile(name), 5, cpu=True)


def test_launcher_more_processes_than_gpus_raises_that_names_the_number(four_gpus: None) -> None:
    assert not check_devices(load_profile("ddp"), 4)
    assert not check_devices(load_profile("ddp"), 8, num_machines=2)
    (problem,) = check_devices(load_profile("ddp"), 5)
    assert problem.what == "5 processes on this machine, but it has 4 visible GPUs"
    assert "--num-processes 4" in problem.hint


def test_launcher_no_number_of_processes_below_one() -> None:
    with pytest.raises(InputError, match="--num-processes is 0"):
        count_processes(load_profile("ddp"), 0, cpu=True)


@pytest.mark.parametrize(
    ("machines", "message"),
    [
        (Machines(1, 4), "--machine-rank 4 of --num-machines 1"),
        (Machines(2, 0, "10.0.0.1", 99999), "--main-process-port 99999"),
    ],
)
def test_launcher_ranks_and_ports_that_cannot_be_are_refused(machines: Machines, message: str) -> None:
    (problem,) = machine_problems(load_profile("ddp"), 2, machines)
    assert problem.what == message


def test_launcher_launch_line_is_plain_accelerate() -> None:
    profile = load_profile("ddp")
    machines = Machines(count=2, rank=1, main_ip="10.0.0.1", main_port=29400)
    line = accelerate_command.plain_launch_command(["train", "r.yaml"], profile, 8, machines, ["--max_restarts", "3"])
    assert shlex.join(line) == (
        f"accelerate launch --config_file {profile.path} --num_processes 8 --num_machines 2 --machine_rank 1 "
        "--main_process_ip 10.0.0.1 --main_process_port 29400 --max_restarts 3 -m ftcli train r.yaml"
    )


def test_launcher_rendezvous_that_the_profile_names_is_on_the_launch_line(tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text("distributed_type: MULTI_GPU\nnum_machines: 2\nrdzv_backend: c10d\n")
    profile = load_profile(tmp_path / "two.yaml")
    machines = Machines.of(profile, 1, 1, "10.0.0.1", 29400)
    assert "--rdzv_backend c10d -m ftcli" in shlex.join(
        accelerate_command.plain_launch_command(["train"], profile, 2, machines)
    )


def test_train_on_another_machine_does_not_write_the_shared_folder(recipe: Path, four_gpus: None) -> None:
    dry = Path("runs/tiny-dry-run")
    dry.mkdir(parents=True)
    (dry / DRY_RUN).write_text("")
    for rank, stays in ((1, True), (0, False)):
        with pytest.raises(InputError, match="several machines need"):
            launcher.train(recipe, "ddp", num_machines=2, machine_rank=rank, num_processes=2, dry_run=True)
        assert dry.exists() is stays
    folder = RunFolder("runs/object")
    first, second = (
        worker_recipe.recipe_file_for_workers(load_recipe(recipe), folder, Machines(2, rank)) for rank in (0, 1)
    )
    assert Path(first).name == "recipe.yaml" and Path(second).read_text() == Path(first).read_text()
    (folder.path / "status.json").unlink()
    worker_recipe.recipe_file_for_workers(load_recipe(recipe), folder, Machines(2, 1))
    assert folder.status() == {}


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("--mixed_precision=bf16", "precision in the recipe"),
        ("--mixed-precision", "precision in the recipe"),
        ("--num_proc", "--num-processes"),
        ("--cpu", "--cpu to ftcli"),
        ("-m", "starts itself"),
        ("--use_deepspeed", "in the profile"),
        ("--fsdp_offload_params", "in the profile"),
        ("--gradient_accumulation_steps", "in the profile"),
    ],
)
def test_train_with_conflicting_launch_arguments_is_refused(recipe: Path, argument: str, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        launcher.train(recipe, "ddp", cpu=True, launch_arguments=[argument, "x"])
    assert argument in str(caught.value) and hint in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_processes": 3, "cpu": True}, "batch.global_size 4 cannot be divided evenly over 3 processes"),
        ({"num_processes": 64}, "64 processes on this machine, but it has 4 visible GPUs"),
        ({"num_machines": 2, "num_processes": 4}, "several machines need --main-process-ip"),
        ({"num_machines": 2, "machine_rank": 2, "num_processes": 4}, "--machine-rank 2 of --num-machines 2"),
        ({"num_machines": 3, "num_processes": 4}, "4 processes cannot be shared out over 3 machines"),
        ({"overrides": ["batch.globl_size=2"]}, "globl_size"),
    ],
)
def test_train_with_invalid_input_creates_no_folder(
    recipe: Path, four_gpus: None, options: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        launcher.train(recipe, "ddp", **options)  # type: ignore[arg-type]
    assert not Path("runs").exists()


def test_train_with_a_profile_of_two_machines_needs_the_main_address(recipe: Path, four_gpus: None) -> None:
    Path("two.yaml").write_text("distributed_type: MULTI_GPU\nnum_machines: 2\nmachine_rank: 1\n")
    profile = load_profile("two.yaml")
    assert Machines.of(profile, 1, 0, "10.0.0.1", 29400) == Machines(2, 1, "10.0.0.1", 29400)
    with pytest.raises(InputError, match="several machines need --main-process-ip"):
        launcher.train(recipe, "two.yaml")
    with pytest.raises(InputError, match="3 processes cannot be shared out over 2 machines"):
        check.check(recipe, "two.yaml", num_processes=3, overrides=["batch.global_size=3"])


@pytest.mark.parametrize(
    ("processes", "message"),
    [
        (3, "3 processes cannot be divided evenly over 2 copies of the model .parallelism_config_dp_replicate_size."),
        (2, "leaves one process for each copy of the model"),
    ],
)
def test_train_with_processes_that_do_not_fit_the_copies_is_refused(recipe: Path, processes: int, message: str) -> None:
    for verb in (launcher.train, check.check):
        with pytest.raises(InputError, match=message):
            verb(recipe, "hsdp", num_processes=processes, cpu=True, overrides=["batch.global_size=12"])
    assert not Path("runs").exists()
    assert check.check(recipe, "hsdp", num_processes=4, cpu=True).plan.processes == 4


def test_check_counts_the_machines_of_a_profile(recipe: Path, four_gpus: None) -> None:
    report = check.check(recipe, "ddp_multi_node", overrides=["batch.global_size=8"])
    assert report.plan.processes == 8
    assert not any("visible GPU" in note for note in report.notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_processes": 2}, "without a profile a run has exactly one process"),
        ({"num_machines": 2}, "several machines need a profile"),
        ({"launch_arguments": ["--max_restarts", "3"]}, "arguments for accelerate need a profile"),
    ],
)
def test_launcher_options_without_a_profile_are_refused(recipe: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        launcher.train(recipe, **options)  # type: ignore[arg-type]
    assert not Path("runs").exists()


def test_train_into_a_folder_with_a_run_is_refused_and_changes_nothing(recipe: Path) -> None:
    folder = Path("runs/tiny")
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text("task: other\n")
    with pytest.raises(InputError, match="already holds a run"):
        launcher.train(recipe, "ddp", cpu=True)
    assert (folder / "recipe.yaml").read_text() == "task: other\n"


@pytest.mark.parametrize(
    "marks",
    [
        {"FTCLI_LAUNCHED": "x"},
        {"TORCHELASTIC_RUN_ID": "none"},
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
        {
            "ACCELERATE_USE_CPU": "False",
            "ACCELERATE_MIXED_PRECISION": "no",
            "ACCELERATE_DYNAMO_BACKEND": "NO",
        },
    ],
)
def test_launcher_every_launcher_is_recognised(marks: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert not launcher.is_launched()
    for name, value in marks.items():
        monkeypatch.setenv(name, value)
    assert launcher.is_launched()


def test_launcher_with_a_variable_the_user_exported_is_not_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "info")
    assert not launcher.is_launched()


KILLED_BY_TORCHRUN = "forcefully exiting via"  # what torchrun logs of ranks that it kills after 30 seconds

FAILING_RANK = """
import os, sys, time
import torch.distributed as dist
from ftcli.runtime.failures import record_failure, watch_parent
assert os.environ["WORLD_SIZE"] == "2" and "FTCLI_LAUNCHED" in os.environ
with open(f"{sys.argv[1]}/pid-{os.environ['RANK']}", "w") as file:
    file.write(str(os.getpid()))
with record_failure(sys.argv[1]):
    watch_parent()
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 1:
        raise ValueError("boom on one rank")
    dist.barrier()
"""


def profile_command(profile: Profile, processes: int, *worker: str) -> list[str]:
    head = [sys.executable, "-m", accelerate_command.LAUNCHER, "--config_file", str(profile.path)]
    return [*head, "--num_processes", str(processes), "--main_process_port", "0", *worker]


def test_through_accelerate_an_error_on_one_rank_ends_all_and_is_printed_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    script = tmp_path / "rank.py"
    script.write_text(FAILING_RANK)
    with pytest.raises(LaunchError, match="rank 1: ValueError: boom on one rank"):
        supervise(profile_command(load_profile("fsdp"), 2, str(script), str(tmp_path)), folder=RunFolder(tmp_path))
    printed = capsys.readouterr().err
    assert KILLED_BY_TORCHRUN not in printed
    assert printed.splitlines()[-1] == "rank 1: ValueError: boom on one rank"
    assert "ChildFailedError" not in printed
    pids = [int((tmp_path / f"pid-{rank}").read_text()) for rank in range(2)]
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids)


@pytest.mark.parametrize(
    ("name", "processes", "expected"),
    [
        pytest.param("single", 1, {"ACCELERATE_USE_CPU": "False"}, marks=pytest.mark.slow),
        ("ddp", 2, {"WORLD_SIZE": "2"}),
        pytest.param("ddp", 1, {"WORLD_SIZE": "1"}, marks=pytest.mark.slow),
        ("fsdp", 2, {"WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}),
        (
            "zero3",
            2,
            {"WORLD_SIZE": "2", "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
        ),
    ],
)
def test_accelerate_starts_every_profile_without_a_gpu(
    name: str, processes: int, expected: dict[str, str], tmp_path: Path, no_gpu: None
) -> None:
    script = tmp_path / "show.py"
    script.write_text(
        "import json, os, sys\n"
        "json.dump(dict(os.environ), open(f\"{sys.argv[1]}/{os.environ.get('RANK', '0')}.json\", 'w'))\n"
    )
    subprocess.run(profile_command(load_profile(name), processes, str(script), str(tmp_path)), check=True)
    seen = [path.read_text() for path in tmp_path.glob("*.json")]
    assert len(seen) == processes
    for variable, value in expected.items():
        assert all(f'"{variable}": "{value}"' in text for text in seen)


def test_allocator_variables_keep_the_settings_of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert accelerate_command.allocator_variables() == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    monkeypatch.setattr("platform.release", lambda: "6.6.87.2-microsoft-standard-WSL2")
    assert accelerate_command.allocator_variables() == {}
    monkeypatch.undo()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    assert accelerate_command.allocator_variables() == {}


def test_rank_error_files_are_in_the_run_folder_unless_the_user_sets_a_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    expected = accelerate_command._flight_recorder_variables(RunFolder(tmp_path))
    assert expected["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/flight-recorder-rank-"
    assert int(expected["TORCH_FR_BUFFER_SIZE"]) > 0 and expected["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", "/elsewhere/rank-")
    assert "TORCH_FR_DUMP_TEMP_FILE" not in accelerate_command._flight_recorder_variables(RunFolder(tmp_path))


def test_train_without_a_profile_sets_the_allocator_of_gpus_in_this_process(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "restored at the end")
        monkeypatch.delenv(name)
    for is_cpu, expected in ((True, None), (False, "expandable_segments:True")):
        with pytest.raises(InputError, match="no data at"):
            launcher.train(recipe, cpu=is_cpu, overrides=["data.train=no-such-rows.jsonl"])
        assert os.environ.get("PYTORCH_ALLOC_CONF") == expected
