"""Check the machines of a run, one fact a line, before any model is loaded: `ftcli doctor`.

The facts of this machine are in ftcli/runtime/machine. With several processes, ftcli/launch/meeting.py compares the
machines, and collective_check.py exercises the collectives.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.launch.machines import Machines, machine_problems
from ftcli.launch.processes import check_devices
from ftcli.reports.machine_speeds import draw_speeds, keep_speeds, speed_lines, write_rate
from ftcli.runtime.devices import count_cores, count_gpus
from ftcli.runtime.errors import EXIT_DONE, EXIT_INPUT, InputError
from ftcli.runtime.machine.comparison import describe_machine
from ftcli.runtime.machine.facts import STATES, Fact, look, ok, wrong
from ftcli.runtime.machine.network import network_facts
from ftcli.runtime.machine.nvml import Devices, read_devices
from ftcli.runtime.machine.software import (
    TorchBuild,
    bytecode_facts,
    driver_facts,
    software_facts,
    torch_build,
    torch_module,
)
from ftcli.runtime.machine.storage import has_rdma, storage_facts
from ftcli.runtime.machine.variables import variable_facts
from ftcli.runtime.threads import users_environment

if TYPE_CHECKING:
    from ftcli.config.profile import Profile
    from ftcli.launch.collective_check import LocalRanks

TIMEOUT = 30.0  # seconds
BENCH_SECONDS = 900.0


@dataclass(frozen=True)
class DoctorReport:
    """Result of `ftcli doctor`.

    Attributes:
        facts: What was found, by topic.
        processes: Number of processes that exercised the collectives; 0 if none did.
        machines: Number of machines.
        speeds: What `--bench` measured on this machine; None without it.
        files: Files that `--bench` wrote.
    """

    facts: list[Fact] = field(default_factory=list)
    processes: int = 0
    machines: int = 1
    speeds: dict[str, Any] | None = None
    files: list[Path] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """2 if a fact is wrong, else 0."""
        return EXIT_INPUT if any(fact.state == "wrong" for fact in self.facts) else EXIT_DONE

    def counts(self) -> dict[str, int]:
        """Return state -> number of facts."""
        return {state: sum(fact.state == state for fact in self.facts) for state in STATES}

    def lines(self) -> list[str]:
        """Return the report as text: one line for each fact, and their numbers."""
        width = max((len(fact.topic) for fact in self.facts), default=0)
        text = [
            f"{fact.state:<5}  {fact.topic:<{width}}  {fact.text}{'; ' * bool(fact.remedy)}{fact.remedy}"
            for fact in self.facts
        ]
        counts = self.counts()
        if self.speeds is not None:
            text += ["", *speed_lines(self.speeds), *(f"written: {path}" for path in self.files)]
        return [*text, "", ", ".join(f"{counts[state]} {state}" for state in reversed(STATES))]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for `--json`."""
        return {
            "machines": self.machines,
            "processes": self.processes,
            "counts": self.counts(),
            "facts": [dict(vars(fact)) for fact in self.facts],
            "speeds": self.speeds,
            "files": [str(path) for path in self.files],
        }


def doctor(
    profile: str | Path | None = None,
    *,
    num_processes: int | None = None,
    num_machines: int = 1,
    machine_rank: int = 0,
    main_process_ip: str | None = None,
    main_process_port: int | None = None,
    cpu: bool = False,
    bench: bool = False,
    timeout: float = TIMEOUT,
) -> DoctorReport:
    """Check software, GPUs, memory, disks, network and environment variables of the machines of a run.

    With several processes, each pair of them and each collective is tried once, with NCCL on GPUs and gloo on CPUs. On
    several machines, start the same call on each; machine 0 compares them.

    Args:
        profile: Name or path of an Accelerate config. None: check without one.
        num_processes: Number of processes on all machines. None: one for each GPU if there is a profile for several.
        num_machines: Number of machines.
        machine_rank: Number of this machine, from 0.
        main_process_ip: Address of machine 0.
        main_process_port: Free port on machine 0.
        cpu: Use processes on the CPU, even on a machine with GPUs.
        bench: Measure matrix products, memory, host copies, the disk and the collectives too. The results are kept for
            `ftcli plan`.
        timeout: Seconds for the part with several processes: half of it for all machines to come, the rest to answer.

    Returns:
        The report. `lines()` is its text, `as_dict()` its values, `exit_code` is 2 if a fact is wrong.

    Raises:
        InputError: The profile is invalid, or the numbers of processes and machines do not fit together.

    Example:
        >>> report = ftcli.doctor("fsdp", num_processes=8)
        >>> for fact in report.facts:
        ...     print(fact.state, fact.topic, fact.text, fact.remedy)
    """
    from ftcli.config.profile import load_profile
    from ftcli.launch.torch_probe import probe_facts, start_probe

    hardware = None if profile is None else load_profile(profile)
    machines = Machines.of(hardware, num_machines, machine_rank, main_process_ip, main_process_port)
    gpus = 0 if cpu else count_gpus()
    world = _processes(hardware, num_processes, machines, gpus)
    if bench and num_processes is None and world == 1 and gpus != 1:
        world = gpus or 2
    device = "cuda" if gpus else "cpu"
    problem = check_devices(load_profile("ddp"), world, cpu=device == "cpu", num_machines=machines.count)
    if problems := machine_problems(load_profile("ddp"), world, machines):
        raise InputError(problems)
    speeds = None
    with ExitStack() as stack:
        starts = (world > 1 or bench) and not problem
        ranks = stack.enter_context(_local_ranks(world, machines, device)) if starts else None
        started, probe = time.monotonic(), start_probe()
        stack.callback(probe.kill)
        build, devices = torch_build(), read_devices()
        stored = bytecode_facts(torch_module(), sys.pycache_prefix, may_write=not sys.dont_write_bytecode)
        facts = [*software_facts(build), *stored, *driver_facts(build, devices.driver, devices.cuda), *devices.facts]
        later = [*storage_facts(Path("runs")), *network_facts(machines.count)]
        later += variable_facts(users_environment(), count_cores(), len(devices.names))
        later += _profile_facts(hardware, gpus, world) + [wrong("processes", one.what, one.hint) for one in problem]
        probed = probe_facts(probe, started, gpus) if bench else []  # it must not run beside the measurements
        if ranks is not None:
            together, speeds = _together(ranks, machines, build, devices, timeout, bench=bench)
            later += together
        facts += (probed or probe_facts(probe, started, gpus)) + later
    files: list[Path] = []
    if speeds is not None:
        speeds["disk_bytes_per_second"] = write_rate(Path("runs"))
        speeds["machines"] = machines.count
        path = keep_speeds(speeds)
        files = [path, *filter(None, [draw_speeds(speeds, path.with_suffix(".png"))])]
    return DoctorReport(facts, 0 if ranks is None else world, machines.count, speeds, files)


def _processes(profile: Profile | None, requested: int | None, machines: Machines, gpus: int) -> int:
    """Return the number of processes that exercise the collectives; 1 for none."""
    if requested is not None:
        if requested < 1:
            raise InputError(f"--num-processes is {requested}", hint="it counts all processes: 1 or more")
        return requested
    if machines.count > 1:
        return machines.count * max(gpus, 1)
    if profile is None or profile.distributed_type == "NO":
        return 1
    return profile.num_processes or max(gpus, 1)


def _local_ranks(world: int, machines: Machines, device: str) -> LocalRanks:
    """Return the ranks of this machine."""
    from ftcli.launch.collective_check import LocalRanks

    local = world // machines.count
    return LocalRanks(range(machines.rank * local, (machines.rank + 1) * local), world, device)


def _profile_facts(profile: Profile | None, gpus: int, world: int) -> list[Fact]:
    """Return the fact about the profile and the processes that it gets here."""
    if profile is None:
        return []
    topic, kind = f"profile {profile.name}", profile.distributed_type
    if not gpus:
        remedy = "train with --cpu --num-processes 2 to rehearse it; doctor --num-processes 2 tries its collectives"
        return [look(topic, f"{kind}, but no GPU is visible", remedy)]
    return [ok(topic, f"{kind}, {world} process{'es' * (world > 1)}")]


def _together(
    ranks: LocalRanks, machines: Machines, build: TorchBuild, devices: Devices, timeout: float, *, bench: bool
) -> tuple[list[Fact], dict[str, Any] | None]:
    """Return the facts of all machines and of the collectives, and what was measured."""
    from ftcli.launch.collective_check import check_collectives
    from ftcli.launch.meeting import Meeting, NoMeeting

    try:
        meeting = Meeting.open(machines, timeout / 2)
    except NoMeeting as error:
        return [error.fact], None
    started = time.monotonic()  # importing torch is not counted: the ranks import it at the same time
    facts: list[Fact] = []
    if machines.count > 1:
        description = describe_machine(build, devices, has_rdma())
        facts, is_complete = meeting.gather(description, timeout / 2)
        if not is_complete:
            return [
                *facts,
                look(
                    "collectives",
                    "not tried, because machines are missing or do not reach each other",
                    "repair that first",
                ),
            ], None
    seconds = BENCH_SECONDS if bench else timeout - (time.monotonic() - started)
    facts += check_collectives(ranks, meeting, seconds, bench=bench)
    return facts, meeting.speeds
