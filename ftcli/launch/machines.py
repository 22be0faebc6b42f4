"""Describe the machines of a run: their number, the rank of this one, and the address of the first.

The user starts one command on each machine. ftcli does not log in to other machines. Light: never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftcli.runtime.errors import Problem

if TYPE_CHECKING:
    from ftcli.config.profile import Profile

LARGEST_PORT = 65535


@dataclass(frozen=True)
class Machines:
    """The machines of a run. Machine 0 owns the run folder.

    Attributes:
        count: Number of machines.
        rank: Number of this machine, from 0.
        main_ip: Address of machine 0, where rank 0 listens.
        main_port: Port of machine 0.
        rendezvous: torchrun's backend. With static, ranks follow the machine numbers. With c10d, torchrun orders the
            machines.
    """

    count: int = 1
    rank: int = 0
    main_ip: str | None = None
    main_port: int | None = None
    rendezvous: str = "static"

    @classmethod
    def of(cls, profile: Profile | None, count: int, rank: int, ip: str | None, port: int | None) -> Machines:
        """Return the machines of a command line. Options that have their default value are taken from the profile."""
        values = {} if profile is None else profile.values
        return cls(
            count=count if count != 1 else int(values.get("num_machines") or 1),
            rank=rank or int(values.get("machine_rank") or 0),
            main_ip=ip or values.get("main_process_ip"),
            main_port=port or values.get("main_process_port"),
            rendezvous=str(values.get("rdzv_backend") or "static"),
        )


ONE_MACHINE = Machines()


def machine_problems(profile: Profile, world: int, machines: Machines) -> list[Problem]:
    """Return every reason why `world` processes cannot be distributed over these machines."""
    problems: list[Problem] = []
    if machines.count < 1 or not 0 <= machines.rank < max(machines.count, 1):
        what = f"--machine-rank {machines.rank} of --num-machines {machines.count}"
        problems.append(Problem(what, hint="ranks count from 0 to the number of machines - 1"))
    elif machines.count > 1:
        if profile.distributed_type == "NO":
            problems.append(Problem(f"profile {profile.name} runs on one machine", hint="choose a distributed one"))
        if world % machines.count:
            what = f"{world} processes cannot be shared out over {machines.count} machines"
            problems.append(Problem(what, hint="--num-processes counts the processes of all machines"))
        if machines.main_ip is None or machines.main_port is None:
            what = "several machines need --main-process-ip and --main-process-port"
            problems.append(Problem(what, hint="address of machine 0, and a free port there; the same on all"))
    if machines.main_port is not None and not 0 <= machines.main_port <= LARGEST_PORT:
        problems.append(Problem(f"--main-process-port {machines.main_port}", hint=f"a port is at most {LARGEST_PORT}"))
    return problems
