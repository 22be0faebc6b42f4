"""Several machines in one run: how many, which one this is, and where they meet.

Each machine is started by a command of its own; nobody logs in anywhere. Light: never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import Problem

if TYPE_CHECKING:
    from .profiles import Profile


@dataclass(frozen=True)
class Machines:
    """How many machines take part, which one this is, and where rank 0 listens.

    `rendezvous` is torchrun's: under static the ranks follow the machines, under c10d the machines agree on an
    order among themselves. Machine 0 owns the run folder either way.
    """

    count: int = 1
    rank: int = 0
    main_ip: str | None = None
    main_port: int | None = None
    rendezvous: str = "static"

    @classmethod
    def of(cls, profile: Profile | None, count: int, rank: int, ip: str | None, port: int | None) -> Machines:
        """Return what the command line says; what it leaves open a multi-machine profile may fix."""
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
    """Return every reason why `world` processes cannot be spread over these machines."""
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
    return problems
