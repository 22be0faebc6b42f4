"""Build the command line and the environment of `accelerate launch`, and refuse arguments that ftcli sets itself.

launcher.py decides whether something is launched, and with which worker options. supervisor.py runs the command. Light:
never imports torch.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ftcli.launch.machines import ONE_MACHINE, Machines
from ftcli.launch.supervisor import END_SIGNAL, supervise
from ftcli.runtime.devices import count_cores
from ftcli.runtime.errors import Problem
from ftcli.runtime.log import log_line
from ftcli.runtime.resources import PACKAGE
from ftcli.runtime.run_folder import FLIGHT_RECORDER, RunFolder

if TYPE_CHECKING:
    from ftcli.config.profile import Profile


LAUNCHER = "ftcli.launch.launcher_process"  # Accelerate's launcher, without its stack trace when a rank fails
# Arguments of `accelerate launch` that ftcli sets, and what to use instead. Accelerate also accepts abbreviations.
OWNED_ARGUMENTS = {
    "config_file": "give --profile",
    "num_processes": "give --num-processes to ftcli",
    "num_machines": "give --num-machines to ftcli",
    "machine_rank": "give --machine-rank to ftcli",
    "main_process_ip": "give --main-process-ip to ftcli",
    "main_process_port": "give --main-process-port to ftcli",
    "cpu": "give --cpu to ftcli",
    "gpu_ids": "set CUDA_VISIBLE_DEVICES",
    "mixed_precision": "set precision in the recipe",
    "module": "ftcli starts itself",
    "no_python": "ftcli starts itself",
}
PROFILE_PREFIXES = (
    "multi_gpu",
    "tpu",
    "use_",
    "fsdp_",
    "zero",
    "offload_",
    "deepspeed_",
    "gradient_",
    "dynamo_",
    "megatron_",
    "parallelism_",
    "fp8_",
)


def check_launch_arguments(launch_arguments: Sequence[str]) -> list[Problem]:
    """Return a problem for each argument that would silently override the profile, the recipe or ftcli."""
    problems = []
    for argument in launch_arguments:
        name = "module" if argument == "-m" else argument.split("=")[0].replace("-", "_").removeprefix("__")
        if not argument.startswith("--") and argument != "-m":
            continue
        hints = [hint for owned, hint in OWNED_ARGUMENTS.items() if owned.startswith(name)]
        if name.startswith(PROFILE_PREFIXES):
            hints.append("write it in the profile")
        if hints:
            problems.append(Problem(f"{argument} cannot be passed on to accelerate launch", hint=hints[0]))
    return problems


def launch(
    worker_arguments: Sequence[str],
    *,
    profile: Profile,
    num_processes: int,
    folder: RunFolder,
    machines: Machines = ONE_MACHINE,
    cpu: bool = False,
    launch_arguments: Sequence[str] = (),
    result: str = "status.json",
    rank_environment: Mapping[str, str] | None = None,
) -> None:
    """Run `ftcli WORKER_ARGUMENTS` on several processes by one `accelerate launch`, and wait until they end.

    Args:
        worker_arguments: The command of each worker and its arguments.
        profile: The profile. It has a file, which `accelerate launch` reads.
        num_processes: Number of processes on all machines.
        folder: The run folder.
        machines: Number, rank and address of the machines.
        cpu: Hide the GPUs of this machine from the processes.
        launch_arguments: Further arguments for `accelerate launch`.
        result: File in the run folder that the workers write when they succeed.
        rank_environment: Further environment variables of the ranks.

    Raises:
        LaunchError: The processes failed.
    """
    assert profile.path is not None  # only a worker's profile has no file
    plain_command = plain_launch_command(worker_arguments, profile, num_processes, machines, launch_arguments)
    log_line(f"equivalent command without ftcli's launcher: {shlex.join(plain_command)}")
    local_processes = num_processes // machines.count
    environment = {
        "FTCLI_PROFILE": str(profile.path.resolve()),
        # Accelerate's default is one thread, even for a single process on a CPU.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, count_cores() // local_processes)),
        "PYTHONPATH": os.pathsep.join(_import_path()),
        "PYTHONSAFEPATH": "1",  # Python 3.11 and later: do not import a torch.py of the current folder as torch
    }
    environment |= _flight_recorder_variables(folder) | _torchrun_variables() | dict(rank_environment or {})
    if num_processes == 1 and not cpu:
        environment |= allocator_variables()
    if cpu:  # DeepSpeed would use visible GPUs
        environment |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    port = ["--main_process_port", "0"] if machines.count == 1 and machines.main_port is None else []
    command = [sys.executable, "-m", LAUNCHER, "--quiet", *port, *plain_command[2:]]
    is_first = machines.rank == 0  # the folder may be shared by all machines
    if machines.count > 1:
        others = "the other machines, which must reach it" if is_first else "machine 0"
        place = f"{machines.main_ip}:{machines.main_port}"
        log_line(f"machine {machines.rank} of {machines.count} (from 0) waits for {others} at {place}")
    supervise(
        command,
        folder=folder,
        environment=environment,
        result=result if is_first else None,
        owns_folder=is_first,
        is_alone=machines.count == 1,
    )


def _torchrun_variables() -> dict[str, str]:
    """Return variables that make torchrun ignore stop signals (torch 2.10 and later)."""
    return {"PET_SIGNALS_TO_HANDLE": END_SIGNAL.name}


def allocator_variables() -> dict[str, str]:
    """Return variables that let PyTorch's allocator grow its blocks of GPU memory, which leaves fewer gaps.

    A setting of the user is kept. The driver of Windows Subsystem for Linux does not support it.
    """
    is_set = "PYTORCH_ALLOC_CONF" in os.environ or "PYTORCH_CUDA_ALLOC_CONF" in os.environ
    if is_set or "microsoft" in platform.release().lower():
        return {}
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def _flight_recorder_variables(folder: RunFolder) -> dict[str, str]:
    """Return variables that make each rank write its last collectives to a file when one times out.

    PyTorch adds the rank to the file name. Variables that the user has set are left out.
    """
    variables = {
        "TORCH_FR_BUFFER_SIZE": "2000",  # number of collectives; PyTorch's default
        "TORCH_FR_DUMP_TEMP_FILE": str((folder.path / FLIGHT_RECORDER).resolve()),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    return {name: value for name, value in variables.items() if name not in os.environ}


def plain_launch_command(
    worker_arguments: Sequence[str],
    profile: Profile,
    num_processes: int,
    machines: Machines = ONE_MACHINE,
    launch_arguments: Sequence[str] = (),
) -> list[str]:
    """Return the `accelerate launch` command that starts the same workers without ftcli's launcher."""
    line = ["accelerate", "launch", "--config_file", str(profile.path), "--num_processes", str(num_processes)]
    if machines.count > 1:
        line += ["--num_machines", str(machines.count), "--machine_rank", str(machines.rank)]
    if machines.main_ip is not None:
        line += ["--main_process_ip", machines.main_ip]
    if machines.main_port is not None:
        line += ["--main_process_port", str(machines.main_port)]
    if machines.rendezvous != "static":  # Accelerate ignores the value in the profile
        line += ["--rdzv_backend", machines.rendezvous]
    return [*line, *launch_arguments, "-m", "ftcli", *worker_arguments]


def _import_path() -> list[str]:
    """Return PYTHONPATH for the workers, so that they import the same ftcli also from a checkout."""
    paths = [item for item in os.environ.get("PYTHONPATH", "").split(os.pathsep) if item]
    home = str(PACKAGE.parent)
    return paths if home in paths or home.endswith("-packages") else [*paths, home]
