"""Start a run in this process, or as one `accelerate launch` below it.

The shell and the notebook call the same functions. All user input is checked here, in the parent process, before a
model is loaded. This module decides where a run takes place and which options its workers get. accelerate_command.py
builds the command that starts them. Light: never imports torch.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ftcli.config.trust import FLAG, with_consent
from ftcli.launch.accelerate_command import allocator_variables, check_launch_arguments, launch
from ftcli.launch.bare_launch import check_processes
from ftcli.launch.hub_pushes import pushing
from ftcli.launch.machines import Machines, machine_problems
from ftcli.launch.processes import check_devices, count_processes
from ftcli.launch.worker_recipe import recipe_for_workers
from ftcli.runtime.errors import InputError
from ftcli.runtime.log import log_line
from ftcli.runtime.process import current_rank, has_ftcli_parent, is_launched, profile_path
from ftcli.runtime.run_folder import DRY_RUN, RunFolder
from ftcli.runtime.stop import StopRequest
from ftcli.runtime.threads import wait_passively

if TYPE_CHECKING:
    from ftcli.config.profile import Profile
    from ftcli.config.recipe import Recipe


@dataclass(frozen=True)
class WorkerOptions:
    """Options of a worker beside recipe and profile. They become arguments of `work`, or of a command line."""

    output: Path
    start: Path | None  # the checkpoint to resume from
    resuming: bool  # the folder may hold earlier steps of the run; only the process that claims the folder reads it
    resume_anyway: bool
    cpu: bool
    dry_run: bool
    record_start: bool
    trust_remote_code: bool

    @property
    def arguments(self) -> list[str]:
        """Command line arguments of `ftcli train` for these options."""
        arguments = ["--output", str(self.output)] + ["--cpu"] * self.cpu + ["--dry-run"] * self.dry_run
        arguments += ["--record-start"] * self.record_start + ["--resume-anyway"] * self.resume_anyway
        arguments += [FLAG] * self.trust_remote_code
        return arguments + ([] if self.start is None else ["--resume", str(self.start.resolve())])


def train(
    recipe: str | Path | Recipe,
    profile: str | Path | None = None,
    *,
    num_processes: int | None = None,
    num_machines: int = 1,
    machine_rank: int = 0,
    main_process_ip: str | None = None,
    main_process_port: int | None = None,
    cpu: bool = False,
    overrides: Sequence[str] = (),
    output: str | Path | None = None,
    dry_run: bool = False,
    record_start: bool = False,
    resume: str | Path = "never",
    resume_anyway: bool = False,
    trust_remote_code: bool = False,
    launch_arguments: Sequence[str] = (),
) -> RunFolder:
    """Train a recipe and return its run folder.

    Without a profile, and inside a launched worker, the run trains in this process. With a profile ftcli starts one
    subprocess, `accelerate launch`. A run that is done already is not trained again.

    Args:
        recipe: A recipe file, the name of a shipped recipe, or a `Recipe`.
        profile: Name or path of an Accelerate config, such as "fsdp". None: train in this process.
        num_processes: Number of processes on all machines. None: the profile's number, else one for each GPU.
        num_machines: Number of machines.
        machine_rank: Number of this machine, from 0. Machine 0 owns the run folder.
        main_process_ip: Address of machine 0.
        main_process_port: Free port on machine 0.
        cpu: Train on the CPU, even on a machine with GPUs.
        overrides: Changes of a recipe file such as "train.max_steps=10", applied in order.
        output: The run folder. None: the recipe's `output`, else `runs/<recipe name>`.
        dry_run: Train two steps, evaluate once and save once, in a folder beside `output`.
        record_start: Write digests of the initial weights to start.json, as `compare_profiles` needs them.
        resume: "never"; "auto" for the newest intact checkpoint of the run folder, if there is one; or the folder of a
            checkpoint or a run.
        resume_anyway: Resume also with a recipe or with rows that give another loss curve.
        trust_remote_code: Run Python code of the model or the task. It holds for this launch only and is not stored.
        launch_arguments: Further arguments for `accelerate launch`.

    Returns:
        The run folder. Its `status()` has the state: done or stopped.

    Raises:
        InputError: The recipe, the profile, the data or the model is wrong. It lists all problems at once.
        LaunchError: A launched process failed.
        Stopped: A signal arrived before anything was started.

    Example:
        >>> folder = ftcli.train("recipe.yaml", profile="fsdp", overrides=["train.max_steps=100"])
        >>> folder.status()["state"]
        'done'
        >>> folder.training_rows()[-1]["loss"]
    """
    from ftcli.config.compatibility import check_pair, check_trackers
    from ftcli.config.load import read_recipe, run_output

    wait_passively(cpu=cpu)  # before torch is loaded
    from ftcli.training.resume import AUTO, NEVER, belongs_to, find_start, is_done

    config = read_recipe(recipe, overrides)
    if not isinstance(recipe, str | Path):  # workers read the stored form, which holds no consent
        trust_remote_code |= config.model.trust_remote_code
    if trust_remote_code:
        config = with_consent(config, trusted=True)
    hardware = find_profile(profile)
    if problems := check_trackers(config) + ([] if hardware is None else check_pair(config, hardware)):
        raise InputError(problems)
    folder = RunFolder(run_output(recipe if isinstance(recipe, str | Path) else config.task, config, output))
    machines = Machines.of(hardware, num_machines, machine_rank, main_process_ip, main_process_port)
    if dry_run and not has_ftcli_parent():
        folder = _dry_run_folder(folder, clear=machines.rank == 0)
    resume = NEVER if dry_run else str(resume)
    is_owner = not has_ftcli_parent() and current_rank() == 0 and machines.rank == 0
    with folder.locked() if is_owner else nullcontext():
        with StopRequest() as early, early.raise_on_signal():  # reading a large checkpoint takes minutes
            start = find_start(folder, config, resume, anyway=resume_anyway)
        if start is not None and is_done(folder, config, start):
            if current_rank() == 0:
                log_line(f"{folder.path} is done at step {folder.status()['step']}: nothing is left to resume")
            return folder
        resuming = resume == AUTO or (start is not None and belongs_to(folder, start))
        options = WorkerOptions(
            folder.path, start, resuming, resume_anyway, cpu, dry_run, record_start, trust_remote_code
        )
        uploads = is_owner and not dry_run and not record_start
        pushes = pushing(config, folder, start=start if resuming else None, trust_remote_code=trust_remote_code)
        with pushes if uploads else nullcontext():
            if hardware is None or is_launched():
                _train_here(config, hardware, options, num_processes, num_machines, launch_arguments)
            else:
                _launch_workers(
                    recipe, overrides, config, hardware, options, folder, num_processes, machines, launch_arguments
                )
        return folder


def _dry_run_folder(folder: RunFolder, *, clear: bool) -> RunFolder:
    """Return the folder of a dry run, beside that of the real run; `clear` deletes an earlier one, on rank 0."""
    beside = RunFolder(folder.path.with_name(f"{folder.path.name}-dry-run"))
    if clear and (beside.path / DRY_RUN).exists() and current_rank() == 0:
        shutil.rmtree(beside.path)
    return beside


def _train_here(
    recipe: Recipe,
    profile: Profile | None,
    options: WorkerOptions,
    num_processes: int | None,
    num_machines: int,
    launch_arguments: Sequence[str],
) -> None:
    """Train in this process. If it is the only one, it first makes the checks that otherwise the parent makes."""
    from ftcli.config.plan import derive_plan
    from ftcli.launch.preflight import check_inputs
    from ftcli.launch.worker import work

    if not is_launched():
        check_without_profile(num_processes, num_machines, launch_arguments)
        if not options.cpu:  # read when the first tensor is allocated on a GPU
            os.environ |= allocator_variables()
        derive_plan(recipe, 1)
        check_inputs(recipe, cpu=options.cpu)
    keywords = {name: value for name, value in vars(options).items() if name != "trust_remote_code"}  # in the recipe
    work(recipe, profile, **keywords)


def _launch_workers(
    recipe: str | Path | Recipe,
    overrides: Sequence[str],
    config: Recipe,
    profile: Profile,
    options: WorkerOptions,
    folder: RunFolder,
    num_processes: int | None,
    machines: Machines,
    launch_arguments: Sequence[str],
) -> None:
    """Check the inputs, claim the folder, and train in one `accelerate launch` below this process."""
    from ftcli.checkpoint.folder import read_state
    from ftcli.config.plan import derive_plan, derive_shards
    from ftcli.data.revisions import commit_environment, resolve
    from ftcli.hardware.read_ahead import read_ahead
    from ftcli.launch.preflight import check_inputs

    world = count_world(profile, num_processes, machines, launch_arguments, cpu=options.cpu)
    derive_plan(config, world)
    derive_shards(*profile.mesh, world)
    check_inputs(config, cpu=options.cpu)
    if num_processes is None and options.cpu and world > 1:
        log_line(f"--cpu without --num-processes: {world} processes on this machine's CPU")
    if machines.rank == 0:
        folder.claim(resuming=options.resuming)
    resolved = resolve(config, None if options.start is None else read_state(options.start))
    if machines.rank == 0 or not profile.reads_weights_once:
        read_ahead(resolved.recipe)
    with recipe_for_workers(recipe, overrides, config, folder, machines) as recipe_arguments:
        launch(
            ["train", *recipe_arguments, *options.arguments],
            profile=profile,
            num_processes=world,
            machines=machines,
            cpu=options.cpu,
            folder=folder,
            launch_arguments=launch_arguments,
            rank_environment=commit_environment(resolved),
        )


def evaluate_target(
    target: str | Path,
    profile: str | Path | None = None,
    *,
    num_processes: int | None = None,
    cpu: bool = False,
    trust_remote_code: bool = False,
    launch_arguments: Sequence[str] = (),
) -> dict[str, float]:
    """Evaluate the final weights of a run on its recipe's evaluation rows. The worker also writes evaluation.json.

    Args:
        target: The run folder.
        profile: Name or path of an Accelerate config. None: evaluate in this process.
        num_processes: Number of processes. None: the profile's number, else one for each GPU.
        cpu: Evaluate on the CPU, even on a machine with GPUs.
        trust_remote_code: Run Python code of the model or the task. The run folder cannot allow it.
        launch_arguments: Further arguments for `accelerate launch`.

    Returns:
        The metrics by name.

    Raises:
        InputError: There is no run, or it needs code that is not trusted.
        LaunchError: A launched process failed.
    """
    from ftcli.config.load import load_run_recipe
    from ftcli.config.plan import derive_shards

    folder = RunFolder(target)
    load_run_recipe(folder.path, trust_remote_code=trust_remote_code)
    folder.check_writable("evaluation.json is written into it: copy the run folder, and evaluate the copy")
    if (newer := folder.checkpoint_after_final()) and not has_ftcli_parent() and current_rank() == 0:
        log_line(f"the run continued after the final weights, which are evaluated: {newer} is newer")
    hardware = find_profile(profile)
    if hardware is None or is_launched():
        from ftcli.launch.worker import evaluate_run

        if not is_launched():
            check_without_profile(num_processes, 1, launch_arguments)
        return evaluate_run(folder.path, hardware, cpu=cpu, trust_remote_code=trust_remote_code)
    machines = Machines.of(hardware, 1, 0, None, None)
    if machines.count > 1:
        raise InputError(
            f"profile {hardware.name} has {machines.count} machines, but an evaluation runs on one machine",
            hint="use a profile for one machine",
        )
    world = count_world(hardware, num_processes, machines, launch_arguments, cpu=cpu)
    derive_shards(*hardware.mesh, world)
    worker = ["evaluate", str(folder.path)] + ["--cpu"] * cpu + [FLAG] * trust_remote_code
    launch(
        worker,
        profile=hardware,
        num_processes=world,
        cpu=cpu,
        folder=folder,
        launch_arguments=launch_arguments,
        result="evaluation.json",
    )
    metrics: dict[str, float] = json.loads((folder.path / "evaluation.json").read_text(encoding="utf-8"))
    return metrics


def find_profile(name: str | Path | None) -> Profile | None:
    """Return the profile of the launcher above this process, else the named one; None: train without a profile."""
    from ftcli.config.profile import find_user_default, load_profile, profile_from_environment

    if is_launched():
        check_processes(os.environ)
        if (path := profile_path()) is not None:
            return load_profile(path)
        if (default := find_user_default(os.environ)) is not None and current_rank() == 0:
            log_line(f"note: accelerate launch without --config_file uses {default}")
        launched = profile_from_environment(os.environ)
        if name is not None and load_profile(name).distributed_type != launched.distributed_type:
            raise InputError(
                f"--profile {name} was given, but the launcher started {launched.distributed_type}",
                hint=f"give the launcher --config_file, or start it with: ftcli train RECIPE --profile {name}",
            )
        return launched
    return None if name is None else load_profile(name)


def count_world(
    profile: Profile, num_processes: int | None, machines: Machines, launch_arguments: Sequence[str], *, cpu: bool
) -> int:
    """Return the number of processes to launch; raise `InputError` with all problems of devices and machines."""
    world = count_processes(profile, num_processes, cpu=cpu, num_machines=machines.count)
    problems = check_devices(profile, world, cpu=cpu, num_machines=machines.count)
    if problems := problems + check_launch_arguments(launch_arguments) + machine_problems(profile, world, machines):
        raise InputError(problems)
    return world


def check_without_profile(num_processes: int | None, num_machines: int, launch_arguments: Sequence[str]) -> None:
    """Raise `InputError` for launch options that need a profile."""
    count_processes(None, num_processes)
    if num_machines != 1:
        raise InputError("several machines need a profile", hint="--profile ddp, fsdp or zero3")
    if launch_arguments:
        raise InputError(
            f"arguments for accelerate need a profile: {shlex.join(launch_arguments)}",
            hint="name one with --profile; without a profile the run trains in this process",
        )
