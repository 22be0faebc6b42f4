"""Start the ranks of `ftcli trace`, in this process or below it. Light: never imports torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ftcli.config.trust import FLAG
from ftcli.launch.accelerate_command import launch
from ftcli.launch.launcher import check_without_profile, count_world, find_profile
from ftcli.launch.machines import Machines
from ftcli.launch.preflight import check_inputs
from ftcli.launch.trace_files import facts_name
from ftcli.launch.worker_recipe import recipe_for_workers
from ftcli.runtime.errors import InputError
from ftcli.runtime.run_folder import RunFolder

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe


def trace_ranks(
    recipe: str | Path | Recipe,
    config: Recipe,
    profile: str | Path | None,
    *,
    overrides: Sequence[str],
    folder: RunFolder,
    steps: int,
    num_processes: int | None,
    cpu: bool,
    trust_remote_code: bool,
    launch_arguments: Sequence[str] = (),
) -> None:
    """Check the inputs, claim the folder, and record a trace on every rank.

    Args:
        recipe: The recipe file, or a `Recipe`.
        config: The recipe with the overrides, with the length of the trace.
        profile: Name or path of an Accelerate config. None: train in this process.
        overrides: Changes of the recipe.
        folder: A new folder for the traces.
        steps: Number of recorded steps.
        num_processes: Number of processes. None: the profile's number, else one for each GPU.
        cpu: Train on the CPU, also on a machine with GPUs.
        trust_remote_code: Run Python code of the model or the task.
        launch_arguments: Further arguments for `accelerate launch`.

    Raises:
        InputError: The recipe, the profile or the folder is wrong.
        LaunchError: A launched process failed.
    """
    from ftcli.config.compatibility import check_pair
    from ftcli.config.plan import derive_plan, derive_shards
    from ftcli.data.revisions import commit_environment, resolve

    hardware = find_profile(profile)
    if hardware is None:
        from ftcli.launch.trace_rank import trace_rank

        check_without_profile(num_processes, 1, launch_arguments)
        derive_plan(config, 1)
        check_inputs(config, cpu=cpu)
        claim_new(folder)
        os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # read when the profiler is loaded
        trace_rank(config, hardware, output=folder.path, steps=steps, cpu=cpu)
        return
    if problems := check_pair(config, hardware):
        raise InputError(problems)
    machines = Machines.of(hardware, 1, 0, None, None)
    if machines.count > 1:
        raise InputError(
            f"profile {hardware.name} has {machines.count} machines, but a trace is made on one machine",
            hint="use a profile for one machine",
        )
    world = count_world(hardware, num_processes, machines, launch_arguments, cpu=cpu)
    derive_plan(config, world)
    derive_shards(*hardware.mesh, world)
    check_inputs(config, cpu=cpu)
    claim_new(folder)
    with recipe_for_workers(recipe, overrides, config, folder, machines) as recipe_arguments:
        launch(
            ["trace", *recipe_arguments, "--steps", str(steps), "--output", str(folder.path)]
            + ["--cpu"] * cpu
            + [FLAG] * trust_remote_code,
            profile=hardware,
            num_processes=world,
            cpu=cpu,
            folder=folder,
            launch_arguments=launch_arguments,
            result=facts_name(0),
            # The profiler prints its starts and stops at lower levels.
            rank_environment={"KINETO_LOG_LEVEL": "9", **commit_environment(resolve(config, None))},
        )


def claim_new(folder: RunFolder) -> None:
    """Claim a folder, which must be new or empty, so that no earlier result is overwritten."""
    path = folder.path
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(
            f"{path} exists and is not an empty folder", hint="name another folder with --output, or remove it"
        )
    folder.claim()
