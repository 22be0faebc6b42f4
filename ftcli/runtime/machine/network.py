"""Check InfiniBand and RoCE devices, and find the network interface that NCCL and gloo will take. Light."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import psutil

from ftcli.runtime.machine.facts import Fact, look, ok, wrong

# NCCL skips these unless nothing else exists (findInterfaces in NCCL's src/misc/socket.cc).
LAST = ("docker", "virbr", "lo")
LOOPBACK = ("127.", "::1")


def network_facts(machines: int, root: Path = Path("/")) -> list[Fact]:
    """Return the facts of InfiniBand and RoCE devices and of the interfaces of NCCL and gloo.

    Args:
        machines: Number of machines of the run.
        root: Folder that holds sys.
    """
    return [*infiniband_facts(machines, root), nccl_interface_fact(machines), gloo_interface_fact(machines)]


def infiniband_facts(machines: int, root: Path = Path("/")) -> list[Fact]:
    """Return one fact for each InfiniBand or RoCE port, or one for all machines without any.

    Args:
        machines: Number of machines of the run.
        root: Folder that holds sys/class/infiniband, which Linux documents in sysfs-class-infiniband.
    """
    ports = sorted((root / "sys" / "class" / "infiniband").glob("*/ports/*"))
    if not ports:
        if machines > 1:
            remedy = "expect a tenth of its speed; if the machine has such devices, load their drivers"
            return [look("InfiniBand", "no InfiniBand or RoCE device: NCCL uses TCP sockets", remedy)]
        return [ok("InfiniBand", "no InfiniBand or RoCE device; one machine needs none")]
    read = {port: _port(port) for port in ports}
    any_active = any(state == "ACTIVE" for state, _ in read.values())
    facts = []
    for port, (state, text) in read.items():
        topic = f"InfiniBand {port.parts[-3]}:{port.name}"
        remedy = f"check cable, switch and subnet manager: ibstat {port.parts[-3]}"
        if state == "ACTIVE":
            facts.append(ok(topic, text))
        else:
            facts.append(look(topic, text, remedy) if any_active or machines == 1 else wrong(topic, text, remedy))
    return facts


def _port(port: Path) -> tuple[str, str]:
    """Return (state, description) of a port from its files in sysfs."""
    values = {}
    for name in ("state", "rate", "link_layer"):
        file = port / name
        values[name] = file.read_text().strip() if file.is_file() else "unknown"
    state = values["state"].rpartition(":")[2].strip()  # such as "4: ACTIVE"
    kind = "RoCE" if values["link_layer"] == "Ethernet" else values["link_layer"]
    return state, f"{state}, {values['rate']}, {kind}"


def addresses() -> dict[str, list[str]]:
    """Return interface -> addresses of the interfaces that are up and have an IPv4 or a global IPv6 address."""
    stats = psutil.net_if_stats()
    interfaces: dict[str, list[str]] = {}
    for name, items in psutil.net_if_addrs().items():
        usable = [
            item.address
            for item in items
            if item.family in (socket.AF_INET, socket.AF_INET6) and not item.address.startswith("fe80")
        ]
        if usable and name in stats and stats[name].isup:
            interfaces[name] = usable
    return interfaces


def chosen_interfaces(setting: str | None, interfaces: list[str]) -> list[str]:
    """Return the interfaces that NCCL chooses, in its order.

    Args:
        setting: Value of NCCL_SOCKET_IFNAME: prefixes; `=` before the list for exact names, `^` to exclude. The rules
            are those of NCCL's documentation.
        interfaces: Names of the interfaces that are up.
    """
    if setting:
        exclude = setting.startswith("^")
        rest = setting.removeprefix("^")
        exact = rest.startswith("=")
        names = [name for name in rest.removeprefix("=").split(",") if name]

        def matches(interface: str) -> bool:
            return any(interface == name if exact else interface.startswith(name) for name in names)

        return [interface for interface in interfaces if matches(interface) != exclude]
    if fast := [name for name in interfaces if name.startswith("ib")]:
        return fast
    if usual := [name for name in interfaces if not name.startswith(LAST)]:
        return usual
    return next(
        (
            [name for name in interfaces if name.startswith(last)]
            for last in LAST
            if any(name.startswith(last) for name in interfaces)
        ),
        [],
    )


def nccl_interface_fact(machines: int) -> Fact:
    """Return the fact about the interface that NCCL takes to find its peers, and for TCP sockets.

    Args:
        machines: Number of machines of the run.
    """
    up = addresses()
    setting = os.environ.get("NCCL_SOCKET_IFNAME")
    chosen = chosen_interfaces(setting, list(up))
    if not chosen:
        known = ", ".join(up) or "none"
        what = f"NCCL_SOCKET_IFNAME={setting} matches no interface" if setting else "no interface is up"
        return wrong("NCCL's interface", f"{what}; up: {known}", "set NCCL_SOCKET_IFNAME to one that is up")
    text = ", ".join(f"{name} ({up[name][0]})" for name in chosen)
    if machines > 1 and chosen[0].startswith(LAST):
        remedy = "set NCCL_SOCKET_IFNAME to the interface that reaches the other machines"
        return wrong("NCCL's interface", f"{text} does not reach other machines", remedy)
    return ok("NCCL's interface", text)


def gloo_interface_fact(machines: int) -> Fact:
    """Return the fact about the interface that gloo takes.

    That is GLOO_SOCKET_IFNAME, else the one with the address of this host's name, else the loopback interface
    (createDefaultDevice in torch's ProcessGroupGloo.cpp).

    Args:
        machines: Number of machines of the run.
    """
    topic, up = "gloo's interface", addresses()
    remedy = "set GLOO_SOCKET_IFNAME to the interface that reaches the other machines"
    if setting := os.environ.get("GLOO_SOCKET_IFNAME"):
        missing = [name for name in setting.split(",") if name not in up]
        if missing:
            return wrong(topic, f"GLOO_SOCKET_IFNAME={setting}: {missing[0]} is not up; up: {', '.join(up)}", remedy)
        return ok(topic, ", ".join(f"{name} ({up[name][0]})" for name in setting.split(",")))
    host = socket.gethostname()
    try:
        own = [str(item[4][0]) for item in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        own = []
    name = next((name for name, held in up.items() if set(held) & set(own)), None)
    if name is None or own[0].startswith(LOOPBACK):
        text = f"loopback, because the name {host} has no address of an interface"
        return wrong(topic, text, remedy) if machines > 1 else ok(topic, f"{text}; one machine needs no other")
    return ok(topic, f"{name} ({own[0]})")
