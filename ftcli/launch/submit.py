"""Check a run, write its job and give it to Slurm or Kubernetes: `ftcli submit`.

Everything is checked before anything is written. job_scripts.py has the job's text. Light: never imports torch.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ftcli.launch.job_scripts import Job, job_name, parse_time, render_job
from ftcli.launch.machines import Machines, machine_problems
from ftcli.runtime.errors import InputError, Problem, RunError, collect_problems
from ftcli.runtime.reader_errors import user_path
from ftcli.runtime.redaction import redact

if TYPE_CHECKING:
    from ftcli.config.profile import Profile
    from ftcli.config.recipe import Recipe

System = Literal["slurm", "kubernetes"]
SUFFIXES = {"slurm": ".slurm.sh", "kubernetes": ".kubernetes.yaml"}
# The command that takes the job's file as its last argument and prints the name of the job.
COMMANDS = {"slurm": ("sbatch", "--parsable"), "kubernetes": ("kubectl", "create", "--output=name", "--filename")}
WORKSPACE = Path("/workspace")  # where a pod mounts its claim
PLACES = {"slurm": "a login node of the cluster", "kubernetes": "a machine with access to the cluster"}


@dataclass(frozen=True)
class Submission:
    """A job that was submitted, or only written as text.

    Attributes:
        script: Text of the job.
        path: File that holds it. None for a dry run.
        job: Name of the job: a number of Slurm, or names of Kubernetes, one per line. None for a dry run.
    """

    script: str
    path: Path | None = None
    job: str | None = None


def submit(
    recipe: str | Path,
    profile: str | Path | None = None,
    *,
    system: System,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    time: str | None = None,
    cpu: bool = False,
    overrides: Sequence[str] = (),
    output: str | Path | None = None,
    template: str | Path | None = None,
    placeholders: Mapping[str, str] | None = None,
    trust_remote_code: bool = False,
    dry_run: bool = False,
) -> Submission:
    """Submit a run to a cluster, as a job that checks, trains with `--resume auto` and continues after exit code 75.

    The job runs `ftcli check`, then `ftcli doctor` on all machines, then `ftcli train`. Any other exit code ends it.

    Args:
        recipe: A recipe file, or the name of a shipped recipe.
        profile: Name or path of an Accelerate config. None: one process.
        system: "slurm" or "kubernetes".
        nodes: Number of machines. None: the profile's.
        gpus_per_node: GPUs of each machine. None: the number that the profile sets; 1 without a distributed profile.
        time: Time limit in hours and minutes, such as "4:00". Slurm: of each launch; Kubernetes: of the whole job.
        cpu: Train on the CPU. A distributed profile gets two processes on each machine.
        overrides: Changes of the recipe such as "train.max_steps=10", applied in order.
        output: The run folder. None: the recipe's `output`, else `runs/<recipe name>`.
        template: Template of the job. None: the one of ftcli.
        placeholders: Values of further placeholders in the template, such as {"partition": "gpu"}.
        trust_remote_code: Run Python code of the model or the task in the job.
        dry_run: Only return the text of the job. Nothing is written, and no program of the cluster is needed.

    Returns:
        The text of the job, its file and its name.

    Raises:
        InputError: All problems of recipe, profile and inputs; a wrong template; a credential in the job's text; or the
            program of the cluster is missing.
        RunError: The cluster refused the job.

    Example:
        >>> job = ftcli.submit("recipe.yaml", profile="fsdp", system="slurm", gpus_per_node=8, dry_run=True)
        >>> print(job.script)
    """
    from ftcli.config.load import run_output

    config, hardware = _load(recipe, profile, [*overrides, *["model.trust_remote_code=true"] * trust_remote_code])
    folder = run_output(recipe, config, output)
    machines = _count_machines(hardware, nodes)
    gpus = _count_gpus(hardware, machines, gpus_per_node, cpu=cpu)
    world = _check(config, hardware, machines, gpus)
    seconds = None if time is None else parse_time(time)
    is_shared = system == "slurm"  # the job sees the paths of this machine
    job = Job(
        name=job_name(folder),
        folder=Path.cwd() if is_shared else WORKSPACE,
        recipe=_path_in_job(recipe, is_shared),
        profile=None if profile is None else _path_in_job(profile, is_shared),
        output=str(folder.absolute()) if is_shared else _output_in_pod(folder, template),
        nodes=machines,
        gpus_per_node=gpus,
        num_processes=world,
        seconds=seconds,
        overrides=overrides,
        trust_remote_code=trust_remote_code,
    )
    command = shlex.join([sys.executable, "-m", "ftcli"]) if is_shared else "ftcli"
    own = None if template is None else Path(template)
    script = render_job(job, system, own, placeholders or {}, command)
    return Submission(script) if dry_run else _give(script, system, folder)


def _load(recipe: str | Path, profile: str | Path | None, overrides: Sequence[str]) -> tuple[Recipe, Profile | None]:
    """Return recipe and profile; raise `InputError` with the problems of both."""
    from ftcli.config.load import load_recipe
    from ftcli.config.profile import load_profile

    loads = [partial(load_recipe, recipe, overrides)] + ([] if profile is None else [partial(load_profile, profile)])
    if problems := collect_problems(loads):
        raise InputError(problems)
    return load_recipe(recipe, overrides), None if profile is None else load_profile(profile)


def _count_machines(profile: Profile | None, nodes: int | None) -> int:
    """Return the number of machines: the requested one, else the profile's."""
    stated = 1 if profile is None else profile.num_machines
    if nodes is not None and nodes < 1:
        raise InputError(f"--nodes is {nodes}", hint="1 or more")
    if nodes == 1 and profile is not None and stated > 1:
        raise InputError(f"profile {profile.name} is for {stated} machines, --nodes is 1", hint="choose another one")
    return nodes or stated


def _count_gpus(profile: Profile | None, machines: int, gpus: int | None, *, cpu: bool) -> int:
    """Return the GPUs to book on each machine; 0 for a run on the CPU."""
    if gpus is not None and (gpus < 1 or cpu):
        raise InputError(f"--gpus-per-node is {gpus}", hint="1 or more; on the CPU: --cpu without this option")
    if cpu:
        return 0
    if profile is None or profile.distributed_type == "NO":
        if gpus not in (None, 1):
            raise InputError(f"{gpus} GPUs need a distributed profile", hint="--profile ddp, fsdp or zero3")
        return 1
    if gpus is None and profile.num_processes is None:
        raise InputError(
            f"profile {profile.name} does not set the number of GPUs", hint="give --gpus-per-node, or --cpu to rehearse"
        )
    return gpus or -(-(profile.num_processes or 1) // machines)


def _check(recipe: Recipe, profile: Profile | None, machines: int, gpus: int) -> int:
    """Return the number of processes. Raise `InputError` with every problem that is known without the job's machines.

    Their GPUs are not here, so what a recipe needs of a GPU is left to `ftcli check` in the job.
    """
    from ftcli.config.compatibility import check_pair, check_trackers
    from ftcli.config.plan import derive_plan, derive_shards
    from ftcli.launch.preflight import check_inputs
    from ftcli.launch.processes import count_processes

    problems = check_trackers(recipe) + collect_problems(
        [partial(check_inputs, recipe, cpu=not gpus, is_elsewhere=gpus > 0)]
    )
    if profile is None:
        world = 1
        if machines > 1:
            problems.append(Problem("several machines need a profile", hint="--profile ddp, fsdp or zero3"))
    else:
        count = machines * gpus if gpus and profile.distributed_type != "NO" else None
        world = count_processes(profile, count, cpu=not gpus, num_machines=machines)
        problems += check_pair(recipe, profile)
        there = Machines(machines, main_ip="the address of machine 0", main_port=1)  # set by the job
        problems += machine_problems(profile, world, there)
        problems += collect_problems([partial(derive_shards, *profile.mesh, world)])
    if problems := problems + collect_problems([partial(derive_plan, recipe, world)]):
        raise InputError(list(dict.fromkeys(problems)))
    return world


def _path_in_job(name: str | Path, is_shared: bool) -> str:
    """Return a file or a shipped name as the job finds it: an absolute path, or one below the current folder."""
    path = user_path(name)
    if not path.is_file():
        return str(name)
    return str(path.absolute()) if is_shared else _path_in_claim(path)


def _output_in_pod(folder: Path, template: str | Path | None) -> str:
    """Return the run folder as a pod finds it. A template of the user may mount more than the claim."""
    if not folder.is_absolute() and ".." not in folder.parts:
        return str(folder)  # it may be a link here, which the pod follows in the claim
    if template is not None or folder.is_relative_to(WORKSPACE):
        return str(folder)
    return _path_in_claim(folder)


def _path_in_claim(path: Path) -> str:
    """Return a path relative to the current folder, which the claim of a Kubernetes job holds."""
    absolute, here = path.absolute().resolve(), Path.cwd().resolve()
    if not absolute.is_relative_to(here):
        raise InputError(
            f"{path} is outside of the current folder",
            hint="the claim of a Kubernetes job holds the current folder; name a path below it",
        )
    return str(absolute.relative_to(here))


def _give(script: str, system: System, folder: Path) -> Submission:
    """Write the job beside the run folder and give it to the batch system."""
    program, *arguments = COMMANDS[system]
    if shutil.which(program) is None:
        raise InputError(
            f"--{system} needs the program {program}, which is not on PATH",
            hint=f"submit from {PLACES[system]}; --dry-run prints the job without {program}",
        )
    path = folder.with_name(folder.name + SUFFIXES[system])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script, encoding="utf-8")
    ended = subprocess.run([program, *arguments, str(path)], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if ended.returncode:
        reason = (ended.stderr or ended.stdout).strip() or f"exit code {ended.returncode}"
        raise RunError(f"{program} refused {path}: {redact(reason)}")
    return Submission(script, path, ended.stdout.strip().partition(";")[0])  # sbatch adds ;CLUSTER if there are several
