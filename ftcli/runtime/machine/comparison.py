"""Describe this machine in plain values, and compare the descriptions of several machines. Light."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping
from typing import Any

from ftcli.runtime.environment import package_versions
from ftcli.runtime.machine.facts import Fact, look, ok, wrong
from ftcli.runtime.machine.nvml import Devices
from ftcli.runtime.machine.software import TorchBuild
from ftcli.runtime.machine.variables import SECRET, SHOWN
from ftcli.runtime.redaction import redact

MUST_AGREE = {"ftcli", "torch", "accelerate", "transformers", "deepspeed", "CUDA runtime", "GPUs"}
OWN = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_HOSTID", "NCCL_DEBUG_FILE")  # differ between machines
MOST_SKEW = 1.0  # seconds


def describe_machine(build: TorchBuild, devices: Devices, rdma: bool) -> dict[str, Any]:
    """Return what must agree between machines: versions, GPUs, and the variables that change a run.

    Args:
        build: The installed torch.
        devices: The GPUs.
        rdma: Whether the machine has InfiniBand or RoCE devices.
    """
    versions = package_versions() | {"Python": platform.python_version()}
    versions |= {"CUDA runtime": build.cuda or "none", "driver": devices.driver or "none"}
    versions["GPUs"] = ", ".join(devices.names) or "none"
    shared = {name: value for name, value in os.environ.items() if name.startswith(SHOWN) and name not in OWN}
    variables = {name: "set" if name in SECRET else redact(value) for name, value in shared.items()}
    return {"host": socket.gethostname(), "versions": versions, "variables": variables, "rdma": rdma}


def comparison_facts(machines: Mapping[int, Mapping[str, Any]]) -> list[Fact]:
    """Return the facts of what differs between machines.

    Args:
        machines: Number of a machine -> its description.
    """
    if len(machines) < 2:
        return []
    facts = []
    names = sorted({name for machine in machines.values() for name in machine["versions"]})
    for name in names:
        values = {number: str(machine["versions"].get(name, "none")) for number, machine in machines.items()}
        if len(set(values.values())) > 1:
            remedy = "install the same versions on all machines, from constraints.txt"
            if name == "GPUs":
                remedy = "use machines with the same GPUs: the slowest one sets the pace, the smallest the memory"
            judge = wrong if name in MUST_AGREE else look
            facts.append(judge(f"{name} differs", _by_value(values), remedy))
    for name in sorted({name for machine in machines.values() for name in machine["variables"]}):
        values = {number: machine["variables"].get(name, "not set") for number, machine in machines.items()}
        if len(set(values.values())) > 1:
            judge = wrong if name.startswith("NCCL_") else look
            facts.append(judge(f"{name} differs", _by_value(values), "set it to the same value on all machines"))
    if not facts:
        facts.append(ok("versions", f"the same on {len(machines)} machines"))
    return facts


def _by_value(values: Mapping[int, str]) -> str:
    """Return the values with the machines that have each."""
    groups: dict[str, list[str]] = {}
    for number, value in sorted(values.items()):
        groups.setdefault(value, []).append(str(number))
    return "; ".join(
        f"{value} on machine{'s' * (len(numbers) > 1)} {', '.join(numbers)}" for value, numbers in groups.items()
    )


def clock_fact(offsets: Mapping[int, float]) -> Fact:
    """Return the fact about the clocks of the machines.

    Args:
        offsets: Number of a machine -> seconds by which its clock is ahead of that of machine 0.
    """
    worst = max(offsets, key=lambda number: abs(offsets[number]))
    seconds = offsets[worst]
    text = f"machine {worst} is {abs(seconds):.2f} s {'ahead of' if seconds > 0 else 'behind'} machine 0"
    if abs(seconds) > MOST_SKEW:
        return look("clocks", text, "let all machines use one time server: chronyc tracking")
    return ok("clocks", f"agree within {max(abs(seconds), 0.01):.2f} s")
